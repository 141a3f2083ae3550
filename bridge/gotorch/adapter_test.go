//go:build gotorch

package gotorch

import (
	"os"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	torch "github.com/wangkuiyi/gotorch"

	"github.com/eae-runtime/eae-runtime/bridge/libtorch"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

func TestMain(m *testing.M) {
	runtime.LockOSThread()
	if err := libtorch.Open(os.Getenv("EAE_TEST_LIBTORCH"), true); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

func TestWrapSharesTheMemory(t *testing.T) {
	values := []float32{1, 2, 3, 4}
	g, err := Wrap(&tensor.Tensor{
		Data: unsafe.Pointer(&values[0]), DType: tensor.Float32, Device: tensor.CPU, Shape: []int64{2, 2}, Strides: []int64{2, 1},
	})
	require.NoError(t, err)
	require.Equal(t, []int64{2, 2}, g.Shape())
	g.MulI(g)
	require.Equal(t, []float32{1, 4, 9, 16}, values)
	runtime.KeepAlive(g)
	runtime.KeepAlive(values)
}

func TestBridgeSharesTheMemoryAndKeepsIt(t *testing.T) {
	g := torch.Ones([]int64{3, 2}, false)
	b, err := Bridge(g)
	require.NoError(t, err)
	require.Equal(t, []int64{3, 2}, b.Shape)
	require.Equal(t, []int64{2, 1}, b.Strides)
	require.Equal(t, tensor.Float32, b.DType)
	elements := unsafe.Slice((*float32)(b.Data), 6)
	elements[4] = 7
	require.EqualValues(t, 7, g.Index(2, 0).Item())
	g = torch.Tensor{}
	Collect()
	require.Equal(t, []float32{1, 1, 1, 1, 7, 1}, elements)
	b.Free()
}

func TestAnOperatorOfTheStableABIOnAGotorchTensor(t *testing.T) {
	g := torch.Ones([]int64{4}, false)
	shared, err := libtorch.Adopt(*g.T).Share()
	require.NoError(t, err)
	defer shared.Close()
	out, err := libtorch.Call("aten::exp_", "", 1, shared)
	require.NoError(t, err)
	defer out[0].Close()
	require.InDelta(t, 2.718281828, g.Index(3).Item(), 1e-6)
}
