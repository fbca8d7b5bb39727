package checkpoint

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/internal/filelock"
	"github.com/euryale-ml/euryale/internal/files"
)

// lockName is the file that a writer locks.
const lockName = ".euryale-lock"

// ErrLocked is wrapped by the error of Acquire if another holds the lock.
var ErrLocked = errors.New("the directory is locked")

// Lock is what keeps other writers away from a directory, until Release or the end of the process.
type Lock struct {
	Supported bool     // false if the file system has no locks
	f         *os.File // nil if the directory is not on a disk
	path      string   // of the directory
	made      []string // directories and files that were not there before
}

// Acquire makes a directory, unless it exists, and locks it for a holder, whom others are told.
// After an error nothing is left.
func Acquire(in files.Dir, holder string) (*Lock, error) {
	dir := in.OnDisk()
	l := &Lock{path: in.Path("")}
	if dir == "" {
		return l, nil
	}
	made, err := makeDir(dir)
	l.made = made
	for err == nil {
		if err = l.open(filepath.Join(dir, lockName)); err != nil {
			break
		}
		if err = l.take(holder); err != nil || l.Of(in) {
			break
		}
		err = l.f.Close() // another holder has removed it
	}
	if err != nil {
		return nil, errors.Join(err, l.Undo())
	}
	return l, nil
}

// open opens the file, or makes it.
func (l *Lock) open(path string) (err error) {
	const flags = os.O_RDWR | filelock.NoFollow
	for {
		l.f, err = os.OpenFile(path, flags, 0)
		if !errors.Is(err, os.ErrNotExist) {
			return err
		}
		l.f, err = os.OpenFile(path, flags|os.O_CREATE|os.O_EXCL, 0o666)
		if err == nil {
			l.made = append(l.made, path)
		}
		if !errors.Is(err, os.ErrExist) {
			return err
		}
	}
}

// take locks the file, and writes the holder's name into it.
func (l *Lock) take(holder string) error {
	err := filelock.TryLock(l.f)
	switch {
	case errors.Is(err, filelock.ErrHeld):
		var text []byte
		for range 100 { // who has just locked it has yet to write its name
			if text, _ = io.ReadAll(io.LimitReader(l.f, 1000)); len(text) > 0 {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		l.made = nil // it is the other's now
		other := cmp.Or(strings.TrimSpace(string(text)), "another job")
		return fmt.Errorf("%w: %s saves there: let it end, or name another directory",
			ErrLocked, other)
	case errors.Is(err, filelock.ErrUnsupported):
	case err != nil:
		return err
	default:
		l.Supported = true
	}
	if err := l.f.Truncate(0); err != nil {
		return err
	}
	_, err = l.f.WriteAt([]byte(holder+"\n"), 0)
	return err
}

// Of reports whether the lock is a directory's.
func (l *Lock) Of(in files.Dir) bool {
	if l.f == nil || in.OnDisk() == "" {
		return l.f == nil && l.path == in.Path("")
	}
	is, err := in.Stat(lockName)
	mine, own := l.f.Stat()
	return err == nil && own == nil && os.SameFile(is, mine)
}

// Release lets others write.
func (l *Lock) Release() error {
	if l.f == nil {
		return nil
	}
	return l.f.Close()
}

// Undo is Release, and removes what Acquire has made, if nothing else is in it.
func (l *Lock) Undo() error {
	remove := func() error {
		for _, path := range slices.Backward(l.made) {
			os.Remove(path)
		}
		return nil
	}
	if l.f == nil {
		return remove()
	}
	return filelock.Remove(l.f, remove)
}
