package passes

func init() {
	mustRegister(Spec{
		Name:   "regularization",
		Help:   "scale the gradient by 1-strength",
		Params: []ParamSpec{{Name: "strength", Type: Float, Default: 0.0, Help: "the share taken away; 0 changes nothing"}},
		New:    func(p Params) (Pass, error) { return &Regularization{Strength: p.Float("strength")}, nil },
	})
}

// Regularization multiplies by 1-Strength, as `t * (1.0 - strength)` does in the tensor's type: the factor is rounded to float32 for the types
// up to float32, and the product to the type. NaN and Inf are handed on.
type Regularization struct {
	Strength float64
}

// Name is "regularization".
func (*Regularization) Name() string { return "regularization" }

// Looks is false.
func (*Regularization) Looks() bool { return false }

// Apply scales g.Src into g.Dst.
func (r *Regularization) Apply(ctx *Context, g *Grad) error { return Sweep(ctx, g, r) }

// Prepare gives the scaling, or nothing when Strength is 0.
func (r *Regularization) Prepare(_ *Context, g *Grad) ([]Kernel, error) {
	if r.Strength == 0 {
		return nil, nil
	}
	kernels := make([]Kernel, len(g.Src))
	for i := range kernels {
		kernels[i] = scaleKernel(float32(1-r.Strength), 1-r.Strength)
	}
	return kernels, nil
}
