package checkpoint

import (
	"errors"
	"io/fs"
	"slices"

	"github.com/euryale-ml/euryale/internal/files"
)

// Prune removes the checkpoints of a training, of those in a directory, except for the last few and
// the one that was pinned last. Only whole ones count. Those with a file that Save has not written
// stay.
func Prune(in files.Dir, all []Entry, training string, keep int) (err error) {
	pinned := false
	for _, e := range all {
		if e.Training != training || e.ID == "" || e.Dir == "." {
			continue
		}
		best := e.Pinned && !pinned && e.Wrong == nil
		pinned = pinned || best
		if keep > 0 && e.Wrong == nil {
			keep--
		} else if keep == 0 && !best && e.ours(in) {
			err = errors.Join(err, remove(in, e))
		}
	}
	return err
}

// ours reports whether a checkpoint is as Save has made it: a directory with the name and the files
// that its record says.
func (e Entry) ours(in files.Dir) bool {
	info, err := in.Lstat(e.Dir)
	named := e.Dir == e.Name && drafts.MatchString(draftPrefix+e.ID)
	if e.Wrong != nil || err != nil || !info.IsDir() || !named {
		return false
	}
	names, err := in.ReadDir(e.Dir)
	return err == nil && !slices.ContainsFunc(names, func(n fs.DirEntry) bool {
		is := func(f File) bool { return f.Name == n.Name() }
		listed := n.Name() == RecordName || slices.ContainsFunc(e.Files, is)
		return !n.Type().IsRegular() ||
			n.Name() != marker && (!listed || !fileNames.MatchString(n.Name()))
	})
}

// remove removes a checkpoint: at once for readers, and then file by file.
func remove(in files.Dir, e Entry) error {
	if !in.Renames() {
		return Discard(in, e.Name, e.ID)
	}
	if err := in.Rename(e.Name, draftPrefix+e.ID); err != nil {
		return err
	}
	return Discard(in, draftPrefix+e.ID, e.ID)
}
