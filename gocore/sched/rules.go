package sched

import "fmt"

// The rules, one method an action. Each gives back the rule that is broken, or "".

func (w *worker) forward(k Kind, b, m int) string {
	g := w.graph(b, m)
	switch {
	case g.done || g.i || g.w:
		return fmt.Sprintf("block %d runs after its VJP for microbatch %d", b, m)
	case k == KindF && !w.spec.needs(b):
		return fmt.Sprintf("block %d needs no VJP, its graph would be left over", b)
	case k == KindF && g.alive:
		return fmt.Sprintf("block %d has a graph for microbatch %d already", b, m)
	case !g.forward && m > 0 && len(w.spec.Blocks[b].Buffers) > 0 && !w.graph(b, m-1).forward:
		return fmt.Sprintf("block %d writes buffers and must see microbatch %d first", b, m-1)
	}
	if r := w.readAll(b, m, k, !g.forward); r != "" {
		return r
	}
	readers := 0
	if !g.forward {
		readers = len(w.spec.Boundaries[b+1].Consumers)
		if w.spec.crosses(b + 1) {
			readers = 1
		}
	}
	if r := w.produce(b+1, m, readers); r != "" {
		return r
	}
	if !g.forward && b+1 == w.spec.Len() && w.spec.KeepOutput {
		w.value(b+1, m).kept = true
	}
	g.forward, g.last = true, w.pc
	if k == KindF {
		g.alive, g.fromF = true, true
	}
	return ""
}

func (w *worker) produce(i, m, readers int) string {
	v := w.value(i, m)
	if v.state != absent {
		return fmt.Sprintf("boundary %d of microbatch %d exists already", i, m)
	}
	v.state, v.kept, v.pending, v.born = live, false, readers, w.pc
	return ""
}

// readAll reads everything that block b (or the loss) reads.
func (w *worker) readAll(b, m int, k Kind, first bool) string {
	for _, i := range w.reads[b] {
		v := w.value(i, m)
		if r := w.usable(v, i, m); r != "" {
			return r
		}
		if k == KindC {
			v.kept = true
		}
		w.handOn(v, first)
	}
	return ""
}

// handOn counts a reader off; after the last one, what nobody keeps is gone.
func (w *worker) handOn(v *value, first bool) {
	if first && v.pending > 0 {
		v.pending--
	}
	if v.pending == 0 && !v.kept {
		v.state = absent
	}
}

func (w *worker) usable(v *value, i, m int) string {
	switch {
	case v.state == live:
		return ""
	case v.state == away:
		return fmt.Sprintf("boundary %d of microbatch %d is stored away: no %s before this", i, m, Action{i, KindL, m})
	case v.dropped:
		return fmt.Sprintf("boundary %d of microbatch %d has been dropped", i, m)
	default:
		return fmt.Sprintf("boundary %d of microbatch %d is used before it exists", i, m)
	}
}

func (w *worker) rebuild(b, m int) string {
	g := w.graph(b, m)
	switch {
	case !w.spec.needs(b):
		return fmt.Sprintf("block %d needs no VJP and is never rebuilt", b)
	case !g.forward:
		return fmt.Sprintf("block %d is rebuilt before its forward", b)
	case g.done || g.i || g.w:
		return fmt.Sprintf("block %d is rebuilt after its VJP", b)
	case g.alive:
		return fmt.Sprintf("block %d has a graph for microbatch %d already", b, m)
	}
	if r := w.readAll(b, m, KindR, false); r != "" {
		return r
	}
	g.alive, g.last = true, w.pc
	return ""
}

func (w *worker) vjp(k Kind, b, m int) string {
	g, a := w.graph(b, m), w.adj(b+1, m)
	switch {
	case !w.spec.needs(b):
		return fmt.Sprintf("block %d needs no VJP", b)
	case g.done || k == KindI && g.i || k == KindW && g.w || k == KindV && (g.i || g.w):
		return fmt.Sprintf("double VJP of block %d for microbatch %d", b, m)
	case !g.alive:
		return fmt.Sprintf("block %d has no graph: neither %s nor %s before this", b, Action{b, KindF, m}, Action{b, KindR, m})
	case a.missing > 0:
		return fmt.Sprintf("adjoint %d of microbatch %d is not complete", b+1, m)
	case !a.passed && !w.spec.crosses(b+1) && w.spec.passesAt(b+1):
		return fmt.Sprintf("adjoint %d of microbatch %d has not been through the passes: no %s before this", b+1, m, Action{b + 1, KindP, m})
	case k != KindI && m > 0 && !w.graph(b, m-1).w:
		return fmt.Sprintf("wrong microbatch: gradients of block %d add up in order, %d comes first", b, m-1)
	}
	if k != KindW {
		for _, i := range w.reads[b] {
			w.adj(i, m).missing--
		}
		g.i = true
	}
	g.w = g.w || k != KindI
	if g.i && g.w {
		g.done, g.alive = true, false
	}
	g.last = w.pc
	return ""
}

func (w *worker) loss(m int) string {
	n, micros := w.spec.Len(), w.spec.Microbatches
	switch {
	case w.spec.wholeLoss() && m != All:
		return fmt.Sprintf("the loss is called once on the whole output without targets: write %dB*", n)
	case w.spec.Targets && micros > 1 && m == All:
		return fmt.Sprintf("the loss is called per microbatch with targets: write %dB0 to %dB%d", n, n, micros-1)
	}
	first, last := m, m+1
	if m == All {
		first, last = 0, micros
	}
	for ; first < last; first++ {
		g := w.graph(n, first)
		if g.lossTaken {
			return fmt.Sprintf("the loss of microbatch %d is taken twice", first)
		}
		if r := w.readAll(n, first, KindB, true); r != "" {
			return r
		}
		g.lossTaken = true
		for _, i := range w.reads[n] {
			w.adj(i, first).missing--
		}
	}
	return ""
}

func (w *worker) pass(i, m int) string {
	a := w.adj(i, m)
	switch {
	case !w.spec.Passes:
		return "the spec has no passes"
	case !w.spec.hasAdjoint(i):
		return fmt.Sprintf("adjoint %d does not exist: nothing before it needs a gradient", i)
	case w.spec.sink(i) != w.rank:
		return fmt.Sprintf("passes at boundary %d run on rank %d", i, w.spec.sink(i))
	case a.missing > 0:
		return fmt.Sprintf("adjoint %d of microbatch %d does not exist yet or is not complete", i, m)
	case a.passed:
		return fmt.Sprintf("adjoint %d of microbatch %d has been through the passes already", i, m)
	}
	a.passed = true
	return ""
}

// perBlock checks U and G: after every VJP that adds to what they touch.
func (w *worker) perBlock(k Kind, b int) string {
	switch {
	case !w.spec.needs(b):
		return fmt.Sprintf("block %d has no gradients", b)
	case k == KindU && !w.spec.Update:
		return "the spec has no streamed updates (update)"
	case k == KindU && w.updated[b]:
		return fmt.Sprintf("double update of block %d", b)
	case k == KindG && w.graded[b]:
		return fmt.Sprintf("block %d has been through the gradient passes already", b)
	case w.updated[b]:
		return fmt.Sprintf("block %d has been updated already", b)
	}
	if r := w.waitsFor(b, "block "+fmt.Sprint(b)); r != "" {
		return r
	}
	for _, l := range w.spec.Leaves {
		if w.spec.owner(l) != b {
			continue
		}
		for _, c := range w.spec.needing(l.Blocks) {
			if r := w.waitsFor(c, fmt.Sprintf("leaf group %q", l.Name)); r != "" {
				return r
			}
		}
	}
	if k == KindU {
		w.updated[b] = true
	} else {
		w.graded[b] = true
	}
	return ""
}

func (w *worker) waitsFor(b int, what string) string {
	other := w.workers[w.spec.rank(b)]
	for m := range w.spec.Microbatches {
		if !other.graph(b, m).w {
			return fmt.Sprintf("%s still has a reader: %s comes after this", what, Action{b, KindV, m})
		}
	}
	return ""
}
