package boundary

import (
	"errors"
	"io"
	"io/fs"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Fault is one thing that goes wrong in a [MemFS].
type Fault struct {
	// Op is the operation: "mkdir", "create", "open", "write", "read", "rename", "remove", "readdir", "free", "lock".
	Op string
	// Path, where not "", must be part of the operation's path.
	Path string
	// Skip operations that match pass first. Then Times of them fail; 0 is all.
	Skip, Times int

	// Delay waits first.
	Delay time.Duration
	// Err is returned; syscall.ENOSPC and syscall.EIO are what disks give.
	Err error
	// Short writes or reads only half of what was asked for, and says so.
	Short bool
	// Torn drops the second half of a write and claims success.
	Torn bool
	// Flip changes one bit in the middle of what is written or read.
	Flip bool
	// Panic panics.
	Panic bool
}

// MemFS is a file system in memory that fails on demand. It is safe for several goroutines. The zero value is not usable.
type MemFS struct {
	mu     sync.Mutex
	files  map[string][]byte
	dirs   map[string]bool
	locked map[string]bool
	faults []*Fault
	// Capacity bounds the bytes of all files; writes beyond it give ENOSPC. Set it before use.
	Capacity int64
}

// NewMemFS makes an empty file system without a bound.
func NewMemFS() *MemFS {
	return &MemFS{files: map[string][]byte{}, dirs: map[string]bool{}, locked: map[string]bool{}, Capacity: math.MaxInt64}
}

// Inject adds a fault.
func (m *MemFS) Inject(f Fault) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if f.Times == 0 {
		f.Times = math.MaxInt
	}
	m.faults = append(m.faults, &f)
}

// Heal removes all faults.
func (m *MemFS) Heal() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.faults = nil
}

// Files gives the paths of all files, sorted.
func (m *MemFS) Files() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []string
	for path := range m.files {
		all = append(all, path)
	}
	slices.Sort(all)
	return all
}

// Edit replaces a file's content by what f makes of it; nil removes it.
func (m *MemFS) Edit(path string, f func([]byte) []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if data := f(slices.Clone(m.files[path])); data != nil {
		m.files[path] = data
	} else {
		delete(m.files, path)
	}
}

// hit finds the fault that this operation runs into, and lets its delay pass.
func (m *MemFS) hit(op, path string) Fault {
	m.mu.Lock()
	var found Fault
	for _, f := range m.faults {
		if f.Op != op || !strings.Contains(path, f.Path) || f.Times == 0 {
			continue
		}
		if f.Skip > 0 {
			f.Skip--
			continue
		}
		f.Times--
		found = *f
		break
	}
	m.mu.Unlock()
	time.Sleep(found.Delay)
	if found.Panic {
		panic("injected panic")
	}
	if found.Err != nil {
		found.Err = &fs.PathError{Op: op, Path: path, Err: found.Err}
	}
	return found
}

// MkdirAll implements [FS].
func (m *MemFS) MkdirAll(dir string) error {
	if f := m.hit("mkdir", dir); f.Err != nil {
		return f.Err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dirs[dir] = true
	return nil
}

// Create implements [FS].
func (m *MemFS) Create(path string) (File, error) {
	if f := m.hit("create", path); f.Err != nil {
		return nil, f.Err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.files[path]; ok {
		return nil, &fs.PathError{Op: "create", Path: path, Err: fs.ErrExist}
	}
	m.files[path] = []byte{}
	return &memFile{fs: m, path: path}, nil
}

// Open implements [FS].
func (m *MemFS) Open(path string) (File, error) {
	if f := m.hit("open", path); f.Err != nil {
		return nil, f.Err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	data, ok := m.files[path]
	if !ok {
		return nil, &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
	}
	return &memFile{fs: m, path: path, rest: data}, nil
}

// Rename implements [FS].
func (m *MemFS) Rename(from, to string) error {
	if f := m.hit("rename", from); f.Err != nil {
		return f.Err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	data, ok := m.files[from]
	if !ok {
		return &fs.PathError{Op: "rename", Path: from, Err: fs.ErrNotExist}
	}
	delete(m.files, from)
	m.files[to] = data
	return nil
}

// Remove implements [FS].
func (m *MemFS) Remove(path string) error {
	if f := m.hit("remove", path); f.Err != nil {
		return f.Err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.files[path]; !ok {
		return &fs.PathError{Op: "remove", Path: path, Err: fs.ErrNotExist}
	}
	delete(m.files, path)
	return nil
}

// RemoveAll implements [FS].
func (m *MemFS) RemoveAll(path string) error {
	if f := m.hit("remove", path); f.Err != nil {
		return f.Err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for name := range m.files {
		if strings.HasPrefix(name, path+string(filepath.Separator)) {
			delete(m.files, name)
		}
	}
	delete(m.dirs, path)
	return nil
}

// ReadDir implements [FS].
func (m *MemFS) ReadDir(dir string) ([]string, error) {
	if f := m.hit("readdir", dir); f.Err != nil {
		return nil, f.Err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var names []string
	for path := range m.files {
		if filepath.Dir(path) == dir {
			names = append(names, filepath.Base(path))
		}
	}
	for path := range m.dirs {
		if filepath.Dir(path) == dir {
			names = append(names, filepath.Base(path))
		}
	}
	slices.Sort(names)
	return names, nil
}

// Free implements [FS].
func (m *MemFS) Free(dir string) (int64, error) {
	if f := m.hit("free", dir); f.Err != nil {
		return 0, f.Err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.Capacity - m.used(), nil
}

func (m *MemFS) used() int64 {
	total := int64(0)
	for _, data := range m.files {
		total += int64(len(data))
	}
	return total
}

// Lock implements [FS].
func (m *MemFS) Lock(path string) (io.Closer, bool, error) {
	if f := m.hit("lock", path); f.Err != nil {
		return nil, false, f.Err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.locked[path] {
		return nil, true, nil
	}
	m.locked[path] = true
	m.files[path] = []byte{}
	return &memLock{m, path}, false, nil
}

type memLock struct {
	fs   *MemFS
	path string
}

func (l *memLock) Close() error {
	l.fs.mu.Lock()
	defer l.fs.mu.Unlock()
	delete(l.fs.locked, l.path)
	delete(l.fs.files, l.path)
	return nil
}

type memFile struct {
	fs   *MemFS
	path string
	rest []byte
}

var errUnlinked = errors.New("file was removed while open")

func (f *memFile) Write(p []byte) (int, error) {
	fault := f.fs.hit("write", f.path)
	if fault.Err != nil {
		return 0, fault.Err
	}
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	old, ok := f.fs.files[f.path]
	if !ok {
		return 0, errUnlinked
	}
	if f.fs.used()+int64(len(p)) > f.fs.Capacity {
		return 0, &fs.PathError{Op: "write", Path: f.path, Err: syscall.ENOSPC}
	}
	data := slices.Clone(p)
	if fault.Short || fault.Torn {
		data = data[:len(data)/2]
	}
	if fault.Flip && len(data) > 0 {
		data[len(data)/2] ^= 1
	}
	f.fs.files[f.path] = append(old, data...)
	if fault.Short {
		return len(data), io.ErrShortWrite
	}
	return len(p), nil
}

func (f *memFile) Read(p []byte) (int, error) {
	fault := f.fs.hit("read", f.path)
	if fault.Err != nil {
		return 0, fault.Err
	}
	if fault.Short {
		f.rest = f.rest[:len(f.rest)/2]
	}
	if len(f.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(p, f.rest)
	f.rest = f.rest[n:]
	if fault.Flip {
		p[n/2] ^= 1
	}
	return n, nil
}

func (f *memFile) Size() (int64, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	return int64(len(f.fs.files[f.path])), nil
}

func (f *memFile) Close() error { return nil }
