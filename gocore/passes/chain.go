package passes

import (
	"encoding/json"
	"fmt"
	"sync"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// Chain is a run of passes applied in one call. Its methods may be called from any goroutine; they exclude each other.
type Chain struct {
	mu      sync.Mutex
	passes  []Pass
	reports []Report
	workers *Workers
	owned   bool
	closed  bool
}

// Report is what one pass of a chain reported about the last Apply. A value of a per-tensor pass on a boundary of several tensors is a list with
// one entry a tensor that reported it.
type Report struct {
	Name   string
	Values map[string]any
}

// NewChain builds a chain from a JSON list such as [{"name":"clip","params":{"max_norm":1.0}}, {"name":"bf16"}]. A name that is not
// registered, a parameter that the pass does not have and a value that is not allowed give errs.ErrValue and say what is. The chain has its own
// workers, which start with the first large tensor; Close ends them.
func NewChain(specJSON string) (*Chain, error) {
	list, err := parse(specJSON)
	if err != nil {
		return nil, err
	}
	c := ChainOf(NewWorkers(0), list...)
	c.owned = true
	return c, nil
}

// ChainOf makes a chain of given passes. The workers (nil: none) stay the caller's; Close does not end them.
func ChainOf(workers *Workers, list ...Pass) *Chain {
	return &Chain{passes: list, workers: workers, reports: make([]Report, len(list))}
}

// Len is the number of passes.
func (c *Chain) Len() int { return len(c.passes) }

// Names lists the passes in order.
func (c *Chain) Names() []string {
	names := make([]string, len(c.passes))
	for i, p := range c.passes {
		names[i] = p.Name()
	}
	return names
}

// Apply takes g.Src through the passes and sets g.Dst, whose tensors the caller then owns and frees. ctx may be nil. It
// blocks until done and never writes a source. On an error no destination is left, g.Dst is nil, and the error, of kind
// errs.ErrPass, names pass, block, microbatch and step; a panic in a pass is such an error. It returns errs.ErrClosed after Close and errs.ErrValue for a loss scale that is not positive.
func (c *Chain) Apply(ctx *Context, g *Grad) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errs.E(errs.ErrClosed, "the chain of passes is closed")
	}
	local := Context{}
	if ctx != nil {
		local = *ctx
	}
	if local.Workers == nil {
		local.Workers = c.workers
	}
	g.Dst = nil
	for i := range c.reports {
		c.reports[i] = Report{Name: c.passes[i].Name()}
	}
	err := c.apply(&local, g)
	if err != nil {
		for i := range g.Dst {
			g.Dst[i].Free()
		}
		g.Dst = nil
	}
	return err
}

func (c *Chain) apply(ctx *Context, g *Grad) error {
	r, err := newRun(ctx, g)
	if err != nil {
		return err
	}
	for i, p := range c.passes {
		ctx.Index = i
		if err := c.one(r, i, p); err != nil {
			return inPass(p.Name(), g, err)
		}
	}
	if err := guard(r.finish); err != nil {
		return inPass(fmt.Sprint(c.Names()), g, err)
	}
	return nil
}

// one takes the run through pass i, tensor by tensor if the pass wants that, and keeps its reports.
func (c *Chain) one(r *run, i int, p Pass) error {
	n := len(r.g.Src)
	single := n == 1
	if pt, ok := p.(PerTensor); !ok || !pt.PerTensor() {
		if err := guard(func() error { return r.step(p, 0, n) }); err != nil {
			return err
		}
		c.keep(i, p, true)
		return nil
	}
	for t := range n {
		if err := guard(func() error { return r.step(p, t, t+1) }); err != nil {
			return err
		}
		c.keep(i, p, single)
	}
	return nil
}

// keep stores a report of pass i: as it is, or appended to the lists of the tensors before.
func (c *Chain) keep(i int, p Pass, single bool) {
	reporter, ok := p.(Reporter)
	if !ok {
		return
	}
	for key, value := range reporter.Report() {
		if c.reports[i].Values == nil {
			c.reports[i].Values = map[string]any{}
		}
		if !single {
			list, _ := c.reports[i].Values[key].([]any)
			value = append(list, value)
		}
		c.reports[i].Values[key] = value
	}
}

// Reports lists, pass by pass, what the last Apply reported.
func (c *Chain) Reports() []Report {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]Report(nil), c.reports...)
}

// Meta is Reports as a JSON list of objects, {"name": ..., and the values}. Numbers that JSON has no word for are written NaN, Infinity and
// -Infinity, as Python's json module reads them.
func (c *Chain) Meta() string {
	var out []byte
	for _, r := range c.Reports() {
		out = appendReport(out, r)
	}
	return "[" + string(out) + "]"
}

// chainState is the text form of State.
type chainState struct {
	Version int         `json:"version"`
	Passes  []passState `json:"passes"`
}

type passState struct {
	Name  string `json:"name"`
	State []byte `json:"state,omitempty"`
}

// State is the state of all passes as JSON text, for SetState of a chain with the same names in the same order.
func (c *Chain) State() (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	state, err := c.state()
	if err != nil {
		return "", err
	}
	text, err := json.Marshal(state)
	return string(text), err
}

func (c *Chain) state() (chainState, error) {
	state := chainState{Version: 1, Passes: make([]passState, len(c.passes))}
	for i, p := range c.passes {
		state.Passes[i].Name = p.Name()
		s, ok := p.(Stateful)
		if !ok {
			continue
		}
		data, err := s.State()
		if err != nil {
			return state, errs.E(errs.ErrPass, "pass %s gave no state: %w", p.Name(), err)
		}
		state.Passes[i].State = data
	}
	return state, nil
}

// SetState puts back what State gave. Text that is not a state, or one of other passes, gives errs.ErrValue; after any error all passes are as
// they were.
func (c *Chain) SetState(text string) error {
	var state chainState
	if err := json.Unmarshal([]byte(text), &state); err != nil || state.Version != 1 {
		return errs.E(errs.ErrValue, "this is not the state of a chain (version %d, known is 1): %v", state.Version, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(state.Passes) != len(c.passes) {
		return errs.E(errs.ErrValue, "a state of %d passes does not fit the chain %v", len(state.Passes), c.Names())
	}
	for i, p := range c.passes {
		if state.Passes[i].Name != p.Name() {
			return errs.E(errs.ErrValue, "state %d is of pass %q, the chain has %q there", i, state.Passes[i].Name, p.Name())
		}
	}
	before, err := c.state()
	if err != nil {
		return err
	}
	for i, p := range c.passes {
		s, ok := p.(Stateful)
		if !ok {
			continue
		}
		if err := s.SetState(state.Passes[i].State); err != nil {
			for k := range i {
				if s, ok := c.passes[k].(Stateful); ok {
					if undo := s.SetState(before.Passes[k].State); undo != nil {
						return errs.E(errs.ErrPass, "pass %s refuses its own state: %w", s.Name(), undo)
					}
				}
			}
			return errs.E(errs.ErrValue, "pass %s refuses the state: %w", p.Name(), err)
		}
	}
	return nil
}

// Close ends the chain's own workers. A second call does nothing; Apply then returns errs.ErrClosed.
func (c *Chain) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	c.closed = true
	if c.owned {
		c.workers.Close()
	}
}
