package trace

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// picture is what a viewer reads.
type picture struct {
	DisplayTimeUnit string `json:"displayTimeUnit"`
	OtherData       struct{ Lost int64 }
	TraceEvents     []struct {
		Ph, Name string
		Pid, Tid int
		Ts, Dur  *float64
		Args     map[string]any
	}
}

func read(t *testing.T, r *Recorder) picture {
	var b bytes.Buffer
	require.NoError(t, r.Write(&b))
	var p picture
	d := json.NewDecoder(&b)
	require.NoError(t, d.Decode(&p))
	return p
}

// draw prints one line an event, so that a test can be laid out as the picture.
func (p picture) draw() []string {
	names := map[int]string{}
	var out []string
	for _, e := range p.TraceEvents {
		switch e.Ph {
		case "M":
			if e.Name == "thread_name" {
				names[e.Tid] = e.Args["name"].(string)
			}
		case "X":
			line := fmt.Sprintf("%s: %s %g+%g", names[e.Tid], e.Name, *e.Ts, *e.Dur)
			if n, ok := e.Args["bytes"]; ok {
				line += fmt.Sprintf(" (%v)", n)
			}
			out = append(out, line)
		case "C":
			out = append(out, fmt.Sprintf("%s at %g = %v", e.Name, *e.Ts, e.Args["bytes"]))
		}
	}
	return out
}

func open(t *testing.T, spec string) *Recorder {
	r, err := Open(spec)
	require.NoError(t, err)
	return r
}

func TestPicture(t *testing.T) {
	r := open(t, `{"process":"rank 0"}`)
	require.NoError(t, r.AddLines(strings.Join([]string{
		"store\t0S0\t3000\t9000\t64",
		"executor\t1C0\t4000\t6000",
		"executor\t0C0\t1000\t3000\t128",
		"", // a batch may end with a newline
		"bytes\t6000\t0",
		"bytes\t2000\t128",
	}, "\n")))
	r.Add(Span{"zeta", "late", 9000, 8000, 0})
	r.Add(Span{LanePasses, "int8", 7000, 8500, 0})
	p := read(t, r)
	assert.Equal(t, "ms", p.DisplayTimeUnit)
	assert.Equal(t, "process_name", p.TraceEvents[0].Name)
	assert.Equal(t, "rank 0", p.TraceEvents[0].Args["name"])
	assert.Equal(t, []string{
		"executor: 0C0 0+2 (128)",
		"executor: 1C0 3+2",
		"store: 0S0 2+6 (64)",
		"passes: int8 6+1.5",
		"zeta: late 8+0",
		"bytes at 1 = 128",
		"bytes at 5 = 0",
	}, p.draw())
}

// TestOverlapsGetThreadsOfTheirOwn: nested spans share a thread, crossing ones do not.
func TestOverlapsGetThreadsOfTheirOwn(t *testing.T) {
	r := open(t, "")
	for _, s := range []Span{
		{"store", "a", 0, 10000, 0},
		{"store", "inside a", 2000, 4000, 0},
		{"store", "crosses a", 5000, 15000, 0},
		{"store", "after a", 10000, 12000, 0},
		{"store", "crosses both", 11000, 20000, 0},
	} {
		r.Add(s)
	}
	assert.Equal(t, []string{
		"store: a 0+10", "store: inside a 2+2", "store: after a 10+2",
		"store 2: crosses a 5+10",
		"store 3: crosses both 11+9",
	}, read(t, r).draw())
}

func TestEscaping(t *testing.T) {
	r := open(t, "")
	name := "a \"quote\" \\ </script> \x01 \xff 漢\n"
	r.Add(Span{"lane \"x\"", name, 0, 1, 0})
	p := read(t, r)
	last := p.TraceEvents[len(p.TraceEvents)-1]
	assert.Equal(t, strings.ToValidUTF8(name, "\ufffd"), last.Name)
	assert.Contains(t, r.Report(), `a \"quote\"`)
}

func TestSecondsAndNanoseconds(t *testing.T) {
	r := open(t, "")
	require.NoError(t, r.AddLines("executor\t0C0\t1.5\t1.75e0\t8\nexecutor\t0C0\t2000000000\t2750000000\t8\n"))
	assert.JSONEq(t, `{"0C0":{"count":2,"total_seconds":1,"mean_seconds":0.5,"min_seconds":0.25,"max_seconds":0.75,"bytes":16}}`, r.Report())
}

// TestBadLines: the line is named and nothing of its batch is recorded.
func TestBadLines(t *testing.T) {
	r := open(t, "")
	for _, c := range []struct{ line, want string }{
		{"executor\t0C0", "2 fields"},
		{"counter\t1\t2", "3 fields"},
		{"executor\t0C0\tx\t1", `"x"`},
		{"executor\t0C0\t1\ty", `"y"`},
		{"executor\t0C0\t1\t2\t0.5", `"0.5"`},
		{"executor\t0C0\t1e30\t2", `"1e30"`},
		{"executor\t0C0\t1.2.3\t2", `"1.2.3"`},
		{"bytes\t1\tz", `"z"`},
		{"bytes\tq\t1", `"q"`},
	} {
		err := r.AddLines("executor\tgood\t1\t2\n" + c.line)
		require.ErrorIs(t, err, errs.ErrValue, c.line)
		assert.ErrorContains(t, err, "trace line 2")
		assert.ErrorContains(t, err, c.want)
	}
	assert.Equal(t, "{}", r.Report())
}

func TestBadOptions(t *testing.T) {
	for _, spec := range []string{`{"capacity":-1}`, `{"capacity":"many"}`, `{"size":1}`, `{`, `{} {}`} {
		_, err := Open(spec)
		assert.ErrorIs(t, err, errs.ErrValue, spec)
	}
}

// TestRingForgetsTheOldest: the picture is bounded, the totals are not.
func TestRingForgetsTheOldest(t *testing.T) {
	r := open(t, `{"capacity":3}`)
	for i := range int64(5) {
		r.Add(Span{"executor", fmt.Sprint(i), i * 1000, i*1000 + 500, 0})
		r.Count(i*1000, i)
	}
	assert.EqualValues(t, 4, r.Lost())
	p := read(t, r)
	assert.EqualValues(t, 4, p.OtherData.Lost)
	assert.Equal(t, []string{"executor: 2 0+0.5", "executor: 3 1+0.5", "executor: 4 2+0.5", "bytes at 0 = 2", "bytes at 1 = 3", "bytes at 2 = 4"}, p.draw())
	assert.Len(t, r.Totals(), 5)
	r.Reset()
	assert.Zero(t, r.Lost())
	assert.Empty(t, read(t, r).draw())
	assert.Equal(t, "{}", r.Report())
}

// TestNilIsSwitchedOff: every method, no work.
func TestNilIsSwitchedOff(t *testing.T) {
	var r *Recorder
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		r.End(LaneStore, "0S0", r.Start(), 1)
		r.Add(Span{})
		r.Count(0, 1)
	}))
	assert.Zero(t, r.Start())
	assert.NoError(t, r.AddLines("executor\t0C0\t1\t2"))
	assert.Error(t, r.AddLines("nonsense"), "a bad line is bad also when nobody listens")
	assert.Zero(t, r.Lost())
	assert.Equal(t, "{}", r.Report())
	assert.Empty(t, read(t, r).draw())
	r.Reset()
}

func TestConcurrentUse(t *testing.T) {
	r := open(t, `{"capacity":64}`)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 100 {
				r.End(LaneStore, "move", r.Start(), 2)
				assert.NoError(t, r.AddLines(fmt.Sprintf("executor\t%dC%d\t1\t2", w, i)))
				r.Count(r.Start(), int64(i))
				if i%50 == 0 {
					assert.NoError(t, r.Write(&bytes.Buffer{}))
					r.Report()
				}
			}
		})
	}
	wg.Wait()
	total := r.Totals()["move"]
	assert.EqualValues(t, 400, total.Count)
	assert.EqualValues(t, 800, total.Bytes)
	assert.EqualValues(t, 800-64+400-64, r.Lost())
}

// TestClockRuns: a span measured here has a length and stands at the wall clock's time.
func TestClockRuns(t *testing.T) {
	r := open(t, "")
	a := r.Start()
	b := r.Start()
	assert.GreaterOrEqual(t, b, a)
	assert.Greater(t, a, int64(1.7e18))
}

func TestWriteFile(t *testing.T) {
	dir := t.TempDir()
	r := open(t, "")
	r.Add(Span{"executor", "0C0", 0, 1000, 0})
	path := filepath.Join(dir, "trace.json")
	for range 2 { // the second time over the first
		require.NoError(t, r.WriteFile(path))
	}
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.True(t, json.Valid(text))

	for _, bad := range []string{filepath.Join(dir, "none", "trace.json"), dir} {
		err := r.WriteFile(bad)
		require.ErrorIs(t, err, errs.ErrValue)
		assert.ErrorContains(t, err, bad)
	}
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Len(t, left, 1, "nothing but the trace is left")
}

type full struct{ room int }

func (f *full) Write(p []byte) (int, error) {
	if len(p) > f.room {
		return 0, errors.New("disk full")
	}
	f.room -= len(p)
	return len(p), nil
}

func TestWriterErrorsArrive(t *testing.T) {
	r := open(t, "")
	for i := range int64(1000) {
		r.Add(Span{"executor", "0C0", i, i, 0})
	}
	for _, room := range []int{0, 5000} {
		assert.ErrorContains(t, r.Write(&full{room}), "disk full")
	}
}

func BenchmarkSpan(b *testing.B) {
	for _, on := range []bool{false, true} {
		b.Run(fmt.Sprint(on), func(b *testing.B) {
			var r *Recorder
			if on {
				r, _ = Open("")
			}
			for b.Loop() {
				r.End(LaneStore, "0S0", r.Start(), 1)
			}
		})
	}
}
