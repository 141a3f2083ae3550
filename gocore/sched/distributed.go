package sched

import "github.com/eae-runtime/eae-runtime/gocore/errs"

// Distributed gives each rank the actions of its own blocks, microbatches in 1F1B order: the stage that has d stages after it runs d forwards
// ahead, then one forward and one backward in turn, so that it never holds more than d+1 microbatches. Four blocks on two ranks,
// three microbatches, as time runs:
//
//	rank 0   F0 F1 .. B0 F2 .. B1 .. B2
//	rank 1   .. F0 B0 F1 B1 F2 B2
//
// where on rank 0
//
//	Fm = 0Cm 1Cm 2XFm            Bm = 2YBm 1Rm 1Vm 1Dm 0Rm 0Vm 0Dm
//
// and on rank 1
//
//	Fm = 2YFm 2Cm 3Fm            Bm = 4Bm 3Vm 2Rm 2Vm 2XBm 2Dm
//
// With Order "gpipe" every rank runs all its forwards first. Receives wait, sends do not; every message goes to a later stage or answers one that did,
// and every rank takes microbatches in the same order, so that no circle of waits can close. A rank without blocks has empty lists.
//
// More than one microbatch without targets is ErrPlan: one loss on the whole output would have every rank hold everything.
func Distributed(s *Spec) (Program, error) {
	if s.wholeLoss() {
		return nil, errs.E(errs.ErrPlan,
			"the distributed schedule calls the loss per microbatch: give targets=, or run 1 microbatch (now %d)", s.Microbatches)
	}
	for _, l := range s.Leaves {
		for _, b := range l.Blocks {
			if first := l.Blocks[0]; s.Update && s.rank(b) != s.rank(first) {
				return nil, errs.E(errs.ErrPlan, "leaf group %q is read on ranks %d and %d: it cannot be updated while the step streams (update)",
					l.Name, s.rank(first), s.rank(b))
			}
		}
	}
	p := make(Program, s.World)
	after := 0 // stages after the one at hand
	for hi := s.Len(); hi > 0; after++ {
		rank, lo := s.rank(hi-1), hi-1
		for lo > 0 && s.rank(lo-1) == rank {
			lo--
		}
		p[rank] = cut(prefetch(stage(s, lo, hi, after), s.Prefetch))
		hi = lo
	}
	return p, nil
}

// stage writes the list of blocks lo..hi-1, which have `after` stages behind them.
func stage(s *Spec, lo, hi, after int) Schedule {
	e := newEmitter(s, lo, hi)
	ahead := after
	if s.Order == "gpipe" {
		ahead = s.Microbatches
	}
	ahead = min(ahead, s.Microbatches)
	for m := range ahead {
		e.forward(m)
	}
	for m := range s.Microbatches {
		if m+ahead < s.Microbatches {
			e.forward(m + ahead)
		}
		if hi == s.Len() {
			e.loss(m)
		}
		e.reverse(m)
	}
	return e.out
}
