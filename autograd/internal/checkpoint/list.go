package checkpoint

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
)

// stepNames are the names that Commit gives.
var stepNames = regexp.MustCompile(`^step-\d{8,20}(\.\d+)?$`)

// Entry is a checkpoint in a directory.
type Entry struct {
	Path string
	Stamp
	Wrong error // why it cannot be loaded, nil if it is whole
}

// List returns the checkpoints of a directory, the newest first. Those whose records cannot be read
// come before all: nobody knows when they were written. A directory that is a checkpoint itself,
// of an older version or because the user names it, is the last. The content of files is not
// read. The error wraps os.ErrNotExist if there is no directory.
func List(dir string) ([]Entry, error) {
	all, err := entries(dir)
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(all, func(a, b Entry) int {
		if unread := cmp.Compare(b.unread(), a.unread()); unread != 0 {
			return unread
		}
		return cmp.Or(cmp.Compare(b.Save, a.Save), cmp.Compare(b.Step, a.Step))
	})
	if _, err := os.Lstat(filepath.Join(dir, RecordName)); err == nil {
		all = append(all, examine(dir))
	}
	return all, nil
}

// entries returns the checkpoints that a directory has at one moment, while a Save may add some and
// remove others.
func entries(dir string) ([]Entry, error) {
	names, err := namesIn(dir)
	for err == nil {
		was := names
		if names, err = namesIn(dir); err != nil || !slices.Equal(names, was) {
			continue
		}
		var all []Entry
		gone := false
		for _, name := range names {
			e := examine(filepath.Join(dir, name))
			if info, err := os.Stat(e.Path); err == nil && info.IsDir() {
				all = append(all, e)
			}
			_, err := os.Lstat(e.Path)
			gone = gone || errors.Is(err, os.ErrNotExist)
		}
		if !gone {
			return all, nil
		}
	}
	return nil, err
}

// namesIn returns the names of checkpoints in a directory.
func namesIn(dir string) (names []string, err error) {
	all, err := os.ReadDir(dir)
	for _, n := range all {
		if stepNames.MatchString(n.Name()) {
			names = append(names, n.Name())
		}
	}
	return names, err
}

// examine looks at a checkpoint.
func examine(path string) Entry {
	_, s, err := ReadRecord(path)
	e := Entry{path, s, err}
	for _, f := range s.Files {
		info, err := os.Stat(filepath.Join(path, f.Name))
		if err == nil {
			err = f.long(info.Size())
		}
		if err != nil {
			e.Wrong = &Damaged{Path: filepath.Join(path, f.Name), Cause: err}
		}
	}
	return e
}

// unread is 1 for a checkpoint whose record cannot be read.
func (e Entry) unread() int {
	if e.Wrong != nil && e.ID == "" {
		return 1
	}
	return 0
}

// next completes the stamp of a Save to a directory.
func (s Stamp) next(dir string, all []Entry) (Stamp, error) {
	for _, e := range all {
		s.Save = max(s.Save, e.Save)
	}
	s.Save++
	base := fmt.Sprintf("step-%08d", s.Step)
	s.Name = base
	for i := 1; ; i++ {
		_, err := os.Lstat(filepath.Join(dir, s.Name))
		if errors.Is(err, os.ErrNotExist) {
			return s, nil
		}
		if err != nil {
			return s, err
		}
		s.Name = fmt.Sprintf("%s.%d", base, i)
	}
}

// Follows reports whether a training that saves after so many steps, and has saved or loaded the
// known ids, goes on from its newest checkpoint in a directory. Otherwise it is a branch, another
// training.
func Follows(all []Entry, training string, step uint64, known map[string]bool) bool {
	i := slices.IndexFunc(all, func(e Entry) bool { return e.Training == training && e.ID != "" })
	return i < 0 || known[all[i].ID] || all[i].Step < step
}
