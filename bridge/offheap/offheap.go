// Package offheap allocates memory that Go's collector neither sees nor moves, aligned to 64 bytes as torch's own CPU allocator does (another
// alignment changes which instructions some kernels take, and with them the last bits of their results).
package offheap

// #include <stdlib.h>
import "C"

import (
	"sync/atomic"
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// Align is the alignment of every block, in bytes.
const Align = 64

var live atomic.Int64

// Allocator gives blocks from posix_memalign. The zero value is ready; all methods may be called at once.
type Allocator struct{}

// Alloc gives n bytes (at least one), not zeroed, aligned to [Align]. The caller frees them with Free and the same n.
func (Allocator) Alloc(n int64) (unsafe.Pointer, error) {
	if n < 0 {
		return nil, errs.E(errs.ErrValue, "a buffer of %d bytes was asked for", n)
	}
	var block unsafe.Pointer
	if C.posix_memalign(&block, Align, C.size_t(max(n, 1))) != 0 {
		return nil, errs.E(errs.ErrStore, "no memory for a buffer of %d bytes", n)
	}
	live.Add(n)
	return block, nil
}

// Free gives a block of n bytes back.
func (Allocator) Free(block unsafe.Pointer, n int64) {
	C.free(block)
	live.Add(-n)
}

// Live is the number of bytes that are allocated now.
func Live() int64 { return live.Load() }
