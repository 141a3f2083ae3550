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

func TestPageLockedBlocks(t *testing.T) {
	_, found := NewPinned()
	require.False(t, found, "no CUDA in a Go test's process")
	memory := FakePinned()
	before := Live()
	block, err := memory.Alloc(5000)
	require.NoError(t, err)
	require.Zero(t, uintptr(block)%Align)
	require.Equal(t, before+5000, Live())
	memory.Free(block, 5000)
	require.Equal(t, before, Live())
	_, err = memory.Alloc(-1)
	require.ErrorIs(t, err, errs.ErrValue)
	_, err = memory.Alloc(2 << 20)
	require.ErrorIs(t, err, errs.ErrStore)
	require.ErrorContains(t, err, "pin_memory=False")
	require.Equal(t, before, Live())
}
