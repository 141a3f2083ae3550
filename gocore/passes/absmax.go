package passes

import (
	"math"
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

const (
	absBits  = 0x7fff_ffff
	infBits  = 0x7f80_0000
	signBits = 0x8000_0000
)

// absMax is the largest magnitude among a tensor's elements as float32, 0 when there are none; NaN and Inf are an error.
func absMax(ctx *Context, g *Grad, i int) (float32, error) {
	t := &g.Src[i]
	parts := make([]uint32, chunks(t.Numel()))
	err := look(ctx, t, func(chunk int, v []float32) { parts[chunk] = max(parts[chunk], absMaxBits(v)) })
	if err != nil {
		return 0, err
	}
	top := uint32(0)
	for _, part := range parts {
		top = max(top, part)
	}
	if top >= infBits {
		return 0, errs.E(errs.ErrPass, "tensor %d holds NaN or Inf (as float32)", g.First+i)
	}
	return math.Float32frombits(top), nil
}

// absMaxBits compares the bits, which order magnitudes as integers do and put NaN above Inf above all others.
func absMaxBits(v []float32) uint32 {
	a, done := wideAbsMax(v)
	v = v[done:]
	bits := unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(v))), len(v))
	var b, c, d uint32
	for len(bits) >= 4 {
		a = max(a, bits[0]&absBits)
		b = max(b, bits[1]&absBits)
		c = max(c, bits[2]&absBits)
		d = max(d, bits[3]&absBits)
		bits = bits[4:]
	}
	for _, x := range bits {
		a = max(a, x&absBits)
	}
	return max(a, b, c, d)
}

// perTensor is embedded in passes that take each tensor by itself.
type perTensor struct{}

// PerTensor is true.
func (perTensor) PerTensor() bool { return true }

// single gives the only tensor's kernel as a list.
func single(t *tensor.Tensor, k Kernel) []Kernel {
	if t.Numel() == 0 {
		return nil
	}
	return []Kernel{k}
}
