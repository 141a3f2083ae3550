//go:build gotorch

// The tests behind the build tag `gotorch` hold the core against torch itself, without Python: gotorch's operators and autograd are the
// independent reference.
package tests

import (
	"os"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	torch "github.com/wangkuiyi/gotorch"

	adapter "github.com/eae-runtime/eae-runtime/bridge/gotorch"
	"github.com/eae-runtime/eae-runtime/bridge/libtorch"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

func TestMain(m *testing.M) {
	// gotorch and torch keep state per OS thread.
	runtime.LockOSThread()
	if err := libtorch.Open(os.Getenv("EAE_TEST_LIBTORCH"), true); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// bits gives the elements of a contiguous float32 tensor as bytes, so that comparisons are bitwise.
func bits(t *testing.T, g torch.Tensor) []byte {
	t.Helper()
	b := bridged(t, g)
	require.True(t, b.Contiguous())
	return append([]byte(nil), unsafe.Slice((*byte)(b.Data), b.Bytes())...)
}

// bridged gives a bridge tensor on the memory of g, released at the test's end.
func bridged(t *testing.T, g torch.Tensor) tensor.Tensor {
	t.Helper()
	b, err := adapter.Bridge(g)
	require.NoError(t, err)
	t.Cleanup(b.Free)
	return b
}

// leaf makes a tensor that collects a gradient, on the data of g.
func leaf(g torch.Tensor) torch.Tensor {
	made := torch.Empty(g.Shape(), true)
	made.SetData(g)
	return made
}
