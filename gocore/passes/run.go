package passes

import (
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// run is one gradient on its way through passes. Each tensor is in one of three conditions: still the source, untouched (written false, no
// kernels); waiting for kernels (pending); or in its destination (written true), possibly with further kernels waiting.
type run struct {
	ctx     *Context
	g       *Grad
	written []bool
	pending [][]Kernel
	// names are the passes that the pending kernels belong to.
	names [][]string
}

// newRun checks what no pass could compute with. The destinations may be set already (Sweep), else they are taken from the buffers when
// needed.
func newRun(ctx *Context, g *Grad) (*run, error) {
	if s := g.scale(); !(s > 0) || math.IsInf(s, 0) {
		return nil, errs.E(errs.ErrValue, "the loss scale is %v, allowed is a positive finite number", g.LossScale)
	}
	if g.Dst == nil {
		g.Dst = make([]tensor.Tensor, len(g.Src))
	}
	for i := range g.Src {
		t := &g.Src[i]
		if !t.Device.Host() {
			return nil, errs.E(errs.ErrPass, "tensor %d%s is on device type %d, allowed is host memory", g.First+i, g.where(), t.Device.Type)
		}
		switch t.DType {
		case tensor.Float32, tensor.Float64, tensor.Float16, tensor.BFloat16:
		default:
			return nil, errs.E(errs.ErrPass, "tensor %d%s is of %s, allowed are float16, bfloat16, float32 and float64",
				g.First+i, g.where(), typeName(t.DType))
		}
	}
	n := len(g.Src)
	return &run{ctx: ctx, g: g, written: make([]bool, n), pending: make([][]Kernel, n), names: make([][]string, n)}, nil
}

// where names the gradient's place in an error message.
func (g *Grad) where() string {
	if g.Step < 0 {
		return fmt.Sprintf(" at boundary %d, microbatch %d", g.Block, g.Microbatch)
	}
	return fmt.Sprintf(" at boundary %d, microbatch %d, step %d", g.Block, g.Microbatch, g.Step)
}

func typeName(d tensor.DType) string {
	kind, known := map[uint8]string{tensor.CodeInt: "int", tensor.CodeUint: "uint", tensor.CodeFloat: "float",
		tensor.CodeBFloat: "bfloat", tensor.CodeComplex: "complex", tensor.CodeBool: "bool"}[d.Code]
	if !known {
		return fmt.Sprintf("DLPack type code %d with %d bits", d.Code, d.Bits)
	}
	if d.Code == tensor.CodeBool {
		return kind
	}
	return fmt.Sprintf("%s%d", kind, d.Bits)
}

// ensure gives tensor i a destination.
func (r *run) ensure(i int) error {
	src, dst := &r.g.Src[i], &r.g.Dst[i]
	if dst.Shape != nil {
		return nil
	}
	*dst = tensor.Tensor{DType: src.DType, Device: tensor.CPU, Shape: append([]int64{}, src.Shape...), Strides: tensor.RowMajor(src.Shape)}
	if src.Numel() == 0 {
		return nil
	}
	var buffers Buffers = heap{}
	if r.ctx.Buffers != nil {
		buffers = r.ctx.Buffers
	}
	ptr, release, err := buffers.Get(src.Bytes())
	if err != nil {
		*dst = tensor.Tensor{}
		return err
	}
	dst.Data, dst.Release = ptr, release
	return nil
}

// source is where tensor i's elements are now: its destination once written, else its source.
func (r *run) source(i int) *tensor.Tensor {
	if r.written[i] {
		return &r.g.Dst[i]
	}
	return &r.g.Src[i]
}

// settle brings tensors lo to hi into a condition in which they can be read as contiguous memory: no kernels waiting, no odd strides.
func (r *run) settle(lo, hi int) error {
	if err := r.sweep(lo, hi); err != nil {
		return err
	}
	for i := lo; i < hi; i++ {
		if !r.written[i] && !r.g.Src[i].Contiguous() {
			if err := r.copy(i); err != nil {
				return err
			}
		}
	}
	return nil
}

// copy brings the untouched tensor i into its destination.
func (r *run) copy(i int) error {
	if err := r.ensure(i); err != nil {
		return err
	}
	r.written[i] = true
	if r.g.Src[i].Data == r.g.Dst[i].Data {
		return nil
	}
	return copyInto(r.ctx, &r.g.Dst[i], &r.g.Src[i])
}

// view is the gradient as the next pass sees it.
func (r *run) view(lo, hi int) *Grad {
	part := r.g.slice(lo, hi)
	part.Src = make([]tensor.Tensor, hi-lo)
	for i := range part.Src {
		part.Src[i] = *r.source(lo + i)
		part.Src[i].Release = nil
	}
	part.Dst = nil
	return part
}

// step takes tensors lo to hi through one pass.
func (r *run) step(p Pass, lo, hi int) error {
	sweeper, ok := p.(Sweeper)
	if !ok {
		return r.apply(p, lo, hi)
	}
	if sweeper.Looks() {
		if err := r.settle(lo, hi); err != nil {
			return err
		}
	}
	kernels, err := sweeper.Prepare(r.ctx, r.view(lo, hi))
	if err != nil || kernels == nil {
		return err
	}
	if len(kernels) != hi-lo {
		return errs.E(errs.ErrPass, "Prepare gave %d kernels for %d tensors", len(kernels), hi-lo)
	}
	for i, k := range kernels {
		if !k.none() {
			r.pending[lo+i] = append(r.pending[lo+i], k)
			r.names[lo+i] = append(r.names[lo+i], p.Name())
		}
	}
	return nil
}

// apply runs a pass that is not a Sweeper.
func (r *run) apply(p Pass, lo, hi int) error {
	if err := r.settle(lo, hi); err != nil {
		return err
	}
	for i := lo; i < hi; i++ {
		if err := r.ensure(i); err != nil {
			return err
		}
	}
	part := r.view(lo, hi)
	part.Dst = make([]tensor.Tensor, hi-lo)
	for i := range part.Dst {
		part.Dst[i] = r.g.Dst[lo+i]
		part.Dst[i].Release = nil
	}
	if err := p.Apply(r.ctx, part); err != nil {
		return err
	}
	for i := lo; i < hi; i++ {
		r.written[i] = true
	}
	return nil
}

// sweep runs the waiting kernels of tensors lo to hi.
func (r *run) sweep(lo, hi int) error {
	var jobs []sweepJob
	for i := lo; i < hi; i++ {
		if len(r.pending[i]) == 0 {
			continue
		}
		if err := r.ensure(i); err != nil {
			return err
		}
		if !r.written[i] && !r.g.Src[i].Contiguous() {
			if err := r.copy(i); err != nil {
				return err
			}
		}
		job := sweepJob{kernels: r.pending[i], names: r.names[i], dst: &r.g.Dst[i], src: r.source(i)}
		for chunk := range chunks(job.dst.Numel()) {
			job.chunk = chunk
			jobs = append(jobs, job)
		}
		r.pending[i], r.names[i], r.written[i] = nil, nil, true
	}
	return r.ctx.Workers.Run(len(jobs), func(j int) error {
		err := guard(func() error {
			jobs[j].run()
			return nil
		})
		if err != nil {
			// The kernels of several passes run together, and often only when the pass behind them asks for results.
			return &passError{errs.E(errs.ErrPass, "pass %s%s: %w", strings.Join(jobs[j].names, " or "), r.g.where(), err)}
		}
		return nil
	})
}

type sweepJob struct {
	kernels  []Kernel
	names    []string
	dst, src *tensor.Tensor
	chunk    int
}

func (j sweepJob) run() {
	at := int64(j.chunk) * chunkLen
	end := min(at+chunkLen, j.dst.Numel())
	for ; at < end; at += blockLen {
		runBlock(j.kernels, j.dst, j.src, at, min(blockLen, end-at))
	}
}

// finish brings every tensor into its destination.
func (r *run) finish() error {
	if err := r.sweep(0, len(r.g.Src)); err != nil {
		return err
	}
	for i := range r.g.Src {
		switch {
		case r.written[i]:
		case r.ctx.MoveUnchanged && r.g.Dst[i].Shape == nil:
			r.g.Dst[i] = r.g.Src[i]
			r.g.Src[i].Release = nil
		default:
			if err := r.copy(i); err != nil {
				return err
			}
		}
	}
	return nil
}

// Sweep is the Apply of a Sweeper outside a chain: g.Dst is set and holds contiguous tensors of g.Src's shapes and types. A source may have
// any strides when it is apart from its destination.
func Sweep(ctx *Context, g *Grad, p Sweeper) error {
	if len(g.Dst) != len(g.Src) {
		return errs.E(errs.ErrPass, "pass %s%s: %d destinations for %d sources", p.Name(), g.where(), len(g.Dst), len(g.Src))
	}
	for i := range g.Dst {
		if !g.Dst[i].Contiguous() || g.Dst[i].DType != g.Src[i].DType || g.Dst[i].Numel() != g.Src[i].Numel() {
			return errs.E(errs.ErrPass, "pass %s%s: destination %d does not fit its source", p.Name(), g.where(), i)
		}
		if g.Dst[i].Shape == nil {
			g.Dst[i].Shape, g.Dst[i].Strides = []int64{}, []int64{}
		}
	}
	r, err := newRun(ctx, g)
	if err == nil {
		err = r.step(p, 0, len(g.Src))
	}
	if err == nil {
		err = r.finish()
	}
	return inPass(p.Name(), g, err)
}

// inPass makes an error say which pass failed where, once.
func inPass(name string, g *Grad, err error) error {
	var named *passError
	if err == nil || errors.As(err, &named) {
		return err
	}
	return &passError{errs.E(errs.ErrPass, "pass %s%s: %w", name, g.where(), err)}
}

type passError struct{ error }

func (e *passError) Unwrap() error { return e.error }
