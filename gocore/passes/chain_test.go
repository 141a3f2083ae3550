package passes

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

var everyPass = []string{
	`{"name":"clip","params":{"max_norm":0.5}}`, `{"name":"clip","params":{"max_norm":0.25,"per_tensor":true}}`, `{"name":"fp16"}`,
	`{"name":"bf16"}`, `{"name":"int8"}`, `{"name":"fp8"}`, `{"name":"fp8","params":{"format":"e5m2"}}`,
	`{"name":"fp8","params":{"scaling":"tensor"}}`, `{"name":"regularization","params":{"strength":0.1}}`,
	`{"name":"gaussian_noise","params":{"std":0.01,"seed":5}}`, `{"name":"logging"}`,
}

func TestShapesThatHoldLittle(t *testing.T) {
	cases := []struct {
		name  string
		shape []int64
	}{{"empty", []int64{0}}, {"empty in the middle", []int64{3, 0, 2}}, {"0-dim", []int64{}}, {"one", []int64{1}}}
	for _, c := range cases {
		for _, spec := range append(everyPass, "") {
			for _, d := range floats {
				src := as(d, 0.75)
				src.Shape, src.Strides = c.shape, tensor.RowMajor(c.shape)
				out, _ := apply(t, "["+spec+"]", &Grad{Src: []tensor.Tensor{src, as(d, 1, 2)}})
				require.Len(t, out, 2, c.name)
			}
		}
	}
	out, _ := apply(t, "[]", &Grad{})
	require.Empty(t, out)
}

// A chain gives what its passes give one after the other, whatever the strides, tensors and types.
func TestChainIsItsPassesInTurn(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		spec := rapid.SliceOfN(rapid.SampledFrom(everyPass), 0, 5).Draw(rt, "passes")
		g := &Grad{Step: 3, Block: 2, LossScale: rapid.SampledFrom([]float64{0, 1, 1024}).Draw(rt, "scale")}
		for range rapid.IntRange(1, 3).Draw(rt, "tensors") {
			g.Src = append(g.Src, drawTensor(rt))
		}
		fused, chain := apply(t, "["+join(spec)+"]", g)
		require.Equal(t, len(spec), chain.Len())
		step := *g
		step.Src = nil
		for _, s := range g.Src {
			step.Src = append(step.Src, dense(s))
		}
		for i, one := range spec {
			alone, err := NewChain("[" + one + "]")
			require.NoError(t, err)
			p := alone.passes[0]
			step.Dst = nil
			ctx := &Context{Index: i}
			r, err := newRun(ctx, &step)
			require.NoError(t, err)
			require.NoError(t, alone.one(r, 0, p))
			require.NoError(t, r.finish())
			step.Src = step.Dst
			alone.Close()
		}
		for i := range fused {
			require.Equal(t, bitsOf(step.Src[i]), bitsOf(fused[i]), "tensor %d after %v", i, spec)
		}
	})
}

// drawTensor is a tensor of up to three dimensions that are permuted, cut and expanded.
func drawTensor(rt *rapid.T) tensor.Tensor {
	d := rapid.SampledFrom(floats).Draw(rt, "type")
	rank := rapid.IntRange(0, 3).Draw(rt, "rank")
	shape, full := make([]int64, rank), make([]int64, rank)
	total := int64(1)
	for i := range shape {
		shape[i] = rapid.Int64Range(1, 5).Draw(rt, "size")
		full[i] = shape[i] + rapid.Int64Range(0, 2).Draw(rt, "cut")
		total *= full[i]
	}
	t := as(d, wave(int(total))...)
	strides := tensor.RowMajor(full)
	order := rapid.Permutation(indices(rank)).Draw(rt, "order")
	t.Shape, t.Strides = nil, nil
	for _, from := range order {
		stride := strides[from]
		if rapid.IntRange(0, 3).Draw(rt, "expand") == 0 {
			stride = 0
		}
		t.Shape, t.Strides = append(t.Shape, shape[from]), append(t.Strides, stride)
	}
	return t
}

func indices(n int) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = i
	}
	return list
}

func join(list []string) string {
	text := ""
	for i, s := range list {
		if i > 0 {
			text += ","
		}
		text += s
	}
	return text
}

func TestResultsDoNotDependOnWorkers(t *testing.T) {
	values := wave(2*chunkLen + 77)
	for _, spec := range everyPass {
		var want [][]uint64
		var meta string
		for _, size := range []int{1, 2, 3, 7} {
			list, err := parse("[" + spec + "]")
			require.NoError(t, err)
			workers := NewWorkers(size)
			chain := ChainOf(workers, list...)
			strided := of32(values...)
			strided.Shape, strided.Strides = []int64{77, 1703}, []int64{1, 77}
			g := &Grad{Src: []tensor.Tensor{of32(values...), strided, as(tensor.BFloat16, values...)}, Step: 1}
			require.NoError(t, chain.Apply(&Context{Stats: true}, g))
			got := [][]uint64{bitsOf(g.Dst[0]), bitsOf(g.Dst[1]), bitsOf(g.Dst[2])}
			if want == nil {
				want, meta = got, chain.Meta()
			}
			require.True(t, equal(want, got), "%s with %d workers", spec, size)
			require.Equal(t, meta, chain.Meta())
			chain.Close()
			workers.Close()
		}
	}
}

// Chunks begin in the middle of rows, and a dimension is expanded.
func TestGatherAcrossChunks(t *testing.T) {
	for _, d := range floats {
		for _, strides := range [][]int64{{1, 0, 300}, {0, 1, 300}, {300, 1, 0}, {0, 0, 0}, {2100, 7, 1}} {
			src := as(d, wave(90_000)...)
			src.Shape, src.Strides = []int64{29, 53, 101}, strides
			out, _ := apply(t, `[]`, &Grad{Src: []tensor.Tensor{src}})
			want, got := dense(src), out[0]
			n := want.Bytes()
			require.True(t, bytes.Equal(slice[byte](&want, 0, n), slice[byte](&got, 0, n)), "strides %v", strides)
		}
	}
}

func equal(a, b [][]uint64) bool {
	for i := range a {
		for k := range a[i] {
			if a[i][k] != b[i][k] {
				return false
			}
		}
	}
	return len(a) == len(b)
}

func TestMoveUnchanged(t *testing.T) {
	chain, err := NewChain(`[{"name":"clip","params":{"max_norm":100}},{"name":"logging"}]`)
	require.NoError(t, err)
	defer chain.Close()
	freed := 0
	src := of32(1, 2)
	src.Release = func() { freed++ }
	g := &Grad{Src: []tensor.Tensor{src}}
	require.NoError(t, chain.Apply(&Context{MoveUnchanged: true}, g))
	require.Equal(t, src.Data, g.Dst[0].Data)
	g.Src[0].Free()
	require.Zero(t, freed)
	g.Dst[0].Free()
	require.Equal(t, 1, freed)

	g = &Grad{Src: []tensor.Tensor{of32(100, 200)}}
	require.NoError(t, chain.Apply(&Context{MoveUnchanged: true}, g))
	require.NotEqual(t, g.Src[0].Data, g.Dst[0].Data, "a changed tensor is not moved")
}

// misbehaving is a pass that does as it is told.
type misbehaving struct{ f func(g *Grad) error }

func (misbehaving) Name() string { return "misbehaving" }

func (m misbehaving) Apply(_ *Context, g *Grad) error { return m.f(g) }

// exploding is a Sweeper whose kernel panics, which shows only when somebody needs the result.
type exploding struct{}

func (exploding) Name() string { return "exploding" }

func (exploding) Looks() bool { return false }

func (e exploding) Apply(ctx *Context, g *Grad) error { return Sweep(ctx, g, e) }

func (exploding) Prepare(_ *Context, g *Grad) ([]Kernel, error) {
	return []Kernel{{F32: func(_, _ []float32, _ int64) { panic("boom") }}}, nil
}

func TestForeignPassSeesContiguousTensors(t *testing.T) {
	double := misbehaving{func(g *Grad) error {
		for i := range g.Src {
			src, dst := slice[float32](&g.Src[i], 0, g.Src[i].Numel()), slice[float32](&g.Dst[i], 0, g.Src[i].Numel())
			for k, x := range src {
				dst[k] = 2 * x
			}
		}
		return nil
	}}
	src := of32(1, 2, 3, 4, 5, 6)
	src.Shape, src.Strides = []int64{3, 2}, []int64{1, 3}
	chain := ChainOf(nil, BF16(), double, double)
	g := &Grad{Src: []tensor.Tensor{src}}
	require.NoError(t, chain.Apply(&Context{}, g))
	require.Equal(t, bits32(4, 16, 8, 20, 12, 24), bitsOf(g.Dst[0]))
	require.Equal(t, bits32(1, 2, 3, 4, 5, 6), bitsOf(of32(slice[float32](&src, 0, 6)...)))
}

func TestFailuresNamePassAndBoundaryAndLeaveNothing(t *testing.T) {
	number := of32(1, 2)
	integer := number
	integer.DType = tensor.Int64
	away := number
	away.Device.Type = 2
	own := errs.E(errs.ErrPass, "own words")
	cases := []struct {
		name  string
		chain *Chain
		src   tensor.Tensor
		kind  error
		says  []string
	}{
		{"clip NaN", ChainOf(nil, &Clip{MaxNorm: 1}), of32(1, nan), errs.ErrPass, []string{"clip", "boundary 7", "NaN or Inf", "tensor 1"}},
		{"clip Inf", ChainOf(nil, &Clip{MaxNorm: 1, Each: true}), of32(-inf), errs.ErrPass, []string{"clip", "boundary 7", "tensor 1"}},
		{"int8 NaN", ChainOf(nil, BF16(), &Int8{}), of32(nan), errs.ErrPass, []string{"int8", "boundary 7", "tensor 1"}},
		{"int8 Inf", ChainOf(nil, FP16(), &Int8{}), of32(1e9), errs.ErrPass, []string{"int8", "boundary 7"}},
		{"fp8 scaled NaN", ChainOf(nil, NewFP8("e5m2", true)), of32(nan, 1), errs.ErrPass, []string{"fp8", "boundary 7"}},
		{"int64", ChainOf(nil), integer, errs.ErrPass, []string{"int64", "boundary 7", "bfloat16"}},
		{"complex", ChainOf(nil), tensor.Tensor{Device: tensor.CPU, DType: tensor.DType{Code: tensor.CodeComplex, Bits: 64, Lanes: 1}}, errs.ErrPass, []string{"complex64"}},
		{"bool", ChainOf(nil), tensor.Tensor{Device: tensor.CPU, DType: tensor.Bool}, errs.ErrPass, []string{"bool"}},
		{"device", ChainOf(nil), away, errs.ErrPass, []string{"device type 2", "host"}},
		{"panic", ChainOf(nil, misbehaving{func(*Grad) error { panic("ouch") }}), number, errs.ErrPass, []string{"misbehaving", "boundary 7", "ouch", "chain_test.go"}},
		{"kernels of the wrong number", ChainOf(nil, exploding{}), number, errs.ErrPass, []string{"exploding", "1 kernels for 2"}},
		{"error", ChainOf(nil, BF16(), misbehaving{func(*Grad) error { return own }}), number, own, []string{"misbehaving", "boundary 7", "own words"}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			buffers := &counted{}
			g := &Grad{Src: []tensor.Tensor{of32(1, 2), c.src}, Block: 7}
			err := c.chain.Apply(&Context{Buffers: buffers}, g)
			require.ErrorIs(t, err, c.kind)
			require.Equal(t, "PassError", errs.Code(err))
			for _, word := range c.says {
				require.ErrorContains(t, err, word)
			}
			require.Nil(t, g.Dst)
			require.Zero(t, buffers.live.Load())
		})
	}
}

func TestPanicInKernelNamesItsOwnPass(t *testing.T) {
	for _, chain := range []*Chain{ChainOf(nil, exploding{}), ChainOf(nil, exploding{}, &Int8{})} {
		err := chain.Apply(nil, &Grad{Src: []tensor.Tensor{of32(1)}, Block: 7})
		require.ErrorIs(t, err, errs.ErrPass)
		require.ErrorContains(t, err, "pass exploding at boundary 7")
		require.ErrorContains(t, err, "boom")
	}
	g := &Grad{Src: []tensor.Tensor{of32(1)}, Dst: []tensor.Tensor{of32(0)}}
	require.ErrorContains(t, exploding{}.Apply(&Context{}, g), "boom")
}

// Outside a chain a pass writes the destinations it is given.
func TestBuiltinPassesAlone(t *testing.T) {
	for _, spec := range Specs() {
		p, err := New(spec.Name, nil)
		require.NoError(t, err)
		src := of32(0.5, 0.25, 0.75, -0.5)
		src.Shape, src.Strides = []int64{2, 2}, []int64{1, 2}
		want, _ := apply(t, `[{"name":"`+spec.Name+`"}]`, &Grad{Src: []tensor.Tensor{src, of32(3)}})
		g := &Grad{Src: []tensor.Tensor{src, of32(3)}, Dst: []tensor.Tensor{of32(0, 0, 0, 0), of32(0)}}
		require.NoError(t, p.Apply(&Context{}, g), spec.Name)
		for i := range want {
			require.Equal(t, bitsOf(want[i]), bitsOf(g.Dst[i]), spec.Name)
		}
		require.ErrorIs(t, p.Apply(&Context{}, &Grad{Src: g.Src, Dst: []tensor.Tensor{of64(0, 0, 0, 0), of32(0)}}), errs.ErrPass)
	}
}

func TestBuffersThatFail(t *testing.T) {
	for failAt := int64(1); failAt <= 2; failAt++ {
		for _, spec := range append(everyPass, "") {
			chain, err := NewChain("[" + spec + "]")
			require.NoError(t, err)
			buffers := &counted{failAt: failAt}
			g := &Grad{Src: []tensor.Tensor{of32(1, 2), of32(3, 4)}}
			err = chain.Apply(&Context{Buffers: buffers}, g)
			require.ErrorIs(t, err, errs.ErrPass)
			require.ErrorContains(t, err, "no memory")
			require.Zero(t, buffers.live.Load())
			chain.Close()
		}
	}
}

func TestLossScaleMustBePositive(t *testing.T) {
	for _, scale := range []float64{-1, float64(nan), float64(inf)} {
		require.ErrorIs(t, ChainOf(nil).Apply(&Context{}, &Grad{LossScale: scale}), errs.ErrValue)
	}
}

func TestClose(t *testing.T) {
	chain, err := NewChain(`[{"name":"bf16"}]`)
	require.NoError(t, err)
	g := &Grad{Src: []tensor.Tensor{of32(wave(3 * chunkLen)...)}}
	require.NoError(t, chain.Apply(&Context{}, g))
	chain.Close()
	chain.Close()
	require.ErrorIs(t, chain.Apply(&Context{}, g), errs.ErrClosed)
}

func TestWorkers(t *testing.T) {
	w := NewWorkers(3)
	defer w.Close()
	seen := make([]int, 1000)
	require.NoError(t, w.Run(len(seen), func(i int) error { seen[i]++; return nil }))
	for i, n := range seen {
		require.Equal(t, 1, n, "index %d", i)
	}
	one := errors.New("one")
	require.ErrorIs(t, w.Run(100, func(i int) error {
		if i == 50 {
			return one
		}
		return nil
	}), one)
	require.ErrorContains(t, w.Run(2, func(i int) error { panic(fmt.Sprint("index ", i)) }), "index")
	done := make(chan error)
	for range 8 {
		go func() { done <- w.Run(64, func(int) error { return w.Run(4, func(int) error { return nil }) }) }()
	}
	for range 8 {
		require.NoError(t, <-done)
	}
	require.NoError(t, (*Workers)(nil).Run(3, func(int) error { return nil }))
	w.Close()
	require.NoError(t, w.Run(3, func(int) error { return nil }), "the caller works alone after Close")
}
