package passes

import (
	"math"
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

// roundMagic is 1.5 * 2^23: a float32 near it has steps of 1, so adding it rounds a small number to an integer, ties to even, and leaves that
// integer in the low bits.
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
	table := int8Table(scale)
	// Note [Division by multiplication]: t/scale rounded to float32 is float32(t * (1/scale)) computed in float64. A quotient of two 24-bit
	// numbers that is not a float32 itself is at least 2^-49 of its size away from every point half way between two float32 values, and the two
	// roundings in float64 are off by at most 2^-52 together: both land on the same side. Quotients too small for this round to 0 anyway.
	inverse := 1 / float64(scale)
	lookup := func(x float32) float32 {
		q := float32(float64(x)*inverse) + roundMagic
		// The low byte of the sum is the integer; the value's sign tells 0 from -0.
		return table[math.Float32bits(q)&0xff|math.Float32bits(x)>>23&0x100]
	}
	return func(dst, src []float32, _ int64) {
		done := wideInt8(dst, src, scale)
		dst, src = dst[done:len(src)], src[done:]
		whole := len(src) &^ 7
		for i := 0; i < whole; i += 8 {
			in, out := (*[8]float32)(src[i:]), (*[8]float32)(dst[i:])
			a, b := float32(float64(in[0])*inverse)+roundMagic, float32(float64(in[1])*inverse)+roundMagic
			c, d := float32(float64(in[2])*inverse)+roundMagic, float32(float64(in[3])*inverse)+roundMagic
			out[0] = table[math.Float32bits(a)&0xff|math.Float32bits(in[0])>>23&0x100]
			out[1] = table[math.Float32bits(b)&0xff|math.Float32bits(in[1])>>23&0x100]
			out[2] = table[math.Float32bits(c)&0xff|math.Float32bits(in[2])>>23&0x100]
			out[3] = table[math.Float32bits(d)&0xff|math.Float32bits(in[3])>>23&0x100]
			a, b = float32(float64(in[4])*inverse)+roundMagic, float32(float64(in[5])*inverse)+roundMagic
			c, d = float32(float64(in[6])*inverse)+roundMagic, float32(float64(in[7])*inverse)+roundMagic
			out[4] = table[math.Float32bits(a)&0xff|math.Float32bits(in[4])>>23&0x100]
			out[5] = table[math.Float32bits(b)&0xff|math.Float32bits(in[5])>>23&0x100]
			out[6] = table[math.Float32bits(c)&0xff|math.Float32bits(in[6])>>23&0x100]
			out[7] = table[math.Float32bits(d)&0xff|math.Float32bits(in[7])>>23&0x100]
		}
		for i := whole; i < len(src); i++ {
			dst[i] = lookup(src[i])
		}
	}
}

// int8Table holds q*scale at the low byte of q, the negative ones and -0 behind the others.
func int8Table(scale float32) *[512]float32 {
	table := new([512]float32)
	for q := range 128 {
		table[q] = float32(q) * scale
		table[0x100|int(uint8(-q))] = -table[q]
	}
	return table
}

// quantize is the integer for one value, clamped.
func quantize(x, scale float32) int8 {
	q := math.RoundToEven(float64(x / scale))
	return int8(min(max(q, -127), 127))
}
