//go:build torch

package libtorch

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// TestMain loads torch's library into this process, in which there is no Python.
func TestMain(m *testing.M) {
	runtime.LockOSThread()
	path := os.Getenv("EAE_TEST_LIBTORCH")
	if path == "" {
		found, _ := filepath.Glob("../../.venv/lib/python3*/site-packages/torch/lib/libtorch_cpu.so")
		if len(found) == 0 {
			panic("no torch: set EAE_TEST_LIBTORCH to a libtorch_cpu.so, or run `make build`")
		}
		path = found[0]
	}
	if err := Open(path, true); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// floats makes a torch tensor on a Go slice of two rows.
func floats(t *testing.T, values []float32) *Tensor {
	t.Helper()
	cols := int64(len(values) / 2)
	view, err := View(&tensor.Tensor{
		Data: unsafe.Pointer(&values[0]), DType: tensor.Float32, Device: tensor.CPU,
		Shape: []int64{2, cols}, Strides: []int64{cols, 1},
	})
	require.NoError(t, err)
	t.Cleanup(view.Close)
	return view
}

func TestAnOperatorWritesTheVeryMemory(t *testing.T) {
	values := []float32{1, 2, 3, 4}
	x := floats(t, values)
	out, err := Call("aten::mul_", "Tensor", 1, x, x)
	require.NoError(t, err)
	defer out[0].Close()
	require.Equal(t, []float32{1, 4, 9, 16}, values)
}

func TestDescribeGivesBackWhatViewWasGiven(t *testing.T) {
	values := make([]float64, 12)
	given := tensor.Tensor{
		Data: unsafe.Pointer(&values[0]), DType: tensor.Float64, Device: tensor.CPU, Shape: []int64{2, 3}, Strides: []int64{1, 4},
	}
	view, err := View(&given)
	require.NoError(t, err)
	defer view.Close()
	seen, err := view.Describe()
	require.NoError(t, err)
	require.Equal(t, given, seen)
}

func TestResultsAndOptionalArguments(t *testing.T) {
	x := floats(t, []float32{1, -2, 3, -4})
	sum, err := Call("aten::sum", "", 1, x, Optional{tensor.Float64})
	require.NoError(t, err)
	defer sum[0].Close()
	seen, err := sum[0].Describe()
	require.NoError(t, err)
	require.Empty(t, seen.Shape)
	require.Equal(t, tensor.Float64, seen.DType)
	require.Equal(t, -2.0, *(*float64)(seen.Data))
}

func TestRefusalsCarryTorchsText(t *testing.T) {
	x, y := floats(t, make([]float32, 4)), floats(t, make([]float32, 6))
	_, err := Call("aten::mul", "Tensor", 1, x, y)
	require.ErrorIs(t, err, errs.ErrBridge)
	require.ErrorContains(t, err, "aten::mul")

	_, err = Call("aten::no_such_operator", "", 1, x)
	require.ErrorIs(t, err, errs.ErrBridge)

	_, err = Call("aten::mul", "Tensor", 1, x, "text")
	require.ErrorContains(t, err, "argument 1")

	_, err = View(&tensor.Tensor{DType: tensor.DType{Code: 99, Bits: 8, Lanes: 1}, Device: tensor.CPU})
	require.ErrorIs(t, err, errs.ErrBridge)
}
