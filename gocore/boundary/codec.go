package boundary

import (
	"math"
	"math/bits"
	"unsafe"

	"golang.org/x/sync/errgroup"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// Note [Codec bits]
//
// Conversions of float32 use integer operations only, so that a host thread which flushes denormals changes nothing. They agree with
// torch's .to(torch.float16) and .to(torch.bfloat16) on x86 bit for bit, NaN aside: a NaN stays a NaN with its sign and the top
// of its payload, made quiet, where torch's own result for bfloat16 depends on the CPU. float64 goes through float32, as in torch, so it is rounded twice.

// half gives the IEEE binary16 of a float32, both as bits.
func half(u uint32) uint16 {
	sign := uint16(u>>16) & 0x8000
	a := u & 0x7fffffff
	switch {
	case a-0x38800000 < 0x47800000-0x38800000: // normal: 2^-14 <= |x| < 2^16; a carry out of the mantissa is right, also into Inf
		return sign | uint16((a-0x38000000+0xfff+a>>13&1)>>13)
	case a >= 0x47800000:
		if a > 0x7f800000 {
			return sign | 0x7e00 | uint16(a>>13)&0x1ff
		}
		return sign | 0x7c00
	case a < 0x33000000: // under half the smallest subnormal
		return sign
	}
	shift := 126 - a>>23
	mant := a&0x7fffff | 0x800000
	h := mant >> shift
	rest, tie := mant&(1<<shift-1), uint32(1)<<(shift-1)
	if rest > tie || rest == tie && h&1 == 1 {
		h++
	}
	return sign | uint16(h)
}

// single gives the float32 of an IEEE binary16, both as bits. It is exact.
func single(h uint16) uint32 {
	sign := uint32(h&0x8000) << 16
	a := uint32(h & 0x7fff)
	switch {
	case a-0x400 < 0x7c00-0x400:
		return sign | (a<<13 + 0x38000000)
	case a >= 0x7c00:
		if a > 0x7c00 {
			a |= 0x200
		}
		return sign | 0x7f800000 | (a&0x3ff)<<13
	case a == 0:
		return sign
	}
	shift := uint32(bits.LeadingZeros32(a)) - 21 // the leading one moves to bit 10
	return sign | (113-shift)<<23 | (a<<shift&0x3ff)<<13
}

// brain gives the bfloat16 of a float32, both as bits.
func brain(u uint32) uint16 {
	if u&0x7fffffff > 0x7f800000 {
		return uint16(u>>16) | 0x40
	}
	return uint16((u + 0x7fff + u>>16&1) >> 16)
}

// code is how one span is written.
type code uint8

const (
	asIs code = iota
	asHalf
	asBrain
)

var codes = map[Codec]code{CodecRaw: asIs, CodecFP16: asHalf, CodecBF16: asBrain}

// encode writes n elements of elem bytes (4 or 8) at src as 2-byte values at dst.
func (c code) encode(dst, src unsafe.Pointer, n int64, elem uint8) error {
	out := unsafe.Slice((*uint16)(dst), n)
	return inHalves(n, func(lo, hi int64) {
		out := out[lo:hi]
		if elem == 4 {
			encodeWords(c, out, unsafe.Slice((*uint32)(src), n)[lo:hi])
		} else {
			encodeDoubles(c, out, unsafe.Slice((*float64)(src), n)[lo:hi])
		}
	})
}

// decode writes n 2-byte values at src as elements of elem bytes (4 or 8) at dst.
func (c code) decode(dst, src unsafe.Pointer, n int64, elem uint8) error {
	in := unsafe.Slice((*uint16)(src), n)
	return inHalves(n, func(lo, hi int64) {
		in := in[lo:hi]
		if elem == 4 {
			decodeWords(c, unsafe.Slice((*uint32)(dst), n)[lo:hi], in)
		} else {
			decodeDoubles(c, unsafe.Slice((*float64)(dst), n)[lo:hi], in)
		}
	})
}

func encodeWords(c code, out []uint16, in []uint32) {
	out = out[:len(in)]
	if c == asHalf {
		for i, u := range in {
			out[i] = half(u)
		}
		return
	}
	for i, u := range in {
		out[i] = brain(u)
	}
}

func encodeDoubles(c code, out []uint16, in []float64) {
	out = out[:len(in)]
	for i, f := range in {
		u := math.Float32bits(float32(f))
		if c == asHalf {
			out[i] = half(u)
		} else {
			out[i] = brain(u)
		}
	}
}

func decodeWords(c code, out []uint32, in []uint16) {
	out = out[:len(in)]
	if c == asHalf {
		for i, h := range in {
			out[i] = single(h)
		}
		return
	}
	for i, h := range in {
		out[i] = uint32(h) << 16
	}
}

func decodeDoubles(c code, out []float64, in []uint16) {
	out = out[:len(in)]
	for i, h := range in {
		u := uint32(h) << 16
		if c == asHalf {
			u = single(h)
		}
		out[i] = float64(math.Float32frombits(u))
	}
}

// grain is the number of elements from which on a conversion uses two goroutines.
const grain = 1 << 18

// inHalves runs f over [0, n), in two halves at a time where n is large.
func inHalves(n int64, f func(lo, hi int64)) error {
	if n < grain {
		f(0, n)
		return nil
	}
	var group errgroup.Group
	group.Go(func() (err error) {
		defer recovered(&err)
		f(n/2, n)
		return nil
	})
	f(0, n/2)
	return group.Wait()
}

// recovered turns a panic into a store error. Every goroutine and job defers it: a panic would end the host process.
func recovered(err *error) {
	if p := recover(); p != nil {
		*err = errs.E(errs.ErrStore, "boundary store: internal error: %v", p)
	}
}
