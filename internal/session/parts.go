package session

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/euryale-ml/euryale/backend"
)

// parts are the groups that Split has made of the job's ranks. A rank may fail in
// a group, and leave: its session then tells the ranks outside the group who is to
// blame.
type parts struct {
	localRanks int // of the job, on this rank's machine
	mu         sync.Mutex
	open       map[*part]bool
	failed     error // the first failure of one that is closed, and not survived
	closed     bool  // the session is, and what a Split still makes is closed at once
}

// part is one group.
type part struct {
	backend.Base
	all      *parts
	survived bool // the program goes on after its failure
}

// adopt makes a part of what a Split of whole has returned. A Split that fails because of
// a rank ends whole: the others may not know of that rank yet, and would blame this one.
func (ps *parts) adopt(whole, comm backend.Communicator, err error) (backend.Communicator, error) {
	var of interface{ Blames() int }
	if errors.As(err, &of) && of.Blames() >= 0 {
		whole.Abort(err)
	}
	if err != nil || comm == nil {
		return nil, err
	}
	p := &part{Base: backend.Wrap(comm), all: ps}
	if ps.keep(p) {
		return p, nil
	}
	// The other ranks have the group, and are not to wait in it for one that has left.
	err = fmt.Errorf("%w: %s: split: Close was called on this rank", backend.ErrClosed,
		backend.RankOf(whole))
	return nil, errors.Join(err, comm.Close())
}

// keep has the session close a part, and reports false if the session is closed already.
func (ps *parts) keep(p *part) bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if ps.closed {
		return false
	}
	if ps.open == nil {
		ps.open = map[*part]bool{}
	}
	ps.open[p] = true
	return true
}

// failure returns the error that has ended a group, nil if all work, or did until
// they were closed, or the program has survived it.
func (ps *parts) failure() error {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	err := ps.failed
	for p := range ps.open {
		err = cmp.Or(err, p.failure())
	}
	return err
}

// failure is Err, unless the program has survived it.
func (p *part) failure() error {
	if p.survived {
		return nil
	}
	return p.Err()
}

// forgive forgets the failures of groups so far, which the program has survived.
func (ps *parts) forgive() {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.failed = nil
	for p := range ps.open {
		p.survived = p.Err() != nil
	}
}

// all returns the groups that are open.
func (ps *parts) all() []*part {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return slices.Collect(maps.Keys(ps.open))
}

// close closes the groups that are open, and those to come: no call of theirs goes on without the
// job.
func (ps *parts) close() error {
	ps.mu.Lock()
	ps.closed = true
	ps.mu.Unlock()
	var errs []error
	for _, p := range ps.all() {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}

// Capabilities implements [backend.Communicator].
func (p *part) Capabilities() backend.Capabilities {
	c := p.Communicator.Capabilities()
	c.LocalRanks = p.all.localRanks
	return c
}

// StartChecked implements [backend.CheckedStarter].
func (p *part) StartChecked(q backend.Queue, what backend.Collective, count int, dst,
	src backend.Buffer) (backend.Work, error) {
	return p.Pass(q, what, count, dst, src)
}

// Split implements [backend.Communicator].
func (p *part) Split(color, key int) (backend.Communicator, error) {
	comm, err := p.Communicator.Split(color, key)
	return p.all.adopt(p.Communicator, comm, err)
}

// Close implements [backend.Communicator].
func (p *part) Close() error {
	ps := p.all
	ps.mu.Lock()
	if ps.open[p] { // what ends it later is Close itself
		ps.failed = cmp.Or(ps.failed, p.failure())
		delete(ps.open, p)
	}
	ps.mu.Unlock()
	return p.Communicator.Close()
}

// StartChecked implements [backend.CheckedStarter].
func (s *Session) StartChecked(q backend.Queue, what backend.Collective, count int, dst,
	src backend.Buffer) (backend.Work, error) {
	return s.Pass(q, what, count, dst, src)
}

// Abort implements [backend.Communicator]. It ends the calls of groups, too.
func (s *Session) Abort(cause error) {
	s.Communicator.Abort(cause)
	for _, p := range s.parts.all() {
		p.Abort(cause)
	}
}

// Split implements [backend.Communicator].
func (s *Session) Split(color, key int) (backend.Communicator, error) {
	comm, err := s.Communicator.Split(color, key)
	return s.parts.adopt(s.Communicator, comm, err)
}

// Tell tells the job if the communicator or a group of it has failed, unless the
// job knows of a failure already.
func (s *Session) Tell() {
	err := cmp.Or(s.Communicator.Err(), s.parts.failure())
	if err != nil && s.world.Failure() == nil {
		s.world.Fail(err)
	}
}
