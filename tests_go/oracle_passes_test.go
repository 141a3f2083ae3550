//go:build gotorch

package tests

import (
	"fmt"
	"math"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	torch "github.com/wangkuiyi/gotorch"

	"github.com/eae-runtime/eae-runtime/bridge/libtorch"
	"github.com/eae-runtime/eae-runtime/gocore/passes"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// through takes g through a chain of one pass.
func through(t *testing.T, spec string, g torch.Tensor) torch.Tensor {
	t.Helper()
	chain, err := passes.NewChain(spec)
	require.NoError(t, err)
	t.Cleanup(chain.Close)
	grad := &passes.Grad{Src: []tensor.Tensor{bridged(t, g)}, Step: 1}
	require.NoError(t, chain.Apply(&passes.Context{}, grad))
	out := grad.Dst[0]
	t.Cleanup(out.Free)
	// FromBlob copies, so the result outlives the chain's memory.
	return torch.FromBlob(out.Data, torch.Float, out.Shape)
}

// scalar is a 0-dim tensor.
func scalar(v float32) torch.Tensor { return torch.Full([]int64{1}, v, false) }

func TestPassesAgainstTorch(t *testing.T) {
	cases := []struct {
		name, spec string
		want       func(g torch.Tensor) torch.Tensor
	}{
		{"fp16", `[{"name": "fp16"}]`, func(g torch.Tensor) torch.Tensor { return g.CastTo(torch.Half).CastTo(torch.Float) }},
		{"bf16", `[{"name": "bf16"}]`, func(g torch.Tensor) torch.Tensor { return g.CastTo(torch.BFloat16).CastTo(torch.Float) }},
		{
			"regularization", `[{"name": "regularization", "params": {"strength": 0.25}}]`,
			func(g torch.Tensor) torch.Tensor { return g.Mul(scalar(0.75)) },
		},
		{"logging", `[{"name": "logging"}]`, func(g torch.Tensor) torch.Tensor { return g }},
		{"two", `[{"name": "bf16"}, {"name": "regularization", "params": {"strength": 0.5}}]`, func(g torch.Tensor) torch.Tensor {
			low := g.CastTo(torch.BFloat16).CastTo(torch.Float)
			return low.Mul(scalar(0.5))
		}},
	}
	for _, shape := range [][]int64{{1}, {7, 3}, {64, 1031}} {
		for _, c := range cases {
			t.Run(fmt.Sprint(c.name, shape), func(t *testing.T) {
				g := torch.RandN(shape, false)
				before := bits(t, g)
				require.Equal(t, bits(t, c.want(g)), bits(t, through(t, c.spec, g)))
				require.Equal(t, before, bits(t, g), "the source is not written")
			})
		}
	}
}

func TestClipAgainstTorch(t *testing.T) {
	g := torch.RandN([]int64{100, 37}, false)
	square := g.Mul(g)
	sum := square.CastTo(torch.Double).Sum().Item().(float64)
	norm := float32(math.Sqrt(sum))
	want := g.Mul(scalar(1 / (norm + 1e-6)))
	require.True(t, torch.AllClose(want, through(t, `[{"name": "clip", "params": {"max_norm": 1.0}}]`, g)))
	require.Equal(t, bits(t, g), bits(t, through(t, `[{"name": "clip", "params": {"max_norm": 1e6}}]`, g)), "within the norm")
}

// call runs an operator that gotorch lacks through the stable ABI.
func call(t *testing.T, op, overload string, args ...any) *libtorch.Tensor {
	t.Helper()
	out, err := libtorch.Call(op, overload, 1, args...)
	require.NoError(t, err)
	t.Cleanup(out[0].Close)
	return out[0]
}

func TestInt8AgainstTorch(t *testing.T) {
	g := torch.RandN([]int64{333, 5}, false)
	shared, err := libtorch.Adopt(*g.T).Share()
	require.NoError(t, err)
	t.Cleanup(shared.Close)
	number := func(v float32) *libtorch.Tensor {
		values := []float32{v}
		view, err := libtorch.View(&tensor.Tensor{Data: unsafe.Pointer(&values[0]), DType: tensor.Float32, Device: tensor.CPU})
		require.NoError(t, err)
		own := call(t, "aten::clone", "", view, nil)
		view.Close()
		return own
	}
	scale := call(t, "aten::div", "Tensor", call(t, "aten::max", "", call(t, "aten::abs", "", shared)), number(127))
	whole := call(t, "aten::round", "", call(t, "aten::div", "Tensor", shared, scale))
	kept := call(t, "aten::clamp", "Tensor", whole, libtorch.Optional{Value: number(-127)}, libtorch.Optional{Value: number(127)})
	want := call(t, "aten::mul", "Tensor", kept, scale)
	seen, err := want.Describe()
	require.NoError(t, err)
	require.Equal(t, unsafe.Slice((*byte)(seen.Data), seen.Bytes()), bits(t, through(t, `[{"name": "int8"}]`, g)))
}
