package boundary

import (
	"fmt"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/memory"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

func TestRoundTrip(t *testing.T) {
	perVariant(t, func(t *testing.T, s *Store, _ *MemFS) {
		values := ramp(1000, 1)
		x, src := vector(values...)
		require.NoError(t, s.PutOne(7, x))
		require.True(t, s.Has(7))
		require.NoError(t, s.Move(7))
		require.NoError(t, s.Load(7))
		ready, err := s.Ready(7, 10*time.Second)
		require.NoError(t, err)
		require.True(t, ready)
		y, err := s.GetOne(bg, 7)
		require.NoError(t, err)
		for i, f := range values {
			require.Equal(t, rounded(s.Spec().Codec, f), floats(y)[i])
		}
		require.NoError(t, s.Drop(7))
		require.ErrorIs(t, s.Drop(7), errs.ErrStoreKey)
		require.Equal(t, rounded(s.Spec().Codec, values[3]), floats(y)[3], "a got tensor outlives the drop")
		y.Free()
		s.Drain()
		require.Equal(t, 1, src.released)
	})
}

func TestGetLoadsByItself(t *testing.T) {
	perVariant(t, func(t *testing.T, s *Store, _ *MemFS) {
		x, _ := vector(1, 2, 3)
		require.NoError(t, s.PutOne(0, x))
		require.NoError(t, s.Move(0))
		for range 2 {
			y, err := s.GetOne(bg, 0)
			require.NoError(t, err)
			require.Equal(t, []float32{1, 2, 3}, floats(y))
			y.Free()
			require.NoError(t, s.Move(0), "and back again")
		}
	})
}

// The pool's demand is the same in every step, so that the second allocates nothing.
func TestNothingNewFromTheSecondStepOn(t *testing.T) {
	perVariant(t, func(t *testing.T, s *Store, _ *MemFS) {
		var first Stats
		for step := range 4 {
			for i := range int64(6) {
				x, _ := vector(ramp(500, uint64(i))...)
				require.NoError(t, s.PutOne(i, x))
				require.NoError(t, s.Move(i))
				c, _ := vector(ramp(300, uint64(i))...)
				require.NoError(t, s.Copy(100+i, []tensor.Tensor{c}))
			}
			for i := int64(5); i >= 0; i-- {
				require.NoError(t, s.Load(i))
				if i > 0 {
					require.NoError(t, s.Load(i-1))
				}
				x, err := s.GetOne(bg, i)
				require.NoError(t, err)
				x.Free()
				require.NoError(t, s.Drop(i))
				require.NoError(t, s.Drop(100+i))
			}
			st := s.Stats()
			if step == 0 {
				first = st
				require.Positive(t, st.BuffersAllocated)
			}
			require.Equal(t, first.BuffersAllocated, st.BuffersAllocated, "step %d", step)
		}
	})
}

// Shapes that come back exactly: each row builds a boundary over one source.
var shapes = []struct {
	name  string
	build func(s *source) []tensor.Tensor
}{
	{"none", func(*source) []tensor.Tensor { return nil }},
	{"scalar", func(s *source) []tensor.Tensor { return []tensor.Tensor{s.at(0, tensor.Float32, nil, nil)} }},
	{"empty", func(s *source) []tensor.Tensor {
		return []tensor.Tensor{s.at(0, tensor.Float32, []int64{0, 3}, []int64{3, 1}), s.at(8, tensor.Int64, []int64{2}, []int64{1})}
	}},
	{"expanded", func(s *source) []tensor.Tensor {
		return []tensor.Tensor{s.at(4, tensor.Float32, []int64{5, 3}, []int64{0, 1})}
	}},
	{"transposed", func(s *source) []tensor.Tensor {
		return []tensor.Tensor{s.at(0, tensor.Float32, []int64{3, 4}, []int64{1, 3})}
	}},
	{"four bytes off", func(s *source) []tensor.Tensor {
		return []tensor.Tensor{s.at(4, tensor.Float32, []int64{33}, []int64{1})}
	}},
	{"one byte off", func(s *source) []tensor.Tensor {
		return []tensor.Tensor{s.at(65, tensor.Uint8, []int64{100}, []int64{1})}
	}},
	{"gaps", func(s *source) []tensor.Tensor {
		return []tensor.Tensor{s.at(12, tensor.Float32, []int64{4, 2}, []int64{7, 2})}
	}},
	{"aliases", func(s *source) []tensor.Tensor {
		return []tensor.Tensor{
			s.at(64, tensor.Float32, []int64{20}, []int64{1}), s.at(100, tensor.Float32, []int64{20}, []int64{1}),
			s.at(300, tensor.Float32, []int64{2}, []int64{1}), s.at(64, tensor.Float32, []int64{4, 5}, []int64{5, 1}),
		}
	}},
	{"aliases of two types", func(s *source) []tensor.Tensor {
		return []tensor.Tensor{s.at(0, tensor.Float32, []int64{8}, []int64{1}), s.at(3, tensor.Uint8, []int64{8}, []int64{1})}
	}},
	{"doubles and masks", func(s *source) []tensor.Tensor {
		return []tensor.Tensor{s.at(8, tensor.Float64, []int64{9}, []int64{1}), s.at(200, tensor.Bool, []int64{9}, []int64{1})}
	}},
}

func TestWhatComesBack(t *testing.T) {
	for _, copied := range []bool{false, true} {
		for _, c := range shapes {
			t.Run(fmt.Sprintf("%s/copied=%v", c.name, copied), func(t *testing.T) {
				perVariant(t, func(t *testing.T, s *Store, _ *MemFS) {
					src := newSource(512)
					fillFloats(src)
					in := c.build(src)
					want := make([][][]byte, len(in))
					for i := range in {
						want[i] = elements(in[i])
					}
					orig := append([]tensor.Tensor(nil), in...)
					n := len(in)
					put := s.Put
					if copied {
						put = s.Copy
					}
					require.NoError(t, put(1, in))
					require.NoError(t, s.Move(1))
					out, err := s.Get(bg, 1)
					require.NoError(t, err)
					require.Len(t, out, n)
					for i := range out {
						require.Equal(t, orig[i].Shape, out[i].Shape)
						require.Equal(t, orig[i].Strides, out[i].Strides)
						require.Equal(t, orig[i].DType, out[i].DType)
						require.Equal(t, want[i], elements(out[i]), "tensor %d", i)
						if orig[i].Numel() == 0 {
							continue
						}
						require.Equal(t, uintptr(orig[i].Data)%64, uintptr(out[i].Data)%64, "alignment")
						for j := range out[:i] {
							if overlap(&orig[i], &orig[j]) {
								require.Equal(t, int64(uintptr(orig[i].Data)-uintptr(orig[j].Data)),
									int64(uintptr(out[i].Data)-uintptr(out[j].Data)), "aliasing of %d and %d", i, j)
							}
						}
					}
					for i := range out {
						out[i].Free()
					}
					require.NoError(t, s.Drop(1))
					s.Drain()
					require.Eventually(t, func() bool { s.Drain(); return src.released == n }, time.Second, time.Millisecond)
				})
			})
		}
	}
}

// fillFloats writes values that every codec keeps, for float32 and for float64 reading.
func fillFloats(s *source) {
	words := unsafe.Slice((*uint64)(s.base), 64)
	for i := range words {
		words[i] = [3]uint64{0x4000000000000000, 0x3ff0000000000000, 0xc008000000000000}[i%3]
	}
}

func overlap(a, b *tensor.Tensor) bool {
	_, ah := a.Span()
	_, bh := b.Span()
	ap, bp := uintptr(a.Data), uintptr(b.Data)
	return ap < bp+uintptr(bh) && bp < ap+uintptr(ah)
}

func TestPutReplacesAndReleases(t *testing.T) {
	perVariant(t, func(t *testing.T, s *Store, _ *MemFS) {
		a, sa := vector(1)
		b, sb := vector(2)
		require.NoError(t, s.PutOne(0, a))
		require.NoError(t, s.PutOne(0, b))
		require.Equal(t, 1, sa.released)
		require.Equal(t, 1, s.Len())
		require.NoError(t, s.Clear())
		require.Equal(t, 1, sb.released)
		require.Zero(t, s.Len())
		require.Zero(t, s.Bytes())
	})
}

func TestAfterClose(t *testing.T) {
	perVariant(t, func(t *testing.T, s *Store, _ *MemFS) {
		a, _ := vector(1, 2)
		require.NoError(t, s.PutOne(0, a))
		require.NoError(t, s.Move(0))
		got, err := s.GetOne(bg, 0)
		require.NoError(t, err)
		require.NoError(t, s.Close())
		require.Equal(t, []float32{1, 2}, floats(got), "a got tensor outlives the store")
		got.Free()
		b, sb := vector(2)
		require.ErrorIs(t, s.PutOne(1, b), errs.ErrClosed)
		require.Equal(t, 1, sb.released, "a refused tensor is released")
		_, err = s.Get(bg, 0)
		require.ErrorIs(t, err, errs.ErrClosed)
		require.ErrorIs(t, s.Move(0), errs.ErrClosed)
		require.ErrorIs(t, s.Load(0), errs.ErrClosed)
		require.ErrorIs(t, s.Drop(0), errs.ErrClosed)
		require.ErrorIs(t, s.Clear(), errs.ErrClosed)
		_, err = s.Ready(0, 0)
		require.ErrorIs(t, err, errs.ErrClosed)
	})
}

func TestMissingKeys(t *testing.T) {
	perVariant(t, func(t *testing.T, s *Store, _ *MemFS) {
		_, err := s.Get(bg, 5)
		require.ErrorIs(t, err, errs.ErrStoreKey)
		require.ErrorContains(t, err, "boundary 5")
		require.ErrorIs(t, s.Move(5), errs.ErrStoreKey)
		require.ErrorIs(t, s.Load(5), errs.ErrStoreKey)
		require.ErrorIs(t, s.Drop(5), errs.ErrStoreKey)
		_, err = s.Ready(5, time.Second)
		require.ErrorIs(t, err, errs.ErrStoreKey)
	})
}

func TestRefusals(t *testing.T) {
	s := newStore(t, specOf(TierHost, CodecRaw, false), Options{})
	src := newSource(64)
	ragged := src.at(0, tensor.Float32, []int64{2}, nil)
	require.ErrorIs(t, s.PutOne(0, ragged), errs.ErrBridge)
	require.Equal(t, 1, src.released)

	require.NoError(t, s.PutOne(1, src.at(32, tensor.Float32, []int64{2}, []int64{-1})))
	require.ErrorIs(t, s.Move(1), errs.ErrBridge)

	far := src.at(0, tensor.Float32, []int64{2}, []int64{1})
	far.Device = gpu
	require.NoError(t, s.PutOne(2, far))
	err := s.Move(2)
	require.ErrorIs(t, err, errs.ErrStore)
	require.ErrorContains(t, err, "device type 2")
	require.ErrorIs(t, s.Copy(3, []tensor.Tensor{far}), errs.ErrStore)

	require.NoError(t, s.Put(4, []tensor.Tensor{src.at(0, tensor.Float32, nil, nil), far}))
	require.ErrorIs(t, s.Move(4), errs.ErrBridge)
	_, err = s.GetOne(bg, 4)
	require.ErrorIs(t, err, errs.ErrBridge)
	require.NoError(t, s.Close())
}

func TestCaps(t *testing.T) {
	for _, tier := range []Tier{TierDevice, TierHost, TierDisk} {
		t.Run(string(tier), func(t *testing.T) {
			spec := specOf(tier, CodecRaw, false)
			spec.MaxBytes = 500
			s := newStore(t, spec, Options{FS: NewMemFS()})
			store := func(key int64) error {
				x, _ := vector(ramp(60, 1)...)
				if err := s.PutOne(key, x); err != nil {
					return err
				}
				return s.Move(key)
			}
			require.NoError(t, store(0))
			require.NoError(t, store(0), "a replaced boundary does not count")
			var err error
			for key := int64(1); key < 3 && err == nil; key++ {
				err = store(key)
			}
			require.ErrorIs(t, err, errs.ErrStore)
			require.ErrorContains(t, err, "max_bytes")
			st := s.Stats()
			require.LessOrEqual(t, map[Tier]int64{TierDevice: st.PeakDevice, TierHost: st.PeakHost, TierDisk: st.PeakDisk}[tier], int64(500))
			require.NoError(t, s.Close())
		})
	}
}

func TestStatsAreExact(t *testing.T) {
	ledger := &memory.Ledger{}
	s := newStore(t, specOf(TierDisk, CodecFP16, false), Options{FS: NewMemFS(), Ledger: ledger})
	for key := range int64(3) {
		x, _ := vector(ramp(100, 1)...)
		require.NoError(t, s.PutOne(key, x))
	}
	require.Equal(t, int64(1200), s.Bytes())
	file := int64(128 + 200 + 4) // header 40+32+32+16+4 in 64s, payload, checksum
	for key := range int64(3) {
		require.NoError(t, s.Move(key))
	}
	require.Equal(t, 3*file, s.Bytes())
	require.Equal(t, memory.Count{Current: 3 * file, Peak: 3 * file}, ledger.Get(memory.BoundaryDisk))
	y, err := s.GetOne(bg, 1)
	require.NoError(t, err)
	require.NoError(t, s.Drop(2))
	require.Equal(t, []int64{0, 1}, s.Keys())
	require.Equal(t, Stats{
		Boundaries: 2, Puts: 3, Gets: 1, Drops: 1, Moves: 3, Loads: 1, BytesDevice: 400, BytesDisk: file, PeakDevice: 1200, PeakDisk: 3 * file,
		BytesWritten: 3 * file, BytesRead: file, FilesWritten: 3, FilesRemoved: 2,
		BuffersAllocated: 2, BuffersReused: 3, BuffersActive: 1, BuffersPooled: 1,
	}, s.Stats())
	y.Free()
	require.NoError(t, s.Close())
}

func BenchmarkDevicePutGetDrop(b *testing.B) {
	s, _ := New(DefaultSpec(), Options{Ledger: &memory.Ledger{}})
	x, _ := vector(ramp(1024, 1)...)
	x.Release = nil
	b.ReportAllocs()
	for b.Loop() {
		_ = s.PutOne(3, x)
		y, _ := s.GetOne(bg, 3)
		_ = s.Drop(3)
		y.Free()
	}
	_ = s.Close()
}
