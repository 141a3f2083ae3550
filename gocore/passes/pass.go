package passes

import (
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// Pass is one transform of a boundary's gradient.
type Pass interface {
	// Name is the pass's name in specs, reports and errors.
	Name() string
	// Apply reads g.Src and writes every element of g.Dst. Both hold the same shapes and types, contiguous, in flatten order; a source is
	// either apart from its destination or the very same memory. It must not write a source that is apart. It keeps no tensor after
	// it returns. An error should be of kind errs.ErrPass; a panic is recovered into one.
	Apply(ctx *Context, g *Grad) error
}

// Stateful is a pass that remembers something from step to step. State and SetState round-trip; SetState refuses what State did not
// write and then leaves the pass as it was.
type Stateful interface {
	Pass
	State() ([]byte, error)
	SetState(state []byte) error
}

// PerTensor is a pass that may want to see the tensors of a boundary one by one. When PerTensor returns true the chain calls it once a
// tensor, with Grad.First saying which one.
type PerTensor interface {
	Pass
	PerTensor() bool
}

// Reporter is a pass that has something to say about its last Apply, such as a quantization scale. The values are numbers, booleans and
// strings; nil or an empty map is no report.
type Reporter interface {
	Pass
	Report() map[string]any
}

// Context is what a chain hands to its passes besides the gradient. The zero value works: one goroutine, memory from Go's heap.
type Context struct {
	// Workers share the chunks of large tensors. Nil means the chain's own, and no other goroutine when there is no chain.
	Workers *Workers
	// Buffers give the memory of destinations. Nil means Go's heap.
	Buffers Buffers
	// Stats asks the logging pass for statistics; without it logging costs nothing.
	Stats bool
	// MoveUnchanged lets a tensor that no pass changed be handed on instead of copied: its header, Release included, moves from Src to
	// Dst, and Src keeps a borrowed view (Release nil). Freeing all of Src and later all of Dst is right in both cases.
	MoveUnchanged bool
	// Index is the position of the running pass in its chain; the chain sets it.
	Index int
}

// Buffers give memory for destinations: at least `bytes` bytes, aligned for float64, with any content, and the function that takes the
// memory back, to be called once.
type Buffers interface {
	Get(bytes int64) (ptr unsafe.Pointer, release func(), err error)
}

// BufferFunc makes a function a source of Buffers.
type BufferFunc func(bytes int64) (unsafe.Pointer, func(), error)

// Get calls the function.
func (f BufferFunc) Get(bytes int64) (unsafe.Pointer, func(), error) { return f(bytes) }

// heap is the Buffers of a Context that has none: the destination keeps the memory alive.
type heap struct{}

func (heap) Get(bytes int64) (unsafe.Pointer, func(), error) {
	words := make([]uint64, (bytes+7)/8)
	return unsafe.Pointer(unsafe.SliceData(words)), func() {}, nil
}

// Grad is the gradient of one boundary on its way through a chain, and what passes may know about it.
type Grad struct {
	// Src are the boundary's differentiable tensors in flatten order. The chain reads them and frees none.
	Src []tensor.Tensor
	// Dst are the results, contiguous, of Src's shapes and types. A chain fills it; the caller then owns the tensors and frees each.
	Dst []tensor.Tensor
	// First is the number of Src[0] within the boundary: not zero only where a per-tensor pass sees one tensor of several.
	First int
	// LossScale is the factor that the gradient carries; 0 means 1. It must be positive and finite.
	LossScale float64
	// Step, Block and Microbatch say where the gradient stands. A negative Step means that the caller does not count steps.
	Step, Block, Microbatch int64
	// Rows is the number of batch rows of this microbatch (0: unknown) and Weight its share of the whole batch's loss (0: unknown).
	Rows   int64
	Weight float64
}

// scale is the loss scale with its default.
func (g *Grad) scale() float64 {
	if g.LossScale == 0 {
		return 1
	}
	return g.LossScale
}

// slice views tensors lo to hi of the gradient as a gradient.
func (g *Grad) slice(lo, hi int) *Grad {
	part := *g
	part.Src, part.First = g.Src[lo:hi], g.First+lo
	if g.Dst != nil {
		part.Dst = g.Dst[lo:hi]
	}
	return &part
}
