package checkpoint

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/euryale-ml/euryale/internal/files"
)

// drafts are the names of directories that Save makes and removes: [Draft].
var drafts = regexp.MustCompile(`^\.euryale-saving-[0-9a-f]{32}$`)

const (
	draftPrefix = ".euryale-saving-"
	marker      = "made-by-save"
)

// NewID returns an id for a Save or a training.
func NewID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	return fmt.Sprintf("%x", b)
}

// Draft is the directory where the files of a Save are until Commit, and those of a checkpoint
// while Prune removes it.
func Draft(dir, id string) string { return filepath.Join(dir, draftPrefix+id) }

// Clean removes the drafts that interrupted Saves have left.
func Clean(dir string) error {
	names, err := os.ReadDir(dir)
	for _, n := range names {
		if drafts.MatchString(n.Name()) {
			err = errors.Join(err, Discard(dir, strings.TrimPrefix(n.Name(), draftPrefix)))
		}
	}
	return err
}

// Begin makes a draft, for all ranks to write to.
func Begin(dir, id string) error {
	draft := Draft(dir, id)
	if err := os.Mkdir(draft, 0o777); err != nil {
		return err
	}
	if err := mark(draft); err != nil {
		return errors.Join(err, os.Remove(draft))
	}
	return nil
}

// mark says that a draft was made by Save.
func mark(draft string) error {
	f, err := os.OpenFile(filepath.Join(draft, marker), os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return err
	}
	return f.Close()
}

// Commit writes the record of a draft whose files are on the disk, and makes it a checkpoint beside
// all others. s has the id, the training, the step, and the files; seal returns the text of the
// record with a completed stamp. The checkpoint is on the disk then. After an error there still is
// a draft.
func Commit(dir string, all []Entry, s Stamp, seal func(Stamp) ([]byte, error)) (Stamp, error) {
	s, err := s.next(dir, all)
	if err != nil {
		return s, err
	}
	text, err := seal(s)
	if err != nil {
		return s, err
	}
	draft, path := Draft(dir, s.ID), filepath.Join(dir, s.Name)
	_, err = WriteFile(filepath.Join(draft, RecordName), func(w io.Writer) { w.Write(text) })
	if err != nil {
		return s, err
	}
	if err := os.Remove(filepath.Join(draft, marker)); err != nil { // the record says whose it is
		return s, err
	}
	if err := files.SyncDir(draft); err != nil {
		return s, err
	}
	if err := os.Rename(draft, path); err != nil {
		return s, err
	}
	if err := files.SyncDir(dir); err != nil {
		return s, errors.Join(err, os.Rename(path, draft))
	}
	return s, nil
}

// Discard removes a draft, if there is one. It leaves what Save has not made.
func Discard(dir, id string) error {
	name := draftPrefix + id
	if info, err := os.Lstat(Draft(dir, id)); err != nil || !info.IsDir() {
		return nil
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	names, err := os.ReadDir(Draft(dir, id))
	if err != nil {
		return err
	}
	_, s, err := ReadRecord(Draft(dir, id))
	_, unmarked := root.Lstat(filepath.Join(name, marker))
	if ours := err == nil && s.ID == id || unmarked == nil; !ours {
		root.Remove(name) // if it is empty
		return nil
	}
	// What says that it is ours goes last.
	for _, n := range names {
		if n.Type().IsRegular() && n.Name() != RecordName && fileNames.MatchString(n.Name()) {
			if err := root.Remove(filepath.Join(name, n.Name())); err != nil {
				return err
			}
		}
	}
	for _, last := range []string{RecordName, marker} {
		if err := ignoreMissing(root.Remove(filepath.Join(name, last))); err != nil {
			return err
		}
	}
	if err := root.Remove(name); err != nil { // a straggler still writes: the next Save
		return errors.Join(err, mark(Draft(dir, id)))
	}
	return nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
