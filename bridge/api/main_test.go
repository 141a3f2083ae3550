package api

import (
	"encoding/json"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/eae-runtime/eae-runtime/bridge/dlpack"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// host stands for the other side of the bridge: it makes tensors and counts what comes back.
type host struct {
	t     *testing.T
	freed int
	made  int
}

// newHost makes a host, and checks at the test's end that nothing is left.
func newHost(t *testing.T) *host {
	t.Helper()
	before := held(t)
	h := &host{t: t}
	t.Cleanup(func() {
		_, err := DrainReleases()
		require.NoError(t, err)
		require.Equal(t, before, held(t), "something is left in the core")
		require.Equal(t, h.made, h.freed, "tensors made and freed")
	})
	return h
}

// held is Live without what the test process itself changes.
func held(t *testing.T) census {
	t.Helper()
	text, err := Live()
	require.NoError(t, err)
	var now census
	require.NoError(t, json.Unmarshal([]byte(text), &now))
	now.Goroutines, now.Files = 0, 0
	return now
}

// give makes a tensor of the values and gives its address.
func (h *host) give(values ...float32) int64 {
	h.t.Helper()
	h.made++
	address, err := dlpack.Export(&tensor.Tensor{
		Data: unsafe.Pointer(unsafe.SliceData(values)), DType: tensor.Float32, Device: tensor.CPU,
		Shape: []int64{int64(len(values))}, Strides: []int64{1}, Release: func() { h.freed++ },
	})
	require.NoError(h.t, err)
	return address
}

// take reads the tensor at that address and gives it back.
func (h *host) take(address int64) []float32 {
	h.t.Helper()
	got, err := dlpack.Import(address)
	require.NoError(h.t, err)
	require.Equal(h.t, tensor.Float32, got.DType)
	values := append([]float32(nil), unsafe.Slice((*float32)(got.Data), got.Numel())...)
	got.Free()
	dlpack.Drain()
	return values
}

// code checks the class that an error becomes in Python.
func code(t *testing.T, err error, want string) {
	t.Helper()
	require.Error(t, err)
	require.Regexp(t, "^"+want+`\|`, err.Error())
}
