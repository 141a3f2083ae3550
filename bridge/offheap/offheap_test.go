package offheap

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

func TestBlocksAreAlignedAndCounted(t *testing.T) {
	var memory Allocator
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.Int64Range(0, 1<<16).Draw(rt, "bytes")
		before := Live()
		block, err := memory.Alloc(n)
		require.NoError(rt, err)
		require.Zero(rt, uintptr(block)%Align)
		require.Equal(rt, before+n, Live())
		memory.Free(block, n)
		require.Equal(rt, before, Live())
	})
}

func TestRefusals(t *testing.T) {
	var memory Allocator
	_, err := memory.Alloc(-1)
	require.ErrorIs(t, err, errs.ErrValue)
	_, err = memory.Alloc(1 << 60)
	require.ErrorIs(t, err, errs.ErrStore)
}
