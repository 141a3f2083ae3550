package trace

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// event is one entry of the Chrome trace format. Times are microseconds.
type event struct {
	Phase string         `json:"ph"`
	Pid   int            `json:"pid"`
	Tid   int            `json:"tid"`
	Name  string         `json:"name"`
	Time  *float64       `json:"ts,omitempty"`
	Dur   *float64       `json:"dur,omitempty"`
	Args  map[string]any `json:"args,omitempty"`
}

// Write writes Chrome trace JSON: the process's name, a thread a lane, one "X" event a span (args.bytes where known), and the counter track
// "bytes". Time starts at 0 with the earliest entry. Spans of one lane that overlap without one holding the other (several workers of a store)
// are laid out on further threads "LANE 2", "LANE 3", ..., because the viewers cannot draw them on one. otherData.lost says what the ring
// has forgotten. Errors are w's. A recorder that is switched off writes an empty trace.
func (r *Recorder) Write(w io.Writer) error {
	var spans []Span
	var samples []sample
	process, lost := "eae-runtime", int64(0)
	if r != nil {
		r.mu.Lock()
		spans, samples = r.spans.list(), r.bytes.list()
		process, lost = r.opt.Process, r.spans.lost+r.bytes.lost
		r.mu.Unlock()
	}
	b := bufio.NewWriter(w)
	fmt.Fprintf(b, `{"displayTimeUnit":"ms","otherData":{"lost":%d},"traceEvents":[`+"\n", lost)
	err := writeEvent(b, event{Phase: "M", Pid: 1, Name: "process_name", Args: map[string]any{"name": process}})
	put := func(e event) {
		if err == nil {
			b.WriteString(",\n")
			err = writeEvent(b, e)
		}
	}
	zero := earliest(spans, samples)
	micros := func(ns int64) *float64 { us := float64(ns) / 1e3; return &us }
	for i, lane := range lanes(spans) {
		tid := i + 1
		put(event{Phase: "M", Pid: 1, Tid: tid, Name: "thread_name", Args: map[string]any{"name": lane.name}})
		put(event{Phase: "M", Pid: 1, Tid: tid, Name: "thread_sort_index", Args: map[string]any{"sort_index": tid}})
		for _, s := range lane.spans {
			e := event{Phase: "X", Pid: 1, Tid: tid, Name: s.Name, Time: micros(s.Start - zero), Dur: micros(s.End - s.Start)}
			if s.Bytes != 0 {
				e.Args = map[string]any{"bytes": s.Bytes}
			}
			put(e)
		}
	}
	slices.SortStableFunc(samples, func(a, b sample) int { return cmp.Compare(a.at, b.at) })
	for _, s := range samples {
		put(event{Phase: "C", Pid: 1, Name: "bytes", Time: micros(s.at - zero), Args: map[string]any{"bytes": s.bytes}})
	}
	if err != nil {
		return err
	}
	b.WriteString("\n]}\n")
	return b.Flush()
}

func writeEvent(b *bufio.Writer, e event) error {
	text, err := json.Marshal(e)
	if err != nil {
		return err
	}
	_, err = b.Write(text)
	return err
}

// WriteFile writes the trace to path, whole or not at all: a temporary file beside it is renamed. Errors are ErrValue naming the path.
func (r *Recorder) WriteFile(path string) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".trace-*")
	if err != nil {
		return errs.E(errs.ErrValue, "trace file %s: %w", path, err)
	}
	err = r.Write(f)
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Chmod(f.Name(), 0o644) // CreateTemp gives 0600; a trace is meant to be passed on
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errs.E(errs.ErrValue, "trace file %s: %w", path, errors.Join(err, os.Remove(f.Name())))
	}
	return nil
}

func earliest(spans []Span, samples []sample) int64 {
	var times []int64
	for _, s := range spans {
		times = append(times, s.Start)
	}
	for _, s := range samples {
		times = append(times, s.at)
	}
	if len(times) == 0 {
		return 0
	}
	return slices.Min(times)
}

// lane is one thread of the picture: spans that are apart or nested, by start.
type lane struct {
	name  string
	spans []Span
	open  []int64 // ends of the spans that hold the next one
}

// takes adds the span if it is apart from or inside the lane's last ones.
func (l *lane) takes(s Span) bool {
	for len(l.open) > 0 && l.open[len(l.open)-1] <= s.Start {
		l.open = l.open[:len(l.open)-1]
	}
	if len(l.open) > 0 && l.open[len(l.open)-1] < s.End {
		return false
	}
	l.open = append(l.open, s.End)
	l.spans = append(l.spans, s)
	return true
}

// lanes deals spans to threads: executor, store and passes first, then the rest by name.
func lanes(spans []Span) []*lane {
	order := func(name string) int {
		if i := slices.Index([]string{LaneExecutor, LaneStore, LanePasses}, name); i >= 0 {
			return i
		}
		return 3
	}
	slices.SortStableFunc(spans, func(a, b Span) int {
		return cmp.Or(cmp.Compare(order(a.Lane), order(b.Lane)), cmp.Compare(a.Lane, b.Lane), cmp.Compare(a.Start, b.Start), cmp.Compare(b.End, a.End))
	})
	var out []*lane
	first := 0 // where the threads of the lane at hand begin
	for i, s := range spans {
		if i == 0 || s.Lane != spans[i-1].Lane {
			first = len(out)
		}
		if slices.ContainsFunc(out[first:], func(l *lane) bool { return l.takes(s) }) {
			continue
		}
		name := s.Lane
		if n := len(out) - first; n > 0 {
			name = fmt.Sprintf("%s %d", s.Lane, n+1)
		}
		l := &lane{name: name}
		l.takes(s)
		out = append(out, l)
	}
	return out
}
