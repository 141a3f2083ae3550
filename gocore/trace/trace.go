// Package trace records what ran when: spans on lanes and a counter of bytes, kept in bounded memory, written as Chrome trace JSON (which
// Perfetto opens), and summed up per name.
//
// # Basics
//
// A [Recorder] takes spans from Go ([Recorder.Start], [Recorder.End]) and, in batches of lines, from Python ([Recorder.AddLines]). A nil *Recorder is
// a recorder that is switched off: every method may be called on it, costs one comparison, and reads no clock.
//
// # Caveats
//
// Times are nanoseconds since the Unix epoch, in Go and in lines alike: they meet on one axis. The ring forgets the oldest
// spans when it is full ([Recorder.Lost] counts them); the totals of [Recorder.Report] forget nothing.
package trace

import (
	"encoding/json"
	"errors"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// The lanes that the core itself uses; any other name makes a lane of its own.
const (
	LaneExecutor = "executor"
	LaneStore    = "store"
	LanePasses   = "passes"
)

// Span is one piece of work on a lane. Start and End are nanoseconds since the Unix epoch; Bytes is what it moved or made, 0 if nothing is known.
type Span struct {
	Lane, Name string
	Start, End int64
	Bytes      int64
}

// sample is one value of the bytes counter.
type sample struct{ at, bytes int64 }

// Options of a recorder; their JSON form is what crosses the bridge.
type Options struct {
	// Capacity is how many spans, and how many counter samples, are kept. Default 262144 (about 17 MB of spans when full).
	Capacity int `json:"capacity"`
	// Process is the name that the viewer shows for the process. Default "eae-runtime".
	Process string `json:"process"`
}

// Recorder collects spans. It is safe for concurrent use; the zero value is not usable, nil is (see the package comment).
type Recorder struct {
	opt   Options
	wall  int64     // Unix nanoseconds at base
	base  time.Time // carries the monotonic clock, so that a stepped wall clock tears nothing
	mu    sync.Mutex
	spans ring[Span]
	bytes ring[sample]
	total map[string]*Total
}

// New makes a recorder; zero options take their defaults. A negative capacity is ErrValue.
func New(opt Options) (*Recorder, error) {
	if opt.Capacity < 0 {
		return nil, errs.E(errs.ErrValue, "capacity: %d is negative", opt.Capacity)
	}
	if opt.Capacity == 0 {
		opt.Capacity = 1 << 18
	}
	if opt.Process == "" {
		opt.Process = "eae-runtime"
	}
	now := time.Now()
	r := &Recorder{opt: opt, wall: now.UnixNano(), base: now}
	r.Reset()
	return r, nil
}

// Open is [New] on the JSON form of [Options]; the empty text takes every default. Unknown fields and bad values are ErrValue.
func Open(spec string) (*Recorder, error) {
	var opt Options
	if strings.TrimSpace(spec) != "" {
		d := json.NewDecoder(strings.NewReader(spec))
		d.DisallowUnknownFields()
		if err := d.Decode(&opt); err != nil {
			return nil, errs.E(errs.ErrValue, "trace options: %s", strings.TrimPrefix(err.Error(), "json: "))
		}
		if _, err := d.Token(); !errors.Is(err, io.EOF) {
			return nil, errs.E(errs.ErrValue, "trace options: text after the JSON object")
		}
	}
	return New(opt)
}

// Start reads the clock for a later [Recorder.End]; 0 when switched off.
func (r *Recorder) Start() int64 {
	if r == nil {
		return 0
	}
	return r.wall + int64(time.Since(r.base))
}

// End records a span from start (of [Recorder.Start]) to now.
func (r *Recorder) End(lane, name string, start, bytes int64) {
	if r == nil {
		return
	}
	r.Add(Span{lane, name, start, r.Start(), bytes})
}

// Add records a span. An End before its Start counts as no time.
func (r *Recorder) Add(s Span) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.add(s)
}

func (r *Recorder) add(s Span) {
	s.End = max(s.End, s.Start)
	r.spans.push(s)
	t := r.total[s.Name]
	if t == nil {
		t = &Total{}
		r.total[s.Name] = t
	}
	t.add(s)
}

// Count records the value of the bytes counter at a time of [Recorder.Start].
func (r *Recorder) Count(at, bytes int64) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bytes.push(sample{at, bytes})
}

// Lost is how many spans and counter samples the ring has overwritten.
func (r *Recorder) Lost() int64 {
	if r == nil {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.spans.lost + r.bytes.lost
}

// Reset forgets everything recorded so far, and the count of what was lost.
func (r *Recorder) Reset() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.spans = ring[Span]{limit: r.opt.Capacity}
	r.bytes = ring[sample]{limit: r.opt.Capacity}
	r.total = map[string]*Total{}
}

// ring keeps the last limit items; it grows as it fills.
type ring[T any] struct {
	limit int
	items []T
	next  int // where the oldest item lies once the ring is full
	lost  int64
}

func (r *ring[T]) push(x T) {
	if len(r.items) < r.limit {
		r.items = append(r.items, x)
		return
	}
	r.items[r.next] = x
	r.next = (r.next + 1) % r.limit
	r.lost++
}

// list copies the items, oldest first.
func (r *ring[T]) list() []T {
	out := make([]T, 0, len(r.items))
	return append(append(out, r.items[r.next:]...), r.items[:r.next]...)
}
