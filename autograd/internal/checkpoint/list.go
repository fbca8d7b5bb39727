package checkpoint

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"

	"github.com/euryale-ml/euryale/internal/files"
)

// stepNames are the names that Commit gives.
var stepNames = regexp.MustCompile(`^step-\d{8,20}(\.\d+)?$`)

// Entry is a checkpoint in a directory.
type Entry struct {
	Dir string // its name in the directory, "." if it is that
	Stamp
	Wrong error // why it cannot be loaded, nil if it is whole
}

// List returns the checkpoints of a directory, the newest first. Those whose records cannot be read
// come before all: nobody knows when they were written. A directory that is a checkpoint itself,
// of an older version or because the user names it, is the last. The content of files is not
// read. The error wraps fs.ErrNotExist if there is no directory.
func List(in files.Dir) ([]Entry, error) {
	all, err := entries(in)
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(all, func(a, b Entry) int {
		return cmp.Or(cmp.Compare(a.self(), b.self()), cmp.Compare(b.unread(), a.unread()),
			cmp.Compare(b.Save, a.Save), cmp.Compare(b.Step, a.Step))
	})
	return all, nil
}

// entries returns the checkpoints that a directory has at one moment, while a Save may add some and
// remove others.
func entries(in files.Dir) ([]Entry, error) {
	names, err := namesIn(in)
	for err == nil {
		var all []Entry
		var drafts []string
		for _, name := range names {
			e, is, err := examine(in, name)
			if err != nil {
				return nil, err
			}
			if is {
				all = append(all, e)
			} else {
				drafts = append(drafts, name)
			}
		}
		became := func(draft string) bool {
			_, is, err := examine(in, draft)
			return is || err != nil
		}
		was := names
		names, err = namesIn(in)
		if err == nil && slices.Equal(names, was) && !slices.ContainsFunc(drafts, became) {
			return all, nil
		}
	}
	return nil, err
}

// namesIn returns the names of checkpoints in a directory, and "." if it is one.
func namesIn(in files.Dir) (names []string, err error) {
	all, err := in.ReadDir(".")
	for _, n := range all {
		name, is := n.Name(), n.IsDir()
		if n.Type() == fs.ModeSymlink {
			info, err := in.Stat(name)
			is = err == nil && info.IsDir()
		}
		if is && stepNames.MatchString(name) {
			names = append(names, name)
		} else if name == RecordName {
			names = append(names, ".")
		}
	}
	return names, err
}

// stands reports whether a checkpoint is there. Where drafts are in its place, a record makes it
// one.
func stands(in files.Dir, name string) bool {
	if !in.Renames() {
		name = path.Join(name, RecordName)
	}
	_, err := in.Lstat(name)
	return !errors.Is(err, fs.ErrNotExist)
}

// examine looks at a checkpoint, if one is there.
func examine(in files.Dir, name string) (e Entry, is bool, err error) {
	at, has := in.Sub(name), map[string]fs.DirEntry{}
	names, err := at.ReadDir(".")
	for _, n := range names {
		has[n.Name()] = n
	}
	if errors.Is(err, fs.ErrNotExist) || !in.Renames() && err == nil && has[RecordName] == nil {
		return e, false, nil
	}
	e.Dir = name
	if _, e.Stamp, e.Wrong = ReadRecord(at); e.Wrong == nil && err != nil {
		e.Wrong = damagedFile(at.Path("."), err)
	}
	for _, f := range e.Files {
		if err := f.in(at, has[f.Name]); err != nil {
			e.Wrong = damagedFile(at.Path(f.Name), err)
		}
	}
	if errors.Is(e.Wrong, files.ErrUnreachable) {
		return e, false, e.Wrong
	}
	return e, true, nil
}

// in returns an error if a directory has not the file, or with another length.
func (f File) in(dir files.Dir, is fs.DirEntry) error {
	if is == nil {
		return fs.ErrNotExist
	}
	info, err := is.Info()
	if err == nil && is.Type() == fs.ModeSymlink {
		info, err = dir.Stat(f.Name)
	}
	if err != nil {
		return err
	}
	return f.long(info.Size())
}

// self is 1 for a directory that is a checkpoint itself.
func (e Entry) self() int {
	if e.Dir == "." {
		return 1
	}
	return 0
}

// unread is 1 for a checkpoint whose record cannot be read.
func (e Entry) unread() int {
	if e.Wrong != nil && e.ID == "" {
		return 1
	}
	return 0
}

// next completes the stamp of a Save to a directory.
func (s Stamp) next(in files.Dir, all []Entry) (Stamp, error) {
	for _, e := range all {
		s.Save = max(s.Save, e.Save)
	}
	s.Save++
	if s.Name != "" {
		return s, nil
	}
	names, err := in.ReadDir(".")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return s, err
	}
	base := fmt.Sprintf("step-%08d", s.Step)
	s.Name = base
	taken := func(n fs.DirEntry) bool { return n.Name() == s.Name }
	for i := 1; slices.ContainsFunc(names, taken); i++ {
		s.Name = fmt.Sprintf("%s.%d", base, i)
	}
	return s, nil
}

// Follows reports whether a training that saves after so many steps, and has saved or loaded the
// known ids, goes on from its newest checkpoint in a directory. Otherwise it is a branch, another
// training.
func Follows(all []Entry, training string, step uint64, known map[string]bool) bool {
	i := slices.IndexFunc(all, func(e Entry) bool { return e.Training == training && e.ID != "" })
	return i < 0 || known[all[i].ID] || all[i].Step < step
}
