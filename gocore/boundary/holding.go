package boundary

import (
	"sync/atomic"

	"github.com/eae-runtime/eae-runtime/gocore/memory"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// holding is readable memory of one boundary under a count: Note [Who owns a boundary]. Its tensors are either adopted (each
// with its Release) or views of buf, a loan from pool.
type holding struct {
	refs    atomic.Int32
	tensors []tensor.Tensor
	single  [1]tensor.Tensor // backs tensors on the fast path, so that a boundary of one tensor costs one allocation
	buf     memory.Buffer
	pool    *memory.Pool
	got     func() // what Get's tensors carry as their Release
}

// adopt makes h hold tensors, with one count.
func (h *holding) adopt(tensors []tensor.Tensor) {
	h.tensors = tensors
	h.refs.Store(1)
}

func (h *holding) adoptOne(t tensor.Tensor) {
	h.single[0] = t
	h.tensors = h.single[:]
	h.refs.Store(1)
}

// bytes is what the tensors occupy. They have been checked when they were put.
func (h *holding) bytes(key int64) int64 {
	n, err := occupied(key, h.tensors)
	if err != nil {
		panic(err)
	}
	return n
}

// give drops one count and, if it was the last, frees the memory on this thread.
func (h *holding) give() { h.giveTo(nil) }

// giveTo drops one count; if it was the last, adopted tensors are released through queue, or on this thread without one.
func (h *holding) giveTo(queue *Releases) {
	if h.refs.Add(-1) != 0 {
		return
	}
	if !h.buf.IsZero() {
		giveBack(h.pool, h.buf)
		return
	}
	for i := range h.tensors {
		release := h.tensors[i].Release
		h.tensors[i].Release = nil
		if release == nil {
			continue
		}
		if queue != nil {
			queue.Push(release)
		} else {
			release()
		}
	}
}

// lendOne gives the only tensor as a view that carries a count, which the caller has already added.
func (h *holding) lendOne() tensor.Tensor {
	t := h.tensors[0]
	t.Release = h.got
	return t
}

// lend gives every tensor as a view that carries a count each, which the caller has already added.
func (h *holding) lend() []tensor.Tensor {
	out := make([]tensor.Tensor, len(h.tensors))
	copy(out, h.tensors)
	for i := range out {
		out[i].Release = h.got
	}
	return out
}

// giveBack returns a loan that the store has made itself; a refusal could only mean that the store's own books are wrong.
func giveBack(pool *memory.Pool, buf memory.Buffer) {
	if err := pool.Put(buf); err != nil {
		panic(err)
	}
}
