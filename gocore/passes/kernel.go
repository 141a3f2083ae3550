package passes

import (
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/numeric"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

const (
	// chunkLen is the number of elements that a worker takes at a time, and over which a partial result is formed.
	chunkLen = 1 << 16
	// blockLen is the number of elements that go through all pending kernels before the next ones are touched: 16 KiB of float32.
	blockLen = 1 << 12
)

// Kernel is what a Sweeper does to the elements of one tensor: a function from values to values, called on consecutive blocks in any order
// and from several goroutines at once. dst and src are of the same length and either apart or the same memory; `at` is the index of their
// first element within the tensor, a multiple of 4096.
type Kernel struct {
	// F32 is used for float32 tensors. For float16 and bfloat16 it gets the exact values as float32, and its results are rounded to the type
	// afterwards; a kernel of several operations rounds between them itself.
	F32 func(dst, src []float32, at int64)
	// F64 is used for float64 tensors. Where it is nil, F32 gets the values rounded to float32.
	F64 func(dst, src []float64, at int64)
}

// none says that the kernel changes nothing.
func (k Kernel) none() bool { return k.F32 == nil && k.F64 == nil }

// Sweeper is a pass that treats each element on its own once it has looked at the whole (or without looking). Chains run consecutive
// Sweepers block by block in one trip through memory. Its Apply is Sweep(ctx, g, p).
type Sweeper interface {
	Pass
	// Looks says whether Prepare reads the elements of g.Src.
	Looks() bool
	// Prepare gives one kernel for each tensor of g, or nil when it changes nothing; the zero Kernel leaves a tensor alone. g.Dst is not
	// set, and g.Src holds contiguous tensors when Looks returns true (else only shapes and types mean something).
	Prepare(ctx *Context, g *Grad) ([]Kernel, error)
}

// slice views elements [at, at+n) of a contiguous tensor.
func slice[T any](t *tensor.Tensor, at, n int64) []T {
	var zero T
	return unsafe.Slice((*T)(unsafe.Add(t.Data, at*int64(unsafe.Sizeof(zero)))), n)
}

// runBlock sends one block of a tensor through the kernels, reading src and writing dst.
func runBlock(kernels []Kernel, dst, src *tensor.Tensor, at, n int64) {
	switch dst.DType {
	case tensor.Float32:
		out, in := slice[float32](dst, at, n), slice[float32](src, at, n)
		for _, k := range kernels {
			k.F32(out, in, at)
			in = out
		}
	case tensor.Float64:
		runBlock64(kernels, slice[float64](dst, at, n), slice[float64](src, at, n), at)
	case tensor.Float16:
		var scratch [blockLen]float32
		values := scratch[:n]
		numeric.F16ToF32(values, slice[uint16](src, at, n))
		for i, k := range kernels {
			k.F32(values, values, at)
			if i < len(kernels)-1 {
				numeric.RoundF16Slice(values, values)
			}
		}
		numeric.F32ToF16(slice[uint16](dst, at, n), values)
	case tensor.BFloat16:
		var scratch [blockLen]float32
		values := scratch[:n]
		numeric.BF16ToF32(values, slice[uint16](src, at, n))
		for i, k := range kernels {
			k.F32(values, values, at)
			if i < len(kernels)-1 {
				numeric.RoundBF16Slice(values, values)
			}
		}
		numeric.F32ToBF16(slice[uint16](dst, at, n), values)
	}
}

func runBlock64(kernels []Kernel, dst, src []float64, at int64) {
	var scratch [blockLen]float32
	for _, k := range kernels {
		if k.F64 != nil {
			k.F64(dst, src, at)
		} else {
			values := scratch[:len(src)]
			for i, x := range src {
				values[i] = float32(x)
			}
			k.F32(values, values, at)
			for i, x := range values {
				dst[i] = float64(x)
			}
		}
		src = dst
	}
}

// chunks is the number of chunks of n elements.
func chunks(n int64) int { return int((n + chunkLen - 1) / chunkLen) }

// look calls f on the elements of a contiguous tensor as float32 (rounded, for float64), block by block. The chunks are shared among the
// workers, and within a chunk the blocks come in order: f must keep what it learns by chunk.
func look(ctx *Context, t *tensor.Tensor, f func(chunk int, values []float32)) error {
	total := t.Numel()
	return ctx.Workers.Run(chunks(total), func(chunk int) error {
		end := min(int64(chunk+1)*chunkLen, total)
		if t.DType == tensor.Float32 {
			for at := int64(chunk) * chunkLen; at < end; at += blockLen {
				f(chunk, slice[float32](t, at, min(blockLen, end-at)))
			}
			return nil
		}
		var scratch [blockLen]float32
		for at := int64(chunk) * chunkLen; at < end; at += blockLen {
			n := min(blockLen, end-at)
			values := scratch[:n]
			switch t.DType {
			case tensor.Float64:
				for i, x := range slice[float64](t, at, n) {
					values[i] = float32(x)
				}
			case tensor.Float16:
				numeric.F16ToF32(values, slice[uint16](t, at, n))
			case tensor.BFloat16:
				numeric.BF16ToF32(values, slice[uint16](t, at, n))
			}
			f(chunk, values)
		}
		return nil
	})
}
