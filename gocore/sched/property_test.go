package sched

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// aCase draws a scheduler and a spec of a plain chain that it can run.
func aCase(t *rapid.T) (scheduler, spec string) {
	scheduler = rapid.SampledFrom([]string{"sequential", "async", "pipeline", "distributed"}).Draw(t, "scheduler")
	n := rapid.IntRange(1, 6).Draw(t, "blocks")
	blocks := make([]map[string]any, n)
	for b := range blocks {
		blocks[b] = map[string]any{}
		if rapid.IntRange(0, 3).Draw(t, "buffers") == 0 {
			blocks[b]["buffers"] = []string{"running_mean"}
		}
	}
	s := map[string]any{
		"blocks":            blocks,
		"graph_free_prefix": max(0, rapid.IntRange(-3, n-1).Draw(t, "graph_free_prefix")),
		"tier":              rapid.SampledFrom([]string{"device", "host", "disk"}).Draw(t, "tier"),
		"prefetch":          rapid.IntRange(0, 4).Draw(t, "prefetch"),
		"targets":           true,
	}
	for _, flag := range []string{"keep_last", "keep_output", "passes", "pass_input", "input_grad", "update"} {
		s[flag] = rapid.Bool().Draw(t, flag)
	}
	switch scheduler {
	case "pipeline":
		s["targets"] = rapid.Bool().Draw(t, "targets")
		s["microbatches"] = rapid.IntRange(1, 4).Draw(t, "microbatches")
	case "distributed":
		world := rapid.IntRange(1, 4).Draw(t, "world")
		ranks := rapid.SliceOfN(rapid.IntRange(0, world-1), n, n).Draw(t, "ranks")
		slices.Sort(ranks)
		s["world"], s["ranks"] = world, ranks
		s["microbatches"] = rapid.IntRange(1, 5).Draw(t, "microbatches")
		s["order"] = rapid.SampledFrom([]string{"1f1b", "gpipe"}).Draw(t, "order")
	}
	if scheduler != "distributed" && n > 1 && rapid.Bool().Draw(t, "tied") {
		first := s["graph_free_prefix"].(int)
		if first < n-1 {
			s["leaves"] = []map[string]any{{"name": "tok", "blocks": []int{n - 1, first}}}
		}
	}
	out, err := json.Marshal(s)
	require.NoError(t, err)
	return scheduler, string(out)
}

func generated(t *rapid.T) (*Spec, Program, *naive) {
	scheduler, text := aCase(t)
	s, err := ParseSpec(text)
	require.NoError(t, err)
	p, err := generators[scheduler](s)
	require.NoError(t, err)
	t.Logf("%s\n%s", text, p)
	return s, p, newNaive(s, p)
}

func (n *naive) copyLists() []Schedule {
	out := make([]Schedule, len(n.lists))
	for r, l := range n.lists {
		out[r] = slices.Clone(l)
	}
	return out
}

func programOf(lists []Schedule) Program {
	p := make(Program, len(lists))
	for r, l := range lists {
		p[r] = cut(l)
	}
	return p
}

// TestGeneratedSchedulesAreValid: for the validator and for the naive model, and twice the same bytes.
func TestGeneratedSchedulesAreValid(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		scheduler, text := aCase(t)
		out, err := Generate(scheduler, text)
		require.NoError(t, err)
		s, err := ParseSpec(text)
		require.NoError(t, err)
		p, err := ParseProgram(out)
		require.NoError(t, err)
		require.NoError(t, Check(s, p))
		n := newNaive(s, p)
		assert.True(t, n.right(n.lists))
		again, err := generators[scheduler](s)
		require.NoError(t, err)
		assert.Equal(t, out, again.String())
	})
}

// TestMutationsAreJudgedAlike makes one change to a generated schedule, twenty times over. Validator and naive model agree, and what is left out, doubled or put before
// what it depends on is refused.
func TestMutationsAreJudgedAlike(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, _, n := generated(t)
		for range 20 {
			judgeOneMutation(t, s, n)
		}
	})
}

func judgeOneMutation(t *rapid.T, s *Spec, n *naive) {
	lists := n.copyLists()
	busy := slices.DeleteFunc([]int{0, 1, 2, 3}, func(r int) bool { return r >= len(lists) || len(lists[r]) == 0 })
	r := rapid.SampledFrom(busy).Draw(t, "rank")
	list := lists[r]
	i := rapid.IntRange(0, len(list)-1).Draw(t, "i")
	j := rapid.IntRange(0, len(list)-1).Draw(t, "j")
	how := rapid.SampledFrom([]string{"delete", "duplicate", "swap", "neighbours", "move"}).Draw(t, "how")
	mustFail := false
	switch how {
	case "delete":
		lists[r], mustFail = slices.Delete(list, i, i+1), true
	case "duplicate":
		lists[r], mustFail = slices.Insert(list, max(i, j), list[i]), true
	case "swap":
		i, j = min(i, j), max(i, j)
		mustFail = n.dependent(event{list[i], r}, event{list[j], r})
		list[i], list[j] = list[j], list[i]
	case "neighbours":
		if i+1 < len(list) {
			mustFail = n.dependent(event{list[i], r}, event{list[i+1], r})
			list[i], list[i+1] = list[i+1], list[i]
		}
	case "move":
		a := list[i]
		lists[r] = slices.Insert(slices.Delete(list, i, i+1), min(j, len(list)-1), a)
	}
	want := n.right(lists)
	if mustFail {
		require.False(t, want, "%s: the naive model is wrong\n%s", how, programOf(lists))
	}
	err := Check(s, programOf(lists))
	if want {
		require.NoError(t, err, "%s\n%s", how, programOf(lists))
	} else {
		require.ErrorIs(t, err, errs.ErrSchedule, "%s\n%s", how, programOf(lists))
	}
}

// TestDropsMovedEarlyAreRefused: no D can stand before the V that it waits for.
func TestDropsMovedEarlyAreRefused(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, _, n := generated(t)
		for r, list := range n.lists {
			for i, a := range list {
				before := slices.IndexFunc(list, func(b Action) bool { return n.dependent(event{b, r}, event{a, r}) })
				if a.Kind != KindD || before < 0 {
					continue
				}
				lists := n.copyLists()
				lists[r] = slices.Insert(slices.Delete(lists[r], i, i+1), before, a)
				var f *Fault
				require.ErrorAs(t, Check(s, programOf(lists)), &f)
				assert.Equal(t, a, lists[r][f.At], f.Text)
			}
		}
	})
}

// TestSpecsNeverPanic: whatever numbers a spec has, the answer is a schedule or a typed error.
func TestSpecsNeverPanic(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		small := rapid.IntRange(-1, 4)
		consumers := rapid.SliceOfN(small, 0, 3)
		n := rapid.IntRange(1, 3).Draw(t, "blocks")
		blocks := make([]map[string]any, n)
		bounds := make([]map[string]any, n+1)
		for b := range blocks {
			blocks[b] = map[string]any{"needs_vjp": rapid.Bool().Draw(t, "needs_vjp")}
		}
		for i := range bounds {
			bounds[i] = map[string]any{"producer": i - 1, "consumers": consumers.Draw(t, "consumers")}
		}
		spec, err := json.Marshal(map[string]any{
			"blocks": blocks, "boundaries": bounds, "world": small.Draw(t, "world"), "microbatches": small.Draw(t, "microbatches"),
			"tier": "host", "passes": true, "targets": rapid.Bool().Draw(t, "targets"), "keep_last": rapid.Bool().Draw(t, "keep_last"),
		})
		require.NoError(t, err)
		name := rapid.SampledFrom([]string{"sequential", "async", "pipeline", "distributed"}).Draw(t, "scheduler")
		if _, err := Generate(name, string(spec)); err != nil {
			assert.NotErrorIs(t, err, errs.ErrSchedule, "a generator wrote what the validator refuses: %s", spec)
		}
	})
}

// TestSkipsValidate: chains with skips, frozen parts and ranks, of which every generator must make something valid.
func TestSkipsValidate(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 6).Draw(t, "blocks")
		bounds := make([]map[string]any, n+1)
		for i := range bounds {
			readers := []int{i}
			for b := i + 1; b <= n; b++ {
				if rapid.IntRange(0, 3).Draw(t, "skip") == 0 {
					readers = append(readers, b)
				}
			}
			bounds[i] = map[string]any{"producer": i - 1, "consumers": readers}
		}
		split := rapid.IntRange(0, n).Draw(t, "split")
		ranks := make([]int, n)
		for b := range ranks {
			if b >= split {
				ranks[b] = 1
			}
		}
		spec, err := json.Marshal(map[string]any{
			"blocks": make([]struct{}, n), "boundaries": bounds, "world": 2, "ranks": ranks, "targets": true,
			"microbatches": rapid.IntRange(1, 3).Draw(t, "microbatches"), "tier": rapid.SampledFrom([]string{"device", "host"}).Draw(t, "tier"),
			"passes": rapid.Bool().Draw(t, "passes"), "keep_last": rapid.Bool().Draw(t, "keep_last"),
			"prefetch": rapid.IntRange(0, 3).Draw(t, "prefetch"), "graph_free_prefix": rapid.IntRange(0, n-1).Draw(t, "frozen"),
		})
		require.NoError(t, err)
		if _, err := Generate("distributed", string(spec)); err != nil {
			require.ErrorIs(t, err, errs.ErrPlan, string(spec))
		}
	})
}
