package memory

import (
	"sync"
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// Alignment is the boundary, in bytes, on which every buffer starts, and the unit to which sizes are rounded up. Another
// alignment changes the bits that some kernels compute.
const Alignment = 64

// Round gives n rounded up to the next multiple of [Alignment].
func Round(n int64) int64 { return (n + Alignment - 1) &^ (Alignment - 1) }

// Allocator gives and takes memory. Both methods may be called from any goroutine.
type Allocator interface {
	// Alloc gives n bytes, n > 0, that start at a multiple of [Alignment]; their content is undefined.
	Alloc(n int64) (unsafe.Pointer, error)
	// Free takes back what Alloc gave for the same n. It is called once for each pointer.
	Free(ptr unsafe.Pointer, n int64)
}

// Heap allocates on Go's heap and keeps what it gave alive until Free, also when only foreign code knows the address. It is
// meant for tests and for processes without the bridge. The zero value is not usable; see [NewHeap].
type Heap struct {
	mu    sync.Mutex
	live  map[unsafe.Pointer][]byte
	bytes int64
}

// NewHeap makes an allocator on Go's heap.
func NewHeap() *Heap { return &Heap{live: map[unsafe.Pointer][]byte{}} }

// Alloc gives n bytes on a multiple of [Alignment]; ErrValue when n is not positive.
func (h *Heap) Alloc(n int64) (unsafe.Pointer, error) {
	if n <= 0 {
		return nil, errs.E(errs.ErrValue, "memory: cannot allocate %d bytes; ask for at least 1", n)
	}
	block := make([]byte, n+Alignment-1)
	base := unsafe.Pointer(unsafe.SliceData(block))
	skip := -uintptr(base) & (Alignment - 1)
	ptr := unsafe.Add(base, skip)
	h.mu.Lock()
	h.live[ptr] = block
	h.bytes += n
	h.mu.Unlock()
	return ptr, nil
}

// Free forgets the memory at ptr. An address that is not live is a bug of the caller and panics.
func (h *Heap) Free(ptr unsafe.Pointer, n int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.live[ptr]; !ok {
		panic("memory: Free of an address that is not allocated")
	}
	delete(h.live, ptr)
	h.bytes -= n
}

// Live gives the number of allocations not yet freed, and their bytes.
func (h *Heap) Live() (count int, bytes int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.live), h.bytes
}
