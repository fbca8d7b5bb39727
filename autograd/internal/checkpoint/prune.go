package checkpoint

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
)

// Prune removes the checkpoints of a training, except for the last few and the one that was pinned
// last. Only whole ones count. Those with a file that Save has not written stay.
func Prune(dir, training string, keep int) error {
	all, err := List(dir)
	if err != nil {
		return err
	}
	pinned := false
	for _, e := range all {
		if e.Training != training || e.ID == "" || filepath.Dir(e.Path) != filepath.Clean(dir) {
			continue
		}
		best := e.Pinned && !pinned && e.Wrong == nil
		pinned = pinned || best
		if keep > 0 && e.Wrong == nil {
			keep--
		} else if keep == 0 && !best && e.ours() {
			err = errors.Join(err, remove(dir, e))
		}
	}
	return err
}

// ours reports whether a checkpoint is as Save has made it: a directory with the name and the files
// that its record says.
func (e Entry) ours() bool {
	info, err := os.Lstat(e.Path)
	named := filepath.Base(e.Path) == e.Name && drafts.MatchString(draftPrefix+e.ID)
	if e.Wrong != nil || err != nil || !info.IsDir() || !named {
		return false
	}
	names, err := os.ReadDir(e.Path)
	return err == nil && !slices.ContainsFunc(names, func(n os.DirEntry) bool {
		is := func(f File) bool { return f.Name == n.Name() }
		listed := n.Name() == RecordName || slices.ContainsFunc(e.Files, is)
		return !n.Type().IsRegular() || !listed || !fileNames.MatchString(n.Name())
	})
}

// remove removes a checkpoint: at once for readers, and then file by file.
func remove(dir string, e Entry) error {
	if err := os.Rename(e.Path, Draft(dir, e.ID)); err != nil {
		return err
	}
	return Discard(dir, e.ID)
}
