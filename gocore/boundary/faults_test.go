package boundary

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/memory"
)

// The n-th operation of every kind fails, for every n: the error is clear, every value that was put is still right or said to be lost, and at
// the end nothing is left but what could not be removed.
func TestTheNthFileOperationFails(t *testing.T) {
	faults := map[string]Fault{
		"error":       {Err: syscall.EIO},
		"full":        {Err: syscall.ENOSPC},
		"short":       {Short: true},
		"torn":        {Torn: true},
		"flipped bit": {Flip: true},
		"panic":       {Panic: true},
	}
	for name, fault := range faults {
		for _, op := range []string{"create", "open", "write", "read", "rename", "remove", "free"} {
			if fault.Panic && op == "remove" {
				continue // the folder's removal in Close is the caller's own thread, where the bridge recovers
			}
			for _, async := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%s/%v", name, op, async), func(t *testing.T) {
					for n := range 12 {
						walk(t, fault, op, n, async)
					}
				})
			}
		}
	}
}

func walk(t *testing.T, fault Fault, op string, n int, async bool) {
	heap, fs := memory.NewHeap(), NewMemFS()
	s, err := New(specOf(TierDisk, CodecRaw, async), Options{Allocator: heap, FS: fs})
	require.NoError(t, err)
	fault.Op, fault.Skip, fault.Times = op, n, 1
	fs.Inject(fault)
	fine := func(err error) bool {
		if err != nil {
			require.True(t, errors.Is(err, errs.ErrStore) || errors.Is(err, errs.ErrStoreKey), err)
			require.Contains(t, err.Error(), "boundary")
		}
		return err == nil
	}
	var sources []*source
	for k := range int64(3) {
		x, src := vector(ramp(50, uint64(k))...)
		sources = append(sources, src)
		require.NoError(t, s.PutOne(k, x))
		fine(s.Move(k))
	}
	for k := range int64(3) {
		y, err := s.GetOne(bg, k)
		if fine(err) {
			require.Equal(t, ramp(50, uint64(k)), floats(y), "never a wrong value")
			y.Free()
		}
		fine(s.Drop(k))
	}
	err = s.Close()
	if err != nil {
		require.ErrorIs(t, err, errs.ErrStore)
	}
	s.Drain()
	if op != "remove" {
		require.NoError(t, err)
		require.Empty(t, fs.Files())
	}
	count, _ := heap.Live()
	require.Zero(t, count)
	for _, src := range sources {
		require.Equal(t, 1, src.released)
	}
}

// boundaryFile is the only boundary's file.
func boundaryFile(t *testing.T, fs *MemFS) string {
	t.Helper()
	var found []string
	for _, path := range fs.Files() {
		if strings.HasSuffix(path, ".eaeb") {
			found = append(found, path)
		}
	}
	require.Len(t, found, 1)
	return found[0]
}

// Each byte of a file, changed, is found; the error names boundary and file.
func TestADamagedFileIsFound(t *testing.T) {
	fs := NewMemFS()
	s := newStore(t, specOf(TierDisk, CodecRaw, false), Options{FS: fs})
	x, _ := vector(ramp(5, 1)...)
	require.NoError(t, s.PutOne(4, x))
	require.NoError(t, s.Move(4))
	path := boundaryFile(t, fs)
	size := 0
	fs.Edit(path, func(data []byte) []byte { size = len(data); return data })
	found := int64(0)
	for i := range size {
		padding := false
		fs.Edit(path, func(data []byte) []byte { padding = data[i] == 0; data[i] ^= 0x10; return data })
		y, err := s.GetOne(bg, 4)
		if err == nil {
			require.True(t, padding, "byte %d", i)
			require.Equal(t, ramp(5, 1), floats(y))
			y.Free()
			require.NoError(t, s.Move(4))
			path = boundaryFile(t, fs)
			continue
		}
		found++
		require.ErrorIs(t, err, errs.ErrStore)
		require.ErrorContains(t, err, "boundary 4")
		require.ErrorContains(t, err, filepath.Base(path))
		fs.Edit(path, func(data []byte) []byte { data[i] ^= 0x10; return data })
	}
	require.Greater(t, found, int64(100))
	require.Equal(t, found, s.Stats().ChecksumFailures)
	require.NoError(t, s.Close())
}

func TestAFileThatIsGoneOrCutShort(t *testing.T) {
	for name, edit := range map[string]func([]byte) []byte{
		"gone":  func([]byte) []byte { return nil },
		"empty": func([]byte) []byte { return []byte{} },
		"half":  func(data []byte) []byte { return data[:len(data)/2] },
		"long":  func(data []byte) []byte { return append(data, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			fs := NewMemFS()
			s := newStore(t, specOf(TierDisk, CodecRaw, false), Options{FS: fs})
			x, _ := vector(1, 2, 3)
			require.NoError(t, s.PutOne(0, x))
			require.NoError(t, s.Move(0))
			fs.Edit(boundaryFile(t, fs), edit)
			_, err := s.GetOne(bg, 0)
			require.ErrorIs(t, err, errs.ErrStore)
			require.ErrorContains(t, err, "boundary 0")
			_ = s.Close() // the file may be gone
		})
	}
}

// A store removes what a dead process left behind, and nothing else.
func TestLeftoversOfADeadProcess(t *testing.T) {
	dir := t.TempDir()
	spec := specOf(TierDisk, CodecRaw, false)
	spec.Dir = dir
	alive := newStore(t, spec, Options{})
	x, _ := vector(1, 2, 3)
	require.NoError(t, alive.PutOne(0, x))
	require.NoError(t, alive.Move(0))
	names, err := os.ReadDir(dir)
	require.NoError(t, err)
	var folder string
	for _, entry := range names {
		if entry.IsDir() {
			folder = entry.Name()
		}
	}
	require.NotEmpty(t, folder)
	// The lock of a killed process ends with it; its file and folder stay. A copy under another name is just that.
	dead := folder[:len(folder)-1] + map[bool]string{true: "1", false: "0"}[strings.HasSuffix(folder, "0")]
	require.NoError(t, os.MkdirAll(filepath.Join(dir, dead), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, dead, "0-1.eaeb"), []byte("x"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, dead+lockSuffix), nil, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "mine.txt"), []byte("x"), 0o600))

	second := newStore(t, spec, Options{})
	require.NoDirExists(t, filepath.Join(dir, dead))
	require.NoFileExists(t, filepath.Join(dir, dead+lockSuffix))
	require.FileExists(t, filepath.Join(dir, "mine.txt"))
	y, err := alive.GetOne(bg, 0)
	require.NoError(t, err)
	require.Equal(t, []float32{1, 2, 3}, floats(y))
	y.Free()
	require.NoError(t, second.Close())
	require.NoError(t, alive.Close())
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 1)
}

// 1,000 steps through one-buffer pools on a slow disk, with background moves: never a stale byte.
func TestNoStaleByte(t *testing.T) {
	spec := specOf(TierDisk, CodecRaw, true)
	fs := NewMemFS()
	fs.Inject(Fault{Op: "write", Delay: 20 * time.Microsecond})
	fs.Inject(Fault{Op: "read", Delay: 20 * time.Microsecond})
	s := newStore(t, spec, Options{FS: fs})
	first := int64(0)
	for step := range 1000 {
		for k := range int64(2) {
			x, _ := vector(ramp(20, uint64(step)<<8|uint64(k))...)
			require.NoError(t, s.PutOne(k, x))
			require.NoError(t, s.Move(k))
		}
		for k := int64(1); k >= 0; k-- {
			require.NoError(t, s.Load(k))
			y, err := s.GetOne(bg, k)
			require.NoError(t, err)
			require.Equal(t, ramp(20, uint64(step)<<8|uint64(k)), floats(y))
			y.Free()
			require.NoError(t, s.Drop(k))
		}
		if step == 0 {
			first = s.Stats().BuffersAllocated
		}
	}
	require.Positive(t, first)
	require.Equal(t, first, s.Stats().BuffersAllocated)
	require.NoError(t, s.Close())
}
