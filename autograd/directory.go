package autograd

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
)

// ErrLocked is wrapped by the error of Save, on all ranks, if another job saves to the directory.
var ErrLocked = checkpoint.ErrLocked

// SaveOption changes what [DataParallel.Save] keeps. Rank 0's options count.
type SaveOption func(*saveOptions)

type saveOptions struct {
	keep   int // checkpoints of this training
	pinned bool
}

// KeepLast makes Save keep the last n checkpoints of this training, this one included. The default
// is 2. Save returns ErrArgument for n < 1.
func KeepLast(n int) SaveOption { return func(o *saveOptions) { o.keep = n } }

// Pin makes Save keep this checkpoint, such as the best one so far, beside the last ones until this
// training pins another.
func Pin() SaveOption { return func(o *saveOptions) { o.pinned = true } }

// saveOptionsOf returns what options say.
func saveOptionsOf(opts []SaveOption) (saveOptions, error) {
	o := saveOptions{keep: 2}
	for _, opt := range opts {
		if opt != nil {
			opt(&o)
		}
	}
	err := backend.Given("DataParallel.Save", "opts", opts)
	if o.keep < 1 {
		err = errors.Join(err,
			fmt.Errorf("%w: KeepLast(%d): Save keeps 1 or more", backend.ErrArgument, o.keep))
	}
	return o, err
}

// errNoName is the error of an empty dir.
var errNoName = fmt.Errorf("%w: dir is empty: name a directory", backend.ErrArgument)

// saves is what a DataParallel remembers of checkpoints.
type saves struct {
	steps    uint64             // since training began
	training string             // its id, empty before the first Save
	best     string             // id of the Save that was pinned last
	known    map[string]bool    // ids of what was loaded last, and of what was saved since
	locks    []*checkpoint.Lock // on rank 0
}

// learn notes that a checkpoint now belongs to the training.
func (s *saves) learn(of checkpoint.Stamp) {
	s.training, s.best = of.Training, of.Best
	if s.known == nil {
		s.known = map[string]bool{}
	}
	s.known[of.ID] = true
}

// unlock lets others save.
func (s *saves) unlock() (err error) {
	for _, l := range s.locks {
		err = errors.Join(err, l.Release())
	}
	s.locks = nil
	return err
}

// begin makes the draft of a Save, and returns the Save's id on all ranks. After an error rank 0
// may have a draft.
func (d *DataParallel) begin(dir string) (id string, err error) {
	mine := checkpoint.NewID()
	id, err = d.decide(func() (string, error) {
		if err := d.lock(dir); err != nil {
			return "", err
		}
		if err := checkpoint.Clean(dir); err != nil {
			d.say(fmt.Sprintf("what an interrupted Save has left cannot be removed: %v", err))
		}
		return mine, checkpoint.Begin(dir, mine)
	})
	if err != nil {
		return mine, err
	}
	return id, nil
}

// abandon removes what a failed Save has made, and releases locks that were not held before it.
func (d *DataParallel) abandon(dir, id string, held int) (err error) {
	if !d.first() {
		return nil
	}
	err = checkpoint.Discard(dir, id)
	for _, l := range d.saves.locks[held:] {
		err = errors.Join(err, l.Undo())
	}
	d.saves.locks = d.saves.locks[:held]
	return err
}

// lock locks a directory until Close, unless d has locked it before.
func (d *DataParallel) lock(dir string) error {
	if slices.ContainsFunc(d.saves.locks, func(l *checkpoint.Lock) bool { return l.Of(dir) }) {
		return nil
	}
	host, err := os.Hostname()
	if err != nil {
		host = "a host without a name"
	}
	holder := fmt.Sprintf("job %s (%s, process %d of %s, since %s)", d.comm.Name(),
		filepath.Base(os.Args[0]), os.Getpid(), host, time.Now().Format(time.RFC3339))
	l, err := checkpoint.Acquire(dir, holder)
	if errors.Is(err, ErrLocked) && strings.Contains(err.Error(), fmt.Sprintf(", process %d of %s,",
		os.Getpid(), host)) {
		err = fmt.Errorf("%w, or Close the machine or DataParallel of this process that has saved "+
			"there", err)
	}
	if err != nil {
		return err
	}
	if !l.Supported {
		d.say(fmt.Sprintf("%s: its file system has no locks: do not let two jobs save there", dir))
	}
	d.saves.locks = append(d.saves.locks, l)
	return nil
}

// filesOf returns the files that all ranks have written: those in common, and each rank's own file,
// if it has a name. It returns an error on all ranks if one has a problem.
func (d *DataParallel) filesOf(common []checkpoint.File, own checkpoint.File, err error) (
	[]checkpoint.File, error) {
	if err := d.agree("", err); err != nil || !d.ownFiles() {
		return common, err
	}
	files := []checkpoint.File{own}
	for _, comm := range d.comms() {
		all, err := group.Exchange(framed(comm), comm.Capabilities().Members, files)
		if err != nil {
			return nil, err
		}
		files = slices.Concat(all...)
	}
	files = slices.DeleteFunc(files, func(f checkpoint.File) bool { return f.Name == "" })
	return append(common, files...), nil
}

// Pinned returns the path of the checkpoint in dir that was pinned last ([Pin]), by this training
// or by the one it was loaded from, or "" if dir has none. It is collective, and waits for the last
// SaveAsync.
//
// Errors, on all ranks: that of the last SaveAsync; those of the file system and the communicator.
func (d *DataParallel) Pinned(dir string) (path string, err error) {
	err = d.collectively(backend.ForLoad, "find what is pinned in "+dir, func() error {
		if err := d.finish(); err != nil {
			return err
		}
		name, err := d.decide(func() (string, error) {
			all, err := checkpoint.List(dir)
			if errors.Is(err, fs.ErrNotExist) {
				return "", nil
			}
			for _, e := range all {
				if e.ID == d.saves.best && e.ID != "" {
					return filepath.Rel(dir, e.Path)
				}
			}
			return "", err
		})
		if name != "" {
			path = filepath.Join(dir, name)
		}
		return err
	})
	return path, err
}

// choice is where Load looks for a checkpoint that all ranks can read. Rank 0 chooses.
type choice struct {
	dir    string
	last   checkpoint.Entry // chosen
	tried  map[string]bool  // paths and ids
	passed error            // what was wrong with them
}

// next chooses the newest checkpoint that was not tried, and returns its path on all ranks.
func (c *choice) next(d *DataParallel) (path string, err error) {
	path, err = d.decide(func() (string, error) {
		if c.dir == "" {
			return "", errNoName
		}
		dir := filepath.Clean(c.dir)
		all, err := checkpoint.List(dir)
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
	if _, err := os.Stat(filepath.Join(old, checkpoint.RecordName)); err == nil {
		hint = fmt.Sprintf("; %s has one: if an older version was killed in Save, rename it", old)
	}
	return fmt.Errorf("%w: %s has no checkpoint%s", fs.ErrNotExist, c.dir, hint)
}

// decision is what rank 0 tells the others.
type decision struct {
	Text, Problem   string
	Missing, Locked bool // what the problem is
}

// decide runs f on the first rank and returns its result on all. The others return an error with
// the same text, and the same fs.ErrNotExist or ErrLocked.
func (d *DataParallel) decide(f func() (string, error)) (string, error) {
	var is decision
	var err error
	if d.first() {
		if is.Text, err = f(); err != nil {
			if d.comm.Size() > 1 || d.parts != nil {
				err = fmt.Errorf("rank 0 cannot go on: %w", err)
			}
			is = decision{
				Problem: err.Error(),
				Missing: errors.Is(err, fs.ErrNotExist), Locked: errors.Is(err, ErrLocked),
			}
		}
	}
	for _, comm := range d.comms() {
		all, lost := group.Exchange(framed(comm), comm.Capabilities().Members, is)
		if lost != nil {
			return "", errors.Join(err, lost)
		}
		is = all[0]
	}
	if err != nil || is.Problem == "" {
		return is.Text, err
	}
	return "", is
}

// comms returns the communicators that carry the first rank's decision to all ranks, in this order.
func (d *DataParallel) comms() (all []backend.Communicator) {
	if d.parts != nil {
		all = append(all, d.parts.comm)
	}
	if d.comm.Size() > 1 {
		all = append(all, d.comm)
	}
	return all
}

// Error says what the problem of rank 0 is.
func (is decision) Error() string { return is.Problem }

// Is reports whether that is the problem.
func (is decision) Is(target error) bool {
	return target == fs.ErrNotExist && is.Missing || target == ErrLocked && is.Locked
}

// anywhere reports whether a condition holds on any rank.
func (d *DataParallel) anywhere(is bool) (bool, error) {
	for _, comm := range d.comms() {
		note := []byte{0}
		if is {
			note[0] = 1
		}
		notes, err := gather(comm, note)
		if err != nil {
			return false, err
		}
		is = slices.ContainsFunc(notes, func(n []byte) bool { return n[0] != 0 })
	}
	return is, nil
}
