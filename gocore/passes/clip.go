package passes

import (
	"math"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/numeric"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

func init() {
	mustRegister(Spec{
		Name: "clip",
		Help: "scale the gradient down to max_norm when its 2-norm is larger",
		Params: []ParamSpec{
			{Name: "max_norm", Type: Float, Default: 1.0, Max: math.MaxFloat64, Help: "largest norm let through, in unscaled units"},
			{Name: "per_tensor", Type: Bool, Default: false, Help: "clip each tensor of a boundary by its own norm, not by the joint one"},
		},
		New: func(p Params) (Pass, error) {
			return &Clip{MaxNorm: p.Float("max_norm"), Each: p.Bool("per_tensor")}, nil
		},
	})
}

// Clip scales a gradient whose norm exceeds MaxNorm by MaxNorm/(norm+1e-6), all tensors of the boundary by the same factor. The norm is taken
// over the values as float32, summed in float64 over fixed chunks, and divided by the loss scale; norm and factor are then float32, the
// factor is rounded to the tensor's type and multiplied. A gradient within the norm is left alone. NaN and Inf are refused.
type Clip struct {
	// MaxNorm is in unscaled units, at least 0.
	MaxNorm float64
	// Each clips each tensor by its own norm.
	Each bool
	last map[string]any
}

// Name is "clip".
func (*Clip) Name() string { return "clip" }

// PerTensor is Each.
func (c *Clip) PerTensor() bool { return c.Each }

// Looks is true: the norm needs every element.
func (*Clip) Looks() bool { return true }

// Report gives the norm that the last Apply found, in unscaled units, and the factor that it scaled by (1: left alone).
func (c *Clip) Report() map[string]any { return c.last }

// Apply clips g.Src into g.Dst.
func (c *Clip) Apply(ctx *Context, g *Grad) error { return Sweep(ctx, g, c) }

// Prepare finds the norm and gives the scaling.
func (c *Clip) Prepare(ctx *Context, g *Grad) ([]Kernel, error) {
	c.last = nil
	sum := 0.0
	for i := range g.Src {
		part, err := squares(ctx, &g.Src[i])
		if err != nil {
			return nil, err
		}
		if math.IsNaN(part) || math.IsInf(part, 0) {
			return nil, errs.E(errs.ErrPass, "tensor %d holds NaN or Inf (as float32)", g.First+i)
		}
		sum += part
	}
	norm := math.Sqrt(sum) / g.scale()
	if float32(norm) <= float32(c.MaxNorm) {
		c.last = map[string]any{"norm": norm, "clip_factor": 1.0}
		return nil, nil
	}
	factor := clipFactor(norm, c.MaxNorm)
	c.last = map[string]any{"norm": norm, "clip_factor": float64(factor)}
	kernels := make([]Kernel, len(g.Src))
	for i := range kernels {
		kernels[i] = scaleKernel(roundTo(g.Src[i].DType, factor), float64(factor))
	}
	return kernels, nil
}

// clipFactor is max/(norm+1e-6) as eager torch computes it in float32: by way of the reciprocal. A norm beyond float32 would give 0 there;
// it is divided in float64.
func clipFactor(norm, limit float64) float32 {
	single := float32(norm)
	if math.IsInf(float64(single), 0) {
		return float32(limit / norm)
	}
	return float32(1/(single+1e-6)) * float32(limit)
}

// roundTo rounds x to a value of a float type no wider than float32.
func roundTo(d tensor.DType, x float32) float32 {
	switch d {
	case tensor.Float16:
		return numeric.RoundF16(x)
	case tensor.BFloat16:
		return numeric.RoundBF16(x)
	default:
		return x
	}
}

// squares is the sum of the squares of a tensor's elements. A float32 squared cannot overflow in float64, so the sum is finite exactly
// when all elements are.
func squares(ctx *Context, t *tensor.Tensor) (float64, error) {
	parts := make([]float64, chunks(t.Numel()))
	err := look(ctx, t, func(chunk int, v []float32) { parts[chunk] += squaresOf(v) })
	sum := 0.0
	for _, part := range parts {
		sum += part
	}
	return sum, err
}

// squaresOf adds in four lanes, so that an addition need not wait for the one before it.
func squaresOf(v []float32) float64 {
	var lanes [4]float64
	v = v[wideSquares(&lanes, v):]
	a, b, c, d := lanes[0], lanes[1], lanes[2], lanes[3]
	for len(v) >= 4 {
		w, x, y, z := float64(v[0]), float64(v[1]), float64(v[2]), float64(v[3])
		a += w * w
		b += x * x
		c += y * y
		d += z * z
		v = v[4:]
	}
	for _, x := range v {
		a += float64(x) * float64(x)
	}
	return (a + b) + (c + d)
}

// scaleKernel multiplies: by `single` in float32 and the half types, by `double` in float64.
func scaleKernel(single float32, double float64) Kernel {
	return Kernel{
		F32: func(dst, src []float32, _ int64) {
			done := wideScale(dst, src, single)
			dst, src = dst[done:len(src)], src[done:]
			for len(src) >= 4 && len(dst) >= 4 {
				dst[0], dst[1], dst[2], dst[3] = src[0]*single, src[1]*single, src[2]*single, src[3]*single
				src, dst = src[4:], dst[4:]
			}
			for i, x := range src {
				dst[i] = x * single
			}
		},
		F64: func(dst, src []float64, _ int64) {
			for i, x := range src {
				dst[i] = x * double
			}
		},
	}
}
