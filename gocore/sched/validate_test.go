package sched

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

const (
	skipChain = `"blocks":[{},{},{}],"boundaries":[{"producer":-1,"consumers":[0]},{"producer":0,"consumers":[1,2]},
		{"producer":1,"consumers":[2]},{"producer":2,"consumers":[3]}]`
	twoRanks = `"blocks":[{},{}],"world":2,"microbatches":2,"targets":true`
)

// TestRefused: each schedule breaks one rule; the action that breaks it is marked in its context.
func TestRefused(t *testing.T) {
	for _, c := range []struct{ name, spec, text, mark, reason string }{
		{"used before it exists", `{"blocks":[{},{}]}`, "1F0 0C0\n2B0 1V0 0R0 0V0 0D0", ">>1F0<< 0C0", "used before it exists"},
		{"dropped while needed", `{"blocks":[{},{},{},{}]}`,
			"0C0 1C0 2C0 3F0\n4B0 3V0 2D0 2R0 2V0 1R0 1V0 1D0 0R0 0V0 0D0", "... 4B0 3V0 >>2D0<< 2R0 2V0 ...", "dropped while needed: 2V0"},
		{"dropped between rebuild and VJP", `{"blocks":[{},{}]}`, "0C0 1F0\n2B0 1V0 0R0 0D0 0V0", ">>0D0<<", "dropped while needed: 0V0"},
		{"dropped before the forward", `{"blocks":[{},{}]}`, "0C0\n1D0 1F0", ">>1D0<<", "block 1's forward"},
		{"output dropped before the loss", `{"blocks":[{}],"keep_output":true}`, "0F0\n1D0 1B0 0V0", ">>1D0<<", "the loss reads it"},
		{"used after its drop", `{"blocks":[{},{}]}`, "0C0 1F0\n2B0 1V0 0R0 0V0 0D0 0D0", "0D0 >>0D0<<", "has been dropped"},
		{"not kept", `{"blocks":[{},{}]}`, "0N0 1F0\n2B0 1V0 0R0 0V0", ">>0R0<<", "boundary 0"},
		{"missing VJP", `{"blocks":[{},{}]}`, "0C0 1F0\n2B0 0R0", ">>0R0<<", "missing VJP: no 0V0"},
		{"VJP skipped on the way", `{"blocks":[{},{}]}`, "0C0 1F0\n2B0 0R0 0V0 0D0", ">>0V0<<", "adjoint 1 of microbatch 0 is not complete"},
		{"double VJP", `{"blocks":[{}]}`, "0F0\n1B0 0V0 0V0", "0V0 >>0V0<<", "double VJP"},
		{"VJP without a graph", `{"blocks":[{},{}]}`, "0C0 1C0\n2B0 1V0", ">>1V0<<", "has no graph"},
		{"VJP of a frozen block", `{"blocks":[{},{}],"graph_free_prefix":1}`, "0N0 1F0\n2B0 1V0 0V0", ">>0V0<<", "needs no VJP"},
		{"rebuild of a frozen block", `{"blocks":[{},{}],"graph_free_prefix":1}`, "0C0 1F0\n2B0 1V0 0R0", ">>0R0<<", "never rebuilt"},
		{"graph of a frozen block", `{"blocks":[{},{}],"graph_free_prefix":1}`, "0F0 1F0\n", ">>0F0<<", "left over"},
		{"rebuilt twice", `{"blocks":[{},{}]}`, "0C0 1F0\n2B0 1V0 0R0 0R0", "0R0 >>0R0<<", "has a graph"},
		{"rebuilt after its VJP", `{"blocks":[{},{}]}`, "0C0 1F0\n2B0 1V0 0R0 0V0 0R0", "0V0 >>0R0<<", "after its VJP"},
		{"rebuilt before its forward", `{"blocks":[{},{}]}`, "0R0\n", ">>0R0<<", "before its forward"},
		{"forward twice", `{"blocks":[{},{}]}`, "0C0 0C0 1F0\n", "0C0 >>0C0<<", "exists already"},
		{"forward after the VJP", `{"blocks":[{},{}]}`, "0C0 1F0\n2B0 1V0 0R0 0V0 0N0", ">>0N0<<", "after its VJP"},
		{"run again for nothing", `{"blocks":[{},{}]}`, "0C0 1F0\n2B0 0C0 1V0 0R0 0V0 0D0", ">>0C0<<", "boundary 1 of microbatch 0 is still held"},
		{"leak", `{"blocks":[{},{},{}]}`, "0C0 1C0 2F0\n3B0 2V0 1R0 1V0 0R0 0V0 0D0", ">>0C0<< 1C0", "still held at the end: no 1D0"},
		{"output left", `{"blocks":[{},{}],"keep_output":true}`, "0C0 1F0\n2B0 1V0 0R0 0V0 0D0", ">>1F0<<", "no 2D0"},
		{"no loss", `{"blocks":[{}],"graph_free_prefix":1}`, "0N0\n", "rank 0", "missing loss"},
		{"no forward", `{"blocks":[{}]}`, "\n", "rank 0", "block 0 never runs"},
		{"loss twice", `{"blocks":[{}],"keep_output":true}`, "0F0\n1B0 1B0", "1B0 >>1B0<<", "taken twice"},
		{"whole loss, asked for a part", `{"blocks":[{}],"microbatches":2}`, "0C0 0C1\n1B0", ">>1B0<<", "write 1B*"},
		{"loss by parts, asked for all", `{"blocks":[{}],"microbatches":2,"targets":true}`, "0F0 0F1\n1B*", ">>1B*<<", "write 1B0 to 1B1"},
		{"wrong loss number", `{"blocks":[{}]}`, "0F0\n0B0", ">>0B0<<", "number 1"},
		{"wrong microbatch", `{"blocks":[{}]}`, "0F1\n", ">>0F1<<", "wrong microbatch"},
		{"all microbatches at once", `{"blocks":[{}]}`, "0F*\n", ">>0F*<<", "wrong microbatch: * stands only"},
		{"adjoint of the other microbatch", `{"blocks":[{}],"microbatches":2,"targets":true}`, "0F0 0F1\n1B1 0V0", ">>0V0<<", "not complete"},
		{"gradients out of order", `{"blocks":[{}],"microbatches":2,"targets":true}`, "0F0 0F1\n1B0 1B1 0V1", ">>0V1<<", "wrong microbatch"},
		{"buffers out of order", `{"blocks":[{"buffers":["running_mean"]}],"microbatches":2,"targets":true}`, "0F1\n", ">>0F1<<", "microbatch 0 first"},
		{"no such block", `{"blocks":[{}]}`, "1F0\n", ">>1F0<<", "no block 1"},
		{"no such boundary", `{"blocks":[{}]}`, "0F0\n2D0", ">>2D0<<", "no boundary 2"},
		{"forbidden kind", `{"blocks":[{}],"kinds":["F","V"]}`, "0F0\n1B0", ">>1B0<<", "only F V may"},
		{"load without store", `{"blocks":[{},{}],"tier":"host"}`, "0C0 1F0\n2B0 1V0 0L0", ">>0L0<<", "load without store"},
		{"load twice", `{"blocks":[{},{}],"tier":"host"}`, "0C0 0S0 1F0\n2B0 1V0 0L0 0L0", "0L0 >>0L0<<", "on the device already"},
		{"store twice", `{"blocks":[{},{}],"tier":"host"}`, "0C0 0S0 0S0", "0S0 >>0S0<<", "stored twice"},
		{"used while away", `{"blocks":[{},{}],"tier":"host"}`, "0C0 0S0 1F0\n2B0 1V0 0R0", ">>0R0<<", "stored away: no 0L0"},
		{"store on the device tier", `{"blocks":[{},{}]}`, "0C0 0S0\n", ">>0S0<<", "tier is device"},
		{"store under a forward reader", `{"tier":"host",` + skipChain + `}`, "0C0 1C0 1S0\n", ">>1S0<<", "a forward still has to read it"},
		{"store of what is not kept", `{"blocks":[{},{}],"tier":"host"}`, "0C0 1S0\n", ">>1S0<<", "a forward still"},
		{"skip dropped after the wrong block", `{"keep_last":false,` + skipChain + `}`,
			"0C0 1C0 2C0\n3B0 2R0 2V0 2D0 1D0 1R0", ">>1D0<<", "dropped while needed: 1V0"},
		{"skip's adjoint not complete", `{` + skipChain + `}`, "0C0 1C0 2F0\n3B0 2V0 0R0 0V0", ">>0V0<<", "adjoint 1 of microbatch 0 is not complete"},
		{"pass too early", `{"blocks":[{}],"passes":true}`, "0F0\n1P0", ">>1P0<<", "does not exist yet"},
		{"pass on a frozen boundary", `{"blocks":[{},{}],"graph_free_prefix":1,"passes":true}`, "0N0 1F0\n2B0 2P0 1V0 1P0", ">>1P0<<", "does not exist"},
		{"pass on the input, not asked for", `{"blocks":[{}],"passes":true,"pass_input":false}`, "0F0\n1B0 1P0 0V0 0P0", ">>0P0<<", "does not exist"},
		{"pass twice", `{"blocks":[{}],"passes":true}`, "0F0\n1B0 1P0 1P0", "1P0 >>1P0<<", "already"},
		{"pass left out", `{"blocks":[{}],"passes":true}`, "0F0\n1B0 0V0", ">>0V0<<", "no 1P0"},
		{"pass on the input left out", `{"blocks":[{}],"passes":true}`, "0F0\n1B0 1P0 0V0", ">>0V0<<", "no 0P0"},
		{"pass without passes", `{"blocks":[{}]}`, "0F0\n1B0 1P0", ">>1P0<<", "no passes"},
		{"update before a microbatch", `{"blocks":[{}],"microbatches":2,"targets":true,"update":true}`,
			"0F0 0F1\n1B0 1B1 0V0 0U* 0V1", ">>0U*<<", "0V1 comes after"},
		{"update before the other reader", `{"blocks":[{},{},{}],"graph_free_prefix":1,"update":true,"leaves":[{"name":"w","blocks":[0,1,2]}]}`,
			"0N0 1C0 2F0\n3B0 1U*", ">>1U*<<", "1V0 comes after"},
		{"update twice", `{"blocks":[{}],"update":true}`, "0F0\n1B0 0V0 0U* 0U*", "0U* >>0U*<<", "double update"},
		{"update left out", `{"blocks":[{}],"update":true}`, "0F0\n1B0 0V0", ">>0V0<<", "no 0U*"},
		{"update not asked for", `{"blocks":[{}]}`, "0F0\n1B0 0V0 0U*", ">>0U*<<", "no streamed updates"},
		{"update of one microbatch", `{"blocks":[{}],"update":true}`, "0F0\n1B0 0V0 0U0", ">>0U0<<", "write 0U*"},
		{"gradient passes after the update", `{"blocks":[{}],"update":true}`, "0F0\n1B0 0V0 0U* 0G*", ">>0G*<<", "updated already"},
		{"gradient passes twice", `{"blocks":[{}]}`, "0F0\n1B0 0V0 0G* 0G*", "0G* >>0G*<<", "already"},
		{"half a split VJP", `{"blocks":[{}]}`, "0F0\n1B0 0I0", ">>0I0<<", "missing VJP"},
		{"full after half", `{"blocks":[{}]}`, "0F0\n1B0 0I0 0V0", ">>0V0<<", "double VJP"},
		{"lines for too few ranks", `{` + twoRanks + `}`, "0C0\n", "1 ranks", "world is 2"},
		{"another rank's block", `{` + twoRanks + `}`, "1F0\n\n\n", ">>1F0<<", "block 1 is on rank 1"},
		{"another rank's loss", `{` + twoRanks + `}`, "\n2B0\n\n", ">>2B0<<", "runs on rank 1"},
		{"a boundary that does not cross", `{` + twoRanks + `}`, "0XF0\n\n\n", ">>0XF0<<", "does not cross"},
		{"the wrong end", `{` + twoRanks + `}`, "1YF0\n\n\n", ">>1YF0<<", "is on rank 1"},
		{"sent twice", `{` + twoRanks + `}`, "0C0 1XF0 1XF0\n\n\n", "1XF0 >>1XF0<<", "used before it exists"},
		{"adjoint sent too early", `{` + twoRanks + `}`, "0C0 1XF0\n\n1YF0 1F0\n1XB0", ">>1XB0<<", "before it is complete"},
		{"adjoint sent without its pass", `{"passes":true,` + twoRanks + `}`, "0C0 1XF0\n\n1YF0 1F0\n2B0 2P0 1V0 1XB0", ">>1XB0<<", "no 1P0"},
		{"adjoint sent twice", `{` + twoRanks + `}`, "0C0 1XF0\n\n1YF0 1F0\n2B0 1V0 1XB0 1XB0", "1XB0 >>1XB0<<", "sent twice"},
		{"another order than sent", `{` + twoRanks + `}`, "0C0 1XF0 0C1 1XF1\n\n1YF1\n", ">>1YF1<<", "next message is boundary 1 of microbatch 0"},
		{"unmatched receive", `{` + twoRanks + `}`, "0C0\n\n1YF0\n", ">>1YF0<<", "unmatched receive: rank 0 never sends it (1XF0)"},
		{"store after the rebuild", `{"blocks":[{},{}],"tier":"host"}`, "0C0 1F0\n0R0 0S0 2B0 1V0 0L0 0V0 0D0", ">>0S0<<", "after the rebuild of block 0"},
		{"load after the drop", `{"blocks":[{},{}],"tier":"host"}`, "0C0 0S0 1F0\n2B0 1V0 0L0 0R0 0V0 0D0 0L0", ">>0L0<<", "has been dropped"},
		{"graph twice", `{"blocks":[{},{},{}]}`, "0C0 1N0 2F0\n0R0 0F0", "0R0 >>0F0<<", "has a graph"},
		{"store of what was made again", `{"blocks":[{},{},{}],"tier":"host"}`, "0C0 1N0 2F0\n3B0 2V0 0N0 1S0", ">>1S0<<", "not kept"},
		{"drop of what was made again", `{"blocks":[{},{}]}`, "0C0 1F0\n0C0 1D0", ">>1D0<<", "not kept"},
		{"drop while another microbatch waits", `{"blocks":[{}],"microbatches":2,"targets":true}`, "0C0 0C1\n1B0 1B1 0R1 0D1", ">>0D1<<", "0V1 comes after"},
		{"update of a frozen block", `{"blocks":[{},{}],"graph_free_prefix":1,"update":true}`, "0N0 1F0\n2B0 1V0 0U*", ">>0U*<<", "no gradients"},
		{"update before a parallel reader", `{"blocks":[{},{}],"update":true,"leaves":[{"name":"w","blocks":[0,1]}],"boundaries":[
			{"producer":-1,"consumers":[0,1]},{"producer":0,"consumers":[2]},{"producer":1,"consumers":[2]}]}`,
			"0F0 1F0\n2B0 0V0 0U*", ">>0U*<<", `leaf group "w" still has a reader: 1V0`},
		{"pass on the producer's rank", `{"passes":true,` + twoRanks + `}`, "0C0 1XF0\n1P0\n\n", ">>1P0<<", "run on rank 1"},
		{"adjoint sent to a frozen block", `{"graph_free_prefix":1,` + twoRanks + `}`, "0N0 1XF0\n\n1YF0 1F0\n2B0 1V0 1XB0", ">>1XB0<<", "does not exist"},
		{"made again and sent again", `{` + twoRanks + `}`, "0C0 1XF0 0C0 1XF0\n\n\n", "0C0 >>1XF0<<", "sent twice"},
		{"unmatched send", `{` + twoRanks + `}`, "0C0 1XF0 0C1 1XF1\n\n1YF0 1F0\n2B0 1V0", ">>1XF1<<", "unmatched send: rank 1 never receives it"},
		{"deadlock", `{` + twoRanks + `}`,
			"0C0 1XF0\n1YB0 0R0 0V0 0D0 0C1 1XF1 1YB1 0R1 0V1 0D1\n1YF0 1F0 1YF1 1F1\n2B0 1V0 1XB0 2B1 1V1 1XB1", ">>1YB0<<",
			"deadlock: rank 0 waits at 0C0 1XF0 >>1YB0<< 0R0 0V0 ... for rank 1; rank 1 waits at 1YF0 1F0 >>1YF1<< 1F1 2B0 ... for rank 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := Validate(c.spec, c.text)
			require.ErrorIs(t, err, errs.ErrSchedule)
			assert.ErrorContains(t, err, c.mark)
			assert.ErrorContains(t, err, c.reason)
		})
	}
}

// TestAccepted: right schedules that no generator writes.
func TestAccepted(t *testing.T) {
	for _, c := range []struct{ name, spec, text string }{
		{"split VJP", `{"blocks":[{},{}]}`, "0C0 1F0\n2B0 1I0 0R0 1W0 0I0 0W0 0D0"},
		{"rebuilt early", `{"blocks":[{},{}]}`, "0C0 1F0\n0R0 2B0 1V0 0V0 0D0"},
		{"every graph kept", `{"blocks":[{},{}]}`, "0F0 1F0\n2B0 1V0 0V0"},
		{"rebuilt from further left", `{"blocks":[{},{},{}]}`, "0C0 1N0 2F0\n3B0 2V0 0N0 1R0 1V0 0R0 0V0 0D0"},
		{"kept although frozen", `{"blocks":[{},{}],"graph_free_prefix":1}`, "0C0 1F0\n2B0 1V0 0D0"},
		{"dropped while away", `{"blocks":[{},{}],"graph_free_prefix":1,"tier":"host"}`, "0C0 0S0 1F0\n2B0 1V0 0D0"},
		{"gradient passes before the update", `{"blocks":[{}],"update":true}`, "0F0\n1B0 0V0 0G* 0U*"},
		{"a leaf group that no VJP reads", `{"blocks":[{},{},{}],"graph_free_prefix":2,"update":true,"leaves":[{"name":"w","blocks":[0,1]}]}`,
			"0N0 1N0 2F0\n3B0 2V0 2U*"},
		{"one microbatch, written as all", `{"blocks":[{}]}`, "0F0\n1B* 0V0"},
		{"a loss that reads two boundaries", `{"blocks":[{},{}],"passes":true,"boundaries":[{"producer":-1,"consumers":[0]},
			{"producer":0,"consumers":[1,2]},{"producer":1,"consumers":[2]}]}`, "0C0 1C0\n2B0 2P0 1R0 1V0 1P0 1D0 0R0 0V0 0P0 0D0"},
	} {
		t.Run(c.name, func(t *testing.T) { assert.NoError(t, Validate(c.spec, c.text)) })
	}
}

// TestValidateReadsBothTexts: what is wrong with the spec or with the text is said as such, also for a Program made by hand.
func TestValidateReadsBothTexts(t *testing.T) {
	assert.ErrorIs(t, Validate(`{"blocks":[]}`, "0F0\n1B0 0V0"), errs.ErrValue)
	assert.ErrorIs(t, Validate(`{"blocks":[{}]}`, "0Q0"), errs.ErrSchedule)
	s, err := ParseSpec(`{"blocks":[{}]}`)
	require.NoError(t, err)
	assert.ErrorContains(t, Check(s, Program{{Forward: Schedule{{0, 0, 0}}}}), "not a kind")
}

func TestFaultIsTyped(t *testing.T) {
	err := Validate(`{"blocks":[{},{}]}`, "0C0 1F0\n2B0 0R0 0V0")
	var f *Fault
	require.ErrorAs(t, err, &f)
	assert.Equal(t, []any{0, 4, "... 2B0 0R0 >>0V0<<"}, []any{f.Rank, f.At, f.Text})
	assert.Equal(t, "ScheduleError", errs.Code(err))
}
