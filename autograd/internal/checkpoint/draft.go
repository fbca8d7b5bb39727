package checkpoint

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/internal/files"
)

// drafts are the names of directories that Save makes and removes: [Begin].
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

// Clean removes the drafts that interrupted Saves have left.
func Clean(in files.Dir) error {
	all, err := in.ReadDir(".")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, n := range all {
		name := n.Name()
		if drafts.MatchString(name) || stepNames.MatchString(name) && !stands(in, name) {
			err = errors.Join(err, Discard(in, name, strings.TrimPrefix(name, draftPrefix)))
		}
	}
	return err
}

// Begin makes a draft for all ranks to write to, and returns its name. Where directories can be
// renamed that has the id in it; elsewhere the files are in their place from the beginning, and are
// a checkpoint once they have a record.
func Begin(in files.Dir, s Stamp) (name string, err error) {
	if in.Renames() {
		name = draftPrefix + s.ID
		if err := in.Mkdir(name); err != nil {
			return "", err
		}
		if err := mark(in.Sub(name), s.ID); err != nil {
			return "", errors.Join(err, in.Remove(name))
		}
		return name, nil
	}
	for {
		next, err := s.next(in, nil)
		if err == nil {
			err = mark(in.Sub(next.Name), s.ID)
		}
		if !errors.Is(err, fs.ErrExist) { // else another job was faster
			return next.Name, err
		}
	}
}

// mark says that a draft was made by Save.
func mark(draft files.Dir, id string) error {
	return draft.Create(marker, files.Text([]byte(id+"\n")))
}

// Commit writes the record of a draft whose files are on the disk, and makes it a checkpoint beside
// all others. s has the id, the training, the step, and the files; seal returns the text of the
// record with a completed stamp. The checkpoint is on the disk then. After an error there still is
// a draft.
func Commit(in files.Dir, draft string, all []Entry, s Stamp, seal func(Stamp) ([]byte, error)) (
	Stamp, error) {
	if !in.Renames() {
		s.Name = draft
	}
	s, err := s.next(in, all)
	if err != nil {
		return s, err
	}
	text, err := seal(s)
	if err != nil {
		return s, err
	}
	at := in.Sub(draft)
	if err = at.Create(RecordName, files.Text(text)); err != nil {
		return s, err
	}
	if err = at.Remove(marker); !in.Renames() { // the record says whose it is
		return s, nil // whether the marker is there or not
	}
	if err != nil {
		return s, err
	}
	if err := in.Sync(draft); err != nil {
		return s, err
	}
	if err := in.Rename(draft, s.Name); err != nil {
		return s, err
	}
	if err := in.Sync("."); err != nil {
		return s, errors.Join(err, in.Rename(s.Name, draft))
	}
	return s, nil
}

// Discard removes the draft of an id, if there is one. It leaves what Save has not made.
func Discard(in files.Dir, name, id string) error {
	if info, err := in.Lstat(name); err != nil || !info.IsDir() {
		return nil
	}
	at := in.Sub(name)
	names, err := in.ReadDir(name)
	if err != nil {
		return err
	}
	has := func(file string) bool {
		return slices.ContainsFunc(names, func(n fs.DirEntry) bool { return n.Name() == file })
	}
	marked := has(marker)
	if !marked {
		if _, s, err := ReadRecord(at); err != nil || s.ID != id {
			in.Remove(name) // if it is empty
			return nil
		}
	}
	if !in.Renames() && has(RecordName) { // then readers see it
		if !marked {
			err = mark(at, id)
		}
		if err = errors.Join(err, at.Remove(RecordName)); err != nil {
			return err
		}
	}
	// What says that it is ours goes last.
	for _, n := range names {
		if n.Type().IsRegular() && n.Name() != RecordName && fileNames.MatchString(n.Name()) {
			if err := in.Remove(path.Join(name, n.Name())); err != nil {
				return err
			}
		}
	}
	for _, last := range []string{RecordName, marker} {
		if err := ignoreMissing(in.Remove(path.Join(name, last))); err != nil {
			return err
		}
	}
	if err := in.Remove(name); err != nil { // a straggler still writes: the next Save
		return errors.Join(err, mark(at, id))
	}
	return nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
