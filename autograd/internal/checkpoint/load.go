package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/euryale-ml/euryale/internal/files"
)

// Load calls read with the newest checkpoint of a directory until all ranks can read it, and give
// it the same description. If a rank's error is a [*Damaged], the next older one follows.
func (s *Saver) Load(dir string, read func(files.Dir) (description string, err error)) error {
	in, unopened := files.At(dir, s.Store...)
	if dir == "" {
		unopened = errNoName
	}
	c := choice{in: in, wrong: unopened, tried: map[string]bool{}}
	for {
		name, err := c.next(s.Ranks)
		if err != nil {
			return err
		}
		description, err := "", unopened
		if err == nil {
			description, err = read(in.Sub(name))
		}
		damaged := errors.As(err, new(*Damaged))
		if err = s.Agree(description, err); err == nil {
			if c.passed != nil {
				s.Say(fmt.Sprintf("%s is loaded, since every newer checkpoint is damaged, "+
					"incomplete or not finite: %v", in.Path(name), c.passed))
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
		in, err := files.At(dir, s.Store...)
		if err != nil {
			return "", err
		}
		all, err := List(in)
		if errors.Is(err, fs.ErrNotExist) {
			return "", nil
		}
		for _, e := range all {
			if e.ID == s.Best && e.ID != "" {
				return e.Dir, nil
			}
		}
		return "", err
	})
	if in, err := files.At(dir, s.Store...); name != "" && err == nil {
		path = in.Path(name)
	}
	return path, err
}

// choice is where Load looks for a checkpoint that all ranks can read. The first rank chooses.
type choice struct {
	in     files.Dir
	wrong  error           // with it
	last   Entry           // chosen
	tried  map[string]bool // paths and ids
	passed error           // what was wrong with them
}

// next chooses the newest checkpoint that was not tried, and returns its name on all ranks.
func (c *choice) next(g Ranks) (name string, err error) {
	return g.decide(func() (string, error) {
		if c.wrong != nil {
			return "", c.wrong
		}
		all, err := List(c.in)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
		for _, c.last = range all {
			if c.tried[c.last.Dir+c.last.ID] {
				continue
			}
			if c.last.Wrong == nil {
				return c.last.Dir, nil
			}
			c.pass(c.last.Wrong)
		}
		if c.passed != nil {
			return "", c.passed
		}
		return "", c.none()
	})
}

// pass notes what is wrong with the last one, unless a Save has removed it since.
func (c *choice) pass(wrong error) {
	c.tried[c.last.Dir+c.last.ID] = true
	if stands(c.in, c.last.Dir) {
		c.passed = errors.Join(c.passed, wrong)
	}
}

// none is the error if there is no checkpoint.
func (c *choice) none() error {
	hint := ""
	old := c.in.OnDisk() + ".old"
	if _, err := os.Stat(filepath.Join(old, RecordName)); err == nil {
		hint = fmt.Sprintf("; %s has one: if an older version was killed in Save, rename it", old)
	}
	return fmt.Errorf("%w: %s has no checkpoint%s", fs.ErrNotExist, c.in.Path(""), hint)
}
