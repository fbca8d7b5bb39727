package launch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/euryale-ml/euryale/internal/filelock"
)

// scratchName is the pattern of a scratch directory's name.
const scratchName = "euryale-run-*"

// scratch is a temporary directory. It stays locked while its process lives, so that the next
// launcher recognises directories of killed ones.
type scratch struct {
	path string
	lock *os.File
}

// newScratch makes a scratch directory.
func newScratch() (*scratch, error) {
	for {
		path, err := os.MkdirTemp("", scratchName)
		if err == nil {
			path, err = filepath.Abs(path) // go build runs in another directory
		}
		if err != nil {
			return nil, fmt.Errorf("make a directory to build in: %w: set TMPDIR to a directory "+
				"that you can write", err)
		}
		lock, err := lockDirectory(path, filelock.TryLock)
		if err == nil && isThere(lock) {
			return &scratch{path, lock}, nil
		}
		if err == nil { // expire was faster than the lock: make another one
			lock.Close()
			continue
		}
		if !os.IsNotExist(err) && !errors.Is(err, filelock.ErrHeld) {
			os.Remove(path)
			return nil, fmt.Errorf("lock the directory to build in: %w: set TMPDIR to a "+
				"directory of another file system", err)
		}
	}
}

// isThere reports whether a file still has its name.
func isThere(f *os.File) bool {
	mine, err1 := f.Stat()
	there, err2 := os.Lstat(f.Name())
	return err1 == nil && err2 == nil && os.SameFile(mine, there)
}

// removeTime is how long remove retries: processes of a killed build may still create files.
const removeTime = time.Second

// remove removes the directory. The next launcher removes anything left.
func (s *scratch) remove() {
	filelock.Remove(s.lock, func() error {
		end := time.Now().Add(removeTime)
		for os.RemoveAll(s.path) != nil && time.Now().Before(end) {
			time.Sleep(time.Millisecond)
		}
		return nil
	})
}

// expire removes the scratch directories in dir that killed launchers of this user have left.
// Directories of other users and of running launchers stay.
func expire(dir string) {
	left, _ := filepath.Glob(filepath.Join(dir, scratchName))
	for _, path := range left {
		sweep(path)
	}
}

// sweep removes a directory that no process has locked. The next launcher removes what this one
// cannot.
func sweep(dir string) {
	if lock, err := lockDirectory(dir, filelock.TryLock); err == nil {
		filelock.Remove(lock, func() error { return os.RemoveAll(dir) })
	}
}
