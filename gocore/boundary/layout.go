package boundary

import (
	"cmp"
	"slices"
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/memory"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// span is one run of memory that some tensors of a boundary share. It has two addresses: memOff in a readable buffer, packOff
// in the encoded payload. Both are relative to a 64-byte aligned start, and memOff keeps the source's address modulo 64.
type span struct {
	code     code
	elem     uint8 // bytes of an element where code is not asIs, else 0
	phase    uint16
	memOff   int64
	memLen   int64
	packOff  int64
	packLen  int64
	src      unsafe.Pointer // where the span was when the layout was made; not written to files
	firstUse int            // the tensor that opened it
}

// view is one tensor of a boundary: a span, and the offset of its element zero in it. span is -1 for a tensor without elements.
type view struct {
	dtype   tensor.DType
	device  tensor.Device
	span    int32
	offset  int64
	shape   []int64
	strides []int64
}

// layout says how a boundary's tensors lie in memory and in a payload.
type layout struct {
	spans   []span
	views   []view
	memLen  int64 // bytes of a readable buffer
	packLen int64 // bytes of a payload, padding included
	encoded bool  // some span is not asIs
}

// maxDims is far above what any producer has, and bounds what a damaged header can ask for.
const maxDims = 64

// plan lays out tensors. Overlapping spans are merged, so that aliases stay aliases. Spans whose tensors are all float32 or all
// float64 are encoded by c. ErrBridge for a negative stride, a missing or ragged shape, or tensors on several devices.
func plan(key int64, tensors []tensor.Tensor, c code) (*layout, error) {
	l := &layout{views: make([]view, len(tensors)), spans: make([]span, 0, len(tensors))}
	for i := range tensors {
		t := &tensors[i]
		if err := checkTensor(key, i, t); err != nil {
			return nil, err
		}
		if t.Device != tensors[0].Device && !(t.Device.Host() && tensors[0].Device.Host()) {
			return nil, errs.E(errs.ErrBridge, "boundary %d: tensors 0 and %d are on devices %v and %v; store them as two boundaries",
				key, i, tensors[0].Device, t.Device)
		}
		l.views[i] = view{dtype: t.DType, device: t.Device, span: -1, shape: t.Shape, strides: t.Strides}
	}
	for n, run := range merged(tensors) {
		first := run.members[0].index
		l.spans = append(l.spans, span{
			phase: uint16(run.lo % memory.Alignment), memLen: int64(run.hi - run.lo), src: tensors[first].Data, firstUse: first,
		})
		for _, r := range run.members {
			l.views[r.index].span, l.views[r.index].offset = int32(n), int64(r.lo-run.lo)
		}
	}
	for i := range l.spans {
		l.spans[i].chooseCode(i, l, c)
	}
	l.place()
	return l, nil
}

func checkTensor(key int64, i int, t *tensor.Tensor) error {
	if len(t.Shape) != len(t.Strides) || len(t.Shape) > maxDims {
		return errs.E(errs.ErrBridge, "boundary %d: tensor %d has %d sizes and %d strides; give one stride a size, at most %d",
			key, i, len(t.Shape), len(t.Strides), maxDims)
	}
	for d, n := range t.Shape {
		if n < 0 || t.Strides[d] < 0 {
			return errs.E(errs.ErrBridge, "boundary %d: tensor %d has size %d and stride %d in dimension %d; resolve negative views first",
				key, i, n, t.Strides[d], d)
		}
	}
	if t.Data == nil && t.Numel() > 0 {
		return errs.E(errs.ErrBridge, "boundary %d: tensor %d has no memory; meta tensors cannot be stored", key, i)
	}
	return nil
}

// reach is the memory that one tensor touches; run is that of tensors which overlap.
type reach struct {
	lo, hi uintptr
	index  int
}

type run struct {
	lo, hi  uintptr
	members []reach // by address
}

// merged gives the runs of memory that the tensors touch, by address. Tensors without elements touch none.
func merged(tensors []tensor.Tensor) []run {
	reaches := make([]reach, 0, len(tensors))
	for i := range tensors {
		t := &tensors[i]
		if lo, hi := t.Span(); hi > lo {
			base := uintptr(t.Data)
			reaches = append(reaches, reach{base + uintptr(lo), base + uintptr(hi), i})
		}
	}
	slices.SortStableFunc(reaches, func(a, b reach) int { return cmp.Compare(a.lo, b.lo) })
	runs := make([]run, 0, len(reaches))
	for i, r := range reaches {
		if last := len(runs) - 1; last >= 0 && r.lo < runs[last].hi {
			runs[last].hi = max(runs[last].hi, r.hi)
			runs[last].members = append(runs[last].members, r)
		} else {
			runs = append(runs, run{r.lo, r.hi, reaches[i : i+1 : i+1]})
		}
	}
	return runs
}

// chooseCode encodes the span if every tensor in it is of one float type and sits on whole elements.
func (s *span) chooseCode(index int, l *layout, c code) {
	s.code, s.elem = asIs, 0
	first := l.views[s.firstUse]
	if c == asIs || first.dtype != tensor.Float32 && first.dtype != tensor.Float64 {
		return
	}
	size := first.dtype.Size()
	if int64(s.phase)%size != 0 {
		return // element addresses that the conversion loops may not load
	}
	for i := range l.views {
		if v := &l.views[i]; int(v.span) == index && (v.dtype != first.dtype || v.offset%size != 0) {
			return
		}
	}
	s.code, s.elem = c, uint8(size)
}

// place computes every offset and the totals from the spans' codes, phases and memory lengths alone, so that a file's header
// determines them.
func (l *layout) place() {
	l.memLen, l.packLen, l.encoded = 0, 0, false
	for i := range l.spans {
		s := &l.spans[i]
		s.memOff = memory.Round(l.memLen) + int64(s.phase)
		l.memLen = s.memOff + s.memLen
		if s.code == asIs {
			s.packOff = memory.Round(l.packLen) + int64(s.phase)
			s.packLen = s.memLen
		} else {
			s.packOff = memory.Round(l.packLen)
			s.packLen = s.memLen / int64(s.elem) * 2
			l.encoded = true
		}
		l.packLen = s.packOff + s.packLen
	}
}

// bytes is what the payload holds without padding.
func (l *layout) bytes() int64 {
	total := int64(0)
	for i := range l.spans {
		total += l.spans[i].packLen
	}
	return total
}

// spanBytes is what readable memory holds without padding.
func (l *layout) spanBytes() int64 {
	total := int64(0)
	for i := range l.spans {
		total += l.spans[i].memLen
	}
	return total
}

// device is where the boundary's tensors are; the CPU for an empty one.
func (l *layout) device() tensor.Device {
	if len(l.views) == 0 {
		return tensor.CPU
	}
	return l.views[0].device
}

// tensorsAt gives the views over readable memory at base. Pinned sources come back as plain host memory.
func (l *layout) tensorsAt(out []tensor.Tensor, base unsafe.Pointer) []tensor.Tensor {
	for i := range l.views {
		v := &l.views[i]
		t := tensor.Tensor{DType: v.dtype, Device: v.device, Shape: v.shape, Strides: v.strides}
		if t.Device.Host() {
			t.Device = tensor.CPU
		}
		if v.span >= 0 {
			t.Data = unsafe.Add(base, l.spans[v.span].memOff+v.offset)
		}
		out = append(out, t)
	}
	return out
}

// copies gives the copies between the spans' sources and readable memory at base.
func (l *layout) copies(base unsafe.Pointer) []Span {
	out := make([]Span, len(l.spans))
	for i := range l.spans {
		s := &l.spans[i]
		out[i] = Span{Dst: unsafe.Add(base, s.memOff), Src: s.src, N: s.memLen}
	}
	return out
}

// gather copies every span from its source to readable memory at base, without encoding.
func (l *layout) gather(base unsafe.Pointer) {
	for i := range l.spans {
		s := &l.spans[i]
		copy(unsafe.Slice((*byte)(unsafe.Add(base, s.memOff)), s.memLen), unsafe.Slice((*byte)(s.src), s.memLen))
	}
}

// from gives where span i's bytes are: in readable memory at base, or at its source if base is nil.
func (l *layout) from(i int, base unsafe.Pointer) unsafe.Pointer {
	if base == nil {
		return l.spans[i].src
	}
	return unsafe.Add(base, l.spans[i].memOff)
}

// pack writes the payload at dst from readable memory at base, or from the spans' sources if base is nil.
func (l *layout) pack(dst, base unsafe.Pointer) error {
	for i := range l.spans {
		s := &l.spans[i]
		from, to := l.from(i, base), unsafe.Add(dst, s.packOff)
		if s.code == asIs {
			copy(unsafe.Slice((*byte)(to), s.packLen), unsafe.Slice((*byte)(from), s.memLen))
		} else if err := s.code.encode(to, from, s.memLen/int64(s.elem), s.elem); err != nil {
			return err
		}
	}
	return nil
}

// unpack writes readable memory at base from the payload at src.
func (l *layout) unpack(base, src unsafe.Pointer) error {
	for i := range l.spans {
		s := &l.spans[i]
		from, to := unsafe.Add(src, s.packOff), unsafe.Add(base, s.memOff)
		if s.code == asIs {
			copy(unsafe.Slice((*byte)(to), s.memLen), unsafe.Slice((*byte)(from), s.packLen))
		} else if err := s.code.decode(to, from, s.memLen/int64(s.elem), s.elem); err != nil {
			return err
		}
	}
	return nil
}
