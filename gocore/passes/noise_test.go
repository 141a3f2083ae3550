package passes

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// The known answers of the Random123 distribution.
func TestPhiloxKnownAnswers(t *testing.T) {
	cases := []struct {
		counter [4]uint32
		key     [2]uint32
		want    [4]uint32
	}{
		{[4]uint32{}, [2]uint32{}, [4]uint32{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
		{[4]uint32{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, [2]uint32{0xffffffff, 0xffffffff},
			[4]uint32{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
		{[4]uint32{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, [2]uint32{0xa4093822, 0x299f31d0},
			[4]uint32{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
	}
	for _, c := range cases {
		require.Equal(t, c.want, Philox(c.counter, c.key))
	}
}

func noise(t *testing.T, p Pass, g Grad, n int) []float32 {
	t.Helper()
	g.Src = []tensor.Tensor{of32(make([]float32, n)...)}
	require.NoError(t, ChainOf(nil, p).Apply(&Context{}, &g))
	return slice[float32](&g.Dst[0], 0, int64(n))
}

func TestNoiseIsStandardNormal(t *testing.T) {
	v := noise(t, &GaussianNoise{Std: 2, Seed: 11}, Grad{LossScale: 4}, 400_000)
	var m1, m2, m3, m4, lag float64
	for i, x := range v {
		z := float64(x) / 8
		m1, m2, m3, m4 = m1+z, m2+z*z, m3+z*z*z, m4+z*z*z*z
		if i > 0 {
			lag += z * float64(v[i-1]) / 8
		}
	}
	n := float64(len(v))
	// Five standard errors each.
	require.InDelta(t, 0, m1/n, 5/math.Sqrt(n))
	require.InDelta(t, 1, m2/n, 5*math.Sqrt(2/n))
	require.InDelta(t, 0, m3/n, 5*math.Sqrt(15/n))
	require.InDelta(t, 3, m4/n, 5*math.Sqrt(96/n))
	require.InDelta(t, 0, lag/n, 5/math.Sqrt(n))
}

func TestBoxMullerAtTheEnds(t *testing.T) {
	for _, u := range []uint32{0, 1, math.MaxUint32} {
		for _, v := range []uint32{0, math.MaxUint32} {
			a, b := boxMuller(u, v)
			require.False(t, math.IsNaN(a+b) || math.IsInf(a+b, 0))
			require.LessOrEqual(t, math.Hypot(a, b), 6.7)
		}
	}
}

func TestNoiseIsKeyed(t *testing.T) {
	base := Grad{Step: 1, Block: 2, Microbatch: 3}
	want := noise(t, &GaussianNoise{Std: 1, Seed: 4}, base, 9)
	require.Equal(t, want, noise(t, &GaussianNoise{Std: 1, Seed: 4}, base, 9), "the same key gives the same noise")
	require.Equal(t, want[:5], noise(t, &GaussianNoise{Std: 1, Seed: 4}, base, 5), "the length does not matter")
	others := map[string][]float32{
		"seed":       noise(t, &GaussianNoise{Std: 1, Seed: 5}, base, 9),
		"seed high":  noise(t, &GaussianNoise{Std: 1, Seed: 4 + 1<<32}, base, 9),
		"step":       noise(t, &GaussianNoise{Std: 1, Seed: 4}, Grad{Step: 2, Block: 2, Microbatch: 3}, 9),
		"block":      noise(t, &GaussianNoise{Std: 1, Seed: 4}, Grad{Step: 1, Block: 3, Microbatch: 3}, 9),
		"microbatch": noise(t, &GaussianNoise{Std: 1, Seed: 4}, Grad{Step: 1, Block: 2, Microbatch: -1}, 9),
	}
	for name, v := range others {
		for i := range v {
			require.NotEqual(t, want[i], v[i], name)
		}
	}
	two := of32(make([]float32, 9)...)
	g := base
	g.Src = []tensor.Tensor{two, two}
	require.NoError(t, ChainOf(nil, &GaussianNoise{Std: 1, Seed: 4}).Apply(&Context{}, &g))
	require.Equal(t, want, slice[float32](&g.Dst[0], 0, 9))
	require.NotEqual(t, want, slice[float32](&g.Dst[1], 0, 9), "tensors have noise of their own")
	g.Src = g.Src[:1]
	require.NoError(t, ChainOf(nil, &GaussianNoise{Std: 1, Seed: 4}, &GaussianNoise{Std: 1, Seed: 4}).Apply(&Context{}, &g))
	require.NotEqual(t, 2*want[0], slice[float32](&g.Dst[0], 0, 9)[0], "so have the passes of a chain")
}

func TestNoiseInEveryType(t *testing.T) {
	want := noise(t, &GaussianNoise{Std: 1}, Grad{}, 6)
	for _, d := range floats {
		g := &Grad{Src: []tensor.Tensor{as(d, make([]float32, 6)...)}}
		require.NoError(t, ChainOf(nil, &GaussianNoise{Std: 1}).Apply(&Context{}, g))
		require.NoError(t, look(&Context{}, &g.Dst[0], func(_ int, v []float32) {
			for i, x := range v {
				require.Equal(t, roundTo(d, want[i]), x)
			}
		}))
	}
}

func TestNoiseStateResumes(t *testing.T) {
	spec := `[{"name":"bf16"},{"name":"gaussian_noise","params":{"std":1,"seed":3}}]`
	draw := func(c *Chain) float32 {
		g := &Grad{Src: []tensor.Tensor{of32(0)}, Step: -1}
		require.NoError(t, c.Apply(&Context{}, g))
		return slice[float32](&g.Dst[0], 0, 1)[0]
	}
	a, err := NewChain(spec)
	require.NoError(t, err)
	defer a.Close()
	first, second := draw(a), draw(a)
	require.NotEqual(t, first, second)
	state, err := a.State()
	require.NoError(t, err)
	third, fourth := draw(a), draw(a)
	b, err := NewChain(`[{"name":"bf16"},{"name":"gaussian_noise","params":{"std":1}}]`)
	require.NoError(t, err)
	defer b.Close()
	require.NoError(t, b.SetState(state))
	require.Equal(t, []float32{third, fourth}, []float32{draw(b), draw(b)})
	again, err := a.State()
	require.NoError(t, err)
	require.NoError(t, b.SetState(again))
	require.Equal(t, draw(a), draw(b))
}

// remembering is a pass whose state is a text that must not be "bad".
type remembering struct{ text string }

func (*remembering) Name() string { return "remembering" }

func (*remembering) Apply(*Context, *Grad) error { return nil }

func (r *remembering) State() ([]byte, error) { return []byte(r.text), nil }

func (r *remembering) SetState(state []byte) error {
	if string(state) == "bad" {
		return errs.E(errs.ErrValue, "bad")
	}
	r.text = string(state)
	return nil
}

func TestSetStateIsAllOrNothing(t *testing.T) {
	one, two := &remembering{"a"}, &remembering{"b"}
	c := ChainOf(nil, one, BF16(), two)
	bad, err := ChainOf(nil, &remembering{"c"}, BF16(), &remembering{"bad"}).State()
	require.NoError(t, err)
	require.ErrorIs(t, c.SetState(bad), errs.ErrValue)
	require.Equal(t, []string{"a", "b"}, []string{one.text, two.text})
	for _, text := range []string{"", "{}", `{"version":2,"passes":[]}`, `{"version":1,"passes":[]}`,
		`{"version":1,"passes":[{"name":"bf16"},{"name":"remembering"},{"name":"remembering"}]}`} {
		require.ErrorIs(t, c.SetState(text), errs.ErrValue, text)
	}
	good, err := ChainOf(nil, &remembering{"c"}, BF16(), &remembering{"d"}).State()
	require.NoError(t, err)
	require.NoError(t, c.SetState(good))
	require.Equal(t, []string{"c", "d"}, []string{one.text, two.text})
}
