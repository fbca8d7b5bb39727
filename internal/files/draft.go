package files

import (
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/internal/filelock"
)

// Draft is files that are to replace those of a directory together. On a disk they are written
// beside their places, under names that nothing reads, and get their own when all are on the disk.
// A process that ends before leaves them to the next Draft in the directory, which removes them. An
// object store has no other names: there they are in memory until Place.
type Draft struct {
	in    Dir
	made  []string // directories, outermost first
	lock  *os.File // its name begins those of the files; nil in a store
	files map[string]drafted
}

// drafted is a file of a draft.
type drafted interface {
	io.WriterAt
	io.Closer
	Sync() error
}

// locks are the names of files that the processes of drafts have locked.
var locks = regexp.MustCompile(`^\.euryale-save-[A-Z2-7]{26}$`)

// NewDraft makes a directory, if there is none, and a draft of its files.
func NewDraft(in Dir) (d *Draft, err error) {
	d = &Draft{in: in, files: map[string]drafted{}}
	dir := in.OnDisk()
	if dir == "" {
		return d, nil
	}
	for at := filepath.Clean(dir); ; at = filepath.Dir(at) {
		if _, err := os.Stat(at); !errors.Is(err, fs.ErrNotExist) {
			break
		}
		d.made = slices.Insert(d.made, 0, at)
	}
	err = os.MkdirAll(dir, 0o777)
	if err == nil {
		err = removeDead(dir)
	}
	for err == nil && d.lock == nil {
		name := filepath.Join(dir, ".euryale-save-"+rand.Text())
		d.lock, err = os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
		if err == nil && errors.Is(filelock.TryLock(d.lock), filelock.ErrHeld) { // by removeDead
			d.lock, err = nil, d.lock.Close()
		}
	}
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// removeDead removes what processes have left that ended before their drafts. Where files cannot be
// locked nothing tells whether they have.
func removeDead(dir string) error {
	all, err := os.ReadDir(dir)
	for _, lock := range all {
		if !locks.MatchString(lock.Name()) || !lock.Type().IsRegular() {
			continue
		}
		path := filepath.Join(dir, lock.Name())
		f, lost := os.OpenFile(path, os.O_RDWR|filelock.NoFollow, 0)
		if lost != nil {
			continue // it is removed meanwhile, or another user's
		}
		if filelock.TryLock(f) != nil {
			f.Close()
			continue
		}
		for _, e := range all {
			if strings.HasPrefix(e.Name(), lock.Name()+".") {
				err = errors.Join(err, gone(os.Remove(filepath.Join(dir, e.Name()))))
			}
		}
		err = errors.Join(err, gone(filelock.Remove(f, func() error { return os.Remove(path) })))
	}
	return err
}

// gone is err, unless it says that a file is gone already.
func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Create makes a file of so many bytes.
func (d *Draft) Create(name string, size int64) (io.WriterAt, error) {
	if d.lock == nil {
		f := make(kept, size)
		d.files[name] = f
		return f, nil
	}
	f, err := os.OpenFile(d.path(name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return nil, err
	}
	d.files[name] = f
	return f, f.Truncate(size)
}

func (d *Draft) path(name string) string { return d.lock.Name() + "." + name }

// Sync returns when all files are on the disk. None is written after it.
func (d *Draft) Sync() error {
	errs := make(chan error)
	for _, f := range d.files {
		go func() { errs <- errors.Join(f.Sync(), f.Close()) }()
	}
	var all error
	for range d.files {
		all = errors.Join(all, <-errs)
	}
	return all
}

// Place gives a file its own name, after Sync. A link of that name is replaced.
func (d *Draft) Place(name string) (err error) {
	if d.lock == nil {
		err = d.in.Replace(name, Text(d.files[name].(kept)))
	} else {
		err = os.Rename(d.path(name), filepath.Join(d.in.OnDisk(), name))
	}
	if err == nil {
		delete(d.files, name)
	}
	return err
}

// Close removes the files that have no place, and the directories that NewDraft has made, if they
// are empty.
func (d *Draft) Close() (err error) {
	if d.lock != nil {
		for name, f := range d.files {
			f.Close() // again, after Sync
			err = errors.Join(err, gone(os.Remove(d.path(name))))
		}
		err = errors.Join(err, gone(filelock.Remove(d.lock, func() error {
			return os.Remove(d.lock.Name())
		})))
	}
	for _, dir := range slices.Backward(d.made) {
		os.Remove(dir)
	}
	return err
}

// kept is a file in memory.
type kept []byte

func (k kept) WriteAt(p []byte, at int64) (int, error) { return copy(k[at:], p), nil }
func (k kept) Close() error                            { return nil }
func (k kept) Sync() error                             { return nil }
