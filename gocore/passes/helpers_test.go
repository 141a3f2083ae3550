package passes

import (
	"fmt"
	"math"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/eae-runtime/eae-runtime/gocore/numeric"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// of32 makes a one-dimensional float32 tensor over v's memory.
func of32(v ...float32) tensor.Tensor { return over(v, tensor.Float32) }

func of64(v ...float64) tensor.Tensor { return over(v, tensor.Float64) }

func of16(d tensor.DType, v ...float32) tensor.Tensor {
	codes := make([]uint16, len(v))
	if d == tensor.Float16 {
		numeric.F32ToF16(codes, v)
	} else {
		numeric.F32ToBF16(codes, v)
	}
	return over(codes, d)
}

func over[T any](v []T, d tensor.DType) tensor.Tensor {
	return tensor.Tensor{Data: unsafe.Pointer(unsafe.SliceData(v)), DType: d, Device: tensor.CPU,
		Shape: []int64{int64(len(v))}, Strides: []int64{1}}
}

// as makes a tensor of any of the four types.
func as(d tensor.DType, v ...float32) tensor.Tensor {
	switch d {
	case tensor.Float32:
		return of32(append([]float32{}, v...)...)
	case tensor.Float64:
		wide := make([]float64, len(v))
		for i, x := range v {
			wide[i] = float64(x)
		}
		return of64(wide...)
	default:
		return of16(d, v...)
	}
}

// bitsOf lists the elements of a contiguous tensor as integers.
func bitsOf(t tensor.Tensor) []uint64 {
	out := make([]uint64, t.Numel())
	for i := range out {
		switch t.DType.Size() {
		case 2:
			out[i] = uint64(slice[uint16](&t, int64(i), 1)[0])
		case 4:
			out[i] = uint64(slice[uint32](&t, int64(i), 1)[0])
		case 8:
			out[i] = slice[uint64](&t, int64(i), 1)[0]
		}
	}
	return out
}

func bits32(v ...float32) []uint64 { return bitsOf(of32(v...)) }

var floats = []tensor.DType{tensor.Float32, tensor.Float64, tensor.Float16, tensor.BFloat16}

// counted is a source of buffers that counts, fills what it gives with junk, and fails when asked to.
type counted struct {
	live   atomic.Int64
	failAt int64
	calls  int64
}

func (c *counted) Get(bytes int64) (unsafe.Pointer, func(), error) {
	c.calls++
	if c.calls == c.failAt {
		return nil, nil, fmt.Errorf("no memory")
	}
	words := make([]uint64, (bytes+7)/8)
	for i := range words {
		words[i] = 0x7ff8_dead_7fc0_dead
	}
	c.live.Add(1)
	return unsafe.Pointer(unsafe.SliceData(words)), func() { c.live.Add(-1) }, nil
}

// apply runs a chain on tensors and checks what always holds: sources unchanged, destinations fresh, buffers balanced.
func apply(t *testing.T, spec string, g *Grad) ([]tensor.Tensor, *Chain) {
	t.Helper()
	chain, err := NewChain(spec)
	require.NoError(t, err)
	t.Cleanup(chain.Close)
	buffers := &counted{}
	before := make([][]uint64, len(g.Src))
	for i := range g.Src {
		before[i] = bitsOf(dense(g.Src[i]))
	}
	require.NoError(t, chain.Apply(&Context{Buffers: buffers, Stats: true}, g))
	require.Len(t, g.Dst, len(g.Src))
	for i := range g.Src {
		require.Equal(t, before[i], bitsOf(dense(g.Src[i])), "source %d was written", i)
		require.True(t, g.Dst[i].Contiguous())
		require.Equal(t, g.Src[i].DType, g.Dst[i].DType)
		require.Equal(t, append([]int64{}, g.Src[i].Shape...), g.Dst[i].Shape)
	}
	out := append([]tensor.Tensor{}, g.Dst...)
	for i := range g.Dst {
		g.Dst[i].Free()
	}
	require.Zero(t, buffers.live.Load(), "buffers left")
	return out, chain
}

// dense copies a tensor of any strides by the definition of strides.
func dense(t tensor.Tensor) tensor.Tensor {
	size, n := t.DType.Size(), t.Numel()
	data := make([]byte, n*size)
	for i := range n {
		rest, offset := i, int64(0)
		for d := len(t.Shape) - 1; d >= 0; d-- {
			offset += rest % t.Shape[d] * t.Strides[d]
			rest /= t.Shape[d]
		}
		copy(data[i*size:], unsafe.Slice((*byte)(unsafe.Add(t.Data, offset*size)), size))
	}
	out := t
	out.Data, out.Strides = unsafe.Pointer(unsafe.SliceData(data)), tensor.RowMajor(t.Shape)
	return out
}

// wave is n values of many magnitudes.
func wave(n int) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(math.Sin(float64(i)*0.37)) * float32(math.Ldexp(1, i*7919%24-16))
	}
	return v
}

var (
	nan     = float32(math.NaN())
	inf     = float32(math.Inf(1))
	negZero = float32(math.Copysign(0, -1))
)
