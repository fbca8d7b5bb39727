package euryale

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/trace"
	"github.com/euryale-ml/euryale/rendezvous"
)

// session is the outermost communicator: it owns the world.
type session struct {
	backend.Communicator
	recorder *trace.Communicator
	world    *rendezvous.World
	own      []backend.Backend
	traceTo  string
	unwatch  func() // SIGQUIT
	once     sync.Once
	err      error

	mu     sync.Mutex     // guards what follows
	parts  map[*part]bool // the groups of the job that are open
	failed error          // the first failure of one that is closed
}

// Unwrap implements [backend.Wrapper].
func (s *session) Unwrap() []backend.Communicator { return []backend.Communicator{s.Communicator} }

// Split implements [backend.Communicator].
func (s *session) Split(color, key int) (backend.Communicator, error) {
	return s.adopt(s.Communicator.Split(color, key))
}

// Close closes the communicator, leaves the job, and writes the trace. If the
// communicator or a group of it has failed the job is told, so that nobody waits
// for this rank, or takes it for the one that is to blame.
func (s *session) Close() error {
	s.once.Do(func() {
		s.unwatch()
		s.tell()
		s.err = errors.Join(s.Communicator.Close(), closeAll(s.own), s.writeTrace(), s.world.Close())
	})
	return s.err
}

// tell tells the job if the communicator or a group of it has failed, unless the
// job knows of a failure already.
func (s *session) tell() {
	s.mu.Lock()
	err := cmp.Or(failureOf(s.Communicator), s.failed)
	for p := range s.parts {
		err = cmp.Or(err, failureOf(p))
	}
	s.mu.Unlock()
	if err != nil && s.world.Failure() == nil {
		s.world.Fail(err)
	}
}

// failureOf returns the error that has ended comm, nil if it works.
func failureOf(comm backend.Communicator) error {
	if leaf, ok := backend.As[interface{ Err() error }](comm); ok {
		return leaf.Err()
	}
	return nil
}

func (s *session) writeTrace() error {
	if s.traceTo == "" {
		return nil
	}
	path := fmt.Sprintf("%s.%d.json", s.traceTo, s.world.Rank)
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("rank %d: EURYALE_TRACE: %w", s.world.Rank, err)
	}
	return errors.Join(s.recorder.WriteChrome(f), f.Close())
}

// part is a group of the job's ranks. A rank may fail in a group, and leave; its
// session then tells the ranks outside the group who is to blame.
type part struct {
	backend.Communicator
	session *session
}

// adopt makes a part of what a Split has returned.
func (s *session) adopt(comm backend.Communicator, err error) (backend.Communicator, error) {
	if err != nil || comm == nil {
		return nil, err
	}
	p := &part{comm, s}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.parts[p] = true
	return p, nil
}

// Unwrap implements [backend.Wrapper].
func (p *part) Unwrap() []backend.Communicator { return []backend.Communicator{p.Communicator} }

// Split implements [backend.Communicator].
func (p *part) Split(color, key int) (backend.Communicator, error) {
	return p.session.adopt(p.Communicator.Split(color, key))
}

// Close implements [backend.Communicator].
func (p *part) Close() error {
	s := p.session
	s.mu.Lock()
	if s.parts[p] { // what ended it later is Close itself
		s.failed = cmp.Or(s.failed, failureOf(p))
		delete(s.parts, p)
	}
	s.mu.Unlock()
	return p.Communicator.Close()
}
