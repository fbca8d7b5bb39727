package launch

import (
	"cmp"
	"errors"
	"os"
	"path/filepath"
	"slices"

	"github.com/euryale-ml/euryale/internal/filelock"
)

// keptCopies is how many copies the cache of a host keeps beside those that live jobs use.
const keptCopies = 20

// cache is the cache of a host, which is the working directory of its launcher: see host.sh. Each
// copy has a directory. Those that it holds are not removed, and are the same directories whatever
// others make of their paths.
type cache struct{ held []*os.File }

// hold returns a path of a copy's directory, for as long as this process lives.
func (c *cache) hold(dir string) (path string, err error) {
	f, err := lockDirectory(dir, func(f *os.File) error {
		err := filelock.TryShare(f)
		if errors.Is(err, filelock.ErrUnsupported) { // nothing is removed there: see expire
			return nil
		}
		return err
	})
	if err != nil {
		return "", err
	}
	c.held = append(c.held, f)
	return pathOf(f)
}

// self returns the path of this program, which the cache holds if it was started from there.
func (c *cache) self() (path string, err error) {
	path, err = os.Executable()
	if err != nil {
		return "", err
	}
	if dir, err := c.hold(filepath.Base(filepath.Dir(path))); err == nil {
		path = filepath.Join(dir, filepath.Base(path))
	}
	return path, nil
}

// expire removes the copies that nobody uses, but for those that were used last. It comes when what
// this job needs is held.
func (c *cache) expire() {
	if len(c.held) == 0 {
		return // the working directory is another one
	}
	copies, _ := filepath.Glob("sha256-*") // the pattern is right
	used := func(dir string) int64 {
		info, err := os.Lstat(dir)
		if err != nil {
			return 0
		}
		return info.ModTime().UnixNano()
	}
	slices.SortFunc(copies, func(a, b string) int { return cmp.Compare(used(b), used(a)) })
	for _, dir := range copies[min(keptCopies, len(copies)):] {
		sweep(dir)
	}
}
