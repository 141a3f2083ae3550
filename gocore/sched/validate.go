package sched

import (
	"fmt"
	"slices"
	"strings"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// Check replays a program on symbols, all ranks side by side with receives that wait, under the rules of Note [What an action reads, makes and
// frees]. The first action that breaks one is returned as a [Fault] (ErrSchedule); nil says that every rank runs to its end, every block's
// VJP is taken once per microbatch, and nothing is left behind. It takes time in proportion to the actions.
func Check(s *Spec, p Program) error {
	if len(p) != s.World {
		return errs.E(errs.ErrSchedule, "the schedule has %d ranks, the spec's world is %d", len(p), s.World)
	}
	r := newReplay(s, p)
	for moved := true; moved; {
		moved = false
		for _, w := range r.workers {
			for w.pc < len(w.list) {
				waits, reason := w.step(w.list[w.pc])
				if reason != "" {
					return w.fault(w.pc, reason)
				}
				if waits {
					break
				}
				w.pc++
				moved = true
			}
		}
	}
	if err := r.stuck(); err != nil {
		return err
	}
	if err := r.unreceived(); err != nil {
		return err
	}
	return r.leftovers()
}

// replay is the state that all ranks share.
type replay struct {
	spec    *Spec
	reads   [][]int
	allowed [kindEnd]bool
	workers []*worker
	sent    map[channel][]message
}

// channel is one direction between two ranks; messages in it keep their order.
type channel struct {
	from, to int
	adjoint  bool
}

type message struct{ boundary, micro, at int }

// value is a boundary of one microbatch on one rank.
type value struct {
	state   valueState
	kept    bool
	stored  bool // an S has run
	dropped bool
	pending int // forward readers that have not run for the first time
	born    int // place of the action that made it
}

type valueState uint8

const (
	absent valueState = iota
	live
	away
)

// adjoint is the adjoint of a boundary of one microbatch on one rank.
type adjoint struct {
	missing int // contributions still to come
	passed  bool
	sent    bool
}

// graph is one block's work on one microbatch.
type graph struct {
	forward   bool // the first forward has run
	alive     bool // F or R has built a graph that no VJP has used up
	fromF     bool
	i, w      bool // the VJPs for the input and for the weights are taken
	done      bool // the VJP is complete
	last      int  // place of the last action on it
	lossTaken bool
}

// worker is one rank.
type worker struct {
	*replay
	rank    int
	list    Schedule
	pc      int
	values  []value   // (L+1) x microbatches
	adjs    []adjoint // the same
	graphs  []graph   // the same; number L is the loss
	updated []bool    // per block
	graded  []bool    // per block: G has run
}

func newReplay(s *Spec, p Program) *replay {
	r := &replay{spec: s, reads: s.reads(), sent: map[channel][]message{}}
	for k := range r.allowed {
		r.allowed[k] = len(s.Kinds) == 0
	}
	for _, name := range s.Kinds {
		if k, err := ParseKind(name); err == nil {
			r.allowed[k] = true
		}
	}
	cells := (s.Len() + 1) * s.Microbatches
	for rank, phases := range p {
		w := &worker{replay: r, rank: rank, list: phases.All(), values: make([]value, cells), adjs: make([]adjoint, cells),
			graphs: make([]graph, cells), updated: make([]bool, s.Len()), graded: make([]bool, s.Len())}
		for i, x := range s.Boundaries {
			for m := range s.Microbatches {
				if s.sink(i) == rank {
					w.adj(i, m).missing = len(s.needing(x.Consumers))
				} else {
					w.adj(i, m).missing = 1
				}
				if i == 0 && s.sink(0) == rank {
					*w.value(0, m) = value{state: live, pending: len(x.Consumers)}
				}
			}
		}
		r.workers = append(r.workers, w)
	}
	return r
}

func (w *worker) value(i, m int) *value { return &w.values[i*w.spec.Microbatches+m] }
func (w *worker) adj(i, m int) *adjoint { return &w.adjs[i*w.spec.Microbatches+m] }
func (w *worker) graph(b, m int) *graph { return &w.graphs[b*w.spec.Microbatches+m] }

func (w *worker) fault(at int, reason string) error {
	return &Fault{Rank: w.rank, At: at, Reason: reason, Text: marked(w.list, at)}
}

// step runs one action. It gives back whether a receive has to wait, or the rule that the action breaks.
func (w *worker) step(a Action) (waits bool, broken string) {
	if reason := w.numbers(a); reason != "" {
		return false, reason
	}
	b, m := a.Block, a.Micro
	switch a.Kind {
	case KindF, KindC, KindN:
		return false, w.forward(a.Kind, b, m)
	case KindR:
		return false, w.rebuild(b, m)
	case KindV, KindI, KindW:
		return false, w.vjp(a.Kind, b, m)
	case KindB:
		return false, w.loss(m)
	case KindP:
		return false, w.pass(b, m)
	case KindG, KindU:
		return false, w.perBlock(a.Kind, b)
	case KindS:
		return false, w.store(b, m)
	case KindL:
		return false, w.load(b, m)
	case KindD:
		return false, w.drop(b, m)
	case KindXF, KindXB:
		return false, w.send(a.Kind == KindXB, b, m)
	default:
		return w.receive(a.Kind == KindYB, b, m)
	}
}

// numbers checks kind, block or boundary number, microbatch, and that the action's block is on this rank.
func (w *worker) numbers(a Action) string {
	n, micros := w.spec.Len(), w.spec.Microbatches
	if a.Kind == 0 || a.Kind >= kindEnd {
		return "not a kind"
	}
	if !w.allowed[a.Kind] {
		return fmt.Sprintf("kind %s may not appear: only %s may (kinds)", a.Kind, strings.Join(w.spec.Kinds, " "))
	}
	boundary, perBlock := false, false
	switch a.Kind {
	case KindB:
		if a.Block != n {
			return fmt.Sprintf("the loss is number %d, the number of blocks", n)
		}
		if w.spec.rank(n) != w.rank {
			return fmt.Sprintf("the loss runs on rank %d", w.spec.rank(n))
		}
	case KindP, KindS, KindL, KindD, KindXF, KindYF, KindXB, KindYB:
		boundary = true
	case KindG, KindU:
		perBlock = true
	}
	switch {
	case boundary && (a.Block < 0 || a.Block > n):
		return fmt.Sprintf("there is no boundary %d: the chain has 0..%d", a.Block, n)
	case !boundary && a.Kind != KindB && (a.Block < 0 || a.Block >= n):
		return fmt.Sprintf("there is no block %d: the chain has 0..%d", a.Block, n-1)
	case !boundary && w.spec.rank(a.Block) != w.rank:
		return fmt.Sprintf("block %d is on rank %d", a.Block, w.spec.rank(a.Block))
	case perBlock && a.Micro != All:
		return fmt.Sprintf("wrong microbatch: a block's parameters belong to all of them, write %d%s*", a.Block, a.Kind)
	case a.Micro == All && !perBlock && a.Kind != KindB:
		return "wrong microbatch: * stands only with B, G and U"
	case a.Micro != All && (a.Micro < 0 || a.Micro >= micros):
		return fmt.Sprintf("wrong microbatch: the spec has 0..%d", micros-1)
	}
	return ""
}

// stuck tells why ranks wait for ever, if any does.
func (r *replay) stuck() error {
	var waiting []string
	var first *worker
	for _, w := range r.workers {
		if w.pc == len(w.list) {
			continue
		}
		a := w.list[w.pc]
		c, peer := w.route(a.Kind == KindYB, a.Block), KindXF
		if a.Kind == KindYB {
			peer = KindXB
		}
		from := r.workers[c.from]
		if !slices.Contains(from.list[from.pc:], Action{a.Block, peer, a.Micro}) {
			return w.fault(w.pc, fmt.Sprintf("unmatched receive: rank %d never sends it (%s)", c.from, Action{a.Block, peer, a.Micro}))
		}
		waiting = append(waiting, fmt.Sprintf("rank %d waits at %s for rank %d", w.rank, marked(w.list, w.pc), c.from))
		if first == nil {
			first = w
		}
	}
	if first == nil {
		return nil
	}
	return first.fault(first.pc, "deadlock: "+strings.Join(waiting, "; "))
}

// leftovers finds what a complete schedule still owes.
func (r *replay) leftovers() error {
	s := r.spec
	for _, w := range r.workers {
		for m := range s.Microbatches {
			for b := range s.Len() + 1 {
				if s.rank(b) != w.rank {
					continue
				}
				if err := w.unfinished(b, m); err != nil {
					return err
				}
			}
			for i := range s.Len() + 1 {
				if v := w.value(i, m); v.state != absent {
					return w.fault(v.born, fmt.Sprintf("boundary %d of microbatch %d is still held at the end: no %s", i, m, Action{i, KindD, m}))
				}
				if i == 0 && s.sink(0) == w.rank && s.passesAt(0) && !w.adj(0, m).passed {
					return w.fault(w.graph(s.needing(s.Boundaries[0].Consumers)[0], m).last, fmt.Sprintf("missing pass: no %s", Action{0, KindP, m}))
				}
			}
		}
		for b := range s.Len() {
			if s.Update && s.needs(b) && s.rank(b) == w.rank && !w.updated[b] {
				return w.fault(w.graph(b, s.Microbatches-1).last, fmt.Sprintf("missing update: no %s", Action{b, KindU, All}))
			}
		}
	}
	return nil
}

// unreceived finds the first send, by rank and place, that nobody receives.
func (r *replay) unreceived() error {
	var first *Fault
	for c, messages := range r.sent {
		if len(messages) == 0 {
			continue
		}
		w, at := r.workers[c.from], messages[0].at
		if first == nil || w.rank < first.Rank || w.rank == first.Rank && at < first.At {
			first = &Fault{Rank: w.rank, At: at, Text: marked(w.list, at), Reason: fmt.Sprintf("unmatched send: rank %d never receives it", c.to)}
		}
	}
	if first == nil {
		return nil
	}
	return first
}

// unfinished checks that block b (or the loss, number L) has done all its work on microbatch m.
func (w *worker) unfinished(b, m int) error {
	g := w.graph(b, m)
	switch {
	case b == w.spec.Len():
		if !g.lossTaken {
			return &Fault{Rank: w.rank, At: -1, Reason: fmt.Sprintf("missing loss: microbatch %d has no %dB", m, b)}
		}
	case !g.forward:
		return &Fault{Rank: w.rank, At: -1, Reason: fmt.Sprintf("block %d never runs forward on microbatch %d", b, m)}
	case w.spec.needs(b) && !g.done:
		return w.fault(g.last, fmt.Sprintf("missing VJP: no %s", Action{b, KindV, m}))
	}
	return nil
}
