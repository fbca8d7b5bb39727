package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/awaited"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/rendezvous"
)

// remembered is how many collectives the flight recorder keeps, and traced how many for a trace:
// a thousand steps of 16.
const (
	remembered = 2048
	traced     = 1 << 14
)

// Session is the outermost communicator: it owns the world.
type Session struct {
	backend.Base
	world    *rendezvous.World
	own      []backend.Backend
	recorder *observe.Recorder
	watch    *observe.Watch
	trace    *traceFile
	parts    parts
	unwatch  func() // SIGQUIT
	unreport func() // the end of reports to a launcher; nil for none
	once     sync.Once
	err      error
}

// Capabilities implements [backend.Communicator].
func (s *Session) Capabilities() backend.Capabilities {
	c := s.Communicator.Capabilities()
	c.LocalRanks = s.world.LocalSize
	return c
}

// Nodes returns the machine of each rank, by its number; nil where ranks do not know it.
func (s *Session) Nodes() []int {
	nodes, _ := s.world.Nodes(context.Background())
	return nodes
}

// Recorder returns the flight recorder of this rank.
func (s *Session) Recorder() *observe.Recorder { return s.recorder }

// Watch returns the watch of this rank, which may not have started. A nil Session has none.
func (s *Session) Watch() *observe.Watch {
	if s == nil {
		return nil
	}
	return s.watch
}

// Close closes the communicator and its groups, leaves the job, and writes the trace. If the
// communicator or a group of it has failed the job is told, so that nobody waits
// for this rank, or takes it for the one that is to blame.
func (s *Session) Close() error {
	s.once.Do(func() {
		s.unwatch()
		endWatch(s.watch, s.world.Rank)
		if s.unreport != nil {
			s.unreport()
		}
		s.Tell()
		s.err = errors.Join(s.parts.close(), s.Communicator.Close(), s.recorder.Close(),
			CloseBackends(s.own))
		s.trace.close()
		s.err = errors.Join(s.err, s.world.Close())
	})
	return s.err
}

// dissolve says that all ranks go on without each other. It does nothing to a nil session.
func (s *Session) dissolve() {
	if s != nil {
		s.world.Dissolve()
	}
}

// Connect connects w on the best of backends that all ranks can use. Those of own close with the
// session, and if Connect fails. generation is of an elastic job, -1 of others. It is collective.
func Connect(ctx context.Context, w *rendezvous.World, backends, own []backend.Backend,
	generation int) (*Session, error) {
	file, err := openTrace(w.Rank, generation)
	if err != nil {
		return nil, errors.Join(err, CloseBackends(own))
	}
	kept := remembered
	if file != nil {
		kept = traced
	}
	recorder := observe.New(w.Rank, kept)
	w.Awaited = awaited.New(w.Size)
	if w.LongWait == nil {
		w.LongWait = sayLongWait(os.Stderr, w, recorder)
	}
	comm, watched, err := choose(ctx, w, backends, recorder, generation)
	if err != nil {
		return nil, errors.Join(err, recorder.Close(), CloseBackends(own), file.discard())
	}
	hooks := &survival{Recorder: recorder}
	if file != nil {
		recorder.KeepLayers(traced)
		_ = recorder.TimeParts(comm.Device(), 0) // without a clock, graphs are not looked into
	}
	comm = backend.WithHooks(comm, hooks)
	unwatch, err := lastCallsOnQuit(recorder)
	if err != nil {
		return nil, errors.Join(err, comm.Close(), recorder.Close(), CloseBackends(own),
			file.discard())
	}
	file.watch(recorder, w.Down())
	watch := observe.NewWatch(w, recorder, os.Stderr)
	if watched {
		watch.Start(comm.Device())
	}
	hooks.session = &Session{
		Base: backend.Wrap(comm), world: w, own: own, recorder: recorder, watch: watch,
		trace: file,
		parts: parts{localRanks: w.LocalSize}, unwatch: unwatch,
	}
	return hooks.session, nil
}

// endWatch ends a watch, and has rank 0 say who was late if EURYALE_LATENESS asks for that.
func endWatch(w *observe.Watch, rank int) {
	w.Close()
	if rank == 0 && env.Lateness.Set(os.Getenv) {
		_ = w.Report(os.Stderr) // the work is done by then
	}
}

// lastCallsOnQuit has the recorder write its last calls on SIGQUIT, as many as EURYALE_LAST_CALLS
// says, until stop is called.
func lastCallsOnQuit(recorder *observe.Recorder) (stop func(), err error) {
	n, err := env.LastCalls.Read(os.Getenv, 0)
	if err != nil {
		return nil, err
	}
	return recorder.WriteLastOnQuit(os.Stderr, n), nil
}

// CloseBackends closes the backends that have something to close.
func CloseBackends(backends []backend.Backend) error {
	var errs []error
	for _, b := range backends {
		if c, ok := b.(io.Closer); ok {
			errs = append(errs, c.Close())
		}
	}
	return errors.Join(errs...)
}

// errNoBackend: no backend works on every rank.
var errNoBackend = errors.New("no backend works on every rank")

// verdict is an error that all ranks reach together. rank is to blame, -1 if that is not known.
type verdict struct {
	error
	rank int
}

// Blames returns the rank.
func (v verdict) Blames() int { return v.rank }

func (v verdict) Unwrap() error { return v.error }

// Leave tells the other ranks why this one leaves, unless they know already. That
// it may not reach them is no news: they notice that it is gone.
func Leave(w *rendezvous.World, why error) {
	if w.Failure() == nil && !errors.As(why, new(verdict)) {
		w.Fail(why)
	}
	w.Close()
}

// sayLongWait returns a [rendezvous.World.LongWait] that says once for whom this rank waits, in
// which call, and when that ends.
func sayLongWait(
	to io.Writer, w *rendezvous.World, recorder *observe.Recorder,
) func(ranks string, waited time.Duration) {
	var once sync.Once
	return func(ranks string, waited time.Duration) {
		once.Do(func() {
			call := "a collective"
			if last, ok := recorder.Last(); ok {
				call = fmt.Sprintf("%v on %s", last.Header, last.Comm)
			}
			fmt.Fprintf(to, "euryale: rank %d has waited %v in %s for %s to start it; "+
				"EURYALE_TIMEOUT=%gs ends the wait\n",
				w.Rank, waited.Round(time.Second), call, ranks, w.Timeout.Seconds())
		})
	}
}
