package passes

import (
	"encoding/binary"
	"math"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// Int8Header is the number of bytes before the payload of EncodeInt8.
const Int8Header = 16

var int8Magic = [4]byte{'E', 'A', 'I', '8'}

// EncodeInt8 appends the 8-bit form of values to dst and returns it. Layout, little endian:
//
//	bytes 0..3    "EAI8"
//	bytes 4..7    scale, float32
//	bytes 8..15   number of values n, uint64
//	bytes 16..    n integers q, int8, -127..127
//
// The value is q*scale. Scale and integers are those of the pass "int8", except that an integer 0 has no sign. Values whose largest
// magnitude is 0, or gives a scale that underflows, have scale 0 and integers 0. NaN and Inf are errs.ErrPass; dst is then returned as it was.
func EncodeInt8(dst []byte, values []float32) ([]byte, error) {
	top := absMaxBits(values)
	if top >= infBits {
		return dst, errs.E(errs.ErrPass, "int8 cannot hold NaN or Inf")
	}
	scale := math.Float32frombits(top) / 127
	start := len(dst)
	dst = append(dst, int8Magic[:]...)
	dst = binary.LittleEndian.AppendUint32(dst, math.Float32bits(scale))
	dst = binary.LittleEndian.AppendUint64(dst, uint64(len(values)))
	dst = append(dst, make([]byte, len(values))...)
	if scale != 0 {
		payload := dst[start+Int8Header:]
		for i, x := range values {
			payload[i] = byte(quantize(x, scale))
		}
	}
	return dst, nil
}

// DecodeInt8 appends to dst the values that EncodeInt8 wrote to data and returns it. Data of another form or length, a scale that is negative or not
// finite, and an integer -128 are errs.ErrPass; dst is then returned as it was.
func DecodeInt8(dst []float32, data []byte) ([]float32, error) {
	if len(data) < Int8Header || [4]byte(data[:4]) != int8Magic {
		return dst, errs.E(errs.ErrPass, "%d bytes are not 8-bit values: no header", len(data))
	}
	bits := binary.LittleEndian.Uint32(data[4:])
	payload := data[Int8Header:]
	if n := binary.LittleEndian.Uint64(data[8:]); n != uint64(len(payload)) {
		return dst, errs.E(errs.ErrPass, "8-bit values: the header says %d, %d follow", n, len(payload))
	}
	if bits >= infBits {
		return dst, errs.E(errs.ErrPass, "8-bit values with the scale %v", math.Float32frombits(bits))
	}
	start := len(dst)
	for i, b := range payload {
		if b == 0x80 {
			return dst[:start], errs.E(errs.ErrPass, "8-bit value %d is -128", i)
		}
		dst = append(dst, float32(int8(b))*math.Float32frombits(bits))
	}
	return dst, nil
}
