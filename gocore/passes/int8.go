package passes

import (
	"math"
	"unsafe"
)

func init() {
	mustRegister(Spec{
		Name: "int8",
		Help: "quantize each tensor to 8-bit integers with a symmetric scale, and back",
		New:  func(Params) (Pass, error) { return &Int8{}, nil },
	})
}

// Int8 quantizes each tensor by itself: scale = maxabs/127 in float32, q = t/scale rounded to the nearest integer (ties to even) and clamped
// to ±127, value q*scale rounded to the tensor's type. These are the bits of `clamp(round(t/scale), -127, 127)*scale`, zeros with t's sign.
// A tensor of zeros, or one so small that the scale underflows to zero, is left alone and reports nothing. NaN and Inf are refused.
// EncodeInt8 gives the payload itself.
type Int8 struct {
	perTensor
	last map[string]any
}

// Name is "int8".
func (*Int8) Name() string { return "int8" }

// Looks is true: the scale needs every element.
func (*Int8) Looks() bool { return true }

// Report gives the quantization_scale of the last Apply, in the gradient's own (loss-scaled) units.
func (q *Int8) Report() map[string]any { return q.last }

// Apply quantizes g.Src into g.Dst. Outside a chain it takes one tensor at a time.
func (q *Int8) Apply(ctx *Context, g *Grad) error { return sweepEach(ctx, g, q) }

// Prepare finds the scale of g's only tensor and gives the quantization.
func (q *Int8) Prepare(ctx *Context, g *Grad) ([]Kernel, error) {
	q.last = nil
	top, err := absMax(ctx, g, 0)
	scale := top / 127
	if err != nil || scale == 0 {
		return nil, err
	}
	q.last = map[string]any{"quantization_scale": float64(scale)}
	return single(&g.Src[0], Kernel{F32: int8Kernel(scale)}), nil
}

// sweepEach is Sweep tensor by tensor.
func sweepEach(ctx *Context, g *Grad, p Sweeper) error {
	for i := range g.Src {
		if err := Sweep(ctx, g.slice(i, i+1), p); err != nil {
			return err
		}
	}
	return nil
}

// minNormal is the smallest normal float32.
const minNormal = 0x1p-126

// roundMagic is 1.5 * 2^23: a float32 near it has steps of 1, so adding and subtracting it rounds a small number to an integer, ties to even.
const roundMagic = 0x1.8p23

// int8Kernel is the round trip for a scale > 0 with maxabs <= 127*scale*(1+2^-23) where the scale is normal.
func int8Kernel(scale float32) func(dst, src []float32, _ int64) {
	if scale < minNormal {
		return func(dst, src []float32, _ int64) {
			for i, x := range src {
				dst[i] = float32(quantize(x, scale)) * scale
				if dst[i] == 0 {
					dst[i] = float32(math.Copysign(0, float64(x)))
				}
			}
		}
	}
	return func(dst, src []float32, _ int64) {
		dst = dst[:len(src)]
		in := unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(src))), len(src))
		out := unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(dst))), len(src))
		for len(src) >= 4 && len(in) >= 4 && len(out) >= 4 {
			a, b, c, d := src[0]/scale, src[1]/scale, src[2]/scale, src[3]/scale
			a, b, c, d = (a+roundMagic)-roundMagic, (b+roundMagic)-roundMagic, (c+roundMagic)-roundMagic, (d+roundMagic)-roundMagic
			// A quotient that rounds to zero lost its sign; the others have it.
			out0 := math.Float32bits(a*scale) | in[0]&signBits
			out1 := math.Float32bits(b*scale) | in[1]&signBits
			out2 := math.Float32bits(c*scale) | in[2]&signBits
			out3 := math.Float32bits(d*scale) | in[3]&signBits
			out[0], out[1], out[2], out[3] = out0, out1, out2, out3
			src, in, out = src[4:], in[4:], out[4:]
		}
		for i, x := range src {
			q := (x/scale + roundMagic) - roundMagic
			out[i] = math.Float32bits(q*scale) | in[i]&signBits
		}
	}
}

// quantize is the integer for one value, clamped.
func quantize(x, scale float32) int8 {
	q := math.RoundToEven(float64(x / scale))
	return int8(min(max(q, -127), 127))
}
