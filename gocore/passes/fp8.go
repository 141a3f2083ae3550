package passes

import (
	"math"

	"github.com/eae-runtime/eae-runtime/gocore/numeric"
)

func init() {
	mustRegister(Spec{
		Name: "fp8",
		Help: "round to an 8-bit float and back, with or without a scale for each tensor",
		Params: []ParamSpec{
			{Name: "format", Type: String, Default: "e4m3fn", OneOf: []string{"e4m3fn", "e5m2"}, Help: "the 8-bit format"},
			{Name: "scaling", Type: String, Default: "none", OneOf: []string{"none", "tensor"},
				Help: "none: cast as it is; tensor: divide by maxabs/(largest value of the format) before the cast, and multiply after it"},
		},
		New: func(p Params) (Pass, error) { return NewFP8(p.String("format"), p.String("scaling") == "tensor"), nil },
	})
}

// FP8 rounds each tensor to float8 e4m3fn or e5m2 and back.
//
// Without scaling the finite values are those of `t.to(torch.float8_...).to(t.dtype)`: e4m3fn saturates at ±448, e5m2 overflows to
// infinity. NaN and Inf are handed on; an Inf stays an Inf with e4m3fn too, which has none, where torch 2.15 makes 448 of it: an
// overflow that a loss scaler is looking for must not look valid.
//
// With scaling, scale = maxabs/largest in float32, and the value is cast(t/scale)*scale; zeros and tensors whose scale would underflow are
// left alone and report nothing, and NaN and Inf are refused.
type FP8 struct {
	perTensor
	scaled  bool
	e5m2    bool
	largest float32
	last    map[string]any
}

// NewFP8 makes the pass for format "e5m2" or else e4m3fn.
func NewFP8(format string, scaled bool) *FP8 {
	if format == "e5m2" {
		return &FP8{scaled: scaled, e5m2: true, largest: numeric.MaxE5M2}
	}
	return &FP8{scaled: scaled, largest: numeric.MaxE4M3}
}

// Name is "fp8".
func (*FP8) Name() string { return "fp8" }

// Looks is true with scaling: the scale needs every element.
func (f *FP8) Looks() bool { return f.scaled }

// Report gives the quantization_scale of the last Apply with scaling, in the gradient's own (loss-scaled) units.
func (f *FP8) Report() map[string]any { return f.last }

// Apply casts g.Src into g.Dst.
func (f *FP8) Apply(ctx *Context, g *Grad) error { return sweepEach(ctx, g, f) }

// Prepare gives the rounding of g's only tensor.
func (f *FP8) Prepare(ctx *Context, g *Grad) ([]Kernel, error) {
	f.last = nil
	if !f.scaled {
		return single(&g.Src[0], Kernel{F32: f.cast}), nil
	}
	top, err := absMax(ctx, g, 0)
	scale := top / f.largest
	if err != nil || scale == 0 {
		return nil, err
	}
	f.last = map[string]any{"quantization_scale": float64(scale)}
	return single(&g.Src[0], Kernel{F32: f.scaledKernel(scale)}), nil
}

// scaledKernel divides, rounds and multiplies. Where the scale is normal, no quotient exceeds the largest value by more than rounding takes
// back; a subnormal scale is too coarse for that, and its quotients are clamped.
func (f *FP8) scaledKernel(scale float32) func(dst, src []float32, _ int64) {
	round := numeric.RoundE4M3Slice
	if f.e5m2 {
		round = numeric.RoundE5M2Slice
	}
	return func(dst, src []float32, _ int64) {
		dst = dst[:len(src)]
		for i, x := range src {
			dst[i] = x / scale
		}
		if scale < minNormal {
			for i, x := range dst {
				dst[i] = min(max(x, -f.largest), f.largest)
			}
		}
		round(dst, dst)
		for i, x := range dst {
			dst[i] = x * scale
		}
	}
}

func (f *FP8) cast(dst, src []float32, _ int64) {
	if f.e5m2 {
		numeric.RoundE5M2Slice(dst, src)
		return
	}
	if absMaxBits(src) < infBits {
		numeric.RoundE4M3Slice(dst, src)
		return
	}
	for i, x := range src {
		if math.Float32bits(x)&absBits == infBits {
			dst[i] = x
			continue
		}
		dst[i] = numeric.RoundE4M3(x)
	}
}
