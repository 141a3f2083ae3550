package passes

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Wide and plain loops give the same bits, whatever the length and the values.
func TestWideLoopsAgainstPlainOnes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		bits := rapid.SliceOfN(rapid.Uint32(), 0, 70).Draw(t, "bits")
		src := make([]float32, len(bits))
		top := uint32(0)
		var lanes [4]float64
		for i, b := range bits {
			src[i] = math.Float32frombits(b)
			top = max(top, b&absBits)
		}
		require.Equal(t, top, absMaxBits(src))

		factor := rapid.Float32().Draw(t, "factor")
		dst := make([]float32, len(src))
		scaleKernel(factor, 0).F32(dst, src, 0)
		for i, x := range src {
			sameBits(t, x*factor, dst[i])
		}

		if top >= infBits {
			return
		}
		for i, x := range src[:len(src)&^3] {
			lanes[i%4] += float64(x) * float64(x)
		}
		for _, x := range src[len(src)&^3:] {
			lanes[0] += float64(x) * float64(x)
		}
		require.Equal(t, (lanes[0]+lanes[1])+(lanes[2]+lanes[3]), squaresOf(src))

		scale := math.Float32frombits(top) / 127
		if scale == 0 {
			return
		}
		int8Kernel(scale)(dst, src, 0)
		for i, x := range src {
			want := float32(quantize(x, scale)) * scale
			if want == 0 {
				want = float32(math.Copysign(0, float64(x)))
			}
			sameBits(t, want, dst[i])
		}
	})
}

func sameBits(t *rapid.T, want, got float32) {
	if math.IsNaN(float64(want)) && math.IsNaN(float64(got)) {
		return
	}
	require.Equal(t, math.Float32bits(want), math.Float32bits(got), "%v for %v", got, want)
}
