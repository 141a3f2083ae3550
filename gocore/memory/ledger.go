package memory

import (
	"encoding/json"
	"sync/atomic"
)

// Kind is what bytes are used for.
type Kind int

// The kinds of bytes that a [Ledger] tells apart. They are views, not a partition: a boundary on the host tier counts as
// BoundaryHost and its buffer as PoolActive, so the kinds are not to be added up.
const (
	BoundaryDevice Kind = iota // boundaries kept where they were put
	BoundaryHost               // boundaries in host buffers
	BoundaryDisk               // boundaries in files
	PoolActive                 // buffers lent out
	PoolIdle                   // buffers kept for reuse
	Pass                       // outputs and state of passes
	numKinds
)

var kindNames = [numKinds]string{"boundary-device", "boundary-host", "boundary-disk", "pool-active", "pool-idle", "pass"}

// String gives the kind's name in snapshots.
func (k Kind) String() string { return kindNames[k] }

// Count is a number of bytes now and the highest it has been since the last [Ledger.ResetPeaks].
type Count struct {
	Current int64 `json:"current"`
	Peak    int64 `json:"peak"`
}

// Ledger counts bytes by kind. The zero value is ready; a nil *Ledger counts nothing. All methods may be called from any
// goroutine and none blocks.
type Ledger struct {
	counts [numKinds]struct{ current, peak atomic.Int64 }
}

// Add counts delta bytes, which may be negative, for kind k.
func (l *Ledger) Add(k Kind, delta int64) {
	if l == nil || delta == 0 {
		return
	}
	c := &l.counts[k]
	now := c.current.Add(delta)
	for delta > 0 {
		peak := c.peak.Load()
		if now <= peak || c.peak.CompareAndSwap(peak, now) {
			return
		}
	}
}

// Get gives the count of kind k.
func (l *Ledger) Get(k Kind) Count {
	if l == nil {
		return Count{}
	}
	return Count{l.counts[k].current.Load(), l.counts[k].peak.Load()}
}

// ResetPeaks makes each kind's peak what is current.
func (l *Ledger) ResetPeaks() {
	if l == nil {
		return
	}
	for k := range l.counts {
		l.counts[k].peak.Store(l.counts[k].current.Load())
	}
}

// Snapshot gives every kind's count by name. Each count is exact; counts of different kinds may be moments apart.
func (l *Ledger) Snapshot() map[string]Count {
	all := make(map[string]Count, numKinds)
	for k := Kind(0); k < numKinds; k++ {
		all[k.String()] = l.Get(k)
	}
	return all
}

// MarshalJSON gives the snapshot as an object, kind to current and peak.
func (l *Ledger) MarshalJSON() ([]byte, error) { return json.Marshal(l.Snapshot()) }
