package sched

import (
	"strings"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// Phases is one rank's schedule, cut in two so that a caller can run the forward alone: Forward ends where the first action
// stands that only a reverse pass needs.
type Phases struct {
	Forward, Reverse Schedule
}

// All is the whole list in the order in which it runs.
func (p Phases) All() Schedule {
	return append(append(make(Schedule, 0, len(p.Forward)+len(p.Reverse)), p.Forward...), p.Reverse...)
}

// cut divides a rank's list before its first action that is neither a forward nor a store nor an activation's message.
func cut(s Schedule) Phases {
	for i, a := range s {
		if !a.Kind.isForward() && a.Kind != KindS && a.Kind != KindXF && a.Kind != KindYF {
			return Phases{s[:i:i], s[i:]}
		}
	}
	return Phases{Forward: s}
}

// Program is the schedule of a step: one entry a rank.
type Program []Phases

// String prints two lines a rank, forward and reverse, without a final newline; a rank without actions has two empty lines.
func (p Program) String() string {
	lines := make([]string, 0, 2*len(p))
	for _, r := range p {
		lines = append(lines, r.Forward.String(), r.Reverse.String())
	}
	return strings.Join(lines, "\n")
}

// ParseProgram is the inverse of [Program.String]. A single line is one rank with an empty reverse. Errors are ErrSchedule naming line,
// place in the line and token.
func ParseProgram(text string) (Program, error) {
	lines := strings.Split(text, "\n")
	if len(lines) == 1 {
		lines = append(lines, "")
	}
	if len(lines)%2 != 0 {
		return nil, errs.E(errs.ErrSchedule, "a schedule has two lines a rank (forward, reverse): %d lines were given", len(lines))
	}
	p := make(Program, len(lines)/2)
	for i, line := range lines {
		s, err := ParseSchedule(line)
		if err != nil {
			return nil, errs.E(errs.ErrSchedule, "line %d, %w", i+1, err)
		}
		if i%2 == 0 {
			p[i/2].Forward = s
		} else {
			p[i/2].Reverse = s
		}
	}
	return p, nil
}
