package passes

import (
	"math"

	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

func init() {
	mustRegister(Spec{
		Name: "logging",
		Help: "report statistics when the caller asks for them; changes nothing",
		New:  func(Params) (Pass, error) { return &Logging{}, nil },
	})
}

// Logging reports statistics over all tensors of the boundary, in unscaled units, when Context.Stats asks for them. It changes nothing and
// otherwise costs nothing.
type Logging struct {
	last map[string]any
}

// Name is "logging".
func (*Logging) Name() string { return "logging" }

// Looks is true: statistics need every element.
func (*Logging) Looks() bool { return true }

// Report gives mean, std (of the population), min, max, norm, numel, has_nan and has_inf, or nil when nobody asked. The values are those of the
// elements as float32, summed in float64; NaN among the elements makes all but numel, has_nan and has_inf NaN. Without elements the
// numbers are 0.
func (l *Logging) Report() map[string]any { return l.last }

// Apply copies g.Src to g.Dst.
func (l *Logging) Apply(ctx *Context, g *Grad) error { return Sweep(ctx, g, l) }

// Prepare takes the statistics.
func (l *Logging) Prepare(ctx *Context, g *Grad) ([]Kernel, error) {
	l.last = nil
	if !ctx.Stats {
		return nil, nil
	}
	var all moments
	for i := range g.Src {
		m, err := tensorMoments(ctx, &g.Src[i])
		if err != nil {
			return nil, err
		}
		all.add(m)
	}
	l.last = all.report(g.scale())
	return nil, nil
}

// moments are running statistics; the zero value is that of no elements.
type moments struct {
	n              float64
	mean, m2       float64
	min, max       float64
	squares        float64
	hasNaN, hasInf bool
}

// of takes the statistics of a block in two sweeps: the mean first, then the deviations from it.
func of(v []float32) moments {
	m := moments{n: float64(len(v)), min: math.Inf(1), max: math.Inf(-1)}
	sum := 0.0
	for _, x := range v {
		d := float64(x)
		sum += d
		m.squares += d * d
		if d < m.min {
			m.min = d
		}
		if d > m.max {
			m.max = d
		}
	}
	m.mean = sum / m.n
	for _, x := range v {
		d := float64(x) - m.mean
		m.m2 += d * d
	}
	if math.IsNaN(m.squares) || math.IsInf(m.squares, 0) {
		for _, x := range v {
			m.hasNaN = m.hasNaN || x != x
			m.hasInf = m.hasInf || math.IsInf(float64(x), 0)
		}
		if m.hasNaN {
			m.min, m.max = math.NaN(), math.NaN()
		}
	}
	return m
}

// add joins the statistics of two sets (Chan, Golub, LeVeque 1979).
func (m *moments) add(o moments) {
	if o.n == 0 {
		return
	}
	if m.n == 0 {
		*m = o
		return
	}
	n := m.n + o.n
	delta := o.mean - m.mean
	m.m2 += o.m2 + delta*delta*m.n*o.n/n
	m.mean += delta * o.n / n
	m.n = n
	m.min, m.max = min(m.min, o.min), max(m.max, o.max)
	m.squares += o.squares
	m.hasNaN, m.hasInf = m.hasNaN || o.hasNaN, m.hasInf || o.hasInf
}

func tensorMoments(ctx *Context, t *tensor.Tensor) (moments, error) {
	parts := make([]moments, chunks(t.Numel()))
	err := look(ctx, t, func(chunk int, v []float32) { parts[chunk].add(of(v)) })
	var all moments
	for _, part := range parts {
		all.add(part)
	}
	return all, err
}

func (m moments) report(scale float64) map[string]any {
	std := 0.0
	if m.n > 1 {
		std = math.Sqrt(m.m2 / m.n)
	}
	return map[string]any{
		"mean": m.mean / scale, "std": std / scale, "min": m.min / scale, "max": m.max / scale, "norm": math.Sqrt(m.squares) / scale,
		"numel": int64(m.n), "has_nan": m.hasNaN, "has_inf": m.hasInf,
	}
}
