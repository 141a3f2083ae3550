package sched

import (
	"fmt"
	"strings"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// Fault says which action of a schedule breaks a rule and why. It is an ErrSchedule.
type Fault struct {
	Rank   int    // the rank in whose list the action stands
	At     int    // its place in forward and reverse together, from 0; -1 where an action is missing and nothing stands for it
	Reason string // what is wrong with it
	Text   string // the action in its context, marked: "... 2V0 >>2D0<< 2R0 ..."
}

// Error gives rank, place, marked context and reason.
func (f *Fault) Error() string {
	if f.At < 0 {
		return fmt.Sprintf("rank %d: %s", f.Rank, f.Reason)
	}
	return fmt.Sprintf("rank %d, action %d: %s: %s", f.Rank, f.At+1, f.Text, f.Reason)
}

// Unwrap makes errors.Is(f, errs.ErrSchedule) hold.
func (f *Fault) Unwrap() error { return errs.ErrSchedule }

// marked shows list[at] between up to two neighbours on each side.
func marked(list Schedule, at int) string {
	const around = 2
	var parts []string
	if at > around {
		parts = append(parts, "...")
	}
	for i := max(0, at-around); i < min(len(list), at+around+1); i++ {
		if i == at {
			parts = append(parts, ">>"+list[i].String()+"<<")
		} else {
			parts = append(parts, list[i].String())
		}
	}
	if at+around+1 < len(list) {
		parts = append(parts, "...")
	}
	return strings.Join(parts, " ")
}
