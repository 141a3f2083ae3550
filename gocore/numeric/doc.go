// Package numeric converts between float32 and the small floating-point formats: float16 (IEEE binary16), bfloat16 and the
// two eight-bit formats float8 e4m3fn and float8 e5m2.
//
// Every narrowing rounds to nearest, ties to even, once. Zero keeps its sign. A NaN stays a NaN: it becomes quiet, keeps its sign and
// as many leading payload bits as the target holds. Finite values and infinities give the codes that torch's `Tensor.to` gives; the
// codes of a NaN differ between processors in torch too, so they are not compared. Beyond the largest finite value, float16, bfloat16
// and e5m2 overflow to infinity; e4m3fn has no infinity and saturates at ±448 (torch 2.15; older versions gave NaN), infinities
// included.
//
// The slice functions want len(dst) >= len(src), panic otherwise, convert len(src) elements, allocate nothing and use no
// goroutine. Source and destination must not overlap, except that the Round functions may work in place.
//
// A narrowing from float64 goes through float32, that is, it rounds twice, as torch does.
package numeric
