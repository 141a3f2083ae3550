package boundary

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

func TestParseSpec(t *testing.T) {
	spec, err := ParseSpec(`{"tier":"disk","codec":"bf16","dir":"/x","max_bytes":9,"pool_buffers":false,"async":true,"pin":true}`)
	require.NoError(t, err)
	require.Equal(t, Spec{
		Tier: TierDisk, Codec: CodecBF16, Dir: "/x", MaxBytes: 9, Async: true, Workers: 2, Pin: true, TimeoutSeconds: 600,
	}, spec)
	spec, err = ParseSpec(`{}`)
	require.NoError(t, err)
	require.Equal(t, DefaultSpec(), spec)

	for text, part := range map[string]string{
		`{"tier":"tape"}`:           `tier is "tape"; allowed: "device", "host", "disk"`,
		`{"codec":"int3"}`:          `codec is "int3"; allowed: "raw", "fp16", "bf16"`,
		`{"max_bytes":-1}`:          `max_bytes is -1`,
		`{"workers":0}`:             `workers is 0; allowed: 1 to 16`,
		`{"timeout_seconds":0}`:     `timeout_seconds is 0`,
		`{"timeout_seconds":1e300}`: `timeout_seconds`,
		`{"teir":"disk"}`:           `teir`,
		`[]`:                        `store spec`,
	} {
		_, err := ParseSpec(text)
		require.ErrorIs(t, err, errs.ErrValue, text)
		require.ErrorContains(t, err, part)
	}
	_, err = New(Spec{}, Options{})
	require.ErrorIs(t, err, errs.ErrValue)
}
