package boundary

import (
	"math"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// float32 bits, and what torch 2.15 makes of them: .to(torch.float16) and .to(torch.bfloat16), as bits.
var codecCases = []struct {
	word        uint32
	half, brain uint16
}{
	{0x00000000, 0x0000, 0x0000}, // zeros keep their sign
	{0x80000000, 0x8000, 0x8000},
	{0x3f800000, 0x3c00, 0x3f80}, // ones
	{0xbf800000, 0xbc00, 0xbf80},
	{0x477fe000, 0x7bff, 0x4780}, // 65504, the largest half
	{0x477fefff, 0x7bff, 0x4780}, // just under 65520
	{0x477ff000, 0x7c00, 0x4780}, // 65520: a tie to even, which is Inf
	{0x477fffff, 0x7c00, 0x4780},
	{0x47800000, 0x7c00, 0x4780}, // 65536
	{0x7f7fffff, 0x7c00, 0x7f80}, // the largest float32 overflows in both
	{0xff7fffff, 0xfc00, 0xff80},
	{0x7f800000, 0x7c00, 0x7f80}, // infinities
	{0xff800000, 0xfc00, 0xff80},
	{0x38800000, 0x0400, 0x3880}, // 2^-14, the smallest normal half
	{0x387fffff, 0x0400, 0x3880},
	{0x387fe000, 0x0400, 0x3880},
	{0x387ff000, 0x0400, 0x3880},
	{0x387fc000, 0x03ff, 0x3880}, // the largest subnormal half
	{0x33800000, 0x0001, 0x3380}, // 2^-24, the smallest
	{0x33000000, 0x0000, 0x3300}, // 2^-25: a tie to zero
	{0x33000001, 0x0001, 0x3300},
	{0x33c00000, 0x0002, 0x33c0}, // 1.5 * 2^-24: a tie to even, up
	{0x32ffffff, 0x0000, 0x3300},
	{0x33a00000, 0x0001, 0x33a0},
	{0x34200000, 0x0002, 0x3420}, // 2.5 * 2^-24: a tie to even, down
	{0x38000000, 0x0200, 0x3800},
	{0x00000001, 0x0000, 0x0000}, // subnormal float32
	{0x007fffff, 0x0000, 0x0080},
	{0x80000001, 0x8000, 0x8000},
	{0x3f801000, 0x3c00, 0x3f80}, // ties and their neighbours
	{0x3f801001, 0x3c01, 0x3f80},
	{0x3f803000, 0x3c02, 0x3f80},
	{0x3f808000, 0x3c04, 0x3f80},
	{0x3f808001, 0x3c04, 0x3f81},
	{0x3f818000, 0x3c0c, 0x3f82},
	{0x3eaaaaab, 0x3555, 0x3eab}, // 1/3
	{0x7fc00000, 0x7e00, 0x7fc0}, // NaN: torch's own bfloat16 depends on the CPU; ours keeps sign and payload
	{0xffc00000, 0xfe00, 0xffc0},
	{0x7f800001, 0x7e00, 0x7fc0},
	{0x7fc12345, 0x7e09, 0x7fc1},
	{0xff812345, 0xfe09, 0xffc1},
}

func TestCodecBits(t *testing.T) {
	for _, c := range codecCases {
		require.Equal(t, c.half, half(c.word), "half of %08x", c.word)
		require.Equal(t, c.brain, brain(c.word), "bfloat16 of %08x", c.word)
	}
}

func TestEveryHalfSurvives(t *testing.T) {
	for h := range 1 << 16 {
		h := uint16(h)
		want := h
		if h&0x7c00 == 0x7c00 && h&0x3ff != 0 {
			want |= 0x200 // NaNs come back quiet
		}
		require.Equal(t, want, half(single(h)), "%04x", h)
	}
	require.Equal(t, uint32(0x33800000), single(1))
	require.Equal(t, uint32(0x387fc000), single(0x3ff))
	require.Equal(t, uint32(0x477fe000), single(0x7bff))
}

func TestCodecAgainstDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		word := rapid.Uint32().Draw(t, "word")
		f := math.Float32frombits(word)
		if math.IsNaN(float64(f)) {
			require.True(t, math.IsNaN(float64(math.Float32frombits(single(half(word))))))
			require.True(t, math.IsNaN(float64(math.Float32frombits(uint32(brain(word))<<16))))
			return
		}
		require.Equal(t, math.Float32bits(rounded(CodecFP16, f)), single(half(word)))
		require.Equal(t, math.Float32bits(rounded(CodecBF16, f)), uint32(brain(word))<<16)
	})
}

// Doubles go through float32, as in torch: 1 + 2^-11 + 2^-40 is a tie after the first rounding.
func TestDoublesAreRoundedTwice(t *testing.T) {
	in := []float64{1 + math.Ldexp(1, -11) + math.Ldexp(1, -40), 1e-300, 1e300, math.Inf(-1), 65519.9, -3}
	for _, c := range []struct {
		code code
		want []uint16
	}{
		{asHalf, []uint16{0x3c00, 0, 0x7c00, 0xfc00, 0x7bff, 0xc200}},
		{asBrain, []uint16{0x3f80, 0, 0x7f80, 0xff80, 0x4780, 0xc040}},
	} {
		packed := make([]uint16, len(in))
		require.NoError(t, c.code.encode(unsafe.Pointer(&packed[0]), unsafe.Pointer(&in[0]), int64(len(in)), 8))
		require.Equal(t, c.want, packed)
		out := make([]float64, len(in))
		require.NoError(t, c.code.decode(unsafe.Pointer(&out[0]), unsafe.Pointer(&packed[0]), int64(len(in)), 8))
		require.Equal(t, []float64{1, 0, math.Inf(1), math.Inf(-1)}, out[:4])
		require.Equal(t, -3.0, out[5])
	}
}

// Large spans are converted in two halves: every element must be.
func TestLargeSpans(t *testing.T) {
	for _, n := range []int{grain - 1, grain, grain + 1, 3*grain + 7} {
		for _, c := range []code{asHalf, asBrain} {
			in, packed, out := make([]float32, n), make([]uint16, n), make([]float32, n)
			for i := range in {
				in[i] = float32(i%128 + 1)
			}
			require.NoError(t, c.encode(unsafe.Pointer(&packed[0]), unsafe.Pointer(&in[0]), int64(n), 4))
			require.NoError(t, c.decode(unsafe.Pointer(&out[0]), unsafe.Pointer(&packed[0]), int64(n), 4))
			require.Equal(t, in, out)
		}
	}
}

func BenchmarkCodec(b *testing.B) {
	const n = 1 << 22
	in, packed := make([]float32, n), make([]uint16, n)
	copy(in, ramp(n, 1))
	for _, c := range []struct {
		name string
		code code
	}{{"fp16", asHalf}, {"bf16", asBrain}} {
		b.Run("encode-"+c.name, func(b *testing.B) {
			b.SetBytes(4 * n)
			for b.Loop() {
				_ = c.code.encode(unsafe.Pointer(&packed[0]), unsafe.Pointer(&in[0]), n, 4)
			}
		})
		b.Run("decode-"+c.name, func(b *testing.B) {
			b.SetBytes(4 * n)
			for b.Loop() {
				_ = c.code.decode(unsafe.Pointer(&in[0]), unsafe.Pointer(&packed[0]), n, 4)
			}
		})
	}
}
