package libtorch

// #include <stdlib.h>
// #include "libtorch.h"
import "C"

import (
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// Tensor is an at::Tensor*. Whoever holds it calls Close once.
type Tensor struct{ handle unsafe.Pointer }

// codeNames pairs DLPack types and devices with torch's names.
var (
	dtypeNames = map[tensor.DType]string{
		tensor.Float16: "float16", tensor.BFloat16: "bfloat16", tensor.Float32: "float32", tensor.Float64: "float64",
		tensor.Int8: "int8", tensor.Int64: "int64", tensor.Uint8: "uint8", tensor.Bool: "bool",
	}
	deviceNames = map[int32]string{tensor.CPU.Type: "cpu", 2: "cuda", 14: "xpu"}

	dtypeCodes  map[tensor.DType]int32
	deviceCodes map[int32]int32
)

// readCodes asks torch for its numbers.
func readCodes() {
	dtypeCodes, deviceCodes = map[tensor.DType]int32{}, map[int32]int32{}
	for dtype, name := range dtypeNames {
		dtypeCodes[dtype] = code("dtype", name)
	}
	for device, name := range deviceNames {
		deviceCodes[device] = code("device_type", name)
	}
	// torch calls AMD's devices cuda, and pinned memory the CPU's.
	deviceCodes[10], deviceCodes[3] = deviceCodes[2], deviceCodes[tensor.CPU.Type]
}

func code(kind, name string) int32 {
	k, n := C.CString(kind), C.CString(name)
	defer C.free(unsafe.Pointer(k))
	defer C.free(unsafe.Pointer(n))
	return int32(C.eae_torch_code(k, n))
}

// View makes a torch tensor on the memory of t, which the caller keeps alive until the view is closed. Errors: ErrBridge.
func View(t *tensor.Tensor) (*Tensor, error) {
	dtype, known := dtypeCodes[t.DType]
	if !known || dtype < 0 {
		return nil, errs.E(errs.ErrBridge, "torch has no dtype for DLPack code %d of %d bits", t.DType.Code, t.DType.Bits)
	}
	device, known := deviceCodes[t.Device.Type]
	if !known || device < 0 {
		return nil, errs.E(errs.ErrBridge, "torch has no device for DLPack device %d", t.Device.Type)
	}
	// Never empty, so that there is an address to pass for a 0-dim tensor.
	sizes, strides := append(t.Shape[:len(t.Shape):len(t.Shape)], 0), append(t.Strides[:len(t.Strides):len(t.Strides)], 0)
	handle := C.eae_torch_view(t.Data, C.int64_t(len(t.Shape)), (*C.int64_t)(&sizes[0]), (*C.int64_t)(&strides[0]),
		C.int32_t(dtype), C.int32_t(device), C.int32_t(t.Device.ID))
	if handle == nil {
		return nil, errs.E(errs.ErrBridge, "torch refuses a tensor of shape %v with strides %v", t.Shape, t.Strides)
	}
	return &Tensor{handle}, nil
}

// Adopt takes over an at::Tensor*.
func Adopt(handle unsafe.Pointer) *Tensor { return &Tensor{handle} }

// Handle is the at::Tensor*; it stays the Tensor's.
func (t *Tensor) Handle() unsafe.Pointer { return t.handle }

// Share makes another reference to the same tensor.
func (t *Tensor) Share() (*Tensor, error) {
	handle := C.eae_torch_share(t.handle)
	if handle == nil {
		return nil, errs.E(errs.ErrBridge, "torch refuses another reference to a tensor")
	}
	return &Tensor{handle}, nil
}

// Close gives the reference up. A second call does nothing.
func (t *Tensor) Close() {
	if t.handle != nil {
		C.eae_torch_delete(t.handle)
		t.handle = nil
	}
}

// Describe gives the tensor as the core sees it, on the same memory, without a Release: it is valid until the last reference is closed.
func (t *Tensor) Describe() (tensor.Tensor, error) {
	var facts C.eae_torch_facts
	if C.eae_torch_describe(t.handle, &facts) != 0 {
		return tensor.Tensor{}, errs.E(errs.ErrBridge, "torch does not describe a tensor")
	}
	rank := int(facts.ndim)
	seen := tensor.Tensor{
		Data: facts.data, Shape: make([]int64, rank), Strides: make([]int64, rank),
		Device: tensor.Device{Type: -1, ID: max(int32(facts.device_index), 0)},
	}
	if rank > 0 {
		copy(seen.Shape, unsafe.Slice((*int64)(facts.sizes), rank))
		copy(seen.Strides, unsafe.Slice((*int64)(facts.strides), rank))
	}
	found := false
	for dtype, number := range dtypeCodes {
		if number == int32(facts.dtype) {
			seen.DType, found = dtype, true
		}
	}
	for device := range deviceNames {
		if deviceCodes[device] == int32(facts.device_type) {
			seen.Device.Type = device
		}
	}
	if !found || seen.Device.Type < 0 {
		return tensor.Tensor{}, errs.E(errs.ErrBridge, "a torch tensor of dtype %d on device type %d is not known here", facts.dtype, facts.device_type)
	}
	return seen, nil
}

// CopyFrom writes the elements of src over t, without waiting where the device allows it.
func (t *Tensor) CopyFrom(src *Tensor) error { return taken(C.eae_torch_copy(t.handle, src.handle)) }
