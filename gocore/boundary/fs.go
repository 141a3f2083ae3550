package boundary

import (
	"errors"
	"io"
	"os"
	"syscall"
)

// FS is the part of a file system that the disk tier uses. [OSFS] is the real one, [MemFS] the twin for tests. Its methods may be
// called from any goroutine.
type FS interface {
	// MkdirAll makes a folder and those above it; it may exist.
	MkdirAll(dir string) error
	// Create makes a file that must not exist, for writing, readable by this user only.
	Create(path string) (File, error)
	// Open opens a file for reading.
	Open(path string) (File, error)
	Rename(from, to string) error
	Remove(path string) error
	// RemoveAll removes a folder and what is in it; it may be missing.
	RemoveAll(path string) error
	// ReadDir gives the names in a folder, sorted.
	ReadDir(dir string) ([]string, error)
	// Free gives the bytes that this user can still write below dir.
	Free(dir string) (int64, error)
	// Lock makes the file at path if need be and takes its exclusive lock without waiting. held is true, and the lock nil, where
	// somebody else has it. The lock ends with the process or with Close, which removes the file first.
	Lock(path string) (lock io.Closer, held bool, err error)
}

// File is an open file. Write writes all of p or gives an error.
type File interface {
	io.ReadWriteCloser
	Size() (int64, error)
}

// OSFS is the operating system's file system.
type OSFS struct{}

type osFile struct{ *os.File }

func (f osFile) Size() (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// MkdirAll implements [FS].
func (OSFS) MkdirAll(dir string) error { return os.MkdirAll(dir, 0o700) }

// Create implements [FS].
func (OSFS) Create(path string) (File, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

// Open implements [FS].
func (OSFS) Open(path string) (File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

// Rename implements [FS].
func (OSFS) Rename(from, to string) error { return os.Rename(from, to) }

// Remove implements [FS].
func (OSFS) Remove(path string) error { return os.Remove(path) }

// RemoveAll implements [FS].
func (OSFS) RemoveAll(path string) error { return os.RemoveAll(path) }

// ReadDir implements [FS].
func (OSFS) ReadDir(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, nil
}

// Free implements [FS].
func (OSFS) Free(dir string) (int64, error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return int64(st.Bavail) * int64(st.Bsize), nil
}

// Lock implements [FS] with flock, which belongs to the open file: it also keeps two stores of one process apart, and the kernel
// ends it when the process dies.
func (OSFS) Lock(path string) (io.Closer, bool, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, false, err
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		if same, statErr := stillAt(f, path); statErr == nil && same {
			return &osLock{f, path}, false, nil
		}
		err = syscall.EWOULDBLOCK // its owner removed the file between our open and our lock
	}
	closeErr := f.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, true, closeErr
	}
	return nil, false, errors.Join(&os.PathError{Op: "flock", Path: path, Err: err}, closeErr)
}

func stillAt(f *os.File, path string) (bool, error) {
	mine, err := f.Stat()
	if err != nil {
		return false, err
	}
	there, err := os.Stat(path)
	if err != nil {
		return false, err
	}
	return os.SameFile(mine, there), nil
}

type osLock struct {
	f    *os.File
	path string
}

func (l *osLock) Close() error { return errors.Join(os.Remove(l.path), l.f.Close()) }
