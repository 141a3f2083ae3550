package boundary

import (
	"fmt"

	"github.com/eae-runtime/eae-runtime/gocore/trace"
)

// SetTrace has every move and load from now on recorded on the lane "store", named as the action ("3S0", "3L0"), with the bytes on the
// tier; nil ends that. What needs no work (a load of what is readable where it is) leaves no span.
func (s *Store) SetTrace(r *trace.Recorder) { s.trace.Store(r) }

// traced is a job under way; the zero value is one that nobody records.
type traced struct {
	recorder *trace.Recorder
	name     string
	start    int64
	bytes    int64
}

// beginSpan starts the span of e's job, which take has marked.
func (s *Store) beginSpan(e *entry) traced {
	r := s.trace.Load()
	if r == nil {
		return traced{}
	}
	kind := "L"
	if e.phase == moving {
		kind = "S"
	}
	name := fmt.Sprintf("%d%s%d", e.key&(1<<keyBits-1), kind, e.key>>keyBits)
	return traced{r, name, r.Start(), e.transit.tierBytes}
}

func (t traced) end() { t.recorder.End(trace.LaneStore, t.name, t.start, t.bytes) }

// keyBits is where a key's microbatch begins: the boundary's number is below it.
const keyBits = 20
