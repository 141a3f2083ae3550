package boundary

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/memory"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// modelEntry is what the naive model knows of a boundary: its values as they were put, and whether they have travelled.
type modelEntry struct {
	values  []float32
	rounded bool
}

// Any sequence of calls does what a map would do, in every tier, codec and mode; memory, files and releases balance at the end.
func TestAgainstAMap(t *testing.T) {
	for _, v := range variants() {
		t.Run(v.name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) { againstAMap(t, v.spec) })
		})
	}
}

func againstAMap(t *rapid.T, spec Spec) {
	heap, fs := memory.NewHeap(), NewMemFS()
	s, err := New(spec, Options{Allocator: heap, FS: fs})
	require.NoError(t, err)
	model := map[int64]modelEntry{}
	var sources []*source
	var got []tensor.Tensor
	key := rapid.Int64Range(-2, 3)
	expect := func(t *rapid.T, k int64, err error) bool {
		if _, known := model[k]; !known {
			require.ErrorIs(t, err, errs.ErrStoreKey)
			return false
		}
		require.NoError(t, err)
		return true
	}
	check := func(t *rapid.T, y tensor.Tensor, e modelEntry) {
		for i, f := range e.values {
			if e.rounded {
				f = rounded(spec.Codec, f)
			}
			require.Equal(t, f, floats(y)[i])
		}
	}
	t.Repeat(map[string]func(*rapid.T){
		"put": func(t *rapid.T) {
			k, values := key.Draw(t, "key"), ramp(rapid.IntRange(1, 40).Draw(t, "n"), rapid.Uint64().Draw(t, "seed"))
			x, src := vector(values...)
			require.NoError(t, s.PutOne(k, x))
			sources = append(sources, src)
			model[k] = modelEntry{values: values}
		},
		"move": func(t *rapid.T) {
			k := key.Draw(t, "key")
			if expect(t, k, s.Move(k)) && spec.moves() {
				e := model[k]
				e.rounded = true
				model[k] = e
			}
		},
		"load": func(t *rapid.T) {
			k := key.Draw(t, "key")
			expect(t, k, s.Load(k))
		},
		"get": func(t *rapid.T) {
			k := key.Draw(t, "key")
			y, err := s.GetOne(bg, k)
			if expect(t, k, err) {
				check(t, y, model[k])
				got = append(got, y)
			}
		},
		"give back": func(t *rapid.T) {
			if len(got) > 0 {
				got[0].Free()
				got = got[1:]
			}
		},
		"drop": func(t *rapid.T) {
			k := key.Draw(t, "key")
			expect(t, k, s.Drop(k))
			delete(model, k)
		},
		"clear": func(t *rapid.T) {
			require.NoError(t, s.Clear())
			clear(model)
		},
		"": func(t *rapid.T) {
			require.Equal(t, len(model), s.Len())
			for k := range int64(6) {
				_, known := model[k-2]
				require.Equal(t, known, s.Has(k-2))
			}
		},
	})
	for _, y := range got {
		y.Free()
	}
	require.NoError(t, s.Close())
	s.Drain()
	require.Empty(t, fs.Files())
	count, bytes := heap.Live()
	require.Zero(t, count)
	require.Zero(t, bytes)
	for _, src := range sources {
		require.Equal(t, 1, src.released)
	}
}

// What comes back from an accelerator that copies late and in any order is what went there.
func TestAccelerator(t *testing.T) {
	for _, v := range variants() {
		t.Run(v.name, func(t *testing.T) {
			for seed := range uint64(8) {
				t.Run(fmt.Sprint(seed), func(t *testing.T) { onAccelerator(t, v.spec, seed) })
			}
		})
	}
}

// onDevice is a vector in the fake accelerator's memory.
func onDevice(t *testing.T, mover *FakeMover, values []float32, released *int) tensor.Tensor {
	t.Helper()
	ptr, err := mover.Alloc(gpu, int64(4*len(values)))
	require.NoError(t, err)
	x := tensor.Tensor{Data: ptr, DType: tensor.Float32, Device: gpu, Shape: []int64{int64(len(values))}, Strides: []int64{1}}
	copy(floats(x), values)
	x.Release = func() { *released++; mover.Free(gpu, ptr, int64(4*len(values))) }
	return x
}

func onAccelerator(t *testing.T, spec Spec, seed uint64) {
	mover, heap, fs := NewFakeMover(seed, 2*time.Millisecond), memory.NewHeap(), NewMemFS()
	s, err := New(spec, Options{Allocator: heap, FS: fs, Mover: mover})
	require.NoError(t, err)
	released := 0
	if spec.Tier == TierDevice && spec.moves() {
		require.NoError(t, s.PutOne(0, onDevice(t, mover, []float32{1}, &released)))
		require.ErrorContains(t, s.Move(0), "use the host tier")
		require.NoError(t, s.Close())
		s.Drain()
		mover.Close()
		require.Equal(t, 1, released)
		return
	}
	const n = 5
	for k := range int64(n) {
		require.NoError(t, s.PutOne(k, onDevice(t, mover, ramp(100+int(k), seed+uint64(k)), &released)))
		require.NoError(t, s.Move(k))
	}
	require.NoError(t, s.Drop(n-1), "in the middle of its move")
	for k := int64(n - 2); k >= 0; k-- {
		require.NoError(t, s.Load(k))
	}
	for k := range int64(n - 1) {
		y, err := s.GetOne(bg, k)
		require.NoError(t, err)
		require.Equal(t, gpu, y.Device)
		for i, f := range ramp(100+int(k), seed+uint64(k)) {
			if spec.moves() {
				f = rounded(spec.Codec, f)
			}
			require.Equal(t, f, floats(y)[i])
		}
		y.Free()
		require.NoError(t, s.Drop(k))
	}
	require.NoError(t, s.Close())
	s.Drain()
	mover.Close()
	require.Equal(t, n, released)
	require.Empty(t, fs.Files())
	for _, h := range []*memory.Heap{heap, mover.Heap()} {
		count, bytes := h.Live()
		require.Zero(t, count)
		require.Zero(t, bytes)
	}
}

func TestAnAcceleratorThatFails(t *testing.T) {
	for _, tier := range []Tier{TierHost, TierDisk} {
		t.Run(string(tier), func(t *testing.T) {
			mover, heap := NewFakeMover(1, 0), memory.NewHeap()
			s := newStore(t, specOf(tier, CodecRaw, false), Options{Allocator: heap, FS: NewMemFS(), Mover: mover})
			released := 0
			require.NoError(t, s.PutOne(3, onDevice(t, mover, []float32{1, 2}, &released)))
			mover.Fail(fmt.Errorf("bus error"))
			err := s.Move(3)
			require.ErrorIs(t, err, errs.ErrStore)
			require.ErrorContains(t, err, "boundary 3")
			require.ErrorContains(t, err, "bus error")
			mover.Fail(nil)
			require.NoError(t, s.Move(3), "nothing was lost")
			mover.Fail(fmt.Errorf("bus error"))
			require.ErrorIs(t, s.Load(3), errs.ErrStore)
			mover.Fail(nil)
			y, err := s.GetOne(bg, 3)
			require.NoError(t, err)
			require.Equal(t, []float32{1, 2}, floats(y))
			y.Free()
			require.NoError(t, s.Close())
			s.Drain()
			mover.Close()
			require.Equal(t, 1, released)
			for _, h := range []*memory.Heap{heap, mover.Heap()} {
				count, _ := h.Live()
				require.Zero(t, count)
			}
		})
	}
}

func TestWithoutAnAccelerator(t *testing.T) {
	s := newStore(t, specOf(TierHost, CodecRaw, false), Options{})
	src := newSource(64)
	x := src.at(0, tensor.Float32, []int64{2}, []int64{1})
	x.Device = gpu
	require.NoError(t, s.PutOne(0, x))
	require.Error(t, s.Move(0))
	require.NoError(t, s.Close())
	s.Drain()
	require.Equal(t, 1, src.released)
}
