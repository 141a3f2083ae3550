package boundary

import (
	"sync/atomic"
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/memory"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// phase is where a boundary is on its way; doc.go draws it.
type phase uint8

const (
	resident phase = iota // readable: res is set
	moving                // res is set and is being written to the tier
	stored                // only in the tier
	loading               // being read back into target
)

// entry is one boundary in the store. Its fields belong to Store.mu, except that whoever runs its job (busy) reads what the job
// needs: those do not change meanwhile.
type entry struct {
	key      int64
	phase    phase
	busy     bool // a worker or a caller runs its job
	queued   bool // it waits in a queue
	wantLoad bool // moving, and to be loaded as soon as it is stored
	gone     bool // dropped while busy: whoever runs the job cleans up
	inTier   bool // resident in the tier's own buffer: Move has nothing to do
	told     bool // err has been returned to a caller
	aside    bool // its job runs on a goroutine of its own: Note [Work in slices]
	err      error
	res      *holding
	resBytes int64 // readable bytes in the books
	transit  *transit
	done     chan struct{} // closed when the job ends; nil without waiters
	own      holding       // res of a boundary as it was put
}

// transit is what a boundary needs once it moves.
type transit struct {
	lay       *layout
	header    []byte        // disk
	packed    memory.Buffer // the payload, off disk
	stage     memory.Buffer // readable host memory between an accelerator and the payload
	target    *holding      // where a load goes
	after     Event         // on an accelerator: the move's copy begins after this
	loadAfter Event         // the same for the load, which may be asked for while the move runs
	path      string        // disk; "" without a file
	tierBytes int64         // bytes of the tier in the books
	cancel    atomic.Bool   // the job is to stop at its next chunk
	onDevice  bool
}

func (e *entry) device() tensor.Device { return e.transit.lay.device() }

// wake ends every wait for the entry. The caller holds Store.mu.
func (e *entry) wake() {
	if e.done != nil {
		close(e.done)
		e.done = nil
	}
}

// occupied gives the bytes of memory that the tensors keep alive, aliases once. ErrBridge if one has not a stride a size.
func occupied(key int64, tensors []tensor.Tensor) (int64, error) {
	for i := range tensors {
		if t := &tensors[i]; len(t.Shape) != len(t.Strides) {
			return 0, errs.E(errs.ErrBridge, "boundary %d: tensor %d has %d sizes and %d strides; give one stride a size",
				key, i, len(t.Shape), len(t.Strides))
		}
	}
	if len(tensors) == 1 {
		lo, hi := tensors[0].Span()
		return hi - lo, nil
	}
	total := int64(0)
	for _, r := range merged(tensors) {
		total += int64(r.hi - r.lo)
	}
	return total, nil
}

// addr gives where a buffer is; nil for no buffer, as of a boundary without elements.
func addr(b memory.Buffer) unsafe.Pointer {
	if b.IsZero() {
		return nil
	}
	return b.Ptr
}
