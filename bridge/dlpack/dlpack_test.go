package dlpack

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/eae-runtime/eae-runtime/bridge/offheap"
	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// foreign makes a tensor of the given shape whose release is counted, and gives its address: to Import it is one from outside.
func foreign(t require.TestingT, dt tensor.DType, shape, strides []int64, released *atomic.Int64) int64 {
	var memory offheap.Allocator
	block, err := memory.Alloc(64)
	require.NoError(t, err)
	address, err := Export(&tensor.Tensor{
		Data: block, DType: dt, Device: tensor.CPU, Shape: shape, Strides: strides,
		Release: func() { memory.Free(block, 64); released.Add(1) },
	})
	require.NoError(t, err)
	return address
}

func TestCrossingKeepsWhatATensorIs(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		rank := rapid.IntRange(0, maxDims).Draw(rt, "rank")
		shape := rapid.SliceOfN(rapid.Int64Range(0, 5), rank, rank).Draw(rt, "shape")
		strides := rapid.SliceOfN(rapid.Int64Range(-3, 9), rank, rank).Draw(rt, "strides")
		dt := rapid.SampledFrom([]tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float64, tensor.Int8, tensor.Bool}).Draw(rt, "dtype")
		var released atomic.Int64
		before := Live()
		got, err := Import(foreign(rt, dt, shape, strides, &released))
		require.NoError(rt, err)
		require.Equal(rt, dt, got.DType)
		require.Equal(rt, tensor.CPU, got.Device)
		require.ElementsMatch(rt, shape, got.Shape)
		require.Equal(rt, len(strides), len(got.Strides))
		for i := range shape {
			require.Equal(rt, shape[i], got.Shape[i])
			require.Equal(rt, strides[i], got.Strides[i])
		}
		got.Free()
		require.Zero(rt, released.Load(), "the deleter waits for Drain")
		Drain()
		require.EqualValues(rt, 1, released.Load())
		require.Equal(rt, before, Live())
	})
}

func TestReleaseTwiceRunsTheDeleterOnce(t *testing.T) {
	var released atomic.Int64
	got, err := Import(foreign(t, tensor.Float32, []int64{2}, []int64{1}, &released))
	require.NoError(t, err)
	release := got.Release
	release()
	release()
	got.Free()
	Drain()
	require.EqualValues(t, 1, released.Load())
}

func TestBadAddressesAndTensors(t *testing.T) {
	_, err := Import(0)
	require.ErrorIs(t, err, errs.ErrBridge)

	released := 0
	_, err = Export(&tensor.Tensor{Shape: []int64{1}, Release: func() { released++ }})
	require.ErrorIs(t, err, errs.ErrBridge)
	require.Equal(t, 1, released, "a tensor that cannot cross has been released")
}

func TestManyThreadsReleaseEachOnce(t *testing.T) {
	const threads, each = 8, 200
	var released atomic.Int64
	var group sync.WaitGroup
	before := Live()
	for range threads {
		group.Go(func() {
			runtime.LockOSThread()
			for range each {
				got, err := Import(foreign(t, tensor.Float32, []int64{4}, []int64{1}, &released))
				if err != nil {
					t.Error(err)
					return
				}
				again, err := Export(got)
				if err != nil {
					t.Error(err)
					return
				}
				Delete(again)
			}
		})
	}
	group.Wait()
	Drain()
	require.EqualValues(t, threads*each, released.Load())
	require.Equal(t, before, Live())
}

func TestAPanickingReleaseIsCounted(t *testing.T) {
	before := Live().Failed
	address, err := Export(&tensor.Tensor{Release: func() { panic("on purpose") }})
	require.NoError(t, err)
	Delete(address)
	require.Equal(t, before+1, Live().Failed)
}
