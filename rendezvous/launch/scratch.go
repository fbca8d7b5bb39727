package launch

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// scratchName is the pattern of a scratch directory's name.
const scratchName = "euryale-run-*"

// scratch is a temporary directory. It is locked as long as its process lives, so
// that the next launcher recognises the directories of killed ones.
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
		lock, err := lockDirectory(path)
		if err == nil && isAt(lock, path) {
			return &scratch{path, lock}, nil
		}
		if err == nil { // expire was faster than the lock: make another one
			lock.Close()
			continue
		}
		if !os.IsNotExist(err) && err != unix.EWOULDBLOCK {
			os.Remove(path)
			return nil, fmt.Errorf("lock the directory to build in: %w: set TMPDIR to a "+
				"directory of another file system", err)
		}
	}
}

// lockDirectory locks a directory of this user. The error is EWOULDBLOCK if
// another process has it. The lock ends with the file, or with the process.
func lockDirectory(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	var stat unix.Stat_t
	if err = unix.Fstat(int(f.Fd()), &stat); err == nil && int(stat.Uid) != os.Getuid() {
		err = unix.EPERM
	}
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// isAt reports whether a file is still the one at path.
func isAt(f *os.File, path string) bool {
	mine, err1 := f.Stat()
	there, err2 := os.Lstat(path)
	return err1 == nil && err2 == nil && os.SameFile(mine, there)
}

// removeTime is how long remove retries: processes of a killed build may still
// create files.
const removeTime = time.Second

// remove removes the directory. What is left then, the next launcher expires.
func (s *scratch) remove() {
	for end := time.Now().Add(removeTime); os.RemoveAll(s.path) != nil && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	s.lock.Close()
}

// expire removes the scratch directories in dir that killed launchers of this user
// have left. Directories of other users and of running launchers stay.
func expire(dir string) {
	left, _ := filepath.Glob(filepath.Join(dir, scratchName))
	for _, path := range left {
		if lock, err := lockDirectory(path); err == nil {
			os.RemoveAll(path) // or the next launcher does
			lock.Close()
		}
	}
}
