package boundary

import (
	"context"
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// Event marks a point in the order of an accelerator's work. nil is a point that is long past.
type Event any

// Span is one copy: N bytes from Src to Dst.
type Span struct {
	Dst, Src unsafe.Pointer
	N        int64
}

// Direction says on which side of the bus a copy begins and ends.
type Direction int

// The directions of a copy.
const (
	ToHost Direction = iota
	ToDevice
	OnDevice
)

// Mover copies to, from and on an accelerator without waiting. Its methods may be called from any goroutine; those that say
// "the calling thread" mean the current stream of the thread that calls.
type Mover interface {
	// Record marks what the calling thread has queued on dev so far.
	Record(dev tensor.Device) (Event, error)
	// Copy queues spans on a stream of the mover's own, to begin after the event, and returns an event for their end. Memory on
	// both sides stays valid until then.
	Copy(dev tensor.Device, dir Direction, after Event, spans []Span) (Event, error)
	// Join makes the calling thread's later work on dev begin after the event. It does not block.
	Join(dev tensor.Device, ev Event) error
	// Await blocks until the event has happened or ctx is done.
	Await(ctx context.Context, ev Event) error
	// Alloc gives n bytes on dev that start at a multiple of 64; Free takes them back once the work queued on them is done.
	Alloc(dev tensor.Device, n int64) (unsafe.Pointer, error)
	Free(dev tensor.Device, ptr unsafe.Pointer, n int64)
}

// deviceAllocator lets a memory.Pool lend an accelerator's memory.
type deviceAllocator struct {
	mover Mover
	dev   tensor.Device
}

func (a deviceAllocator) Alloc(n int64) (unsafe.Pointer, error) { return a.mover.Alloc(a.dev, n) }
func (a deviceAllocator) Free(ptr unsafe.Pointer, n int64)      { a.mover.Free(a.dev, ptr, n) }
