// Package tensor is the core's vocabulary for tensors that somebody else allocated: a typed, strided view of memory and the
// function that gives the memory back. It computes nothing.
package tensor

import (
	"unsafe"
)

// DType is a DLPack data type: code, bits, lanes (lanes is 1 for every type that torch exports).
type DType struct {
	Code  uint8
	Bits  uint8
	Lanes uint16
}

// DLPack type codes.
const (
	CodeInt     = 0
	CodeUint    = 1
	CodeFloat   = 2
	CodeBFloat  = 4
	CodeComplex = 5
	CodeBool    = 6
)

// The types that the core computes with; all others are moved as bytes.
var (
	Float16  = DType{CodeFloat, 16, 1}
	BFloat16 = DType{CodeBFloat, 16, 1}
	Float32  = DType{CodeFloat, 32, 1}
	Float64  = DType{CodeFloat, 64, 1}
	Int8     = DType{CodeInt, 8, 1}
	Int64    = DType{CodeInt, 64, 1}
	Uint8    = DType{CodeUint, 8, 1}
	Bool     = DType{CodeBool, 8, 1}
)

// Size is the number of bytes of one element.
func (d DType) Size() int64 { return (int64(d.Bits)*int64(d.Lanes) + 7) / 8 }

// Device is a DLPack device; Type 1 is the CPU, 2 CUDA, 3 pinned host memory, 10 ROCm.
type Device struct {
	Type int32
	ID   int32
}

// CPU is the host's memory.
var CPU = Device{Type: 1}

// Host says whether the memory can be read by plain loads on the CPU.
func (d Device) Host() bool { return d.Type == 1 || d.Type == 3 }

// Tensor is a view of memory. Data points at the element with index zero. Strides are in elements and may be zero (expanded) or negative
// only where a producer allows it. Whoever holds a Tensor calls Release once; after that Data must not be touched. A nil
// Release means that the memory is borrowed.
type Tensor struct {
	Data    unsafe.Pointer
	DType   DType
	Device  Device
	Shape   []int64
	Strides []int64
	Release func()
}

// Numel is the number of elements (1 for a 0-dim tensor).
func (t *Tensor) Numel() int64 {
	n := int64(1)
	for _, s := range t.Shape {
		n *= s
	}
	return n
}

// Bytes is the number of bytes of the elements, each counted once per index (an expanded tensor counts more than it occupies).
func (t *Tensor) Bytes() int64 { return t.Numel() * t.DType.Size() }

// Span gives the byte range relative to Data that the view touches: [lo, hi). It is empty for a tensor without elements.
func (t *Tensor) Span() (lo, hi int64) {
	size := t.DType.Size()
	hi = size
	for i, n := range t.Shape {
		if n == 0 {
			return 0, 0
		}
		reach := (n - 1) * t.Strides[i] * size
		if reach < 0 {
			lo += reach
		} else {
			hi += reach
		}
	}
	return lo, hi
}

// Contiguous says whether the elements lie in row-major order without gaps. Dimensions of size one do not matter.
func (t *Tensor) Contiguous() bool {
	want := int64(1)
	for i := len(t.Shape) - 1; i >= 0; i-- {
		if t.Shape[i] == 0 {
			return true
		}
		if t.Shape[i] != 1 && t.Strides[i] != want {
			return false
		}
		want *= t.Shape[i]
	}
	return true
}

// RowMajor gives the strides of a contiguous tensor of that shape.
func RowMajor(shape []int64) []int64 {
	strides := make([]int64, len(shape))
	step := int64(1)
	for i := len(shape) - 1; i >= 0; i-- {
		strides[i] = step
		step *= shape[i]
	}
	return strides
}

// Free calls Release if there is one, and forgets it, so that a second call does nothing.
func (t *Tensor) Free() {
	if t.Release != nil {
		release := t.Release
		t.Release = nil
		release()
	}
}
