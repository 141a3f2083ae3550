package api

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"unsafe"

	"github.com/eae-runtime/eae-runtime/bridge/dlpack"
	"github.com/eae-runtime/eae-runtime/bridge/offheap"
	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/memory"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

var pools = table[*tensorPool]{noun: "pool"}

// tensorPool lends buffers as tensors.
//
// Note [A released tensor may still be in use]
//
//	Releasing a tensor makes its memory available at once, but a Python variable may still point at it. So the memory is freed
//	only when the last tensor on it is gone: tensorPool is the pool's allocator and puts such a Free off.
type tensorPool struct {
	pool   *memory.Pool
	memory offheap.Allocator

	mu    sync.Mutex
	loans map[unsafe.Pointer]loan
	views map[unsafe.Pointer]int   // tensors alive on each block
	owed  map[unsafe.Pointer]int64 // blocks to free when their last tensor is gone, with their sizes
}

type loan struct {
	buffer memory.Buffer
	number int64
}

// Alloc gives memory outside Go's heap.
func (p *tensorPool) Alloc(n int64) (unsafe.Pointer, error) { return p.memory.Alloc(n) }

// Free gives memory back, now or when its last tensor is gone.
func (p *tensorPool) Free(block unsafe.Pointer, n int64) {
	p.mu.Lock()
	inUse := p.views[block] > 0
	if inUse {
		p.owed[block] = n
	}
	p.mu.Unlock()
	if !inUse {
		p.memory.Free(block, n)
	}
}

// request lends a tensor of that shape and type.
func (p *tensorPool) request(shape []int64, dtype tensor.DType) (int64, error) {
	size := dtype.Size()
	for _, n := range shape {
		if n != 0 && size > (1<<62)/n {
			return 0, errs.E(errs.ErrValue, "a tensor of shape %v has too many elements", shape)
		}
		size *= n
	}
	space := fmt.Sprint(dtype, shape)
	buffer, err := p.pool.GetKey(context.Background(), space, size)
	if err != nil {
		return 0, err
	}
	number := lastHandle.Add(1)
	p.mu.Lock()
	p.loans[buffer.Ptr] = loan{buffer, number}
	p.views[buffer.Ptr]++
	p.mu.Unlock()
	return dlpack.Export(&tensor.Tensor{
		Data: buffer.Ptr, DType: dtype, Device: tensor.CPU, Shape: shape, Strides: tensor.RowMajor(shape),
		Release: func() { p.gone(buffer.Ptr, number) },
	})
}

// release ends the loan of the block at that address.
func (p *tensorPool) release(block unsafe.Pointer) error {
	p.mu.Lock()
	lent, ok := p.loans[block]
	delete(p.loans, block)
	p.mu.Unlock()
	if !ok {
		return errs.E(errs.ErrBridge, "the tensor was not lent by this pool, or was released before")
	}
	return p.pool.Put(lent.buffer)
}

// gone is told that a tensor on the block has died. One that was never released goes back to the pool.
func (p *tensorPool) gone(block unsafe.Pointer, number int64) {
	p.mu.Lock()
	lent, open := p.loans[block]
	open = open && lent.number == number
	if open {
		delete(p.loans, block)
	}
	p.views[block]--
	size, owed := p.owed[block]
	last := p.views[block] == 0
	if last {
		delete(p.views, block)
		delete(p.owed, block)
	}
	p.mu.Unlock()
	if open {
		// Put fails only for a buffer that is not lent, and this one is.
		if err := p.pool.Put(lent.buffer); err != nil {
			panic(err)
		}
	}
	if last && owed {
		p.memory.Free(block, size)
	}
}

// poolOf is the pool of a handle, nil for 0.
func poolOf(h int64) (*memory.Pool, error) {
	if h == 0 {
		return nil, nil
	}
	pool, err := pools.get(h)
	if err != nil {
		return nil, err
	}
	return pool.pool, nil
}

// PoolNew makes a pool of CPU tensors that keeps at most maxPerKey idle buffers for each shape and dtype. Stores and chains may take their
// buffers from it too; those are all kept.
func PoolNew(maxPerKey int64) (int64, error) {
	return value(func() (int64, error) {
		made := &tensorPool{
			loans: map[unsafe.Pointer]loan{}, views: map[unsafe.Pointer]int{}, owed: map[unsafe.Pointer]int64{},
		}
		var err error
		made.pool, err = memory.NewPool(memory.PoolOptions{Allocator: made, MaxPerKey: int(maxPerKey), KeepPlain: true})
		if err != nil {
			return 0, err
		}
		return pools.add(made), nil
	})
}

// PoolRequest lends a tensor: shape is comma separated ("" for 0-dim), dtype a torch name without "torch.". The memory is not
// zeroed. It goes back to the pool by PoolRelease, or when the tensor dies.
func PoolRequest(h int64, shape, dtype string) (int64, error) {
	return value(func() (int64, error) {
		pool, err := pools.get(h)
		if err != nil {
			return 0, err
		}
		dims, err := parseInts(shape)
		if err != nil {
			return 0, err
		}
		for _, n := range dims {
			if n < 0 {
				return 0, errs.E(errs.ErrValue, "the shape [%s] has a negative size", shape)
			}
		}
		kind, err := parseDType(dtype)
		if err != nil {
			return 0, err
		}
		return pool.request(dims, kind)
	})
}

// PoolRelease gives the memory at that data address back to the pool. The tensor may die later; using it is a fault of the
// caller, but a harmless one: the memory stays mapped until then.
func PoolRelease(h, dataPtr int64) error {
	return guard(func() error {
		pool, err := pools.get(h)
		if err != nil {
			return err
		}
		return pool.release(address(dataPtr))
	})
}

// PoolStats gives the pool's exact counters as JSON (see memory.PoolStats).
func PoolStats(h int64) (string, error) {
	return value(func() (string, error) {
		pool, err := pools.get(h)
		if err != nil {
			return "", err
		}
		text, err := json.Marshal(pool.pool.Stats())
		return string(text), err
	})
}

// PoolReset frees the idle buffers and starts the counters anew.
func PoolReset(h int64) error {
	return guard(func() error {
		pool, err := pools.get(h)
		if err != nil {
			return err
		}
		pool.pool.Reset()
		return nil
	})
}

// PoolClose frees the idle buffers; those that are lent are freed when their tensors die. A second call does nothing.
func PoolClose(h int64) error {
	return guard(func() error {
		if pool, ok := pools.remove(h); ok {
			pool.pool.Close()
		}
		return nil
	})
}
