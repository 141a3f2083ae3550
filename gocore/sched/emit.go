package sched

import "slices"

// emitter writes the actions of one rank's share of the chain, blocks lo..hi-1.
type emitter struct {
	spec     *Spec
	reads    [][]int
	lo, hi   int
	keepLast bool
	out      Schedule
}

func newEmitter(s *Spec, lo, hi int) *emitter {
	return &emitter{spec: s, reads: s.reads(), lo: lo, hi: hi, keepLast: s.KeepLast}
}

func (e *emitter) add(k Kind, block, micro int) { e.out = append(e.out, Action{block, k, micro}) }

// kind is how block b runs forward.
func (e *emitter) kind(b int) Kind {
	switch {
	case !e.spec.needs(b):
		return KindN
	case e.keepLast && b == e.spec.Len()-1:
		return KindF
	default:
		return KindC
	}
}

// rebuilt lists the consumers of boundary i that run as C, for which it is kept.
func (e *emitter) rebuilt(i int) []int {
	var out []int
	for _, b := range e.spec.Boundaries[i].Consumers {
		if b < e.spec.Len() && e.kind(b) == KindC {
			out = append(out, b)
		}
	}
	return out
}

// forward writes microbatch m's forward: receives, blocks, sends, and each store behind the last forward reader.
func (e *emitter) forward(m int) {
	for i := range e.spec.Boundaries {
		if e.receives(i) {
			e.add(KindYF, i, m)
		}
	}
	for b := e.lo; b < e.hi; b++ {
		e.add(e.kind(b), b, m)
		e.stores(b, m)
		if e.spec.crosses(b + 1) {
			e.add(KindXF, b+1, m)
		}
	}
}

// receives tells whether boundary i comes to these blocks from another rank.
func (e *emitter) receives(i int) bool {
	first := e.spec.Boundaries[i].Consumers[0]
	return e.spec.crosses(i) && first >= e.lo && min(first, e.spec.Len()-1) < e.hi
}

func (e *emitter) stores(reader, m int) {
	if !e.spec.offDevice() {
		return
	}
	for _, i := range e.reads[reader] {
		if c := e.spec.Boundaries[i].Consumers; c[len(c)-1] == reader && len(e.rebuilt(i)) > 0 {
			e.add(KindS, i, m)
		}
	}
}

// loss writes the boundary operator for one microbatch or for All.
func (e *emitter) loss(m int) {
	n := e.spec.Len()
	e.add(KindB, n, m)
	first, last := m, m+1
	if m == All {
		first, last = 0, e.spec.Microbatches
	}
	for ; first < last; first++ {
		e.stores(n, first)
	}
}

// reverse writes microbatch m's reverse pass, from the complete adjoints at the loss down to block lo.
func (e *emitter) reverse(m int) {
	s := e.spec
	n := s.Len()
	for i := n; i >= 0; i-- {
		if i > e.lo && i <= e.hi && s.crosses(i) && s.hasAdjoint(i) {
			e.add(KindYB, i, m)
		}
	}
	if e.hi == n {
		e.passes(n, m)
	}
	for b := e.hi - 1; b >= e.lo; b-- {
		if s.needs(b) {
			e.block(b, m)
		}
		if b == e.lo {
			e.sendAdjoints(m)
		}
		e.drops(b, m)
		if s.Update && s.needs(b) && m == s.Microbatches-1 {
			e.add(KindU, b, All)
		}
	}
	if e.hi == n && s.KeepOutput {
		e.add(KindD, n, m)
	}
}

func (e *emitter) block(b, m int) {
	if e.kind(b) == KindC {
		e.loads(b, m)
		e.add(KindR, b, m)
	}
	e.add(KindV, b, m)
	e.passes(b, m)
}

// loads brings back what block b is the first to rebuild from.
func (e *emitter) loads(b, m int) {
	if !e.spec.offDevice() {
		return
	}
	for _, i := range e.reads[b] {
		if slices.Max(e.rebuilt(i)) == b {
			e.add(KindL, i, m)
		}
	}
}

// passes writes P for the adjoints that reader completes.
func (e *emitter) passes(reader, m int) {
	for _, i := range slices.Backward(e.reads[reader]) {
		if e.spec.passesAt(i) && e.spec.needing(e.spec.Boundaries[i].Consumers)[0] == reader {
			e.add(KindP, i, m)
		}
	}
}

func (e *emitter) sendAdjoints(m int) {
	for i := e.spec.Len(); i >= 0; i-- {
		if e.receives(i) && e.spec.hasAdjoint(i) {
			e.add(KindXB, i, m)
		}
	}
}

// drops frees what block b is the last to rebuild from.
func (e *emitter) drops(b, m int) {
	for _, i := range slices.Backward(e.reads[b]) {
		if r := e.rebuilt(i); len(r) > 0 && r[0] == b {
			e.add(KindD, i, m)
		}
	}
}

// prefetch moves every load ahead of the `ahead` block actions that stand before its rebuild, though never ahead of its own microbatch's loss
// or last forward, nor of its own store:
//
//	ahead 0   3V0 2L0 2R0 2V0 1L0 1R0 1V0
//	ahead 1   2L0 3V0 1L0 2R0 2V0 1R0 1V0
func prefetch(s Schedule, ahead int) Schedule {
	base := make(Schedule, 0, len(s))
	before := map[int]Schedule{} // place in base -> loads that go in front of it
	for _, a := range s {
		if a.Kind != KindL {
			base = append(base, a)
			continue
		}
		at, left := len(base), ahead
		for j := len(base) - 1; j >= 0 && left > 0; j-- {
			if b := base[j]; b.Kind == KindS && b.Block == a.Block && b.Micro == a.Micro || b.Kind.isForward() && b.Micro == a.Micro {
				break
			}
			if startsBlock(base, j) {
				at, left = j, left-1
			}
			if b := base[j]; b.Kind == KindB && (b.Micro == All || b.Micro == a.Micro) {
				break
			}
		}
		before[at] = append(before[at], a)
	}
	out := make(Schedule, 0, len(s))
	for i, a := range base {
		out = append(append(out, before[i]...), a)
	}
	return out
}

// startsBlock tells whether a block's work begins at s[j]: a rebuild's V belongs to the R before it.
func startsBlock(s Schedule, j int) bool {
	switch k := s[j].Kind; k {
	case KindV:
		return j == 0 || s[j-1] != Action{s[j].Block, KindR, s[j].Micro}
	default:
		return k.isForward() || k == KindR || k == KindB
	}
}
