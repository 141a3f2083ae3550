package sched

import "github.com/eae-runtime/eae-runtime/gocore/errs"

// Sequential is the reference: every block forward, the loss, every block back (the paper's Algorithm 2). Four blocks with passes, and the
// same on another tier with a last block that is rebuilt (the line break is the cut between forward and reverse):
//
//	0C0 1C0 2C0 3F0
//	4B0 4P0 3V0 3P0 2R0 2V0 2P0 2D0 1R0 1V0 1P0 1D0 0R0 0V0 0P0 0D0
//
//	0C0 0S0 1C0 1S0 2C0 2S0 3C0 3S0
//	4B0 3L0 3R0 3V0 3D0 2L0 2R0 2V0 2D0 1L0 1R0 1V0 1D0 0L0 0R0 0V0 0D0
//
// A frozen prefix runs once and keeps nothing:
//
//	0N0 1N0 2C0 3F0
//	4B0 4P0 3V0 3P0 2R0 2V0 2D0
//
// More than one microbatch or rank is ErrValue.
func Sequential(s *Spec) (Program, error) { return oneSweep("sequential", s, 0) }

// Async is [Sequential] with every load started Prefetch blocks ahead of its rebuild, so that it overlaps them; stores stand where they can
// first stand, and overlap the next block's forward. Four blocks on the host tier, Prefetch 1, then 2:
//
//	0C0 0S0 1C0 1S0 2C0 2S0 3F0
//	4B0 2L0 3V0 1L0 2R0 2V0 2D0 0L0 1R0 1V0 1D0 0R0 0V0 0D0
//
//	0C0 0S0 1C0 1S0 2C0 2S0 3F0
//	2L0 4B0 1L0 3V0 0L0 2R0 2V0 2D0 1R0 1V0 1D0 0R0 0V0 0D0
//
// On the device tier it is the sequential schedule. More than one microbatch or rank is ErrValue.
func Async(s *Spec) (Program, error) { return oneSweep("async", s, s.Prefetch) }

func oneSweep(name string, s *Spec, ahead int) (Program, error) {
	if s.Microbatches != 1 {
		return nil, errs.E(errs.ErrValue, "microbatches: the %s schedule runs 1, not %d; use pipeline", name, s.Microbatches)
	}
	if err := oneRank(name, s); err != nil {
		return nil, err
	}
	e := newEmitter(s, 0, s.Len())
	e.forward(0)
	e.loss(0)
	e.reverse(0)
	return Program{cut(prefetch(e.out, ahead))}, nil
}

func oneRank(name string, s *Spec) error {
	if s.World != 1 {
		return errs.E(errs.ErrValue, "world: the %s schedule runs on 1 rank, not %d; use distributed", name, s.World)
	}
	return nil
}
