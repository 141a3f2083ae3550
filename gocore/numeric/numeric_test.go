package numeric

import (
	"math"
	"sort"
	"testing"
)

// format describes a small float by its numbers alone; value reads a code from the definition, with float64 arithmetic.
type format struct {
	name       string
	bits, mant int
	bias       int
	noInf      bool
	encode     func(float32) uint32
	decode     func(uint32) float32
	round      func(float32) float32
	saturates  bool
}

var formats = []format{
	{name: "float16", bits: 16, mant: 10, bias: 15, encode: func(x float32) uint32 { return uint32(F16(x)) },
		decode: func(c uint32) float32 { return FromF16(uint16(c)) }, round: RoundF16},
	{name: "bfloat16", bits: 16, mant: 7, bias: 127, encode: func(x float32) uint32 { return uint32(BF16(x)) },
		decode: func(c uint32) float32 { return FromBF16(uint16(c)) }, round: RoundBF16},
	{name: "e4m3fn", bits: 8, mant: 3, bias: 7, noInf: true, saturates: true,
		encode: func(x float32) uint32 { return uint32(E4M3(x)) },
		decode: func(c uint32) float32 { return FromE4M3(uint8(c)) }, round: RoundE4M3},
	{name: "e5m2", bits: 8, mant: 2, bias: 15, encode: func(x float32) uint32 { return uint32(E5M2(x)) },
		decode: func(c uint32) float32 { return FromE5M2(uint8(c)) }, round: RoundE5M2},
}

func (f format) value(code uint32) float64 {
	sign := 1.0
	if code>>(f.bits-1) == 1 {
		sign = -1
	}
	expBits := f.bits - 1 - f.mant
	exp := int(code >> f.mant & (1<<expBits - 1))
	mant := float64(code & (1<<f.mant - 1))
	top := 1<<expBits - 1
	if exp == top && f.noInf {
		if int(mant) == 1<<f.mant-1 {
			return math.NaN()
		}
	} else if exp == top {
		if mant == 0 {
			return math.Inf(int(sign))
		}
		return math.NaN()
	}
	if exp == 0 {
		return sign * math.Ldexp(mant, 1-f.bias-f.mant)
	}
	return sign * math.Ldexp(mant+float64(int(1)<<f.mant), exp-f.bias-f.mant)
}

// finite lists the non-negative finite values in order; the index is the code.
func (f format) finite() []float64 {
	var values []float64
	for code := uint32(0); code < 1<<(f.bits-1); code++ {
		v := f.value(code)
		if math.IsNaN(v) || math.IsInf(v, 0) {
			break
		}
		values = append(values, v)
	}
	return values
}

// nearest is the slow reference: search the table of values, ties to the even code, overflow half a step behind the last one.
func (f format) nearest(values []float64, x float64) float64 {
	abs := math.Abs(x)
	last := values[len(values)-1]
	limit := last + (last-values[len(values)-2])/2
	if abs >= limit || math.IsInf(x, 0) {
		if f.saturates {
			return math.Copysign(last, x)
		}
		return math.Inf(int(math.Copysign(1, x)))
	}
	hi := sort.SearchFloat64s(values, abs)
	if hi == len(values) {
		return math.Copysign(last, x)
	}
	if hi == 0 || values[hi] == abs {
		return math.Copysign(values[hi], x)
	}
	lo := hi - 1
	below, above := abs-values[lo], values[hi]-abs
	if below < above || (below == above && lo%2 == 0) {
		return math.Copysign(values[lo], x)
	}
	return math.Copysign(values[hi], x)
}

func same(a, b float64) bool {
	if math.IsNaN(a) || math.IsNaN(b) {
		return math.IsNaN(a) && math.IsNaN(b)
	}
	return math.Float64bits(a) == math.Float64bits(b)
}

func TestEveryCodeDecodesByDefinitionAndEncodesBack(t *testing.T) {
	for _, f := range formats {
		for code := uint32(0); code < 1<<f.bits; code++ {
			want := f.value(code)
			got := f.decode(code)
			if !same(float64(got), want) {
				t.Fatalf("%s code %#x decodes to %v, want %v", f.name, code, got, want)
			}
			back := f.encode(got)
			if math.IsNaN(want) {
				if !math.IsNaN(f.value(back)) || back>>(f.bits-1) != code>>(f.bits-1) {
					t.Fatalf("%s NaN code %#x comes back as %#x", f.name, code, back)
				}
				continue
			}
			if back != code {
				t.Fatalf("%s code %#x comes back as %#x", f.name, code, back)
			}
		}
	}
}

// Around every value and every midpoint of two values the rounding has its edges.
func TestRoundingAtEveryEdge(t *testing.T) {
	for _, f := range formats {
		values := f.finite()
		check := func(x float32) {
			for _, v := range []float32{x, -x} {
				want := f.nearest(values, float64(v))
				if got := f.round(v); !same(float64(got), want) {
					t.Fatalf("%s round(%v) = %v, want %v", f.name, v, got, want)
				}
				if got := f.value(f.encode(v)); !same(got, want) {
					t.Fatalf("%s encode(%v) is %v, want %v", f.name, v, got, want)
				}
			}
		}
		around := func(x float32) {
			check(x)
			check(math.Nextafter32(x, 0))
			check(math.Nextafter32(x, float32(math.Inf(1))))
		}
		for i, v := range values {
			around(float32(v))
			if i+1 < len(values) {
				around(float32((v + values[i+1]) / 2))
			}
		}
		last := values[len(values)-1]
		around(float32(last + (last-values[len(values)-2])/2))
		around(math.MaxFloat32)
		check(float32(math.Inf(1)))
	}
}

// A walk over the float32 line with an odd step meets every exponent and many mantissas.
func TestRoundingOverTheFloat32Line(t *testing.T) {
	for _, f := range formats {
		values := f.finite()
		for bits := uint64(0); bits < 1<<32; bits += 30011 {
			x := math.Float32frombits(uint32(bits))
			if x != x {
				if r := f.round(x); r == r || math.Signbit(float64(r)) != math.Signbit(float64(x)) {
					t.Fatalf("%s round of NaN %#x is %v", f.name, bits, r)
				}
				continue
			}
			want := f.nearest(values, float64(x))
			if got := f.round(x); !same(float64(got), want) {
				t.Fatalf("%s round(%v) = %v, want %v", f.name, x, got, want)
			}
			if got := f.value(f.encode(x)); !same(got, want) {
				t.Fatalf("%s encode(%v) is %v, want %v", f.name, x, got, want)
			}
		}
	}
}

// The loops of the slice functions have a fast path of their own: every code, and the float32 line again.
func TestSlicesOverEverything(t *testing.T) {
	codes, values := make([]uint16, 1<<16), make([]float32, 1<<16)
	for i := range codes {
		codes[i] = uint16(i)
	}
	F16ToF32(values, codes)
	for i, v := range values {
		if math.Float32bits(v) != math.Float32bits(FromF16(uint16(i))) {
			t.Fatalf("float16 code %#x: %v", i, v)
		}
	}
	line := make([]float32, 0, 1<<18)
	for bits := uint64(0); bits < 1<<32; bits += 16381 {
		line = append(line, math.Float32frombits(uint32(bits)))
	}
	narrow, round := make([]uint16, len(line)), make([]float32, len(line))
	F32ToF16(narrow, line)
	for i, x := range line {
		if narrow[i] != F16(x) {
			t.Fatalf("%v becomes %#x, want %#x", x, narrow[i], F16(x))
		}
	}
	for _, r := range []struct {
		all func(dst, src []float32)
		one func(float32) float32
	}{{RoundF16Slice, RoundF16}, {RoundBF16Slice, RoundBF16}, {RoundE4M3Slice, RoundE4M3}, {RoundE5M2Slice, RoundE5M2}} {
		r.all(round, line)
		for i, x := range line {
			if math.Float32bits(round[i]) != math.Float32bits(r.one(x)) {
				t.Fatalf("%v rounds to %v, want %v", x, round[i], r.one(x))
			}
		}
	}
}

// The values that torch 2.15 gives on the CPU.
func TestValuesFromTorch(t *testing.T) {
	inf := float32(math.Inf(1))
	cases := []struct {
		x          float32
		f16, bf16  uint16
		e4m3, e5m2 uint8
	}{
		{0, 0, 0, 0, 0},
		{float32(math.Copysign(0, -1)), 0x8000, 0x8000, 0x80, 0x80},
		{1, 0x3c00, 0x3f80, 0x38, 0x3c},
		{464, 0x5f40, 0x43e8, 0x7e, 0x5f},
		{465, 0x5f44, 0x43e8, 0x7e, 0x5f},
		{1e9, 0x7c00, 0x4e6e, 0x7e, 0x7c},
		{inf, 0x7c00, 0x7f80, 0x7e, 0x7c},
		{-inf, 0xfc00, 0xff80, 0xfe, 0xfc},
		{61439.9, 0x7b80, 0x4770, 0x7e, 0x7b},
		{61440, 0x7b80, 0x4770, 0x7e, 0x7c},
	}
	for _, c := range cases {
		if F16(c.x) != c.f16 || BF16(c.x) != c.bf16 || E4M3(c.x) != c.e4m3 || E5M2(c.x) != c.e5m2 {
			t.Errorf("%v: got %#x %#x %#x %#x, want %#x %#x %#x %#x", c.x,
				F16(c.x), BF16(c.x), E4M3(c.x), E5M2(c.x), c.f16, c.bf16, c.e4m3, c.e5m2)
		}
	}
}

func TestNaNPayload(t *testing.T) {
	cases := []struct {
		bits uint32
		f16  uint16
		bf16 uint16
	}{
		{0x7fc00000, 0x7e00, 0x7fc0}, {0xffc00000, 0xfe00, 0xffc0}, {0x7f800001, 0x7e00, 0x7fc0}, {0x7fc12345, 0x7e09, 0x7fc1},
		{0xffffffff, 0xffff, 0xffff},
	}
	for _, c := range cases {
		x := math.Float32frombits(c.bits)
		if F16(x) != c.f16 || BF16(x) != c.bf16 {
			t.Errorf("%#x: got %#x %#x, want %#x %#x", c.bits, F16(x), BF16(x), c.f16, c.bf16)
		}
	}
}

func TestSlicesAgreeWithScalars(t *testing.T) {
	src := make([]float32, 1037)
	for i := range src {
		src[i] = float32(math.Sin(float64(i))) * float32(math.Ldexp(1, i%60-30))
	}
	copy(src, []float32{float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.Copysign(0, -1)), 0, 65519, 65520, 0x1p-14, 0x1.fffp-15, 447, 448, 61439, 61440})
	codes, bytes, back := make([]uint16, len(src)+1), make([]uint8, len(src)), make([]float32, len(src))
	check := func(name string, one func(float32) float32) {
		t.Helper()
		for i, x := range src {
			if back[i] != one(x) {
				t.Fatalf("%s[%d]: %v -> %v, want %v", name, i, x, back[i], one(x))
			}
		}
	}
	F32ToF16(codes, src)
	F16ToF32(back, codes[:len(src)])
	check("float16", RoundF16)
	F32ToBF16(codes, src)
	BF16ToF32(back, codes[:len(src)])
	check("bfloat16", RoundBF16)
	F32ToE4M3(bytes, src)
	E4M3ToF32(back, bytes)
	check("e4m3fn", RoundE4M3)
	F32ToE5M2(bytes, src)
	E5M2ToF32(back, bytes)
	check("e5m2", RoundE5M2)
	RoundE4M3Slice(back, src)
	check("e4m3fn round", RoundE4M3)
	RoundE5M2Slice(back, src)
	check("e5m2 round", RoundE5M2)
	copy(back, src)
	RoundF16Slice(back, back)
	check("float16 in place", RoundF16)
	RoundBF16Slice(back, src)
	check("bfloat16 round", RoundBF16)
	defer func() {
		if recover() == nil {
			t.Error("a short destination must panic")
		}
	}()
	F32ToF16(codes[:3], src)
}

func BenchmarkRoundTrip(b *testing.B) {
	src, codes, back := make([]float32, 1<<20), make([]uint16, 1<<20), make([]float32, 1<<20)
	for i := range src {
		src[i] = float32(math.Sin(float64(i)))
	}
	run := func(name string, f func()) {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(4 << 20)
			for b.Loop() {
				f()
			}
		})
	}
	run("F32ToF16", func() { F32ToF16(codes, src) })
	run("F16ToF32", func() { F16ToF32(back, codes) })
	run("F32ToBF16", func() { F32ToBF16(codes, src) })
	run("BF16ToF32", func() { BF16ToF32(back, codes) })
	run("RoundF16", func() { RoundF16Slice(back, src) })
	run("RoundBF16", func() { RoundBF16Slice(back, src) })
}
