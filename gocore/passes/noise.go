package passes

import (
	"encoding/json"
	"math"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

func init() {
	mustRegister(Spec{
		Name: "gaussian_noise",
		Help: "add normal noise that depends only on seed, step, block, microbatch, tensor and element",
		Params: []ParamSpec{
			{Name: "std", Type: Float, Default: 0.0, Max: math.MaxFloat64, Help: "standard deviation in unscaled units; 0 changes nothing"},
			{Name: "seed", Type: Int, Default: int64(0), Help: "the stream of noise"},
		},
		New: func(p Params) (Pass, error) { return &GaussianNoise{Std: p.Float("std"), Seed: p.Int("seed")}, nil },
	})
}

// GaussianNoise adds Std times a standard normal number to each element, times the loss scale. Note [Where noise comes from]: the 64-bit seed keys
// Philox, whose value at the counter (step, block, microbatch) keys it once more; four elements of a tensor then share one value at the
// counter (element/4, tensor and position in the chain), turned into normals by Box and Muller's transform in float64. So the noise does not
// depend on threads, schedule or order, and nobody's generator is disturbed. Microbatches have noise of their own.
//
// When the caller does not count steps (Grad.Step negative), the pass numbers its own calls instead, and that number is its state; the order of
// calls then matters. NaN and Inf are handed on.
type GaussianNoise struct {
	// Std is in unscaled units, at least 0.
	Std   float64
	Seed  int64
	calls uint64
}

// Name is "gaussian_noise".
func (*GaussianNoise) Name() string { return "gaussian_noise" }

// Looks is false.
func (*GaussianNoise) Looks() bool { return false }

// Apply adds noise to g.Src into g.Dst.
func (n *GaussianNoise) Apply(ctx *Context, g *Grad) error { return Sweep(ctx, g, n) }

// Prepare gives the addition, or nothing when Std is 0.
func (n *GaussianNoise) Prepare(ctx *Context, g *Grad) ([]Kernel, error) {
	if n.Std == 0 {
		return nil, nil
	}
	key := n.key(g)
	std := n.Std * g.scale()
	kernels := make([]Kernel, len(g.Src))
	for i := range kernels {
		noise := stream{key: key, tensor: uint32(g.First + i), index: uint32(ctx.Index)}
		kernels[i] = noiseKernel(noise, g.Src[i].DType, std)
	}
	return kernels, nil
}

// key is the key of this gradient's noise.
func (n *GaussianNoise) key(g *Grad) [2]uint32 {
	step, kind := uint64(g.Step), uint32(0)
	if g.Step < 0 {
		step, kind = n.calls, 1
		n.calls++
	}
	seed := [2]uint32{uint32(n.Seed), uint32(uint64(n.Seed) >> 32)}
	// Steps go up to 2^63; the sign bit keeps counted steps and numbered calls apart.
	word := Philox([4]uint32{uint32(step), uint32(step>>32) | kind<<31, uint32(g.Block), uint32(g.Microbatch)}, seed)
	return [2]uint32{word[0], word[1]}
}

// stream is the noise of one tensor.
type stream struct {
	key           [2]uint32
	tensor, index uint32
}

// four gives the normals of elements 4*group to 4*group+3.
func (s stream) four(group uint64) [4]float64 {
	w := Philox([4]uint32{uint32(group), uint32(group >> 32), s.tensor, s.index}, s.key)
	a, b := boxMuller(w[0], w[1])
	c, d := boxMuller(w[2], w[3])
	return [4]float64{a, b, c, d}
}

// boxMuller turns two uniform words into two independent standard normal numbers.
func boxMuller(u, v uint32) (float64, float64) {
	radius := math.Sqrt(-2 * math.Log((float64(u)+1)*0x1p-32))
	sin, cos := math.Sincos(float64(v) * (2 * math.Pi * 0x1p-32))
	return radius * cos, radius * sin
}

// noiseKernel computes t + z*std with one rounding to the tensor's type an operation.
func noiseKernel(s stream, d tensor.DType, std float64) Kernel {
	small := float32(std)
	return Kernel{
		F32: func(dst, src []float32, at int64) {
			if d == tensor.Float32 {
				addNoise(s, dst, src, at, func(z float64) float32 { return float32(z) * small })
				return
			}
			addNoise(s, dst, src, at, func(z float64) float32 { return roundTo(d, roundTo(d, float32(z))*small) })
		},
		F64: func(dst, src []float64, at int64) {
			addNoise(s, dst, src, at, func(z float64) float64 { return z * std })
		},
	}
}

// addNoise adds what `scaled` makes of each element's normal number; at is a multiple of 4.
func addNoise[T float32 | float64](s stream, dst, src []T, at int64, scaled func(z float64) T) {
	for i := 0; i < len(src); i += 4 {
		for k, z := range s.four(uint64(at+int64(i)) / 4) {
			if i+k < len(src) {
				dst[i+k] = src[i+k] + scaled(z)
			}
		}
	}
}

// noiseState is the text form of the state.
type noiseState struct {
	Seed  int64  `json:"seed"`
	Calls uint64 `json:"calls"`
}

// State is the seed and the number of calls without a step.
func (n *GaussianNoise) State() ([]byte, error) {
	return json.Marshal(noiseState{n.Seed, n.calls})
}

// SetState continues where State was taken, with its seed.
func (n *GaussianNoise) SetState(data []byte) error {
	var s noiseState
	if err := json.Unmarshal(data, &s); err != nil {
		return errs.E(errs.ErrValue, "not the state of gaussian_noise: %w", err)
	}
	n.Seed, n.calls = s.Seed, s.Calls
	return nil
}
