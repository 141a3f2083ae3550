package boundary

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/eae-runtime/eae-runtime/gocore/memory"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// Note [File format]
//
// A file is a header, zeros up to a multiple of 64, the payload, and the payload's CRC-32C (u32). All numbers are little
// endian. The payload's start is 64-byte aligned in the file as in memory.
//
//	offset size  header
//	     0    4  magic "EAEB"
//	     4    2  version, 1
//	     6    1  codec of the store: 0 raw, 1 fp16, 2 bf16
//	     7    1  zero
//	     8    8  boundary's number, signed
//	    16    4  number of spans S
//	    20    4  number of tensors T
//	    24    8  payload length in bytes
//	    32    4  header length in bytes, its CRC included
//	    36    4  zero
//	    40 32*S  spans
//	       ...   tensors
//	  last    4  CRC-32C of all header bytes before it
//
//	offset size  span
//	     0    1  how it is written: 0 as it is, 1 fp16, 2 bf16
//	     1    1  bytes of an element in memory if encoded (4 or 8), else 0
//	     2    2  address modulo 64 in memory
//	     4    4  zero
//	     8    8  bytes in memory
//	    16    8  offset in the payload
//	    24    8  bytes in the payload
//
//	offset size  tensor
//	     0    1  DLPack type code
//	     1    1  bits
//	     2    2  lanes
//	     4    4  span number, -1 for a tensor without elements
//	     8    8  offset of element zero in the span, bytes in memory
//	    16    4  DLPack device type
//	    20    4  device number
//	    24    4  number of dimensions D
//	    28    4  zero
//	    32  8*D  sizes
//	       8*D  strides, in elements
const (
	magic        = "EAEB"
	version      = 1
	fixedLen     = 40
	spanLen      = 32
	tensorLen    = 32
	crcLen       = 4
	maxHeaderLen = 1 << 26
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// payloadStart is where the payload begins in a file with that header.
func payloadStart(header []byte) int64 { return memory.Round(int64(len(header))) }

// encodeHeader writes l's header.
func encodeHeader(key int64, c code, l *layout) []byte {
	size := fixedLen + spanLen*len(l.spans) + crcLen
	for i := range l.views {
		size += tensorLen + 16*len(l.views[i].shape)
	}
	le := binary.LittleEndian
	b := make([]byte, 0, size)
	b = append(b, magic...)
	b = le.AppendUint16(b, version)
	b = append(b, byte(c), 0)
	b = le.AppendUint64(b, uint64(key))
	b = le.AppendUint32(b, uint32(len(l.spans)))
	b = le.AppendUint32(b, uint32(len(l.views)))
	b = le.AppendUint64(b, uint64(l.packLen))
	b = le.AppendUint32(b, uint32(size))
	b = le.AppendUint32(b, 0)
	for i := range l.spans {
		s := &l.spans[i]
		b = append(b, byte(s.code), s.elem)
		b = le.AppendUint16(b, s.phase)
		b = le.AppendUint32(b, 0)
		b = le.AppendUint64(b, uint64(s.memLen))
		b = le.AppendUint64(b, uint64(s.packOff))
		b = le.AppendUint64(b, uint64(s.packLen))
	}
	for i := range l.views {
		v := &l.views[i]
		b = append(b, v.dtype.Code, v.dtype.Bits)
		b = le.AppendUint16(b, v.dtype.Lanes)
		b = le.AppendUint32(b, uint32(v.span))
		b = le.AppendUint64(b, uint64(v.offset))
		b = le.AppendUint32(b, uint32(v.device.Type))
		b = le.AppendUint32(b, uint32(v.device.ID))
		b = le.AppendUint32(b, uint32(len(v.shape)))
		b = le.AppendUint32(b, 0)
		for _, n := range v.shape {
			b = le.AppendUint64(b, uint64(n))
		}
		for _, n := range v.strides {
			b = le.AppendUint64(b, uint64(n))
		}
	}
	return le.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

var (
	errForeign = errors.New("it is not a boundary file")
	errHeader  = errors.New("its header is damaged")
)

// decodeHeader reads the header at the start of data, which may go on behind it. It allocates no more than a few times
// len(data) and accepts only what encodeHeader can have written.
func decodeHeader(data []byte) (key int64, c code, l *layout, err error) {
	le := binary.LittleEndian
	if len(data) < fixedLen+crcLen || string(data[:4]) != magic {
		return 0, 0, nil, errForeign
	}
	if v := le.Uint16(data[4:]); v != version {
		return 0, 0, nil, fmt.Errorf("%w: version %d, this program reads %d", errForeign, v, version)
	}
	size := int64(le.Uint32(data[32:]))
	if size < fixedLen+crcLen || size > int64(len(data)) || size > maxHeaderLen {
		return 0, 0, nil, fmt.Errorf("%w: it claims %d bytes of %d", errHeader, size, len(data))
	}
	body := data[:size-crcLen]
	if crc32.Checksum(body, castagnoli) != le.Uint32(data[size-crcLen:]) {
		return 0, 0, nil, fmt.Errorf("%w: its checksum does not match", errHeader)
	}
	r := &reader{rest: body[6:]}
	c = code(r.u8())
	r.zero(uint64(r.u8()))
	key = int64(r.u64())
	spans, tensors := int64(r.u32()), int64(r.u32())
	packLen := int64(r.u64())
	r.u32()
	r.zero(uint64(r.u32()))
	if c > asBrain || spans > int64(len(r.rest))/spanLen || tensors > int64(len(r.rest))/tensorLen {
		return 0, 0, nil, fmt.Errorf("%w: codec %d, %d spans and %d tensors", errHeader, c, spans, tensors)
	}
	l = &layout{spans: make([]span, spans), views: make([]view, tensors)}
	for i := range l.spans {
		r.span(&l.spans[i])
	}
	l.placeFrom(r)
	for i := range l.views {
		r.view(&l.views[i], l.spans)
	}
	r.check(len(r.rest) == 0 && l.packLen == packLen)
	if r.bad {
		return 0, 0, nil, fmt.Errorf("%w: its tables contradict each other", errHeader)
	}
	return key, c, l, nil
}

// maxTotal keeps sums of lengths from a header far from overflow.
const maxTotal = int64(1) << 56

// placeFrom recomputes l's offsets and checks that they are those which were read.
func (l *layout) placeFrom(r *reader) {
	read := make([]span, len(l.spans))
	copy(read, l.spans)
	total := int64(0)
	for i := range read {
		if total += read[i].memLen + 2*memory.Alignment; total > maxTotal {
			r.bad = true
			return
		}
	}
	if r.bad {
		return
	}
	l.place()
	for i := range read {
		r.check(read[i] == span{code: read[i].code, elem: read[i].elem, phase: read[i].phase, memLen: read[i].memLen,
			packOff: l.spans[i].packOff, packLen: l.spans[i].packLen})
	}
}

// reader takes numbers off a byte slice. After the first contradiction bad is set and the values mean nothing.
type reader struct {
	rest []byte
	bad  bool
}

func (r *reader) take(n int) []byte {
	if len(r.rest) < n {
		r.bad = true
		return make([]byte, 8)[:n]
	}
	b := r.rest[:n]
	r.rest = r.rest[n:]
	return b
}

func (r *reader) u8() uint8    { return r.take(1)[0] }
func (r *reader) u16() uint16  { return binary.LittleEndian.Uint16(r.take(2)) }
func (r *reader) u32() uint32  { return binary.LittleEndian.Uint32(r.take(4)) }
func (r *reader) u64() uint64  { return binary.LittleEndian.Uint64(r.take(8)) }
func (r *reader) check(b bool) { r.bad = r.bad || !b }
func (r *reader) zero(v uint64) {
	r.check(v == 0)
}

func (r *reader) span(s *span) {
	s.code, s.elem, s.phase = code(r.u8()), r.u8(), r.u16()
	r.zero(uint64(r.u32()))
	s.memLen, s.packOff, s.packLen = int64(r.u64()), int64(r.u64()), int64(r.u64())
	r.check(s.phase < memory.Alignment && s.memLen > 0 && s.memLen <= maxTotal)
	switch s.code {
	case asIs:
		r.check(s.elem == 0)
	case asHalf, asBrain:
		r.check((s.elem == 4 || s.elem == 8) && s.memLen%int64(max(s.elem, 1)) == 0 && s.phase%uint16(max(s.elem, 1)) == 0)
	default:
		r.bad = true
	}
}

func (r *reader) view(v *view, spans []span) {
	v.dtype = tensor.DType{Code: r.u8(), Bits: r.u8(), Lanes: r.u16()}
	v.span, v.offset = int32(r.u32()), int64(r.u64())
	v.device = tensor.Device{Type: int32(r.u32()), ID: int32(r.u32())}
	dims := int(r.u32())
	r.zero(uint64(r.u32()))
	if r.bad || dims > maxDims || dims*16 > len(r.rest) {
		r.bad = true
		return
	}
	v.shape, v.strides = make([]int64, dims), make([]int64, dims)
	for i := range v.shape {
		v.shape[i] = int64(r.u64())
	}
	for i := range v.strides {
		v.strides[i] = int64(r.u64())
	}
	r.check(v.fits(spans))
}

// fits says whether the view lies within its span, without overflow.
func (v *view) fits(spans []span) bool {
	empty := false
	for i, n := range v.shape {
		if n < 0 || v.strides[i] < 0 {
			return false
		}
		empty = empty || n == 0
	}
	if empty {
		return v.span == -1 && v.offset == 0
	}
	if v.span < 0 || int(v.span) >= len(spans) || v.offset < 0 || v.dtype.Size() == 0 {
		return false
	}
	room := spans[v.span].memLen - v.dtype.Size() - v.offset
	if room < 0 {
		return false
	}
	for i, n := range v.shape {
		if n > 1 && v.strides[i] > 0 {
			step := v.strides[i]
			if step > room/(n-1)/v.dtype.Size() {
				return false
			}
			room -= step * (n - 1) * v.dtype.Size()
		}
	}
	return true
}
