package sched

import "fmt"

// The rules for what moves and frees boundaries, and for messages between ranks.

func (w *worker) store(i, m int) string {
	v := w.value(i, m)
	switch {
	case !w.spec.offDevice():
		return "the spec's tier is device: nothing is stored away"
	case v.stored:
		return fmt.Sprintf("boundary %d of microbatch %d is stored twice", i, m)
	case v.state != live:
		return w.usable(v, i, m)
	case v.pending > 0:
		return fmt.Sprintf("boundary %d of microbatch %d is stored away while a forward still has to read it", i, m)
	case !v.kept:
		return fmt.Sprintf("boundary %d of microbatch %d is not kept", i, m)
	}
	for _, b := range w.spec.Boundaries[i].Consumers {
		if g := w.graph(b, m); !g.fromF && (g.alive || g.done) {
			return fmt.Sprintf("boundary %d of microbatch %d is stored away after the rebuild of block %d from it", i, m, b)
		}
	}
	v.state, v.stored = away, true
	return ""
}

func (w *worker) load(i, m int) string {
	v := w.value(i, m)
	switch {
	case !v.stored:
		return fmt.Sprintf("load without store: no %s before this", Action{i, KindS, m})
	case v.state == live:
		return fmt.Sprintf("boundary %d of microbatch %d is on the device already", i, m)
	case v.state == absent:
		return w.usable(v, i, m)
	}
	v.state = live
	return ""
}

func (w *worker) drop(i, m int) string {
	v := w.value(i, m)
	if v.state == absent {
		return w.usable(v, i, m)
	}
	for _, b := range w.spec.Boundaries[i].Consumers {
		g := w.graph(b, m)
		switch {
		case b == w.spec.Len() && !g.lossTaken:
			return fmt.Sprintf("boundary %d is dropped while needed: the loss reads it later", i)
		case b < w.spec.Len() && !g.forward:
			return fmt.Sprintf("boundary %d is dropped while needed: block %d's forward reads it later", i, b)
		case b < w.spec.Len() && w.spec.needs(b) && !g.done && !(g.alive && g.fromF):
			return fmt.Sprintf("boundary %d is dropped while needed: %s comes after this", i, Action{b, KindV, m})
		}
	}
	if !v.kept {
		return fmt.Sprintf("boundary %d of microbatch %d is not kept", i, m)
	}
	v.state, v.kept, v.dropped = absent, false, true
	return ""
}

// route is the channel that a message about boundary i takes.
func (r *replay) route(isAdjoint bool, i int) channel {
	if isAdjoint {
		return channel{r.spec.sink(i), r.spec.source(i), true}
	}
	return channel{r.spec.source(i), r.spec.sink(i), false}
}

// messageRules holds for both ends of a message.
func (w *worker) messageRules(isAdjoint bool, i, end int) string {
	switch {
	case !w.spec.crosses(i):
		return fmt.Sprintf("boundary %d does not cross ranks", i)
	case end != w.rank:
		return fmt.Sprintf("this end of boundary %d is on rank %d", i, end)
	case isAdjoint && !w.spec.hasAdjoint(i):
		return fmt.Sprintf("adjoint %d does not exist: nothing before it needs a gradient", i)
	}
	return ""
}

func (w *worker) send(isAdjoint bool, i, m int) string {
	c := w.route(isAdjoint, i)
	if r := w.messageRules(isAdjoint, i, c.from); r != "" {
		return r
	}
	if isAdjoint {
		a := w.adj(i, m)
		switch {
		case a.missing > 0:
			return fmt.Sprintf("adjoint %d of microbatch %d is sent before it is complete", i, m)
		case a.sent:
			return fmt.Sprintf("adjoint %d of microbatch %d is sent twice", i, m)
		case w.spec.passesAt(i) && !a.passed:
			return fmt.Sprintf("adjoint %d of microbatch %d is sent before its passes: no %s before this", i, m, Action{i, KindP, m})
		}
		a.sent = true
	} else {
		v := w.value(i, m)
		if r := w.usable(v, i, m); r != "" {
			return r
		}
		if v.pending == 0 {
			return fmt.Sprintf("boundary %d of microbatch %d is sent twice", i, m)
		}
		w.handOn(v, true)
	}
	w.sent[c] = append(w.sent[c], message{i, m, w.pc})
	return ""
}

func (w *worker) receive(isAdjoint bool, i, m int) (waits bool, broken string) {
	c := w.route(isAdjoint, i)
	if r := w.messageRules(isAdjoint, i, c.to); r != "" {
		return false, r
	}
	queue := w.sent[c]
	if len(queue) == 0 {
		return true, ""
	}
	if q := queue[0]; q.boundary != i || q.micro != m {
		return false, fmt.Sprintf("rank %d's next message is boundary %d of microbatch %d", c.from, q.boundary, q.micro)
	}
	w.sent[c] = queue[1:]
	if isAdjoint {
		w.adj(i, m).missing = 0
		return false, ""
	}
	return false, w.produce(i, m, len(w.spec.Boundaries[i].Consumers))
}
