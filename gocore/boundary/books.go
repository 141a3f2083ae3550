package boundary

import (
	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/memory"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// Stats are a store's exact counters over its life.
type Stats struct {
	Boundaries       int64 `json:"boundaries"`        // held now
	Puts             int64 `json:"puts"`              // Put, PutOne and Copy that succeeded
	Gets             int64 `json:"gets"`              // Get and GetOne that succeeded
	Drops            int64 `json:"drops"`             // boundaries given up by Drop, Clear or Close
	Moves            int64 `json:"moves"`             // moves begun
	Loads            int64 `json:"loads"`             // loads begun
	Failures         int64 `json:"failures"`          // moves and loads that failed
	ChecksumFailures int64 `json:"checksum_failures"` // loads that found a damaged or foreign file
	BytesDevice      int64 `json:"bytes_device"`      // readable bytes now, and what a device tier with a codec holds
	BytesHost        int64 `json:"bytes_host"`        // payload bytes on the host tier now
	BytesDisk        int64 `json:"bytes_disk"`        // bytes of files now
	PeakDevice       int64 `json:"peak_device"`
	PeakHost         int64 `json:"peak_host"`
	PeakDisk         int64 `json:"peak_disk"`
	BytesWritten     int64 `json:"bytes_written"` // to files that were completed
	BytesRead        int64 `json:"bytes_read"`    // from files that were intact
	FilesWritten     int64 `json:"files_written"`
	FilesRemoved     int64 `json:"files_removed"`
	BuffersAllocated int64 `json:"buffers_allocated"` // by the pool, which may be shared
	BuffersReused    int64 `json:"buffers_reused"`
	BuffersActive    int64 `json:"buffers_active"`
	BuffersPooled    int64 `json:"buffers_pooled"`
	Workers          int64 `json:"workers"`          // goroutines now
	ReleasesPending  int64 `json:"releases_pending"` // in the queue, which may be shared
}

// Stats gives the counters at one moment.
func (s *Store) Stats() Stats {
	s.mu.Lock()
	st := s.stats
	st.Boundaries = int64(len(s.entries))
	pools := []*memory.Pool{s.pool}
	for _, p := range s.devPools {
		pools = append(pools, p)
	}
	s.mu.Unlock()
	for _, pool := range pools {
		p := pool.Stats()
		st.BuffersAllocated += p.Allocations
		st.BuffersReused += p.Reuses
		st.BuffersActive += p.Active
		st.BuffersPooled += p.Pooled
	}
	st.ReleasesPending = int64(s.releases.Len())
	return st
}

// The functions below change the books. Their callers hold s.mu.

func (s *Store) count(kind memory.Kind, delta int64) {
	s.ledger.Add(kind, delta)
	switch kind {
	case memory.BoundaryDevice:
		s.stats.BytesDevice += delta
		s.stats.PeakDevice = max(s.stats.PeakDevice, s.stats.BytesDevice)
	case memory.BoundaryHost:
		s.stats.BytesHost += delta
		s.stats.PeakHost = max(s.stats.PeakHost, s.stats.BytesHost)
	case memory.BoundaryDisk:
		s.stats.BytesDisk += delta
		s.stats.PeakDisk = max(s.stats.PeakDisk, s.stats.BytesDisk)
	}
}

// chargeRes sets the readable bytes of e.
func (s *Store) chargeRes(e *entry, bytes int64) {
	s.count(memory.BoundaryDevice, bytes-e.resBytes)
	if !s.spec.moves() {
		s.capped += bytes - e.resBytes
	}
	e.resBytes = bytes
}

// chargeTier sets the tier bytes of t.
func (s *Store) chargeTier(t *transit, bytes int64) {
	s.count(s.tierKind, bytes-t.tierBytes)
	s.capped += bytes - t.tierBytes
	t.tierBytes = bytes
}

func (s *Store) lookup(key int64) (*entry, error) {
	if s.closed {
		return nil, s.closedError(key)
	}
	e := s.entries[key]
	if e == nil {
		return nil, errs.E(errs.ErrStoreKey, "boundary %d is not in the store: it was never put, or it has been dropped", key)
	}
	return e, nil
}

// discard takes e, which is out of the map, apart and gives the memory that the caller is to give up after unlocking; nil if
// somebody runs its job, who will then do the same.
func (s *Store) discard(e *entry) *holding {
	s.noteUntold(e)
	if e.busy {
		e.gone = true
		e.transit.cancel.Store(true)
		e.wake()
		return nil
	}
	e.queued = false
	s.chargeRes(e, 0)
	if t := e.transit; t != nil {
		s.freeTier(t)
		s.freeLoad(t)
		e.transit = nil
	}
	garbage := e.res
	e.res = nil
	e.wake()
	return garbage
}

// freeTier gives up what t holds in the tier.
func (s *Store) freeTier(t *transit) {
	s.chargeTier(t, 0)
	s.free(&t.packed)
	s.free(&t.stage)
	if t.path != "" {
		s.removals = append(s.removals, t.path)
		t.path = ""
		s.wake.Signal()
	}
}

// freeLoad gives up what t holds for a load.
func (s *Store) freeLoad(t *transit) {
	s.free(&t.stage)
	if t.target != nil {
		t.target.give()
		t.target = nil
	}
}

func (s *Store) free(buf *memory.Buffer) {
	if !buf.IsZero() {
		giveBack(s.pool, *buf)
		*buf = memory.Buffer{}
	}
}

// noteUntold keeps a failure that no caller has seen for Close.
func (s *Store) noteUntold(e *entry) {
	if e.err != nil && !e.told {
		e.told = true
		s.late = append(s.late, e.err)
	}
}

func (s *Store) devicePool(dev tensor.Device) (*memory.Pool, error) {
	if pool := s.devPools[dev]; pool != nil {
		return pool, nil
	}
	pool, err := s.newPool(deviceAllocator{s.mover, dev})
	if err == nil {
		s.devPools[dev] = pool
	}
	return pool, err
}

func (s *Store) closedError(key int64) error {
	return errs.E(errs.ErrClosed, "boundary %d: the store is closed", key)
}

func (s *Store) capError(key, need, used int64) error {
	return errs.E(errs.ErrStore, "boundary %d needs %d bytes on the %s tier, %d of %d are free; raise max_bytes or use another tier",
		key, need, s.spec.Tier, s.spec.MaxBytes-used, s.spec.MaxBytes)
}

func (s *Store) needMover(key int64, dev tensor.Device) error {
	if s.mover == nil {
		return errs.E(errs.ErrStore,
			"boundary %d is on device type %d, number %d, and the store has no mover for it; use the device tier without a codec",
			key, dev.Type, dev.ID)
	}
	return nil
}
