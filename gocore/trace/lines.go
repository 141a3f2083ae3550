package trace

import (
	"math"
	"strconv"
	"strings"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// AddLines records a batch of lines, fields separated by tabs:
//
//	LANE  NAME  START  END  [BYTES]     a span
//	bytes AT    VALUE                   a value of the bytes counter
//
// A time is nanoseconds since the Unix epoch if it is a whole number, seconds if it has a point or an exponent. Empty lines are skipped. A bad
// line is ErrValue naming it, and then nothing of the batch is recorded. Names cannot hold tabs or newlines.
func (r *Recorder) AddLines(lines string) error {
	var spans []Span
	var samples []sample
	n := 0
	for line := range strings.SplitSeq(lines, "\n") {
		n++
		if line == "" {
			continue
		}
		f := strings.Split(line, "\t")
		var err error
		switch {
		case len(f) == 3 && f[0] == "bytes":
			var s sample
			if s, err = parseSample(f); err == nil {
				samples = append(samples, s)
			}
		case len(f) == 4 || len(f) == 5:
			var s Span
			if s, err = parseSpan(f); err == nil {
				spans = append(spans, s)
			}
		default:
			err = errs.E(errs.ErrValue, "%d fields are neither a span (lane, name, start, end, bytes) nor a counter (bytes, at, value)", len(f))
		}
		if err != nil {
			return errs.E(errs.ErrValue, "trace line %d %q: %w", n, line, err)
		}
	}
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range spans {
		r.add(s)
	}
	for _, s := range samples {
		r.bytes.push(s)
	}
	return nil
}

func parseSpan(f []string) (s Span, err error) {
	s.Lane, s.Name = f[0], f[1]
	if s.Start, err = parseTime(f[2]); err != nil {
		return s, err
	}
	if s.End, err = parseTime(f[3]); err != nil {
		return s, err
	}
	if len(f) == 5 {
		s.Bytes, err = parseInt(f[4])
	}
	return s, err
}

func parseSample(f []string) (s sample, err error) {
	if s.at, err = parseTime(f[1]); err != nil {
		return s, err
	}
	s.bytes, err = parseInt(f[2])
	return s, err
}

func parseInt(text string) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, errs.E(errs.ErrValue, "%q is not a whole number", text)
	}
	return n, nil
}

// parseTime gives nanoseconds.
func parseTime(text string) (int64, error) {
	if !strings.ContainsAny(text, ".eE") {
		return parseInt(text)
	}
	seconds, err := strconv.ParseFloat(text, 64)
	if err != nil || math.Abs(seconds) > math.MaxInt64/2e9 {
		return 0, errs.E(errs.ErrValue, "%q is not a time", text)
	}
	return int64(math.Round(seconds * 1e9)), nil
}
