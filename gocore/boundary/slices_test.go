package boundary

import (
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

const soon = time.Millisecond

// settle waits a boundary's move or load out, in slices.
func settle(t *testing.T, s *Store, key int64) {
	t.Helper()
	for done := false; !done; {
		var err error
		done, err = s.Settled(key, 10*time.Millisecond)
		require.NoError(t, err)
	}
}

func TestMovesAndLoadsInSlices(t *testing.T) {
	perVariant(t, func(t *testing.T, s *Store, fs *MemFS) {
		fs.Inject(Fault{Op: "write", Delay: 5 * time.Millisecond})
		fs.Inject(Fault{Op: "read", Delay: 5 * time.Millisecond})
		values := ramp(300, 1)
		x, src := vector(values...)
		require.NoError(t, s.PutOne(0, x))
		for _, start := range []func(int64, time.Duration) (bool, error){s.MoveFor, s.LoadFor} {
			done, err := start(0, soon)
			require.NoError(t, err)
			sliced := s.Spec().Tier == TierDisk && !s.Spec().Async
			require.Equal(t, !sliced, done, "only a file takes longer than that, and an asynchronous store is not waited for")
			settle(t, s, 0)
		}
		y, err := s.GetOne(bg, 0)
		require.NoError(t, err)
		require.Equal(t, rounded(s.Spec().Codec, values[9]), floats(y)[9])
		y.Free()
		require.NoError(t, s.Drop(0))
		s.Drain()
		require.Equal(t, 1, src.released)
		_, err = s.MoveFor(0, soon)
		require.ErrorIs(t, err, errs.ErrStoreKey)
		_, err = s.Settled(0, soon)
		require.ErrorIs(t, err, errs.ErrStoreKey)
	})
}

// A caller that went away in the middle may drop, clear, close, get or go on: nothing is lost or left.
func TestWhatMayFollowAnInterruptedMove(t *testing.T) {
	for name, next := range map[string]func(*Store) error{
		"drop":  func(s *Store) error { return s.Drop(0) },
		"clear": func(s *Store) error { return s.Clear() },
		"close": func(s *Store) error { return s.Close() },
		"get": func(s *Store) error {
			x, err := s.GetOne(bg, 0)
			if err == nil {
				x.Free()
			}
			return err
		},
		"load": func(s *Store) error {
			_, err := s.LoadFor(0, soon)
			return err
		},
		"replace": func(s *Store) error {
			x, _ := vector(1)
			return s.PutOne(0, x)
		},
	} {
		t.Run(name, func(t *testing.T) {
			fs := NewMemFS()
			s := newStore(t, specOf(TierDisk, CodecRaw, false), Options{FS: fs})
			fs.Inject(Fault{Op: "write", Delay: 20 * time.Millisecond})
			x, src := vector(ramp(100, 1)...)
			require.NoError(t, s.PutOne(0, x))
			done, err := s.MoveFor(0, soon)
			require.NoError(t, err)
			require.False(t, done)
			require.NoError(t, next(s))
			require.NoError(t, s.Close())
			require.Equal(t, 1, src.released)
			require.Empty(t, fs.Files())
		})
	}
}

func TestAFailureInSlicesIsToldOnce(t *testing.T) {
	fs := NewMemFS()
	s := newStore(t, specOf(TierDisk, CodecRaw, false), Options{FS: fs})
	x, _ := vector(1, 2)
	require.NoError(t, s.PutOne(0, x))
	fs.Inject(Fault{Op: "write", Delay: 10 * time.Millisecond, Err: syscall.EIO})
	done, err := s.MoveFor(0, soon)
	require.NoError(t, err)
	require.False(t, done)
	_, err = s.Settled(0, 10*time.Second)
	require.ErrorIs(t, err, errs.ErrStore)
	y, err := s.GetOne(bg, 0)
	require.NoError(t, err)
	require.Equal(t, []float32{1, 2}, floats(y))
	y.Free()
	require.NoError(t, s.Close())
}

func TestASlowFile(t *testing.T) {
	spec := specOf(TierDisk, CodecRaw, true)
	spec.Dir = t.TempDir()
	spec.FileDelaySeconds = 0.05
	s := newStore(t, spec, Options{})
	x, _ := vector(ramp(3*chunkLen/4, 1)...)
	require.NoError(t, s.PutOne(0, x))
	start := time.Now()
	require.NoError(t, s.Move(0))
	ready, err := s.Ready(0, time.Millisecond)
	require.NoError(t, err)
	require.False(t, ready)
	y, err := s.GetOne(bg, 0)
	require.NoError(t, err)
	// Written and read: header, three chunks, sum; each waits.
	require.Greater(t, time.Since(start), 10*50*time.Millisecond)
	y.Free()
	require.NoError(t, s.Close())
	spec.FileDelaySeconds = 61
	_, err = New(spec, Options{})
	require.ErrorContains(t, err, "file_delay_seconds")
}
