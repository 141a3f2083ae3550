package offheap

/*
#cgo LDFLAGS: -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

typedef int (*host_alloc)(void **block, size_t bytes, unsigned flags);
typedef int (*host_free)(void *block);

// CUDA's runtime, if the process has one: torch loads it, this library never does.
static void *eae_cuda_symbol(const char *name) {
  static const char *const libraries[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"};
  for (size_t i = 0; i < sizeof libraries / sizeof *libraries; i++) {
    void *library = dlopen(libraries[i], RTLD_LAZY | RTLD_NOLOAD);
    if (library != NULL) {
      void *symbol = dlsym(library, name);
      dlclose(library);
      if (symbol != NULL) {
        return symbol;
      }
    }
  }
  return dlsym(RTLD_DEFAULT, name);
}

static int eae_call_alloc(void *f, void **block, size_t bytes) { return ((host_alloc)f)(block, bytes, 0); }
static void eae_call_free(void *f, void *block) { ((host_free)f)(block); }
*/
import "C"

import (
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// Pinned gives page-locked blocks, which an accelerator copies from and to without a detour, by the cudaHostAlloc that is in the process. Such
// blocks start at a page and are so aligned to [Align]. Make one with NewPinned; all methods may be called at once.
type Pinned struct{ alloc, free unsafe.Pointer }

// NewPinned finds CUDA's runtime among the loaded libraries; false where there is none.
func NewPinned() (Pinned, bool) {
	p := Pinned{alloc: symbol("cudaHostAlloc"), free: symbol("cudaFreeHost")}
	return p, p.alloc != nil && p.free != nil
}

func symbol(name string) unsafe.Pointer {
	text := append([]byte(name), 0)
	return C.eae_cuda_symbol((*C.char)(unsafe.Pointer(unsafe.SliceData(text))))
}

// Alloc gives n bytes (at least one), not zeroed. The caller frees them with Free and the same n. ErrStore where CUDA refuses.
func (p Pinned) Alloc(n int64) (unsafe.Pointer, error) {
	if n < 0 {
		return nil, errs.E(errs.ErrValue, "a buffer of %d bytes was asked for", n)
	}
	var block unsafe.Pointer
	if code := C.eae_call_alloc(p.alloc, &block, C.size_t(max(n, 1))); code != 0 || block == nil {
		return nil, errs.E(errs.ErrStore, "no page-locked memory for a buffer of %d bytes (CUDA error %d); set pin_memory=False", n, int(code))
	}
	live.Add(n)
	return block, nil
}

// Free gives a block of n bytes back.
func (p Pinned) Free(block unsafe.Pointer, n int64) {
	C.eae_call_free(p.free, block)
	live.Add(-n)
}
