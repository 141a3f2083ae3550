package sched

import (
	"encoding/csv"
	"errors"
	"io"
	"strings"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// phaseMark is the cell between a rank's forward and reverse.
const phaseMark = "|"

// ToCSV turns a schedule's text into CSV: one row a rank, one cell an action, a cell "|" between forward and reverse, no header. This is
// the layout of torch.distributed.pipelining's files, so the same viewers show both. Errors are those of [ParseProgram].
func ToCSV(text string) (string, error) {
	p, err := ParseProgram(text)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, r := range p {
		for _, a := range r.Forward {
			b.WriteString(a.String())
			b.WriteByte(',')
		}
		b.WriteString(phaseMark)
		for _, a := range r.Reverse {
			b.WriteByte(',')
			b.WriteString(a.String())
		}
		b.WriteByte('\n')
	}
	return b.String(), nil
}

// FromCSV is the inverse of [ToCSV]. Empty cells (idle slots) are skipped; a row without "|" is cut before its first action that only a reverse
// pass needs. Errors are ErrSchedule naming row, cell (both counted from 1) and token.
func FromCSV(text string) (string, error) {
	r := csv.NewReader(strings.NewReader(text))
	r.FieldsPerRecord = -1
	r.TrimLeadingSpace = true
	var p Program
	for row := 1; ; row++ {
		cells, err := r.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return "", errs.E(errs.ErrSchedule, "row %d: %w", row, err)
		}
		phases, err := rowPhases(cells)
		if err != nil {
			return "", errs.E(errs.ErrSchedule, "row %d, %w", row, err)
		}
		p = append(p, phases)
	}
	if len(p) == 0 {
		return "", errs.E(errs.ErrSchedule, "the CSV text has no row: one row a rank is expected")
	}
	return p.String(), nil
}

func rowPhases(cells []string) (Phases, error) {
	var list Schedule
	mark := -1
	for i, cell := range cells {
		cell = strings.TrimSpace(cell)
		switch {
		case cell == "":
		case cell == phaseMark && mark >= 0:
			return Phases{}, errs.E(errs.ErrSchedule, "cell %d: a second %q", i+1, phaseMark)
		case cell == phaseMark:
			mark = len(list)
		default:
			a, err := Parse(cell)
			if err != nil {
				return Phases{}, errs.E(errs.ErrSchedule, "cell %d: %w", i+1, err)
			}
			list = append(list, a)
		}
	}
	if mark < 0 {
		return cut(list), nil
	}
	return Phases{list[:mark:mark], list[mark:]}, nil
}
