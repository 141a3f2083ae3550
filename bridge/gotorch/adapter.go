//go:build gotorch

package gotorch

import (
	"runtime"

	torch "github.com/wangkuiyi/gotorch"

	"github.com/eae-runtime/eae-runtime/bridge/libtorch"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// Wrap gives a gotorch tensor on the memory of t, which the caller keeps alive until the last gotorch tensor on it is collected (see [Collect]).
// Errors: ErrBridge.
func Wrap(t *tensor.Tensor) (torch.Tensor, error) {
	view, err := libtorch.View(t)
	if err != nil {
		return torch.Tensor{}, err
	}
	handle := view.Handle()
	torch.SetTensorFinalizer(&handle)
	return torch.Tensor{T: &handle}, nil
}

// Bridge gives a bridge tensor on the memory of a gotorch tensor. Its Release gives the reference up; until then the memory lives, whatever
// becomes of g. Errors: ErrBridge.
func Bridge(g torch.Tensor) (tensor.Tensor, error) {
	shared, err := libtorch.Adopt(*g.T).Share()
	runtime.KeepAlive(g.T)
	if err != nil {
		return tensor.Tensor{}, err
	}
	seen, err := shared.Describe()
	if err != nil {
		shared.Close()
		return tensor.Tensor{}, err
	}
	seen.Release = shared.Close
	return seen, nil
}

// Collect runs the collector, and with it the finalizers of gotorch tensors that nobody holds.
func Collect() { runtime.GC() }
