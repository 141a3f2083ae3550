package sched

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

func TestSpecDefaults(t *testing.T) {
	s, err := ParseSpec(`{"blocks":[{"name":"a"},{"needs_vjp":true},{}],"world":2}`)
	require.NoError(t, err)
	assert.Equal(t, []int{0, 0, 1}, s.Ranks)
	assert.Equal(t, []Boundary{{-1, []int{0}}, {0, []int{1}}, {1, []int{2}}, {2, []int{3}}}, s.Boundaries)
	assert.Equal(t, []any{1, true, true, false, "device", 1, "1f1b"},
		[]any{s.Microbatches, s.KeepLast, s.PassInput, s.KeepOutput, s.Tier, s.Prefetch, s.Order})
	assert.True(t, s.Blocks[0].NeedsVJP)
}

func TestEvenRanks(t *testing.T) {
	for _, c := range []struct {
		n, world int
		want     []int
	}{{4, 2, []int{0, 0, 1, 1}}, {5, 3, []int{0, 0, 1, 1, 2}}, {2, 4, []int{0, 1}}, {1, 1, []int{0}}} {
		var got []int
		for b := range c.n {
			got = append(got, evenRank(b, c.n, c.world))
		}
		assert.Equal(t, c.want, got)
	}
}

// TestBadSpecs: each is refused with the kind of error and a text that names the field.
func TestBadSpecs(t *testing.T) {
	for _, c := range []struct {
		scheduler, spec string
		kind            error
		want            string
	}{
		{"sequental", `{"blocks":[{}]}`, errs.ErrValue, `scheduler: "sequental" is none of async, distributed, pipeline, sequential`},
		{"sequential", `{`, errs.ErrValue, "spec:"},
		{"sequential", `{"blocks":[{}]} x`, errs.ErrValue, "spec:"},
		{"sequential", `{"blocks":[{}],"tear":"host"}`, errs.ErrValue, `"tear"`},
		{"sequential", `{"blocks":[{"needs":true}]}`, errs.ErrValue, `"needs"`},
		{"sequential", `{"blocks":[{}],"microbatches":"2"}`, errs.ErrValue, "microbatches"},
		{"sequential", `{"blocks":[]}`, errs.ErrValue, "blocks"},
		{"sequential", `{"blocks":[{}],"microbatches":0}`, errs.ErrValue, "microbatches"},
		{"pipeline", `{"blocks":[{}],"microbatches":16000000}`, errs.ErrValue, "microbatches"},
		{"sequential", `{"blocks":[{}],"microbatches":2}`, errs.ErrValue, "microbatches"},
		{"sequential", `{"blocks":[{},{}],"world":2}`, errs.ErrValue, "world"},
		{"pipeline", `{"blocks":[{},{}],"world":2}`, errs.ErrValue, "world"},
		{"sequential", `{"blocks":[{}],"world":0}`, errs.ErrValue, "world"},
		{"sequential", `{"blocks":[{}],"prefetch":-1}`, errs.ErrValue, "prefetch"},
		{"sequential", `{"blocks":[{}],"tier":"tape"}`, errs.ErrValue, "tier"},
		{"sequential", `{"blocks":[{}],"order":"zb"}`, errs.ErrValue, "order"},
		{"sequential", `{"blocks":[{}],"kinds":["Q"]}`, errs.ErrValue, "kinds[0]"},
		{"sequential", `{"blocks":[{}],"graph_free_prefix":2}`, errs.ErrValue, "graph_free_prefix"},
		{"sequential", `{"blocks":[{},{"needs_vjp":false}]}`, errs.ErrValue, "blocks[0].needs_vjp"},
		{"sequential", `{"blocks":[{}],"boundaries":[]}`, errs.ErrValue, "boundaries"},
		{"sequential", `{"blocks":[{}],"boundaries":[{"producer":0,"consumers":[0]},{"producer":0,"consumers":[1]}]}`, errs.ErrValue, "boundaries[0].producer"},
		{"sequential", `{"blocks":[{}],"boundaries":[{"producer":-1,"consumers":[0,0]},{"producer":0,"consumers":[1]}]}`, errs.ErrValue, "boundaries[0].consumers"},
		{"sequential", `{"blocks":[{}],"boundaries":[{"producer":-1,"consumers":[]},{"producer":0,"consumers":[1]}]}`, errs.ErrValue, "boundaries[0].consumers"},
		{"sequential", `{"blocks":[{},{}],"boundaries":[{"producer":-1,"consumers":[0]},{"producer":0,"consumers":[2]},{"producer":1,"consumers":[2]}]}`,
			errs.ErrValue, "block 1"},
		{"sequential", `{"blocks":[{}],"leaves":[{"name":"w","blocks":[1]}]}`, errs.ErrValue, "leaves[0].blocks"},
		{"sequential", `{"blocks":[{}],"leaves":[{"name":"w","blocks":[]}]}`, errs.ErrValue, "leaves[0].blocks"},
		{"distributed", `{"blocks":[{},{}],"world":2,"ranks":[0]}`, errs.ErrValue, "ranks"},
		{"distributed", `{"blocks":[{},{}],"world":2,"ranks":[1,0]}`, errs.ErrValue, "ranks"},
		{"distributed", `{"blocks":[{},{}],"world":2,"ranks":[0,2]}`, errs.ErrValue, "ranks"},
		{"distributed", `{"blocks":[{"rank":0},{}],"world":2}`, errs.ErrValue, "blocks[1].rank"},
		{"distributed", `{"blocks":[{"rank":0},{"rank":1}],"world":2,"ranks":[0,0]}`, errs.ErrValue, "blocks[1].rank"},
		{"distributed", `{"blocks":[{},{}],"world":2,"microbatches":2}`, errs.ErrPlan, "targets="},
		{"distributed", `{"blocks":[{},{}],"world":2,"update":true,"leaves":[{"name":"tok","blocks":[0,1]}]}`, errs.ErrPlan, `"tok"`},
		{"distributed", `{"blocks":[{},{},{}],"world":3,"boundaries":[{"producer":-1,"consumers":[0]},{"producer":0,"consumers":[1,2]},
			{"producer":1,"consumers":[2]},{"producer":2,"consumers":[3]}]}`, errs.ErrPlan, "boundary 1"},
		{"sequential", `{"blocks":[{},{}],"kinds":["F","N","V","B"]}`, errs.ErrSchedule, ">>0C0<<"},
	} {
		_, err := Generate(c.scheduler, c.spec)
		if assert.ErrorIs(t, err, c.kind, c.spec) {
			assert.ErrorContains(t, err, c.want, c.spec)
		}
	}
}

// TestSameInputSameBytes: generators keep no state and draw nothing.
func TestSameInputSameBytes(t *testing.T) {
	spec := `{"blocks":[{},{},{},{},{}],"world":2,"microbatches":3,"targets":true,"tier":"host","passes":true}`
	s, err := ParseSpec(spec)
	require.NoError(t, err)
	first, err := Distributed(s)
	require.NoError(t, err)
	for range 20 {
		again, err := Distributed(s)
		require.NoError(t, err)
		assert.Equal(t, first.String(), again.String())
	}
}

// TestCacheRemembersOnlyGood: a bad pair is refused every time, and many good ones do not grow the cache past its bound.
func TestCacheRemembersOnlyGood(t *testing.T) {
	spec := `{"blocks":[{},{}]}`
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range cacheSize {
				assert.NoError(t, Validate(spec, "0C0 1F0\n2B0 1V0 0R0 0V0 0D0"+strings.Repeat(" ", i)))
				assert.Error(t, Validate(spec, "0C0 1F0\n2B0 1V0 0R0 0V0"))
			}
		})
	}
	wg.Wait()
	assert.LessOrEqual(t, len(validated.seen), cacheSize)

	var c cache
	calls := 0
	slow := func() error { calls++; return nil }
	for i := range cacheSize + 1 {
		for range 2 {
			require.NoError(t, c.check(fmt.Sprint(i), "", slow))
		}
	}
	assert.Equal(t, cacheSize+1, calls)
	require.NoError(t, c.check("0", "", slow))
	assert.Equal(t, cacheSize+2, calls, "the oldest pair made room")
}

func BenchmarkGenerateAndCheck(b *testing.B) {
	spec := `{"blocks":[{}` + strings.Repeat(",{}", 63) + `],"passes":true}`
	s, err := ParseSpec(spec)
	require.NoError(b, err)
	for b.Loop() {
		p, err := Sequential(s)
		if err != nil || Check(s, p) != nil {
			b.Fatal("not valid")
		}
	}
}
