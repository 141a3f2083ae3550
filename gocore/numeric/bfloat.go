package numeric

import "math"

// BF16 is the bfloat16 code of x.
func BF16(x float32) uint16 {
	bits := math.Float32bits(x)
	if bits&absF32 > infF32 {
		return uint16(bits>>16) | 0x40
	}
	return uint16((bits + 0x7fff + (bits >> 16 & 1)) >> 16)
}

// FromBF16 is the value of a bfloat16 code; it is exact.
func FromBF16(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }

// F32ToBF16 writes the bfloat16 codes of src to dst.
func F32ToBF16(dst []uint16, src []float32) {
	dst = dst[:len(src):len(dst)]
	for i, x := range src {
		dst[i] = BF16(x)
	}
}

// BF16ToF32 writes the values of the bfloat16 codes in src to dst.
func BF16ToF32(dst []float32, src []uint16) {
	dst = dst[:len(src):len(dst)]
	for i, b := range src {
		dst[i] = FromBF16(b)
	}
}

// RoundBF16 is FromBF16(BF16(x)).
func RoundBF16(x float32) float32 { return FromBF16(BF16(x)) }

// RoundBF16Slice rounds src to bfloat16 values in dst, which may be src.
func RoundBF16Slice(dst, src []float32) {
	dst = dst[:len(src):len(dst)]
	for i, x := range src {
		dst[i] = RoundBF16(x)
	}
}
