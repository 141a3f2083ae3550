package passes

import (
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// copyInto writes the elements of src, of any strides, to the contiguous dst in row-major order. Both are of the same type and shape, and
// apart.
func copyInto(ctx *Context, dst, src *tensor.Tensor) error {
	size := src.DType.Size()
	total := src.Numel()
	if src.Contiguous() {
		return ctx.Workers.Run(chunks(total), func(chunk int) error {
			at := int64(chunk) * chunkLen
			n := min(chunkLen, total-at) * size
			copy(slice[byte](dst, at*size, n), slice[byte](src, at*size, n))
			return nil
		})
	}
	switch size {
	case 2:
		return gather[uint16](ctx, dst, src, total)
	case 4:
		return gather[uint32](ctx, dst, src, total)
	default:
		return gather[uint64](ctx, dst, src, total)
	}
}

// gather copies chunk by chunk: the index of a chunk's first element is decomposed once, then the last dimension runs in a plain loop and the
// others count like an odometer.
func gather[T any](ctx *Context, dst, src *tensor.Tensor, total int64) error {
	last := len(src.Shape) - 1
	var zero T
	size := int64(unsafe.Sizeof(zero))
	return ctx.Workers.Run(chunks(total), func(chunk int) error {
		at := int64(chunk) * chunkLen
		out := slice[T](dst, at, min(chunkLen, total-at))
		index := make([]int64, last+1)
		offset, rest := int64(0), at
		for d := last; d >= 0; d-- {
			index[d] = rest % src.Shape[d]
			rest /= src.Shape[d]
			offset += index[d] * src.Strides[d]
		}
		step := src.Strides[last]
		for len(out) > 0 {
			n := min(src.Shape[last]-index[last], int64(len(out)))
			for i := range out[:n] {
				out[i] = *(*T)(unsafe.Add(src.Data, (offset+int64(i)*step)*size))
			}
			out = out[n:]
			offset -= index[last] * step
			index[last] = 0
			for d := last - 1; d >= 0; d-- {
				index[d]++
				offset += src.Strides[d]
				if index[d] < src.Shape[d] {
					break
				}
				offset -= index[d] * src.Strides[d]
				index[d] = 0
			}
		}
		return nil
	})
}
