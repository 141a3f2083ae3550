// Package dlpack moves tensors between Go and whoever speaks DLPack (torch, NumPy), without a copy.
//
// Note [Who runs a deleter]
//
//	The deleter of a tensor that came from outside may need Python's lock, so it must not run on a goroutine of Go's own: that one would
//	wait for a thread that may be waiting for it. Release of an imported tensor therefore only queues the deleter. [Drain] runs what is
//	queued, on the calling thread; the exported functions call it at their end, where the thread is the host's and Python's lock is free.
//
// Note [After a fork]
//
//	A forked child has the parent's memory but not its threads. There, deleters do nothing, whatever they own: the
//	process's end frees it. [Forked] is what exported functions ask first.
package dlpack

/*
#cgo CFLAGS: -std=gnu11 -Wall
#cgo LDFLAGS: -ldl -pthread
#include "dlpack.h"
*/
import "C"

import (
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// maxDims bounds the dimensions that are believed; torch allows 64.
const maxDims = 64

var (
	imported atomic.Int64
	exported struct {
		sync.Mutex
		next    int64
		release map[int64]func()
	}
	queue struct {
		sync.Mutex
		waiting []*C.DLManagedTensor
		length  atomic.Int64
	}
)

func init() { exported.release = map[int64]func(){} }

// Forked says whether this process was forked after the library was loaded.
func Forked() bool { return C.eae_forked != 0 }

// AtForkChild marks this process as a forked child, for hosts whose fork does not run pthread_atfork handlers.
func AtForkChild() { C.eae_at_fork_child() }

// pointer is the address that came as an integer. The memory is not Go's, so the collector does not care.
func pointer(address int64) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&address)) }

// Import takes over the DLManagedTensor at that address. The result's Release queues its deleter, see Note [Who runs a deleter]; also on
// error the tensor has been taken over and its deleter is queued. Does not block. Errors: ErrBridge.
func Import(address int64) (*tensor.Tensor, error) {
	if address == 0 {
		return nil, errs.E(errs.ErrBridge, "a tensor address is 0: the object was no DLPack capsule, or it has been used already")
	}
	foreign := (*C.DLManagedTensor)(pointer(address))
	imported.Add(1)
	dl := &foreign.dl_tensor
	rank := int(dl.ndim)
	if rank < 0 || rank > maxDims || (rank > 0 && dl.shape == nil) {
		enqueue(foreign)
		return nil, errs.E(errs.ErrBridge, "a tensor of %d dimensions cannot cross; at most %d can", rank, maxDims)
	}
	dims := make([]int64, 2*rank)
	shape, strides := dims[:rank:rank], dims[rank:]
	if rank > 0 {
		copy(shape, unsafe.Slice((*int64)(unsafe.Pointer(dl.shape)), rank))
		if dl.strides != nil {
			copy(strides, unsafe.Slice((*int64)(unsafe.Pointer(dl.strides)), rank))
		} else {
			copy(strides, tensor.RowMajor(shape))
		}
	}
	made := &tensor.Tensor{
		Data:    unsafe.Add(dl.data, uintptr(dl.byte_offset)),
		DType:   tensor.DType{Code: uint8(dl.dtype.code), Bits: uint8(dl.dtype.bits), Lanes: uint16(dl.dtype.lanes)},
		Device:  tensor.Device{Type: int32(dl.device.device_type), ID: int32(dl.device.device_id)},
		Shape:   shape,
		Strides: strides,
	}
	var once atomic.Bool
	made.Release = func() {
		if once.CompareAndSwap(false, true) {
			enqueue(foreign)
		}
	}
	return made, nil
}

// Export gives a new DLManagedTensor on the memory of t and takes t over: its Release is called once, when the consumer is done, on the
// consumer's thread. The caller owns the address. Does not block. Errors: ErrBridge; t has been released then.
func Export(t *tensor.Tensor) (int64, error) {
	rank := len(t.Shape)
	if rank != len(t.Strides) || rank > maxDims {
		t.Free()
		return 0, errs.E(errs.ErrBridge, "a tensor with %d sizes and %d strides cannot cross", rank, len(t.Strides))
	}
	var dims [2 * maxDims]int64
	copy(dims[:], t.Shape)
	copy(dims[rank:], t.Strides)
	release := t.Release
	t.Release = nil
	exported.Lock()
	exported.next++
	id := exported.next
	exported.release[id] = release
	exported.Unlock()
	made := C.eae_dl_new(t.Data, C.int32_t(t.Device.Type), C.int32_t(t.Device.ID), C.int32_t(rank), C.uint8_t(t.DType.Code),
		C.uint8_t(t.DType.Bits), C.uint16_t(t.DType.Lanes), (*C.int64_t)(unsafe.Pointer(&dims)), C.int64_t(id))
	if made == nil {
		releaseExported(id)
		return 0, errs.E(errs.ErrBridge, "no memory for a tensor structure")
	}
	return int64(uintptr(unsafe.Pointer(made))), nil
}

// Delete calls the deleter of the DLManagedTensor at that address, on the calling thread, as a consumer does that has no more use for it.
func Delete(address int64) { C.eae_dl_delete((*C.DLManagedTensor)(pointer(address))) }

//export eaeReleaseExported
func eaeReleaseExported(id C.int64_t) {
	// A panic here would end the host process; whoever runs the deleter has nowhere to put an error.
	defer func() {
		if recover() != nil {
			failedReleases.Add(1)
		}
	}()
	releaseExported(int64(id))
	Drain()
}

var failedReleases atomic.Int64

func releaseExported(id int64) {
	exported.Lock()
	release, known := exported.release[id]
	delete(exported.release, id)
	exported.Unlock()
	if known && release != nil {
		release()
	}
}

func enqueue(foreign *C.DLManagedTensor) {
	queue.Lock()
	queue.waiting = append(queue.waiting, foreign)
	queue.length.Store(int64(len(queue.waiting)))
	queue.Unlock()
}

// Drain runs the deleters that are queued, on the calling thread, and gives their number. Costs one atomic load when there are none.
// A deleter may take Python's lock, so the caller must not hold a lock that a thread with Python's lock can wait for.
func Drain() int {
	if queue.length.Load() == 0 {
		return 0
	}
	queue.Lock()
	batch := queue.waiting
	queue.waiting = nil
	queue.length.Store(0)
	queue.Unlock()
	for _, foreign := range batch {
		C.eae_dl_delete(foreign)
		imported.Add(-1)
	}
	return len(batch)
}

// Counts of what is alive.
type Counts struct {
	Imported int64 // tensors from outside whose deleter has not run; those that are queued count
	Exported int64 // tensors handed out that their consumer still holds
	Failed   int64 // release functions that panicked
}

// Live gives the counts at this moment.
func Live() Counts {
	exported.Lock()
	defer exported.Unlock()
	return Counts{Imported: imported.Load(), Exported: int64(len(exported.release)), Failed: failedReleases.Load()}
}
