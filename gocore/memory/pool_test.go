package memory

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

var ctx = context.Background()

func newPool(t *testing.T, opt PoolOptions) (*Pool, *Heap) {
	t.Helper()
	heap := NewHeap()
	opt.Allocator = heap
	p, err := NewPool(opt)
	require.NoError(t, err)
	return p, heap
}

func get(t *testing.T, p *Pool, n int64) Buffer {
	t.Helper()
	b, err := p.Get(ctx, n)
	require.NoError(t, err)
	return b
}

func TestBuffersAreAlignedAndRounded(t *testing.T) {
	p, heap := newPool(t, PoolOptions{MaxPerKey: Unbounded})
	for _, c := range []struct{ ask, size int64 }{{0, 64}, {1, 64}, {64, 64}, {65, 128}, {1000, 1024}, {1 << 20, 1 << 20}} {
		b := get(t, p, c.ask)
		require.Equal(t, c.size, b.Size)
		require.Zero(t, uintptr(b.Ptr)%Alignment)
		require.Len(t, b.Bytes(), int(c.size))
		require.NoError(t, p.Put(b))
	}
	p.Close()
	count, bytes := heap.Live()
	require.Zero(t, count)
	require.Zero(t, bytes)
}

func TestCountersAreExact(t *testing.T) {
	ledger := &Ledger{}
	p, _ := newPool(t, PoolOptions{MaxPerKey: 1, Ledger: ledger})
	a, b := get(t, p, 64), get(t, p, 64)
	require.NoError(t, p.Put(a))
	require.NoError(t, p.Put(b)) // beyond MaxPerKey: freed
	c := get(t, p, 60)           // reused
	d := get(t, p, 100)          // another size
	require.Equal(t, PoolStats{
		Active: 2, Peak: 2, Allocations: 3, Reuses: 1, BytesActive: 192, BytesPeak: 192,
	}, p.Stats())
	require.Equal(t, Count{192, 192}, ledger.Get(PoolActive))
	require.NoError(t, p.Put(c))
	require.Equal(t, Count{64, 64}, ledger.Get(PoolIdle))

	p.Reset() // d is an orphan from here on
	require.Equal(t, PoolStats{Orphans: 1}, p.Stats())
	require.NoError(t, p.Put(d))
	require.Equal(t, PoolStats{}, p.Stats())
	require.Zero(t, ledger.Get(PoolActive).Current)
	require.Zero(t, ledger.Get(PoolIdle).Current)
}

func TestKeySpacesAreApart(t *testing.T) {
	p, _ := newPool(t, PoolOptions{MaxPerKey: 8})
	a, err := p.GetKey(ctx, "(4,4) float32 cpu", 64)
	require.NoError(t, err)
	require.NoError(t, p.Put(a))
	b, err := p.GetKey(ctx, "(16,) float32 cpu", 64)
	require.NoError(t, err)
	require.NotEqual(t, a.Ptr, b.Ptr)
	c, err := p.GetKey(ctx, "(4,4) float32 cpu", 64)
	require.NoError(t, err)
	require.Equal(t, a.Ptr, c.Ptr)
}

func TestPutRefuses(t *testing.T) {
	p, _ := newPool(t, PoolOptions{MaxPerKey: 8})
	other, _ := newPool(t, PoolOptions{MaxPerKey: 8})
	b := get(t, p, 64)
	require.ErrorIs(t, p.Put(Buffer{}), errs.ErrBridge)
	require.ErrorIs(t, other.Put(b), errs.ErrBridge)
	require.NoError(t, p.Put(b))
	require.ErrorIs(t, p.Put(b), errs.ErrBridge)
	again := get(t, p, 64)
	require.Equal(t, b.Ptr, again.Ptr)
	require.ErrorIs(t, p.Put(b), errs.ErrBridge, "a stale loan of memory that is lent again")
	require.Equal(t, int64(1), p.Stats().Active)
}

func TestBadValues(t *testing.T) {
	_, err := NewPool(PoolOptions{MaxPerKey: -1})
	require.ErrorIs(t, err, errs.ErrValue)
	_, err = NewPool(PoolOptions{MaxBytes: -1})
	require.ErrorIs(t, err, errs.ErrValue)
	p, _ := newPool(t, PoolOptions{})
	_, err = p.Get(ctx, -1)
	require.ErrorIs(t, err, errs.ErrValue)
	_, err = NewHeap().Alloc(0)
	require.ErrorIs(t, err, errs.ErrValue)
	require.Panics(t, func() { NewHeap().Free(unsafe.Pointer(p), 64) })
}

func TestCap(t *testing.T) {
	p, heap := newPool(t, PoolOptions{MaxPerKey: 8, MaxBytes: 256})
	a := get(t, p, 128)
	require.NoError(t, p.Put(a)) // idle
	b := get(t, p, 192)          // frees the idle one to stay under the cap
	_, bytes := heap.Live()
	require.Equal(t, int64(192), bytes)
	_, err := p.Get(ctx, 257)
	require.ErrorIs(t, err, errs.ErrStore)
	_, err = p.Get(ctx, 128)
	require.ErrorIs(t, err, errs.ErrStore, "a context without an end is not waited on")

	soon, cancel := context.WithTimeout(ctx, 5*time.Millisecond)
	defer cancel()
	_, err = p.Get(soon, 128)
	require.ErrorIs(t, err, errs.ErrTimeout)

	long, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	got := make(chan error, 1)
	go func() {
		c, err := p.Get(long, 128)
		if err == nil {
			err = p.Put(c)
		}
		got <- err
	}()
	time.Sleep(2 * time.Millisecond)
	require.NoError(t, p.Put(b))
	require.NoError(t, <-got)
}

type brokenAllocator struct{ Allocator }

func (brokenAllocator) Alloc(int64) (unsafe.Pointer, error) { return nil, errors.New("no memory") }

func TestAllocatorFailureChangesNothing(t *testing.T) {
	p, err := NewPool(PoolOptions{Allocator: brokenAllocator{}, MaxBytes: 64})
	require.NoError(t, err)
	for range 3 {
		_, err = p.Get(ctx, 64)
		require.ErrorIs(t, err, errs.ErrStore)
		require.ErrorContains(t, err, "no memory")
	}
	stats := p.Stats()
	require.Zero(t, stats.Active)
	require.Zero(t, stats.Allocations)
}

func TestCloseFreesLentBuffersWhenTheyComeBack(t *testing.T) {
	p, heap := newPool(t, PoolOptions{MaxPerKey: 8})
	a, b := get(t, p, 64), get(t, p, 64)
	require.NoError(t, p.Put(b))
	p.Close()
	p.Close()
	count, _ := heap.Live()
	require.Equal(t, 1, count)
	_, err := p.Get(ctx, 64)
	require.ErrorIs(t, err, errs.ErrClosed)
	require.NoError(t, p.Put(a))
	count, _ = heap.Live()
	require.Zero(t, count)
}

// A naive pool: lists of addresses. The real one must agree on every counter after every step.
func TestPoolAgainstNaiveModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		heap := NewHeap()
		maxPerKey := rapid.IntRange(0, 3).Draw(t, "maxPerKey")
		p, err := NewPool(PoolOptions{Allocator: heap, MaxPerKey: maxPerKey})
		require.NoError(t, err)
		var lent []Buffer
		idle := map[int64]int{}
		var want PoolStats
		t.Repeat(map[string]func(*rapid.T){
			"get": func(t *rapid.T) {
				n := rapid.Int64Range(0, 300).Draw(t, "n")
				b, err := p.Get(ctx, n)
				require.NoError(t, err)
				lent = append(lent, b)
				if idle[b.Size] > 0 {
					idle[b.Size]--
					want.Reuses++
				} else {
					want.Allocations++
				}
			},
			"put": func(t *rapid.T) {
				if len(lent) == 0 {
					t.Skip("nothing lent")
				}
				i := rapid.IntRange(0, len(lent)-1).Draw(t, "i")
				b := lent[i]
				lent = append(lent[:i], lent[i+1:]...)
				require.NoError(t, p.Put(b))
				require.ErrorIs(t, p.Put(b), errs.ErrBridge)
				if idle[b.Size] < maxPerKey {
					idle[b.Size]++
				}
			},
			"": func(t *rapid.T) {
				want.Active, want.BytesActive, want.Pooled, want.BytesPooled = int64(len(lent)), 0, 0, 0
				for _, b := range lent {
					want.BytesActive += b.Size
				}
				for size, n := range idle {
					want.Pooled += int64(n)
					want.BytesPooled += size * int64(n)
				}
				want.Peak = max(want.Peak, want.Active)
				want.BytesPeak = max(want.BytesPeak, want.BytesActive)
				require.Equal(t, want, p.Stats())
				count, bytes := heap.Live()
				require.Equal(t, want.Active+want.Pooled, int64(count))
				require.Equal(t, want.BytesActive+want.BytesPooled, bytes)
			},
		})
	})
}

func TestConcurrentUse(t *testing.T) {
	p, heap := newPool(t, PoolOptions{MaxPerKey: 2, MaxBytes: 1 << 12})
	long, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 200 {
				b, err := p.Get(long, int64(1+(g*7+i)%1000))
				if err != nil {
					t.Error(err)
					return
				}
				b.Bytes()[0] = byte(g)
				if _, bytes := heap.Live(); bytes > 1<<12 {
					t.Errorf("%d bytes live under a cap of %d", bytes, 1<<12)
				}
				if err := p.Put(b); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.Zero(t, p.Stats().Active)
}

func TestLedger(t *testing.T) {
	var none *Ledger
	none.Add(Pass, 5)
	none.ResetPeaks()
	require.Equal(t, Count{}, none.Get(Pass))

	l := &Ledger{}
	l.Add(BoundaryDisk, 10)
	l.Add(BoundaryDisk, 5)
	l.Add(BoundaryDisk, -12)
	require.Equal(t, Count{3, 15}, l.Get(BoundaryDisk))
	text, err := json.Marshal(l)
	require.NoError(t, err)
	require.JSONEq(t, `{"boundary-device":{"current":0,"peak":0},"boundary-host":{"current":0,"peak":0},
		"boundary-disk":{"current":3,"peak":15},"pool-active":{"current":0,"peak":0},
		"pool-idle":{"current":0,"peak":0},"pass":{"current":0,"peak":0}}`, string(text))
	l.ResetPeaks()
	require.Equal(t, Count{3, 3}, l.Get(BoundaryDisk))
}

func BenchmarkGetPut(b *testing.B) {
	p, _ := NewPool(PoolOptions{MaxPerKey: 8})
	b.ReportAllocs()
	for b.Loop() {
		buf, _ := p.Get(ctx, 4096)
		_ = p.Put(buf)
	}
}

// Buffers of the plain key space are all kept; those of a named one only up to MaxPerKey.
func TestKeepPlain(t *testing.T) {
	p, err := NewPool(PoolOptions{MaxPerKey: 1, KeepPlain: true})
	require.NoError(t, err)
	defer p.Close()
	for _, space := range []string{"", "named"} {
		var lent []Buffer
		for range 3 {
			b, err := p.GetKey(context.Background(), space, 100)
			require.NoError(t, err)
			lent = append(lent, b)
		}
		for _, b := range lent {
			require.NoError(t, p.Put(b))
		}
	}
	require.Equal(t, int64(3+1), p.Stats().Pooled)
}
