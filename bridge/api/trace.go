package api

import "github.com/eae-runtime/eae-runtime/gocore/trace"

var traces = table[*trace.Recorder]{noun: "trace"}

// TraceNew makes a recorder from the JSON form of trace.Options ("" for the defaults).
func TraceNew(spec string) (int64, error) {
	return value(func() (int64, error) {
		recorder, err := trace.Open(spec)
		if err != nil {
			return 0, err
		}
		return traces.add(recorder), nil
	})
}

// recorderOf is the recorder of a handle, nil for 0.
func recorderOf(h int64) (*trace.Recorder, error) {
	if h == 0 {
		return nil, nil
	}
	return traces.get(h)
}

// TraceAdd records a batch of lines (see trace.Recorder.AddLines).
func TraceAdd(h int64, lines string) error {
	return guard(func() error {
		recorder, err := traces.get(h)
		if err != nil {
			return err
		}
		return recorder.AddLines(lines)
	})
}

// TraceWrite writes Chrome trace JSON to path, whole or not at all.
func TraceWrite(h int64, path string) error {
	return guard(func() error {
		recorder, err := traces.get(h)
		if err != nil {
			return err
		}
		return recorder.WriteFile(path)
	})
}

// TraceReport gives the totals per name as JSON.
func TraceReport(h int64) (string, error) {
	return value(func() (string, error) {
		recorder, err := traces.get(h)
		if err != nil {
			return "", err
		}
		return recorder.Report(), nil
	})
}

// TraceClose forgets the recorder. A second call does nothing.
func TraceClose(h int64) error {
	return guard(func() error {
		traces.remove(h)
		return nil
	})
}
