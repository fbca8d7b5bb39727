package euryale

import (
	"cmp"

	"github.com/euryale-ml/euryale/backend"
)

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
