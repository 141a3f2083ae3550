//go:build goexperiment.simd && amd64

package passes

import (
	"simd/archsimd"
	"unsafe"
)

// Note [Wide loops]
//
//	The loops in this file do eight elements at a time where the processor has AVX2, and the bits that they give are those of the plain loops,
//	which remain for what is left over, for other processors and for builds without GOEXPERIMENT=simd: every operation is the same correctly
//	rounded one, and sums keep their four lanes. A test compares the two.

// wide says whether this processor can run the loops of this file.
var wide = archsimd.X86.AVX2()

// wideAbsMax is absMaxBits of the first elements, and how many those were.
func wideAbsMax(v []float32) (top uint32, done int) {
	if !wide {
		return 0, 0
	}
	bits := unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(v))), len(v))
	mask := archsimd.BroadcastUint32x8(absBits)
	a, b := archsimd.BroadcastUint32x8(0), archsimd.BroadcastUint32x8(0)
	for len(bits) >= 16 {
		a = a.Max(archsimd.LoadUint32x8((*[8]uint32)(bits)).And(mask))
		b = b.Max(archsimd.LoadUint32x8((*[8]uint32)(bits[8:])).And(mask))
		bits = bits[16:]
	}
	var lanes [8]uint32
	a.Max(b).Store(&lanes)
	archsimd.ClearAVXUpperBits()
	for _, lane := range lanes {
		top = max(top, lane)
	}
	return top, len(v) - len(bits)
}

// wideInt8 is the round trip through 8-bit integers of the first elements for a normal scale, and how many those were.
func wideInt8(dst, src []float32, scale float32) int {
	if !wide {
		return 0
	}
	dst = dst[:len(src)]
	s := archsimd.BroadcastFloat32x8(scale)
	done := 0
	for ; done+8 <= len(src); done += 8 {
		x := archsimd.LoadFloat32x8((*[8]float32)(src[done:]))
		x.Div(s).RoundToEven().Mul(s).Store((*[8]float32)(dst[done:]))
	}
	archsimd.ClearAVXUpperBits()
	return done
}

// wideScale multiplies the first elements, and gives how many those were.
func wideScale(dst, src []float32, factor float32) int {
	if !wide {
		return 0
	}
	dst = dst[:len(src)]
	f := archsimd.BroadcastFloat32x8(factor)
	done := 0
	for ; done+8 <= len(src); done += 8 {
		archsimd.LoadFloat32x8((*[8]float32)(src[done:])).Mul(f).Store((*[8]float32)(dst[done:]))
	}
	archsimd.ClearAVXUpperBits()
	return done
}

// wideSquares adds the squares of the first elements into lanes, element i into lane i%4, and gives how many those were.
func wideSquares(lanes *[4]float64, v []float32) int {
	if !wide {
		return 0
	}
	sum := archsimd.LoadFloat64x4(lanes)
	done := 0
	for ; done+4 <= len(v); done += 4 {
		x := archsimd.LoadFloat32x4((*[4]float32)(v[done:])).ConvertToFloat64()
		sum = sum.Add(x.Mul(x))
	}
	sum.Store(lanes)
	archsimd.ClearAVXUpperBits()
	return done
}
