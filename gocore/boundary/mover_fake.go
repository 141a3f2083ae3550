package boundary

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/memory"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// FakeMover is an accelerator in host memory for tests: copies happen late, in any order that their events allow, on a goroutine
// of its own. Device memory is a heap's. [FakeMover.Close] ends the goroutine.
type FakeMover struct {
	heap *memory.Heap

	mu     sync.Mutex
	rng    *rand.Rand
	delay  time.Duration // the longest pause before a copy
	queue  []*fakeEvent
	work   chan struct{}
	closed bool
	failed error
	done   chan struct{}
}

type fakeEvent struct {
	after *fakeEvent
	spans []Span
	done  chan struct{}
}

// NewFakeMover starts an accelerator whose order and delays, each at most delay, follow from seed.
func NewFakeMover(seed uint64, delay time.Duration) *FakeMover {
	m := &FakeMover{
		heap: memory.NewHeap(), rng: rand.New(rand.NewPCG(seed, seed)), delay: delay,
		work: make(chan struct{}, 1), done: make(chan struct{}),
	}
	go m.run()
	return m
}

// Heap is the accelerator's memory.
func (m *FakeMover) Heap() *memory.Heap { return m.heap }

// Fail makes later calls of Copy fail with err; nil heals.
func (m *FakeMover) Fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.failed = err
}

// Close ends the goroutine once what is queued is done.
func (m *FakeMover) Close() {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.poke()
	<-m.done
}

func (m *FakeMover) poke() {
	select {
	case m.work <- struct{}{}:
	default:
	}
}

func (m *FakeMover) run() {
	defer close(m.done)
	for {
		m.mu.Lock()
		ev, pause := m.pick()
		closed := m.closed
		m.mu.Unlock()
		if ev == nil {
			if closed {
				return
			}
			<-m.work
			continue
		}
		time.Sleep(pause)
		for _, s := range ev.spans {
			copy(unsafe.Slice((*byte)(s.Dst), s.N), unsafe.Slice((*byte)(s.Src), s.N))
		}
		close(ev.done)
	}
}

// pick takes any copy whose predecessor is done.
func (m *FakeMover) pick() (*fakeEvent, time.Duration) {
	for _, i := range m.rng.Perm(len(m.queue)) {
		ev := m.queue[i]
		if ev.after != nil {
			select {
			case <-ev.after.done:
			default:
				continue
			}
		}
		m.queue = append(m.queue[:i], m.queue[i+1:]...)
		return ev, time.Duration(m.rng.Int64N(int64(m.delay) + 1))
	}
	return nil, 0
}

// Record implements [Mover]. The fake's callers queue nothing of their own, so that the point is long past.
func (m *FakeMover) Record(tensor.Device) (Event, error) { return nil, nil }

// Copy implements [Mover].
func (m *FakeMover) Copy(_ tensor.Device, _ Direction, after Event, spans []Span) (Event, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.failed != nil:
		return nil, m.failed
	case m.closed:
		return nil, errors.New("the fake accelerator is closed")
	}
	ev := &fakeEvent{spans: spans, done: make(chan struct{})}
	ev.after, _ = after.(*fakeEvent)
	m.queue = append(m.queue, ev)
	m.poke()
	return ev, nil
}

// Join implements [Mover]. The caller has no stream here, so that it waits itself.
func (m *FakeMover) Join(_ tensor.Device, ev Event) error { return m.Await(context.Background(), ev) }

// Await implements [Mover].
func (m *FakeMover) Await(ctx context.Context, ev Event) error {
	e, ok := ev.(*fakeEvent)
	if !ok || e == nil {
		return nil
	}
	select {
	case <-e.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Alloc implements [Mover].
func (m *FakeMover) Alloc(_ tensor.Device, n int64) (unsafe.Pointer, error) { return m.heap.Alloc(n) }

// Free implements [Mover].
func (m *FakeMover) Free(_ tensor.Device, ptr unsafe.Pointer, n int64) { m.heap.Free(ptr, n) }
