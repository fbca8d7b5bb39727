package checkpoint

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
)

// History is what a training remembers of its checkpoints.
type History struct {
	Steps    uint64          // since training began
	Training string          // its id, empty before the first Save
	Best     string          // id of the Save that was pinned last
	known    map[string]bool // ids of what was loaded last, and of what was saved since
}

// Resume goes on from a checkpoint.
func (h *History) Resume(of Stamp) {
	h.Steps, h.known = of.Step, nil
	h.learn(of)
}

// learn notes that a checkpoint now belongs to the training.
func (h *History) learn(of Stamp) {
	h.Training, h.Best = of.Training, of.Best
	if h.known == nil {
		h.known = map[string]bool{}
	}
	h.known[of.ID] = true
}

// Saver is the part of one rank in the checkpoints of a training. Its methods are collective,
// except for Fetched.
type Saver struct {
	Ranks
	History
	Say     func(text string) // reports something to the user
	Store   []files.Opener    // of directories that are not on a disk, empty for none
	locks   []*Lock           // on the first rank
	pending *saving           // in the background, nil for none
}

// Request is what ranks are told of a Save, which is the same on all of them except for Own.
type Request struct {
	Dir    string
	Keep   int // checkpoints of this training
	Pinned bool
	Behind bool   // the training goes on, and the files are written in the background
	Each   bool   // ranks have files of their own
	Own    string // the name of this rank's own file, empty for none
}

// Content is what a rank writes, or what only the first one does, all of it as it is at the time.
type Content struct {
	Tensors []Tensor
	Fetch   func([]Tensor) error        // brings those that are on a device, nil for none
	Seal    func(Stamp) ([]byte, error) // the text of the record
}

// saving is a Save, from its draft to the checkpoint. Once it is started, the goroutine of run has
// it until ended.
type saving struct {
	Request
	Content
	in             files.Dir // Dir
	draft          string    // its name there
	stamp          Stamp
	held           int             // locks before it
	first          bool            // this rank writes what all have in common
	alone          bool            // the first rank needs no other one to end it
	known          map[string]bool // see History
	fetched, ended chan struct{}

	common  []File
	file    File // this rank's own
	notices []string
	err     error
}

// Save makes a checkpoint of what list returns on the ranks for its stamp, unless one of them has a
// problem. It writes to a draft, which becomes a checkpoint when all ranks are done. After an error
// nothing is left of it. Call Finish before.
func (s *Saver) Save(r Request, problem error, list func(Stamp) (Content, error)) error {
	x, err := s.start(r, problem, list)
	switch {
	case err != nil:
	case r.Behind:
		s.pending = x
		go x.run()
	default:
		x.run()
		err = s.end(x)
	}
	return err
}

// Try returns the error that a Save would return before it lists anything, and locks the directory
// as Save does. It leaves no checkpoint.
func (s *Saver) Try(r Request, problem error) error {
	x := &saving{Request: r, held: len(s.locks)}
	if err := s.Agree("", errors.Join(x.open(s.Store), problem)); err != nil {
		return err
	}
	err := s.begin(x)
	if err == nil {
		if r.Each {
			_, err = x.in.Stat(x.draft)
		}
		if err = s.Agree("", err); err == nil {
			x.held = len(s.locks)
		}
	}
	return errors.Join(err, s.Agree("", s.abandon(x)))
}

// errNoName is the error of an empty directory's name.
var errNoName = fmt.Errorf("%w: dir is empty: name a directory", backend.ErrArgument)

// open opens the directory, and returns what is wrong with a request.
func (x *saving) open(store []files.Opener) (err error) {
	if x.Keep < 1 {
		err = fmt.Errorf("%w: KeepLast(%d): Save keeps 1 or more", backend.ErrArgument, x.Keep)
	}
	if x.Dir == "" {
		return errors.Join(err, errNoName)
	}
	var unopened error
	x.in, unopened = files.At(x.Dir, store...)
	return errors.Join(err, unopened)
}

// start makes a draft, and lists what is to be written.
func (s *Saver) start(r Request, problem error, list func(Stamp) (Content, error)) (*saving,
	error) {
	x := &saving{Request: r, held: len(s.locks), first: s.First(), alone: r.Behind && !r.Each,
		known: s.known, fetched: make(chan struct{}), ended: make(chan struct{})}
	if err := s.Agree("", errors.Join(x.open(s.Store), problem)); err != nil {
		return nil, err
	}
	err := s.begin(x)
	if err == nil {
		// ranks may have to continue without the one that knows whether this becomes a checkpoint
		s.Training = cmp.Or(s.Training, x.stamp.ID)
		x.stamp.Training, x.stamp.Pinned, x.stamp.Best = s.Training, r.Pinned, s.Best
		if r.Pinned {
			x.stamp.Best = x.stamp.ID
		}
		x.Content, x.err = list(x.stamp)
		if r.Behind {
			err = s.Agree("", x.err)
		}
	}
	if err != nil {
		return nil, errors.Join(err, s.abandon(x))
	}
	return x, nil
}

// begin makes the draft of a Save, and tells all ranks the Save's id and where it is. After an
// error the first rank may have a draft.
func (s *Saver) begin(x *saving) error {
	x.stamp.Step = s.Steps
	at, err := s.decide(func() (at string, err error) {
		if err := s.lock(x.in); err != nil {
			return "", err
		}
		if err := Clean(x.in); err != nil {
			s.Say(fmt.Sprintf("what an interrupted Save has left cannot be removed: %v", err))
		}
		x.stamp.ID = NewID()
		x.draft, err = Begin(x.in, x.stamp)
		return x.stamp.ID + " " + x.draft, err
	})
	if err == nil {
		x.stamp.ID, x.draft, _ = strings.Cut(at, " ")
	}
	return err
}

// abandon removes what a failed Save has made, and releases locks that were not held before it.
func (s *Saver) abandon(x *saving) (err error) {
	if !s.First() {
		return nil
	}
	if x.draft != "" {
		err = Discard(x.in, x.draft, x.stamp.ID)
	}
	for _, l := range s.locks[x.held:] {
		err = errors.Join(err, l.Undo())
	}
	s.locks = s.locks[:x.held]
	return err
}

// lock locks a directory until Close, unless it is locked already.
func (s *Saver) lock(in files.Dir) error {
	if slices.ContainsFunc(s.locks, func(l *Lock) bool { return l.Of(in) }) {
		return nil
	}
	host, err := os.Hostname()
	if err != nil {
		host = "a host without a name"
	}
	holder := fmt.Sprintf("job %s (%s, process %d of %s, since %s)", s.Data.Name(),
		filepath.Base(os.Args[0]), os.Getpid(), host, time.Now().Format(time.RFC3339))
	l, err := Acquire(in, holder)
	if errors.Is(err, ErrLocked) && strings.Contains(err.Error(), fmt.Sprintf(", process %d of %s,",
		os.Getpid(), host)) {
		err = fmt.Errorf("%w, or Close the machine or DataParallel of this process that has saved "+
			"there", err)
	}
	if err != nil {
		return err
	}
	if !l.Supported {
		s.Say(fmt.Sprintf("%s: its file system has no locks: do not let two jobs save there",
			in.Path("")))
	}
	s.locks = append(s.locks, l)
	return nil
}

// run writes this rank's files, and ends the Save if that takes no other rank.
func (x *saving) run() {
	defer close(x.ended)
	if x.err == nil && x.Fetch != nil {
		x.err = x.Fetch(x.Tensors)
	}
	close(x.fetched)
	if x.err == nil {
		x.err = x.write()
	}
	if x.err == nil && x.alone && x.first {
		x.err = x.commit(x.common)
	}
	x.Tensors, x.Fetch = nil, nil
}

// write writes this rank's files to the draft.
func (x *saving) write() (err error) {
	if x.Own == "" && !x.first { // the draft may have become a checkpoint
		return nil
	}
	of := Remarks{Save: x.stamp.ID, Step: fmt.Sprint(x.stamp.Step)}
	x.common, x.file, err = Write(x.in.Sub(x.draft), x.Own, x.first, x.Tensors, of)
	if err != nil {
		return err
	}
	if x.alone && !x.first { // the draft may have become a checkpoint
		return nil
	}
	if err = x.in.Sync(x.draft); errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("all ranks must reach the directory: %w", err)
	}
	return err
}

// commit makes a draft a checkpoint, once all ranks have written their files to it, and removes
// older ones. It is for the first rank.
func (x *saving) commit(files []File) error {
	all, err := List(x.in)
	if err != nil {
		return err
	}
	s := x.stamp
	if !Follows(all, s.Training, s.Step, x.known) {
		s.Training = s.ID
	}
	s.Files = files
	if s, err = Commit(x.in, x.draft, all, s, x.Seal); err != nil {
		return err
	}
	x.stamp = s
	all = slices.Insert(all, 0, Entry{Dir: s.Name, Stamp: s})
	if err := Prune(x.in, all, s.Training, x.Keep); err != nil {
		x.notices = append(x.notices, fmt.Sprintf(
			"%s is saved, and an older checkpoint cannot be removed: %v", s.Name, err))
	}
	return nil
}

// end waits for a Save on all ranks, and ends it.
func (s *Saver) end(x *saving) error {
	<-x.ended
	err := s.Agree("", x.err)
	if x.alone || err != nil {
		return s.conclude(x, err)
	}
	written := x.common
	if x.Each {
		written, err = s.files(x.common, x.file)
	}
	if err == nil {
		x.stamp.Training, err = s.decide(func() (string, error) {
			err := x.commit(written)
			return x.stamp.Training, err
		})
	}
	return s.conclude(x, err)
}

// conclude notes what has become of a Save on this rank.
func (s *Saver) conclude(x *saving, err error) error {
	for _, text := range x.notices {
		s.Say(text)
	}
	if err != nil {
		return errors.Join(err, s.abandon(x))
	}
	s.learn(x.stamp)
	return nil
}

// Finish ends the Save in the background, if it has not ended.
func (s *Saver) Finish() error {
	x := s.pending
	if x == nil {
		return nil
	}
	s.pending = nil
	return x.failed(s.end(x))
}

// Close is Finish and lets others save to the directories. Other ranks may have failed: it
// exchanges nothing unless it must, nor after an error that ended the training.
func (s *Saver) Close(ended error) (err error) {
	x := s.pending
	switch {
	case x != nil && (x.alone || ended != nil):
		<-x.ended
		if s.pending = nil; x.alone {
			ended = x.err
		}
		err = x.failed(s.conclude(x, ended))
	default:
		err = s.Finish()
	}
	for _, l := range s.locks {
		err = errors.Join(err, l.Release())
	}
	s.locks = nil
	return err
}

// failed says which Save has failed.
func (x *saving) failed(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("SaveAsync to %s, of step %d: %w", x.Dir, x.stamp.Step, err)
}

// Fetched is closed once the Save in the background has what is on a device; it is nil without one.
func (s *Saver) Fetched() <-chan struct{} {
	if s.pending == nil {
		return nil
	}
	return s.pending.fetched
}
