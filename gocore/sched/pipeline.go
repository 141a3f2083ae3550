package sched

// Pipeline runs the batch in microbatches on one rank. With targets each microbatch goes forward and back before the next one starts, so that
// the peak falls with their number; three blocks, two microbatches:
//
//	0C0 1C0 2F0
//	3B0 2V0 1R0 1V0 1D0 0R0 0V0 0D0 0C1 1C1 2F1 3B1 2V1 1R1 1V1 1D1 0R1 0V1 0D1
//
// Without targets the loss needs the whole output: every forward, one loss, then back one microbatch at a time. The interiors shrink,
// the boundaries do not; and the last block is rebuilt whatever KeepLast says, because its graphs would otherwise all live at once:
//
//	0C0 1C0 2C0 0C1 1C1 2C1
//	3B* 2R0 2V0 2D0 1R0 1V0 1D0 0R0 0V0 0D0 2R1 2V1 2D1 1R1 1V1 1D1 0R1 0V1 0D1
//
// One microbatch is [Async]'s schedule. Loads are moved ahead as Async moves them, also across microbatches. More than one rank is ErrValue.
func Pipeline(s *Spec) (Program, error) {
	if err := oneRank("pipeline", s); err != nil {
		return nil, err
	}
	e := newEmitter(s, 0, s.Len())
	if s.wholeLoss() {
		e.keepLast = false
		for m := range s.Microbatches {
			e.forward(m)
		}
		e.loss(All)
		for m := range s.Microbatches {
			e.reverse(m)
		}
	} else {
		for m := range s.Microbatches {
			e.forward(m)
			e.loss(m)
			e.reverse(m)
		}
	}
	return Program{cut(prefetch(e.out, s.Prefetch))}, nil
}
