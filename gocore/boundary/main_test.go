package boundary

import (
	"context"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/eae-runtime/eae-runtime/gocore/memory"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	bg  = context.Background()
	gpu = tensor.Device{Type: 2}
)

// source is memory for test tensors that counts its releases.
type source struct {
	mem      []byte
	base     unsafe.Pointer // 64-byte aligned
	released int
}

func newSource(n int) *source {
	s := &source{mem: make([]byte, n+64)}
	p := unsafe.Pointer(unsafe.SliceData(s.mem))
	s.base = unsafe.Add(p, -uintptr(p)&63)
	return s
}

func (s *source) at(off int, d tensor.DType, shape, strides []int64) tensor.Tensor {
	return tensor.Tensor{
		Data: unsafe.Add(s.base, off), DType: d, Device: tensor.CPU, Shape: shape, Strides: strides, Release: func() { s.released++ },
	}
}

// vector is one contiguous float32 tensor that owns its memory.
func vector(values ...float32) (tensor.Tensor, *source) {
	s := newSource(4*len(values) + 4)
	copy(unsafe.Slice((*float32)(s.base), len(values)), values)
	return s.at(0, tensor.Float32, []int64{int64(len(values))}, []int64{1}), s
}

func ramp(n int, seed uint64) []float32 {
	rng := rand.New(rand.NewPCG(seed, 1))
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(rng.NormFloat64())
	}
	return v
}

// elements gives every element's bytes in index order.
func elements(t tensor.Tensor) [][]byte {
	var out [][]byte
	size := t.DType.Size()
	var walk func(d int, off int64)
	walk = func(d int, off int64) {
		if d == len(t.Shape) {
			out = append(out, append([]byte(nil), unsafe.Slice((*byte)(unsafe.Add(t.Data, off*size)), size)...))
			return
		}
		for i := range t.Shape[d] {
			walk(d+1, off+i*t.Strides[d])
		}
	}
	if t.Numel() > 0 {
		walk(0, 0)
	}
	return out
}

func floats(t tensor.Tensor) []float32 {
	return unsafe.Slice((*float32)(t.Data), t.Numel())
}

// rounded is what a codec makes of a value: the scalar definition by way of float64 arithmetic, apart from the code under test.
func rounded(c Codec, f float32) float32 {
	switch c {
	case CodecFP16:
		return roundTo(f, 11, -24, 65504)
	case CodecBF16:
		return roundTo(f, 8, -133, math.Float64frombits(0x47efe00000000000))
	}
	return f
}

// roundTo rounds to digits significant bits, no finer than 2^least, infinite beyond largest.
func roundTo(f float32, digits, least int, largest float64) float32 {
	x := float64(f)
	if x == 0 || math.IsNaN(x) || math.IsInf(x, 0) {
		return f
	}
	_, exp := math.Frexp(x)
	unit := math.Ldexp(1, max(exp-digits, least))
	r := math.RoundToEven(x/unit) * unit
	if math.Abs(r) > largest {
		return float32(math.Inf(int(math.Copysign(1, x))))
	}
	return float32(math.Copysign(r, x))
}

// variant is one way to run the suite.
type variant struct {
	name string
	spec Spec
}

func variants() []variant {
	var all []variant
	for _, tier := range []Tier{TierDevice, TierHost, TierDisk} {
		for _, codec := range []Codec{CodecRaw, CodecFP16, CodecBF16} {
			for _, async := range []bool{false, true} {
				spec := DefaultSpec()
				spec.Tier, spec.Codec, spec.Async, spec.Dir, spec.TimeoutSeconds = tier, codec, async, "/scratch", 30
				name := string(tier) + "-" + string(codec)
				if async {
					name += "-async"
				}
				all = append(all, variant{name, spec})
			}
		}
	}
	return all
}

// perVariant runs a test once for each tier, codec and mode, on an in-memory file system, and checks that nothing is left.
func perVariant(t *testing.T, f func(t *testing.T, s *Store, fs *MemFS)) {
	for _, v := range variants() {
		t.Run(v.name, func(t *testing.T) {
			heap, fs := memory.NewHeap(), NewMemFS()
			ledger := &memory.Ledger{}
			s, err := New(v.spec, Options{Allocator: heap, FS: fs, Ledger: ledger})
			require.NoError(t, err)
			f(t, s, fs)
			require.NoError(t, s.Close())
			require.NoError(t, s.Close())
			require.Empty(t, fs.Files())
			count, bytes := heap.Live()
			require.Zero(t, count)
			require.Zero(t, bytes)
			for kind, c := range ledger.Snapshot() {
				require.Zero(t, c.Current, kind)
			}
		})
	}
}

func newStore(t *testing.T, spec Spec, opt Options) *Store {
	t.Helper()
	s, err := New(spec, opt)
	require.NoError(t, err)
	return s
}

func specOf(tier Tier, codec Codec, async bool) Spec {
	spec := DefaultSpec()
	spec.Tier, spec.Codec, spec.Async, spec.Dir, spec.TimeoutSeconds = tier, codec, async, "/scratch", 30
	return spec
}
