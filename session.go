package euryale

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/trace"
	"github.com/euryale-ml/euryale/rendezvous"
)

// session is the outermost communicator: it owns the world.
type session struct {
	backend.Communicator
	recorder   *trace.Communicator
	world      *rendezvous.World
	own        []backend.Backend
	file       *os.File       // for the trace, nil if nobody wants one
	closing    chan struct{}  // closed by Close
	background sync.WaitGroup // what ends with closing
	unwatch    func()         // ends what waits for SIGQUIT
	once       sync.Once
	err        error

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
		s.err = errors.Join(s.Communicator.Close(), closeAll(s.own))
		close(s.closing)
		s.background.Wait()
		if s.file != nil {
			s.report(errors.Join(s.writeTrace(), s.file.Close()))
		}
		s.err = errors.Join(s.err, s.world.Close())
	})
	return s.err
}

// openTrace makes the file that EURYALE_TRACE asks for, nil if it asks for none:
// before the work, so that a place where there can be none is known before it.
func openTrace(rank int) (*os.File, error) {
	to := os.Getenv("EURYALE_TRACE")
	if to == "" {
		return nil, nil
	}
	file, err := os.Create(fmt.Sprintf("%s.%d.json", to, rank))
	if err != nil {
		return nil, fmt.Errorf("rank %d: EURYALE_TRACE: %w", rank, err)
	}
	return file, nil
}

// discard removes a file of openTrace that nothing was written to.
func discard(file *os.File) error {
	if file == nil {
		return nil
	}
	return errors.Join(file.Close(), os.Remove(file.Name()))
}

// traceFailure writes the trace when a rank of the job is lost, which may end this
// process before it gets to Close.
func (s *session) traceFailure() {
	select {
	case <-s.closing:
	case <-s.world.Down():
		s.report(s.writeTrace())
	}
}

// writeTrace writes the trace in place of an earlier one.
func (s *session) writeTrace() error {
	if _, err := s.file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if err := s.file.Truncate(0); err != nil {
		return err
	}
	return s.recorder.WriteChrome(s.file)
}

// report says that the trace cannot be written. The work is done by then, and that is
// no error of the work.
func (s *session) report(err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "euryale: rank %d: the trace is lost: EURYALE_TRACE: %v\n", s.world.Rank, err)
	}
}
