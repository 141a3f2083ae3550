package api

import "github.com/eae-runtime/eae-runtime/gocore/sched"

// SchedGenerate writes the named generator's schedule for a spec in JSON (see sched.Spec), validated: two lines a rank, forward and reverse.
func SchedGenerate(name, spec string) (string, error) {
	return value(func() (string, error) { return sched.Generate(name, spec) })
}

// SchedValidate replays a schedule's text against a spec; the error marks the offending action.
func SchedValidate(spec, text string) error {
	return guard(func() error { return sched.Validate(spec, text) })
}

// SchedToCSV turns a schedule's text into CSV, one row a rank and one cell an action.
func SchedToCSV(text string) (string, error) {
	return value(func() (string, error) { return sched.ToCSV(text) })
}

// SchedFromCSV is the inverse of SchedToCSV.
func SchedFromCSV(csv string) (string, error) {
	return value(func() (string, error) { return sched.FromCSV(csv) })
}
