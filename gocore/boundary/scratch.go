package boundary

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// Note [Whose files]
//
// A store of the disk tier writes to a folder of its own, `eae-<pid>-<random>`, whose life is that of a lock on the file
// `eae-<pid>-<random>.lock` beside it. The lock is taken before the folder is made and given up after it is gone; the kernel
// gives it up when the process dies. So whoever can take the lock of a name may remove its folder, and nobody can while the owner lives.

const lockSuffix = ".lock"

var scratchName = regexp.MustCompile(`^eae-[0-9]+-[0-9a-f]{16}\.lock$`)

// scratch is a store's own folder.
type scratch struct {
	fs   FS
	path string
	lock io.Closer
}

// openScratch removes what crashed processes left in dir and makes a new folder there.
func openScratch(fs FS, dir string) (*scratch, error) {
	if err := fs.MkdirAll(dir); err != nil {
		return nil, errs.E(errs.ErrStore, "boundary store: cannot make the folder %s: %w; give a folder that can be written as dir", dir, err)
	}
	if _, err := sweep(fs, dir); err != nil {
		return nil, err
	}
	for {
		var random [8]byte
		if _, err := rand.Read(random[:]); err != nil {
			return nil, errs.E(errs.ErrStore, "boundary store: no random name: %w", err)
		}
		path := filepath.Join(dir, fmt.Sprintf("eae-%d-%s", os.Getpid(), hex.EncodeToString(random[:])))
		lock, held, err := fs.Lock(path + lockSuffix)
		if err != nil {
			return nil, errs.E(errs.ErrStore, "boundary store: cannot lock in %s: %w; give a folder that can be written as dir", dir, err)
		}
		if held {
			continue // a sweep was faster between making the lock file and locking it
		}
		if err := fs.MkdirAll(path); err != nil {
			return nil, errs.E(errs.ErrStore, "boundary store: cannot make the folder %s: %w", path, errors.Join(err, lock.Close()))
		}
		return &scratch{fs, path, lock}, nil
	}
}

// sweep removes the folders in dir whose owners are gone and gives their number.
func sweep(fs FS, dir string) (int, error) {
	names, err := fs.ReadDir(dir)
	if err != nil {
		return 0, errs.E(errs.ErrStore, "boundary store: cannot read the folder %s: %w", dir, err)
	}
	removed := 0
	for _, name := range names {
		if !scratchName.MatchString(name) {
			continue
		}
		path := filepath.Join(dir, name)
		lock, held, err := fs.Lock(path)
		if held || err != nil {
			continue // somebody lives there, or another user did: not ours to remove
		}
		if err := errors.Join(fs.RemoveAll(strings.TrimSuffix(path, lockSuffix)), lock.Close()); err != nil {
			return removed, errs.E(errs.ErrStore, "boundary store: cannot remove what a crashed process left in %s: %w", dir, err)
		}
		removed++
	}
	return removed, nil
}

// close removes the folder and gives up the lock.
func (d *scratch) close() error { return errors.Join(d.fs.RemoveAll(d.path), d.lock.Close()) }
