package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Load calls read with the newest checkpoint of a directory until all ranks can read it, and give
// it the same description. If a rank's error is a [*Damaged], the next older one follows.
func (s *Saver) Load(dir string, read func(path string) (description string, err error)) error {
	c := choice{dir: dir, tried: map[string]bool{}}
	for {
		path, err := c.next(s.Ranks)
		if err != nil {
			return err
		}
		description, err := read(path)
		damaged := errors.As(err, new(*Damaged))
		if err = s.Agree(description, err); err == nil {
			if c.passed != nil {
				s.Say(fmt.Sprintf("%s is loaded, since every newer checkpoint is damaged, "+
					"incomplete or not finite: %v", path, c.passed))
			}
			return nil
		}
		other, unheard := s.anywhere(damaged)
		if unheard != nil || !other {
			return errors.Join(err, unheard)
		}
		c.pass(err)
	}
}

// Pinned returns the path of the checkpoint in a directory that was pinned last by this training,
// "" for none.
func (s *Saver) Pinned(dir string) (path string, err error) {
	name, err := s.decide(func() (string, error) {
		all, err := List(dir)
		if errors.Is(err, fs.ErrNotExist) {
			return "", nil
		}
		for _, e := range all {
			if e.ID == s.Best && e.ID != "" {
				return filepath.Rel(dir, e.Path)
			}
		}
		return "", err
	})
	if name != "" {
		path = filepath.Join(dir, name)
	}
	return path, err
}

// choice is where Load looks for a checkpoint that all ranks can read. The first rank chooses.
type choice struct {
	dir    string
	last   Entry           // chosen
	tried  map[string]bool // paths and ids
	passed error           // what was wrong with them
}

// next chooses the newest checkpoint that was not tried, and returns its path on all ranks.
func (c *choice) next(g Ranks) (path string, err error) {
	path, err = g.decide(func() (string, error) {
		if c.dir == "" {
			return "", errNoName
		}
		dir := filepath.Clean(c.dir)
		all, err := List(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
		for _, c.last = range all {
			if c.tried[c.last.Path+c.last.ID] {
				continue
			}
			if c.last.Wrong == nil {
				return filepath.Rel(dir, c.last.Path)
			}
			c.pass(c.last.Wrong)
		}
		if c.passed != nil {
			return "", c.passed
		}
		return "", c.none()
	})
	return filepath.Join(c.dir, path), err
}

// pass notes what is wrong with the last one, unless a Save has removed it since.
func (c *choice) pass(wrong error) {
	c.tried[c.last.Path+c.last.ID] = true
	if _, err := os.Stat(c.last.Path); err == nil {
		c.passed = errors.Join(c.passed, wrong)
	}
}

// none is the error if there is no checkpoint.
func (c *choice) none() error {
	hint := ""
	old := filepath.Clean(c.dir) + ".old"
	if _, err := os.Stat(filepath.Join(old, RecordName)); err == nil {
		hint = fmt.Sprintf("; %s has one: if an older version was killed in Save, rename it", old)
	}
	return fmt.Errorf("%w: %s has no checkpoint%s", fs.ErrNotExist, c.dir, hint)
}
