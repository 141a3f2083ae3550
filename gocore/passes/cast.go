package passes

import (
	"github.com/eae-runtime/eae-runtime/gocore/numeric"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

func init() {
	mustRegister(Spec{
		Name: "fp16",
		Help: "round to float16 and back; what is beyond its range becomes infinite",
		New:  func(Params) (Pass, error) { return FP16(), nil },
	})
	mustRegister(Spec{
		Name: "bf16",
		Help: "round to bfloat16 and back",
		New:  func(Params) (Pass, error) { return BF16(), nil },
	})
}

// Cast rounds each element to a smaller type and back, to nearest, ties to even, as `t.to(small).to(t.dtype)` does (float64 by way of float32,
// as there). NaN and Inf are handed on. A tensor that is of the small type already is left alone.
type Cast struct {
	name  string
	small tensor.DType
	round func(dst, src []float32)
}

// FP16 is the pass "fp16": through float16, overflowing to infinity.
func FP16() *Cast { return &Cast{"fp16", tensor.Float16, numeric.RoundF16Slice} }

// BF16 is the pass "bf16": through bfloat16.
func BF16() *Cast { return &Cast{"bf16", tensor.BFloat16, numeric.RoundBF16Slice} }

// Name is "fp16" or "bf16".
func (c *Cast) Name() string { return c.name }

// Looks is false.
func (*Cast) Looks() bool { return false }

// Apply casts g.Src into g.Dst.
func (c *Cast) Apply(ctx *Context, g *Grad) error { return Sweep(ctx, g, c) }

// Prepare gives the rounding.
func (c *Cast) Prepare(_ *Context, g *Grad) ([]Kernel, error) {
	kernels := make([]Kernel, len(g.Src))
	for i := range kernels {
		if g.Src[i].DType != c.small {
			kernels[i].F32 = func(dst, src []float32, _ int64) { c.round(dst, src) }
		}
	}
	return kernels, nil
}
