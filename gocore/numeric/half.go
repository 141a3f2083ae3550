package numeric

import "math"

const (
	signF32 = 0x8000_0000
	absF32  = 0x7fff_ffff
	infF32  = 0x7f80_0000

	// halfOverflow is 65520 as bits: half way between the largest float16 and the next power of two. From here on a value rounds to
	// infinity.
	halfOverflow = 0x477f_f000
	// halfMinNormal is 2^-14 as bits, the smallest normal float16.
	halfMinNormal = 113 << 23
	// halfAlign is 0.5 as bits. A float32 in [0.5, 1) has steps of 2^-24, the step of float16's subnormals: adding 0.5 rounds to that step,
	// and the low bits of the sum are the code.
	halfAlign = 126 << 23
)

// F16 is the float16 code of x.
func F16(x float32) uint16 {
	bits := math.Float32bits(x)
	sign := uint16(bits >> 16 & 0x8000)
	abs := bits & absF32
	switch {
	case abs >= halfOverflow:
		if abs > infF32 {
			return sign | 0x7e00 | uint16(abs>>13&0x1ff)
		}
		return sign | 0x7c00
	case abs < halfMinNormal:
		sum := math.Float32frombits(abs) + 0.5
		return sign | uint16(math.Float32bits(sum)-halfAlign)
	default:
		return sign | uint16((abs+0xfff+(abs>>13&1)-112<<23)>>13)
	}
}

// FromF16 is the value of a float16 code; it is exact.
func FromF16(h uint16) float32 {
	sign := uint32(h&0x8000) << 16
	abs := uint32(h&0x7fff) << 13
	switch exp := abs & infF16; {
	case exp == infF16:
		if abs > infF16 {
			abs |= 0x0040_0000
		}
		return math.Float32frombits(sign | abs | infF32)
	case exp == 0:
		// The code counts steps of 2^-24.
		value := math.Float32frombits(abs>>13|halfAlign) - 0.5
		return math.Float32frombits(sign | math.Float32bits(value))
	default:
		return math.Float32frombits(sign | (abs + 112<<23))
	}
}

// infF16 is float16's infinity, shifted so that the mantissas of float16 and float32 line up.
const infF16 = 0x7c00 << 13

// F32ToF16 writes the float16 codes of src to dst.
func F32ToF16(dst []uint16, src []float32) {
	dst = dst[:len(src):len(dst)]
	for i, x := range src {
		// The common case in place: a call an element would cost more than the conversion.
		bits := math.Float32bits(x)
		if abs := bits & absF32; abs-halfMinNormal < halfOverflow-halfMinNormal {
			dst[i] = uint16(bits>>16&0x8000) | uint16((abs+0xfff+(abs>>13&1)-112<<23)>>13)
			continue
		}
		dst[i] = F16(x)
	}
}

// F16ToF32 writes the values of the float16 codes in src to dst.
func F16ToF32(dst []float32, src []uint16) {
	dst = dst[:len(src):len(dst)]
	for i, h := range src {
		if abs := uint32(h & 0x7fff); abs-0x400 < 0x7c00-0x400 {
			dst[i] = math.Float32frombits(uint32(h&0x8000)<<16 | (abs<<13 + 112<<23))
			continue
		}
		dst[i] = FromF16(h)
	}
}

// RoundF16 is FromF16(F16(x)) without the detour over the code.
func RoundF16(x float32) float32 {
	bits := math.Float32bits(x)
	abs := bits & absF32
	if abs >= halfOverflow {
		if abs > infF32 {
			return math.Float32frombits((bits | 0x0040_0000) &^ 0x1fff)
		}
		return math.Float32frombits(bits&signF32 | infF32)
	}
	return roundStep(bits, halfMinNormal, 13)
}

// RoundF16Slice rounds src to float16 values in dst, which may be src.
func RoundF16Slice(dst, src []float32) {
	dst = dst[:len(src):len(dst)]
	for i, x := range src {
		if bits := math.Float32bits(x); bits&absF32 < halfOverflow {
			dst[i] = roundStep(bits, halfMinNormal, 13)
			continue
		}
		dst[i] = RoundF16(x)
	}
}

// roundStep rounds a finite value to a format with `drop` mantissa bits less than float32 whose smallest normal number has the bits
// minNormal. Adding a power of two that is 2^drop times the value's own leaves no room for the dropped bits, so the addition rounds as
// the format would, ties to even; below minNormal the step stays that of minNormal. The caller has dealt with overflow.
func roundStep(bits, minNormal, drop uint32) float32 {
	abs := bits & absF32
	align := math.Float32frombits(max(abs&infF32, minNormal) + drop<<23)
	sum := math.Float32frombits(abs) + align
	return math.Float32frombits(bits&signF32 | math.Float32bits(sum-align))
}
