package sched

import (
	"slices"
)

// naive judges a schedule of a plain chain by what must come before what, pair by pair. It is written apart from the validator and knows
// nothing of values or states: a schedule is right if it has exactly the generated actions and no pair stands the wrong way round.
type naive struct {
	spec  *Spec
	lists []Schedule // the generated actions, per rank
	pairs map[event][]event
}

// event is an action on a rank.
type event struct {
	Action
	rank int
}

func newNaive(s *Spec, p Program) *naive {
	n := &naive{spec: s, pairs: map[event][]event{}}
	for _, r := range p {
		n.lists = append(n.lists, r.All())
	}
	n.order()
	return n
}

// find gives the event of the first listed kind that the schedule has for this number and microbatch.
func (n *naive) find(block, micro int, kinds ...Kind) (event, bool) {
	for _, k := range kinds {
		for r, list := range n.lists {
			if a := (Action{block, k, micro}); slices.Contains(list, a) {
				return event{a, r}, true
			}
		}
	}
	return event{}, false
}

// chain says that the events follow one another; those that the schedule lacks are left out.
func (n *naive) chain(events ...func() (event, bool)) {
	var last *event
	for _, f := range events {
		if e, ok := f(); ok {
			if last != nil {
				n.pairs[*last] = append(n.pairs[*last], e)
			}
			last = &e
		}
	}
}

func (n *naive) order() {
	l, micros := n.spec.Len(), n.spec.Microbatches
	at := func(b, m int, kinds ...Kind) func() (event, bool) {
		return func() (event, bool) { return n.find(b, m, kinds...) }
	}
	fwd := func(b, m int) func() (event, bool) { return at(b, m, KindF, KindC, KindN) }
	for m := range micros {
		loss := at(l, m, KindB)
		if n.spec.wholeLoss() {
			loss = at(l, All, KindB)
		}
		n.chain(fwd(l-1, m), loss, at(l, m, KindP), at(l-1, m, KindV))
		n.chain(loss, at(l, m, KindD))
		for b := range l {
			n.chain(fwd(b, m), at(b+1, m, KindXF), at(b+1, m, KindYF), fwd(b+1, m))
			n.chain(fwd(b, m), at(b, m, KindS), at(b, m, KindL), at(b, m, KindR), at(b, m, KindV), at(b, m, KindD))
			n.chain(fwd(b, m), at(b, m, KindV), at(b, m, KindP), at(b, m, KindXB), at(b, m, KindYB), at(b-1, m, KindV))
			n.chain(at(b, m, KindV), at(b, All, KindU))
			for _, leaf := range n.spec.Leaves {
				for _, c := range leaf.Blocks {
					if first := slices.Min(leaf.Blocks); c != first {
						n.chain(at(c, m, KindV), at(first, All, KindU))
					}
				}
			}
			if m > 0 {
				n.chain(at(b, m-1, KindV), at(b, m, KindV))
				if len(n.spec.Blocks[b].Buffers) > 0 {
					n.chain(fwd(b, m-1), fwd(b, m))
				}
			}
		}
	}
}

// dependent tells whether b must come after a, directly.
func (n *naive) dependent(a, b event) bool { return slices.Contains(n.pairs[a], b) }

// right judges lists that may differ from the generated ones.
func (n *naive) right(lists []Schedule) bool {
	for r, list := range lists {
		seen := map[Action]bool{}
		for _, a := range list {
			if seen[a] || !slices.Contains(n.lists[r], a) {
				return false
			}
			seen[a] = true
		}
		if len(list) != len(n.lists[r]) {
			return false
		}
	}
	return n.messagesInOrder(lists) && n.finishes(lists)
}

// messagesInOrder compares, for every pair of ranks and direction, what is sent with what is received.
func (n *naive) messagesInOrder(lists []Schedule) bool {
	for _, way := range [][2]Kind{{KindXF, KindYF}, {KindXB, KindYB}} {
		type ends struct{ from, to int }
		sent, received := map[ends]Schedule{}, map[ends]Schedule{}
		for r, list := range lists {
			for _, a := range list {
				if a.Kind != way[0] && a.Kind != way[1] {
					continue
				}
				peer := way[0]
				if a.Kind == way[0] {
					peer = way[1]
				}
				other, _ := n.find(a.Block, a.Micro, peer)
				a.Kind = way[0]
				if peer == way[1] {
					sent[ends{r, other.rank}] = append(sent[ends{r, other.rank}], a)
				} else {
					received[ends{other.rank, r}] = append(received[ends{other.rank, r}], a)
				}
			}
		}
		for k, list := range sent {
			if !slices.Equal(list, received[k]) {
				return false
			}
		}
	}
	return true
}

// finishes runs the ranks side by side: an action may run when all that must come before it have run.
func (n *naive) finishes(lists []Schedule) bool {
	missing := map[event]int{}
	for _, after := range n.pairs {
		for _, e := range after {
			missing[e]++
		}
	}
	pc := make([]int, len(lists))
	for moved := true; moved; {
		moved = false
		for r, list := range lists {
			for pc[r] < len(list) && missing[event{list[pc[r]], r}] == 0 {
				for _, e := range n.pairs[event{list[pc[r]], r}] {
					missing[e]--
				}
				pc[r]++
				moved = true
			}
		}
	}
	for r, list := range lists {
		if pc[r] < len(list) {
			return false
		}
	}
	return true
}
