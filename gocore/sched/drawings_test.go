package sched

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the golden files under testdata")

const (
	fourBlocks  = `"blocks":[{},{},{},{}]`
	threeBlocks = `"blocks":[{},{},{}]`
)

// TestDrawings lays out small schedules as their doc comments draw them.
func TestDrawings(t *testing.T) {
	for _, c := range []struct {
		name, scheduler, spec string
		lines                 []string
	}{
		{"sequential with passes", "sequential", `{` + fourBlocks + `,"passes":true}`, []string{
			"0C0 1C0 2C0 3F0",
			"4B0 4P0 3V0 3P0 2R0 2V0 2P0 2D0 1R0 1V0 1P0 1D0 0R0 0V0 0P0 0D0"}},
		{"passes, not at the input", "sequential", `{` + threeBlocks + `,"passes":true,"pass_input":false}`, []string{
			"0C0 1C0 2F0",
			"3B0 3P0 2V0 2P0 1R0 1V0 1P0 1D0 0R0 0V0 0D0"}},
		{"the input needs a gradient", "sequential", `{"blocks":[{}],"passes":true,"pass_input":false,"input_grad":true}`, []string{
			"0F0",
			"1B0 1P0 0V0 0P0"}},
		{"split forward and backward", "sequential", `{` + fourBlocks + `,"passes":true,"keep_last":false,"keep_output":true}`, []string{
			"0C0 1C0 2C0 3C0",
			"4B0 4P0 3R0 3V0 3P0 3D0 2R0 2V0 2P0 2D0 1R0 1V0 1P0 1D0 0R0 0V0 0P0 0D0 4D0"}},
		{"host tier", "sequential", `{` + fourBlocks + `,"keep_last":false,"tier":"host"}`, []string{
			"0C0 0S0 1C0 1S0 2C0 2S0 3C0 3S0",
			"4B0 3L0 3R0 3V0 3D0 2L0 2R0 2V0 2D0 1L0 1R0 1V0 1D0 0L0 0R0 0V0 0D0"}},
		{"frozen prefix", "sequential", `{"blocks":[{"needs_vjp":false},{"needs_vjp":false},{},{}],"passes":true}`, []string{
			"0N0 1N0 2C0 3F0",
			"4B0 4P0 3V0 3P0 2R0 2V0 2D0"}},
		{"frozen prefix, by number", "sequential", `{` + threeBlocks + `,"graph_free_prefix":2}`, []string{
			"0N0 1N0 2F0",
			"3B0 2V0"}},
		{"everything frozen", "sequential", `{` + threeBlocks + `,"graph_free_prefix":3,"passes":true}`, []string{
			"0N0 1N0 2N0",
			"3B0"}},
		{"a skip from boundary 1 to block 2", "sequential",
			`{` + threeBlocks + `,"passes":true,"keep_last":false,"boundaries":[{"producer":-1,"consumers":[0]},{"producer":0,"consumers":[1,2]},
			{"producer":1,"consumers":[2]},{"producer":2,"consumers":[3]}]}`, []string{
				"0C0 1C0 2C0",
				"3B0 3P0 2R0 2V0 2P0 2D0 1R0 1V0 1P0 1D0 0R0 0V0 0P0 0D0"}},
		{"the same, off the device", "sequential",
			`{` + threeBlocks + `,"tier":"disk","keep_last":false,"boundaries":[{"producer":-1,"consumers":[0]},{"producer":0,"consumers":[1,2]},
			{"producer":1,"consumers":[2]},{"producer":2,"consumers":[3]}]}`, []string{
				"0C0 0S0 1C0 2C0 1S0 2S0",
				"3B0 1L0 2L0 2R0 2V0 2D0 1R0 1V0 1D0 0L0 0R0 0V0 0D0"}},
		{"streamed update, tied ends", "sequential", `{` + threeBlocks + `,"update":true,"leaves":[{"name":"tok","blocks":[0,2]}]}`, []string{
			"0C0 1C0 2F0",
			"3B0 2V0 2U* 1R0 1V0 1D0 1U* 0R0 0V0 0D0 0U*"}},
		{"async, one ahead", "async", `{` + fourBlocks + `,"tier":"host"}`, []string{
			"0C0 0S0 1C0 1S0 2C0 2S0 3F0",
			"4B0 2L0 3V0 1L0 2R0 2V0 2D0 0L0 1R0 1V0 1D0 0R0 0V0 0D0"}},
		{"async, two ahead", "async", `{` + fourBlocks + `,"tier":"host","prefetch":2}`, []string{
			"0C0 0S0 1C0 1S0 2C0 2S0 3F0",
			"2L0 4B0 1L0 3V0 0L0 2R0 2V0 2D0 1R0 1V0 1D0 0R0 0V0 0D0"}},
		{"pipeline with targets", "pipeline", `{` + threeBlocks + `,"microbatches":2,"targets":true}`, []string{
			"0C0 1C0 2F0",
			"3B0 2V0 1R0 1V0 1D0 0R0 0V0 0D0 0C1 1C1 2F1 3B1 2V1 1R1 1V1 1D1 0R1 0V1 0D1"}},
		{"pipeline without targets", "pipeline", `{` + threeBlocks + `,"microbatches":2}`, []string{
			"0C0 1C0 2C0 0C1 1C1 2C1",
			"3B* 2R0 2V0 2D0 1R0 1V0 1D0 0R0 0V0 0D0 2R1 2V1 2D1 1R1 1V1 1D1 0R1 0V1 0D1"}},
		{"pipeline, one microbatch", "pipeline", `{` + threeBlocks + `}`, []string{
			"0C0 1C0 2F0",
			"3B0 2V0 1R0 1V0 1D0 0R0 0V0 0D0"}},
		{"two ranks, 1F1B", "distributed", `{` + fourBlocks + `,"world":2,"microbatches":3,"targets":true}`, []string{
			"0C0 1C0 2XF0 0C1 1C1 2XF1",
			"2YB0 1R0 1V0 1D0 0R0 0V0 0D0 0C2 1C2 2XF2 2YB1 1R1 1V1 1D1 0R1 0V1 0D1 2YB2 1R2 1V2 1D2 0R2 0V2 0D2",
			"2YF0 2C0 3F0",
			"4B0 3V0 2R0 2V0 2XB0 2D0 2YF1 2C1 3F1 4B1 3V1 2R1 2V1 2XB1 2D1 2YF2 2C2 3F2 4B2 3V2 2R2 2V2 2XB2 2D2"}},
		{"two of three ranks, GPipe, passes", "distributed",
			`{"blocks":[{},{}],"world":3,"ranks":[0,2],"microbatches":2,"targets":true,"order":"gpipe","passes":true,"pass_input":false}`, []string{
				"0C0 1XF0 0C1 1XF1",
				"1YB0 0R0 0V0 0D0 1YB1 0R1 0V1 0D1",
				"",
				"",
				"1YF0 1F0 1YF1 1F1",
				"2B0 2P0 1V0 1P0 1XB0 2B1 2P1 1V1 1P1 1XB1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			text, err := Generate(c.scheduler, c.spec)
			require.NoError(t, err)
			assert.Equal(t, c.lines, strings.Split(text, "\n"))
			assert.NoError(t, Validate(c.spec, text))
		})
	}
}

// TestGolden pins larger schedules byte for byte; `go test ./gocore/sched -rewrite` writes them anew.
func TestGolden(t *testing.T) {
	for _, c := range []struct{ file, scheduler, spec string }{
		{"sequential_12_passes", "sequential", `{"blocks":[{},{},{},{},{},{},{},{},{},{},{},{}],"passes":true}`},
		{"async_12_disk_prefetch3", "async", `{"blocks":[{},{},{},{},{},{},{},{},{},{},{},{}],"tier":"disk","prefetch":3,"keep_last":false}`},
		{"pipeline_6_micro4_host", "pipeline", `{"blocks":[{},{},{},{},{},{}],"microbatches":4,"tier":"host"}`},
		{"pipeline_6_micro4_targets", "pipeline", `{"blocks":[{},{},{},{},{},{}],"microbatches":4,"targets":true,"passes":true,"update":true}`},
		{"distributed_8_world4_1f1b", "distributed", `{"blocks":[{},{},{},{},{},{},{},{}],"world":4,"microbatches":6,"targets":true,"passes":true}`},
		{"distributed_8_world4_gpipe", "distributed",
			`{"blocks":[{"needs_vjp":false},{},{},{},{},{},{},{}],"world":4,"microbatches":3,"targets":true,"order":"gpipe","tier":"host"}`},
	} {
		t.Run(c.file, func(t *testing.T) {
			text, err := Generate(c.scheduler, c.spec)
			require.NoError(t, err)
			path := filepath.Join("testdata", c.file+".txt")
			if *rewrite {
				require.NoError(t, os.WriteFile(path, []byte(text+"\n"), 0o644))
			}
			want, err := os.ReadFile(path)
			require.NoError(t, err, "run with -rewrite to make the file")
			assert.Equal(t, strings.TrimSuffix(string(want), "\n"), text)
		})
	}
}
