// Package libtorch calls torch's operators from Go through LibTorch's stable C ABI, so that one built library serves every torch from 2.10 on
// and building it needs neither torch nor C++.
//
// Operators run on the calling OS thread, with grad mode off for the length of the call: an exported function of bridge/api runs on the
// host's own thread, so its current device and stream are the host's, and torch makes no team of threads for a thread of Go's. A goroutine that calls
// an operator must be locked to its thread.
package libtorch

/*
#cgo CFLAGS: -std=gnu11 -Wall
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "libtorch.h"
*/
import "C"

import (
	"sync"
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

var (
	opening sync.Mutex
	opened  bool
)

// Open looks the functions up in the libtorch_cpu at that path. Without load it must be in the process already, as it is after `import torch`.
// Errors: ErrBridge, saying what is missing. A second call after a success does nothing.
func Open(path string, load bool) error {
	opening.Lock()
	defer opening.Unlock()
	if opened {
		return nil
	}
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	flag := C.int(0)
	if load {
		flag = 1
	}
	if err := taken(C.eae_torch_open(name, flag)); err != nil {
		return err
	}
	readCodes()
	opened = true
	return nil
}

// Opened says whether operators can be called.
func Opened() bool {
	opening.Lock()
	defer opening.Unlock()
	return opened
}

// taken turns an error text of the C side into an error and frees it.
func taken(text *C.char) error {
	if text == nil {
		return nil
	}
	defer C.free(unsafe.Pointer(text))
	return errs.E(errs.ErrBridge, "%s", C.GoString(text))
}
