package trace

import "encoding/json"

// Total sums up the spans of one name. Times are seconds.
type Total struct {
	Count int64   `json:"count"`
	Sum   float64 `json:"total_seconds"`
	Mean  float64 `json:"mean_seconds"`
	Min   float64 `json:"min_seconds"`
	Max   float64 `json:"max_seconds"`
	Bytes int64   `json:"bytes"`
}

func (t *Total) add(s Span) {
	d := float64(s.End-s.Start) / 1e9
	if t.Count == 0 || d < t.Min {
		t.Min = d
	}
	t.Max = max(t.Max, d)
	t.Count++
	t.Sum += d
	t.Mean = t.Sum / float64(t.Count)
	t.Bytes += s.Bytes
}

// Totals gives a copy of the sums per name, over everything recorded since the last reset; nil when switched off.
func (r *Recorder) Totals() map[string]Total {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make(map[string]Total, len(r.total))
	for name, t := range r.total {
		out[name] = *t
	}
	return out
}

// Report is [Recorder.Totals] as a JSON object {name: {count, total_seconds, mean_seconds, min_seconds, max_seconds, bytes}}, names sorted; "{}"
// when nothing was recorded or the recorder is switched off.
func (r *Recorder) Report() string {
	totals := r.Totals()
	if totals == nil {
		return "{}"
	}
	out, err := json.Marshal(totals)
	if err != nil {
		panic(err) // strings, integers and finite floats always marshal
	}
	return string(out)
}
