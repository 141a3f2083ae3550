package sched

import (
	"slices"
	"strings"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

var generators = map[string]func(*Spec) (Program, error){
	"sequential":  Sequential,
	"async":       Async,
	"pipeline":    Pipeline,
	"distributed": Distributed,
}

// Generate writes the named generator's schedule for a spec in JSON (see [Spec]) and validates it. The text has two lines a rank, forward and
// reverse. Errors: ErrValue (an unknown name or a bad field, named), ErrPlan (no such schedule), ErrSchedule (a kind that the spec forbids).
func Generate(name, specJSON string) (string, error) {
	gen, ok := generators[name]
	if !ok {
		names := make([]string, 0, len(generators))
		for n := range generators {
			names = append(names, n)
		}
		slices.Sort(names)
		return "", errs.E(errs.ErrValue, "scheduler: %q is none of %s", name, strings.Join(names, ", "))
	}
	s, err := ParseSpec(specJSON)
	if err != nil {
		return "", err
	}
	p, err := gen(s)
	if err != nil {
		return "", err
	}
	text := p.String()
	return text, validated.check(specJSON, text, func() error { return Check(s, p) })
}

// Validate replays a schedule's text against a spec in JSON. Errors: ErrValue (the spec), ErrSchedule (the text, or the first action that breaks a rule, marked
// in its context). What was found valid is remembered, so that asking again costs two hashes.
func Validate(specJSON, text string) error {
	return validated.check(specJSON, text, func() error {
		s, err := ParseSpec(specJSON)
		if err != nil {
			return err
		}
		p, err := ParseProgram(text)
		if err != nil {
			return err
		}
		return Check(s, p)
	})
}
