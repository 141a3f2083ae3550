package memory

import (
	"context"
	"errors"
	"sync"
	"unsafe"

	"golang.org/x/sync/semaphore"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// Unbounded as [PoolOptions].MaxPerKey keeps every returned buffer.
const Unbounded = int(^uint(0) >> 1)

// PoolOptions configures a [Pool].
type PoolOptions struct {
	// Allocator is where the bytes come from; nil is a new [Heap].
	Allocator Allocator
	// MaxPerKey is how many idle buffers of one key are kept; one more that comes back is freed. 0 keeps none.
	MaxPerKey int
	// KeepPlain keeps every returned buffer of Get, whatever MaxPerKey says of the key spaces of GetKey.
	KeepPlain bool
	// MaxBytes is a cap on lent plus idle bytes that holds at every moment; 0 is no cap.
	MaxBytes int64
	// Ledger, where given, is told of PoolActive and PoolIdle.
	Ledger *Ledger
}

// Buffer is a loan of Size bytes at Ptr, which is a multiple of [Alignment]. It is a value: copies are the same loan. The zero
// Buffer is no loan.
type Buffer struct {
	Ptr  unsafe.Pointer
	Size int64
	slot *slot
	loan uint64
}

// Bytes gives the memory as a slice, valid until [Pool.Put].
func (b Buffer) Bytes() []byte { return unsafe.Slice((*byte)(b.Ptr), b.Size) }

// IsZero says whether b is no loan.
func (b Buffer) IsZero() bool { return b.slot == nil }

// slot is one piece of memory over all its loans. loan is odd while it is lent: a stale Put has another number.
type slot struct {
	ptr   unsafe.Pointer
	size  int64
	key   poolKey
	loan  uint64
	epoch uint64
	owner *Pool
}

type poolKey struct {
	space string
	size  int64
}

// PoolStats are a pool's exact counters. Active, Peak, Allocations and Reuses start anew at [Pool.Reset].
type PoolStats struct {
	Active      int64 `json:"active"`       // buffers lent since the last Reset and not returned
	Peak        int64 `json:"peak"`         // highest Active
	Allocations int64 `json:"allocations"`  // requests served by the allocator
	Reuses      int64 `json:"reuses"`       // requests served by an idle buffer
	Pooled      int64 `json:"pooled"`       // idle buffers
	Orphans     int64 `json:"orphans"`      // buffers lent before the last Reset and not returned
	BytesActive int64 `json:"bytes_active"` // bytes of Active
	BytesPooled int64 `json:"bytes_pooled"` // bytes of Pooled
	BytesPeak   int64 `json:"bytes_peak"`   // highest BytesActive
}

// Pool lends buffers. All methods may be called from any goroutine.
type Pool struct {
	alloc     Allocator
	maxPerKey int
	keepPlain bool
	maxBytes  int64
	lentCap   *semaphore.Weighted // weighs lent bytes; nil without a cap
	ledger    *Ledger

	mu     sync.Mutex
	idle   map[poolKey][]*slot
	stats  PoolStats
	lent   int64 // bytes lent, those of orphans too
	epoch  uint64
	closed bool
}

// NewPool makes a pool. ErrValue when MaxPerKey or MaxBytes is negative.
func NewPool(opt PoolOptions) (*Pool, error) {
	if opt.MaxPerKey < 0 {
		return nil, errs.E(errs.ErrValue, "max_per_key is %d; it must be 0 (keep none) or more", opt.MaxPerKey)
	}
	if opt.MaxBytes < 0 {
		return nil, errs.E(errs.ErrValue, "max_bytes is %d; it must be 0 (no cap) or more", opt.MaxBytes)
	}
	if opt.Allocator == nil {
		opt.Allocator = NewHeap()
	}
	p := &Pool{
		alloc: opt.Allocator, maxPerKey: opt.MaxPerKey, keepPlain: opt.KeepPlain, maxBytes: opt.MaxBytes, ledger: opt.Ledger,
		idle: map[poolKey][]*slot{},
	}
	if opt.MaxBytes > 0 {
		p.lentCap = semaphore.NewWeighted(opt.MaxBytes)
	}
	return p, nil
}

// Get lends a buffer of at least n bytes, n >= 0 (rounded up to 64, at least 64). Under a cap it waits for returns until ctx is
// done (ErrTimeout); a ctx that can never be done is not waited on: ErrStore at once. ErrStore also when n exceeds the cap or
// the allocator has no memory, ErrValue when n is negative, ErrClosed after Close.
func (p *Pool) Get(ctx context.Context, n int64) (Buffer, error) { return p.GetKey(ctx, "", n) }

// GetKey is Get in a key space of the caller's: only buffers returned from the same space and size are reused, and MaxPerKey
// counts per space and size. The space may name a shape, a dtype and a device.
func (p *Pool) GetKey(ctx context.Context, space string, n int64) (Buffer, error) {
	if n < 0 {
		return Buffer{}, errs.E(errs.ErrValue, "memory: a buffer of %d bytes was asked for; the size must be 0 or more", n)
	}
	key := poolKey{space, max(Round(n), Alignment)}
	if p.lentCap != nil {
		if err := p.reserve(ctx, key.size); err != nil {
			return Buffer{}, err
		}
	}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		p.unreserve(key.size)
		return Buffer{}, errs.E(errs.ErrClosed, "memory: the pool is closed")
	}
	if bucket := p.idle[key]; len(bucket) > 0 {
		s := bucket[len(bucket)-1]
		bucket[len(bucket)-1] = nil
		p.idle[key] = bucket[:len(bucket)-1]
		p.countIdle(-1, -key.size)
		p.stats.Reuses++
		b := p.lend(s)
		p.mu.Unlock()
		return b, nil
	}
	p.makeRoom(key.size)
	s := &slot{size: key.size, key: key, owner: p}
	b := p.lend(s)
	p.stats.Allocations++
	p.mu.Unlock()

	ptr, err := p.alloc.Alloc(key.size)
	if err != nil {
		p.mu.Lock()
		if s.epoch == p.epoch {
			p.stats.Allocations--
		}
		p.takeBack(s)
		p.mu.Unlock()
		p.unreserve(key.size)
		return Buffer{}, errs.E(errs.ErrStore, "memory: no buffer of %d bytes: %w", key.size, err)
	}
	s.ptr, b.Ptr = ptr, ptr
	return b, nil
}

// Put returns a loan. ErrBridge when b is no loan of this pool or was returned before; nothing changes then. Buffers beyond
// MaxPerKey, orphans, and all after Close are freed. Put does not block.
func (p *Pool) Put(b Buffer) error {
	s := b.slot
	if s == nil || s.owner != p {
		return errs.E(errs.ErrBridge, "memory: the buffer was not lent by this pool")
	}
	p.mu.Lock()
	if s.loan != b.loan || s.loan&1 == 0 {
		p.mu.Unlock()
		return errs.E(errs.ErrBridge, "memory: the buffer of %d bytes at %p was returned twice", b.Size, b.Ptr)
	}
	fresh := p.takeBack(s)
	room := len(p.idle[s.key]) < p.maxPerKey || p.keepPlain && s.key.space == ""
	keep := fresh && !p.closed && room
	if keep {
		p.idle[s.key] = append(p.idle[s.key], s)
		p.countIdle(1, s.size)
	}
	p.mu.Unlock()
	if !keep {
		p.alloc.Free(s.ptr, s.size)
	}
	p.unreserve(s.size)
	return nil
}

// Stats gives the counters at one moment.
func (p *Pool) Stats() PoolStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stats
}

// Reset frees all idle buffers and starts the counters anew. Buffers still lent become orphans: they stay valid, count under
// the cap, and are freed when they are returned.
func (p *Pool) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.freeIdle(func() bool { return true })
	p.ledger.Add(PoolActive, -p.stats.BytesActive)
	p.stats = PoolStats{Orphans: p.stats.Orphans + p.stats.Active}
	p.epoch++
}

// Close frees all idle buffers; lent ones are freed when they are returned. Later Gets fail with ErrClosed. A second Close does
// nothing.
func (p *Pool) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.freeIdle(func() bool { return true })
}

// reserve takes size from the cap on lent bytes.
func (p *Pool) reserve(ctx context.Context, size int64) error {
	if size > p.maxBytes {
		return errs.E(errs.ErrStore, "memory: a buffer of %d bytes cannot fit under the cap of %d bytes; raise the cap", size, p.maxBytes)
	}
	if p.lentCap.TryAcquire(size) {
		return nil
	}
	if ctx.Done() == nil {
		return errs.E(errs.ErrStore, "memory: %d bytes more would pass the cap of %d bytes; return buffers first or raise the cap",
			size, p.maxBytes)
	}
	if err := p.lentCap.Acquire(ctx, size); err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			return errs.E(errs.ErrTimeout, "memory: no %d bytes came free under the cap of %d bytes in time", size, p.maxBytes)
		}
		return errs.E(errs.ErrTimeout, "memory: the wait for %d bytes was given up: %w", size, err)
	}
	return nil
}

func (p *Pool) unreserve(size int64) {
	if p.lentCap != nil {
		p.lentCap.Release(size)
	}
}

// lend counts s as lent. The caller holds p.mu.
func (p *Pool) lend(s *slot) Buffer {
	s.loan++
	s.epoch = p.epoch
	p.lent += s.size
	p.stats.Active++
	p.stats.BytesActive += s.size
	p.stats.Peak = max(p.stats.Peak, p.stats.Active)
	p.stats.BytesPeak = max(p.stats.BytesPeak, p.stats.BytesActive)
	p.ledger.Add(PoolActive, s.size)
	return Buffer{Ptr: s.ptr, Size: s.size, slot: s, loan: s.loan}
}

// takeBack ends the loan of s and says whether it began after the last Reset. The caller holds p.mu.
func (p *Pool) takeBack(s *slot) bool {
	s.loan++
	p.lent -= s.size
	if s.epoch != p.epoch {
		p.stats.Orphans--
		return false
	}
	p.stats.Active--
	p.stats.BytesActive -= s.size
	p.ledger.Add(PoolActive, -s.size)
	return true
}

// makeRoom frees idle buffers until size more bytes fit under the cap. Lent bytes alone always fit: lentCap sees to it. The
// memory is freed under the lock, so that the cap holds at every moment. The caller holds p.mu.
func (p *Pool) makeRoom(size int64) {
	if p.maxBytes > 0 {
		p.freeIdle(func() bool { return p.lent+p.stats.BytesPooled+size > p.maxBytes })
	}
}

// freeIdle frees idle buffers for as long as more says so. The caller holds p.mu.
func (p *Pool) freeIdle(more func() bool) {
	for key, bucket := range p.idle {
		for len(bucket) > 0 && more() {
			s := bucket[len(bucket)-1]
			bucket[len(bucket)-1] = nil
			bucket = bucket[:len(bucket)-1]
			p.countIdle(-1, -s.size)
			p.alloc.Free(s.ptr, s.size)
		}
		if len(bucket) == 0 {
			delete(p.idle, key)
		} else {
			p.idle[key] = bucket
		}
	}
}

func (p *Pool) countIdle(count, bytes int64) {
	p.stats.Pooled += count
	p.stats.BytesPooled += bytes
	p.ledger.Add(PoolIdle, bytes)
}
