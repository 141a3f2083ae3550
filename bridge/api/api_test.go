package api

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/eae-runtime/eae-runtime/bridge/dlpack"
	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/memory"
)

func TestVersion(t *testing.T) {
	got, err := Version()
	require.NoError(t, err)
	require.Equal(t, version, got)
}

func TestAPanicBecomesAnError(t *testing.T) {
	err := guard(func() error { panic("on purpose") })
	code(t, err, "BridgeError")
	require.ErrorContains(t, err, "on purpose")
	n, err := value(func() (int64, error) { return 3, errs.E(errs.ErrPlan, "no") })
	code(t, err, "PlanError")
	require.Zero(t, n, "no result beside an error")
}

func TestLoadTorchNeedsTorchInTheProcess(t *testing.T) {
	code(t, LoadTorch("/no/such/libtorch_cpu.so"), "BridgeError")
}

const smallSpec = `{"blocks": [{}, {}, {}]}`

func TestScheduling(t *testing.T) {
	text, err := SchedGenerate("sequential", smallSpec)
	require.NoError(t, err)
	require.NoError(t, SchedValidate(smallSpec, text))
	csv, err := SchedToCSV(text)
	require.NoError(t, err)
	again, err := SchedFromCSV(csv)
	require.NoError(t, err)
	require.Equal(t, text, again)

	_, err = SchedGenerate("diagonal", smallSpec)
	code(t, err, "ConfigError")
	code(t, SchedValidate(smallSpec, "0C0\n0V0\n"), "ScheduleError")
	_, err = SchedToCSV("0Q0\n")
	code(t, err, "ScheduleError")
	_, err = SchedFromCSV("0Q0")
	code(t, err, "ScheduleError")
}

func TestPool(t *testing.T) {
	host := newHost(t)
	h, err := PoolNew(4)
	require.NoError(t, err)
	stats := func() memory.PoolStats {
		text, err := PoolStats(h)
		require.NoError(t, err)
		var got memory.PoolStats
		require.NoError(t, json.Unmarshal([]byte(text), &got))
		return got
	}
	first, err := PoolRequest(h, "2,3", "float32")
	require.NoError(t, err)
	view, err := dlpack.Import(first)
	require.NoError(t, err)
	require.Equal(t, []int64{2, 3}, view.Shape)
	pointer := int64(uintptr(view.Data))
	require.NoError(t, PoolRelease(h, pointer))
	code(t, PoolRelease(h, pointer), "BridgeError")

	// The memory is lent again while the first tensor is still there.
	second, err := PoolRequest(h, "2,3", "torch.float32")
	require.NoError(t, err)
	require.EqualValues(t, 1, stats().Reuses)
	view.Free()
	dlpack.Drain()
	require.EqualValues(t, 1, stats().Active, "the death of a released tensor ends no other loan")
	require.Len(t, host.take(second), 6)
	require.EqualValues(t, 0, stats().Active, "a tensor that dies unreleased goes back")
	require.EqualValues(t, 1, stats().Pooled)

	require.NoError(t, PoolReset(h))
	require.Zero(t, stats().Pooled)
	require.NoError(t, PoolClose(h))
	require.NoError(t, PoolClose(h))
	code(t, PoolReset(h), "ClosedError")
	_, err = PoolStats(h)
	code(t, err, "ClosedError")
	_, err = PoolRequest(h, "1", "float32")
	code(t, err, "ClosedError")
}

func TestPoolMemoryLivesAsLongAsItsTensor(t *testing.T) {
	host := newHost(t)
	h, err := PoolNew(0)
	require.NoError(t, err)
	a, err := PoolRequest(h, "4", "float32")
	require.NoError(t, err)
	view, err := dlpack.Import(a)
	require.NoError(t, err)
	again, err := dlpack.Export(view)
	require.NoError(t, err)
	require.NoError(t, PoolRelease(h, int64(uintptr(view.Data))))
	require.NotZero(t, held(t).Bytes, "released, but not freed: the tensor is alive")
	require.NoError(t, PoolClose(h))
	require.Len(t, host.take(again), 4)
	require.Zero(t, held(t).Bytes)
}

func TestPoolRefusals(t *testing.T) {
	newHost(t)
	_, err := PoolNew(-1)
	code(t, err, "ConfigError")
	h, err := PoolNew(1)
	require.NoError(t, err)
	for _, bad := range [][2]string{{"-1", "float32"}, {"x", "float32"}, {"2", "float33"}, {"4611686018427387904,8", "float32"}} {
		_, err := PoolRequest(h, bad[0], bad[1])
		code(t, err, "ConfigError")
	}
	require.NoError(t, PoolClose(h))
}

func TestChain(t *testing.T) {
	host := newHost(t)
	h, err := ChainNew(`[{"name": "clip", "params": {"max_norm": 1.0}}, {"name": "regularization", "params": {"strength": 0.5}}]`, 0)
	require.NoError(t, err)
	text, err := ChainApply(h, formatInts([]int64{host.give(3), host.give(4)}), `{"step": 1, "loss_scale": 1}`)
	require.NoError(t, err)
	out, err := parseInts(text)
	require.NoError(t, err)
	require.InDelta(t, 0.3, host.take(out[0])[0], 1e-6)
	require.InDelta(t, 0.4, host.take(out[1])[0], 1e-6)
	meta, err := ChainMeta(h)
	require.NoError(t, err)
	require.Contains(t, meta, `"name":"clip"`)

	code(t, ChainSetState(h, "[null]"), "ConfigError")
	code(t, ChainSetState(h, "{"), "ConfigError")
	state, err := ChainState(h)
	require.NoError(t, err)
	require.Equal(t, "[null,null]", state)
	require.NoError(t, ChainSetState(h, state))

	_, err = ChainApply(h, formatInts([]int64{host.give(1)}), "{")
	code(t, err, "ConfigError")
	_, err = ChainApply(h, "x", "")
	code(t, err, "ConfigError")
	require.NoError(t, ChainClose(h))
	require.NoError(t, ChainClose(h))
	_, err = ChainApply(h, formatInts([]int64{host.give(1)}), "")
	code(t, err, "ClosedError")
	_, err = ChainMeta(h)
	code(t, err, "ClosedError")
	_, err = ChainState(h)
	code(t, err, "ClosedError")
	code(t, ChainSetState(h, "[]"), "ClosedError")
	_, err = ChainNew(`[{"name": "no such pass"}]`, 0)
	code(t, err, "ConfigError")
}

func TestAChainResumes(t *testing.T) {
	host := newHost(t)
	spec := `[{"name": "gaussian_noise", "params": {"std": 1.0, "seed": 3}}]`
	run := func(h int64) []float32 {
		text, err := ChainApply(h, formatInts([]int64{host.give(0, 0, 0)}), `{"step": -1}`)
		require.NoError(t, err)
		out, err := parseInts(text)
		require.NoError(t, err)
		return host.take(out[0])
	}
	whole, err := ChainNew(spec, 0)
	require.NoError(t, err)
	run(whole)
	saved, err := ChainState(whole)
	require.NoError(t, err)
	want := run(whole)
	resumed, err := ChainNew(spec, 0)
	require.NoError(t, err)
	require.NoError(t, ChainSetState(resumed, saved))
	require.Equal(t, want, run(resumed))
	require.NoError(t, ChainClose(whole))
	require.NoError(t, ChainClose(resumed))
}

func TestTrace(t *testing.T) {
	newHost(t)
	h, err := TraceNew("")
	require.NoError(t, err)
	require.NoError(t, TraceAdd(h, "executor\t3R1\t1000\t3000\t64"))
	code(t, TraceAdd(h, "no tabs"), "ConfigError")
	report, err := TraceReport(h)
	require.NoError(t, err)
	require.Contains(t, report, `"3R1"`)
	path := filepath.Join(t.TempDir(), "trace.json")
	require.NoError(t, TraceWrite(h, path))
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.True(t, json.Valid(text))
	require.NoError(t, TraceClose(h))
	require.NoError(t, TraceClose(h))
	_, err = TraceReport(h)
	code(t, err, "ClosedError")
	code(t, TraceAdd(h, ""), "ClosedError")
	code(t, TraceWrite(h, path), "ClosedError")
	_, err = TraceNew("{")
	code(t, err, "ConfigError")
}
