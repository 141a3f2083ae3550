package numeric

import "math"

const (
	// MaxE4M3 is the largest finite float8 e4m3fn value; larger ones saturate to it.
	MaxE4M3 = 448
	// MaxE5M2 is the largest finite float8 e5m2 value.
	MaxE5M2 = 57344

	e4m3MinNormal = 121 << 23   // 2^-6
	e4m3Max       = 0x43e0_0000 // 448
	e5m2Overflow  = 0x4770_0000 // 61440: half way between 57344 and the next power of two
)

// RoundE4M3 is the float8 e4m3fn value nearest to x: FromE4M3(E4M3(x)).
func RoundE4M3(x float32) float32 {
	bits := math.Float32bits(x)
	if abs := bits & absF32; abs >= e4m3Max {
		if abs > infF32 {
			return math.Float32frombits(bits | 0x0040_0000)
		}
		return math.Float32frombits(bits&signF32 | e4m3Max)
	}
	return roundStep(bits, e4m3MinNormal, 20)
}

// RoundE5M2 is the float8 e5m2 value nearest to x, or infinity: FromE5M2(E5M2(x)).
func RoundE5M2(x float32) float32 {
	bits := math.Float32bits(x)
	if abs := bits & absF32; abs >= e5m2Overflow {
		if abs > infF32 {
			return math.Float32frombits(bits | 0x0040_0000)
		}
		return math.Float32frombits(bits&signF32 | infF32)
	}
	return roundStep(bits, halfMinNormal, 21)
}

// E4M3 is the float8 e4m3fn code of x: one sign bit, four exponent bits (bias 7), three mantissa bits; 0x7f and 0xff are NaN.
func E4M3(x float32) uint8 {
	bits := math.Float32bits(RoundE4M3(x))
	sign := uint8(bits >> 24 & 0x80)
	abs := bits & absF32
	switch {
	case abs > infF32:
		return sign | 0x7f
	case abs < e4m3MinNormal:
		return sign | uint8(math.Float32frombits(abs)*(1<<9))
	default:
		return sign | uint8((abs-120<<23)>>20)
	}
}

// FromE4M3 is the value of a float8 e4m3fn code; it is exact.
func FromE4M3(c uint8) float32 {
	sign := uint32(c&0x80) << 24
	abs := uint32(c & 0x7f)
	switch {
	case abs == 0x7f:
		return math.Float32frombits(sign | 0x7fc0_0000)
	case abs < 8:
		return math.Float32frombits(sign | math.Float32bits(float32(abs)/(1<<9)))
	default:
		return math.Float32frombits(sign | (abs<<20 + 120<<23))
	}
}

// E5M2 is the float8 e5m2 code of x: the upper half of a float16, rounded from x once.
func E5M2(x float32) uint8 {
	rounded := RoundE5M2(x)
	if rounded != rounded {
		return uint8(math.Float32bits(rounded)>>24&0x80) | 0x7e | uint8(F16(rounded)>>8&1)
	}
	// Every e5m2 value is a float16 value, so this does not round again.
	return uint8(F16(rounded) >> 8)
}

// FromE5M2 is the value of a float8 e5m2 code; it is exact.
func FromE5M2(c uint8) float32 { return FromF16(uint16(c) << 8) }

// F32ToE4M3 writes the float8 e4m3fn codes of src to dst.
func F32ToE4M3(dst []uint8, src []float32) {
	dst = dst[:len(src):len(dst)]
	for i, x := range src {
		dst[i] = E4M3(x)
	}
}

// E4M3ToF32 writes the values of the float8 e4m3fn codes in src to dst.
func E4M3ToF32(dst []float32, src []uint8) {
	dst = dst[:len(src):len(dst)]
	for i, c := range src {
		dst[i] = FromE4M3(c)
	}
}

// F32ToE5M2 writes the float8 e5m2 codes of src to dst.
func F32ToE5M2(dst []uint8, src []float32) {
	dst = dst[:len(src):len(dst)]
	for i, x := range src {
		dst[i] = E5M2(x)
	}
}

// E5M2ToF32 writes the values of the float8 e5m2 codes in src to dst.
func E5M2ToF32(dst []float32, src []uint8) {
	dst = dst[:len(src):len(dst)]
	for i, c := range src {
		dst[i] = FromE5M2(c)
	}
}

// RoundE4M3Slice rounds src to float8 e4m3fn values in dst, which may be src.
func RoundE4M3Slice(dst, src []float32) {
	dst = dst[:len(src):len(dst)]
	for i, x := range src {
		if bits := math.Float32bits(x); bits&absF32 < e4m3Max {
			dst[i] = roundStep(bits, e4m3MinNormal, 20)
			continue
		}
		dst[i] = RoundE4M3(x)
	}
}

// RoundE5M2Slice rounds src to float8 e5m2 values in dst, which may be src.
func RoundE5M2Slice(dst, src []float32) {
	dst = dst[:len(src):len(dst)]
	for i, x := range src {
		if bits := math.Float32bits(x); bits&absF32 < e5m2Overflow {
			dst[i] = roundStep(bits, halfMinNormal, 21)
			continue
		}
		dst[i] = RoundE5M2(x)
	}
}
