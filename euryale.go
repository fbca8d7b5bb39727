package euryale

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/check"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/backend/trace"
	"github.com/euryale-ml/euryale/rendezvous"
)

// remembered is how many collectives the flight recorder keeps.
const remembered = 2048

// Backends returns the backends of this module, best first.
func Backends() []backend.Backend {
	return []backend.Backend{host.Backend{Dir: os.Getenv("EURYALE_SHM_DIR")}}
}

// Init connects this process to the other ranks of its job and returns their
// communicator. It is collective. Without backends those of [Backends] are
// used; one from outside this module is as good.
//
// Errors: a broken environment, a rank that does not come, no backend that
// every rank can use. Each says what to do.
func Init(ctx context.Context, backends ...backend.Backend) (backend.Communicator, error) {
	env, err := rendezvous.ReadEnv(os.Getenv)
	if err != nil {
		return nil, fmt.Errorf("euryale: %w", err)
	}
	world, err := rendezvous.Join(ctx, env)
	if err != nil {
		return nil, fmt.Errorf("euryale: %w", err)
	}
	comm, err := Connect(ctx, world, backends...)
	if err != nil {
		leave(world, err)
		return nil, fmt.Errorf("euryale: %w", err)
	}
	return comm, nil
}

// errNoBackend is the outcome of a vote that all ranks count alike.
var errNoBackend = errors.New("no backend works on every rank")

// leave tells the other ranks why this one leaves, unless they know already. That
// it may not reach them is no news: they notice that it is gone.
func leave(w *rendezvous.World, why error) {
	if w.Failure() == nil && !errors.Is(why, errNoBackend) {
		w.Fail(why)
	}
	w.Close()
}

// Run runs n ranks as goroutines of this process and waits for them. Each gets
// its communicator and a lock that they all share: Gorgonia cannot build graphs
// concurrently, so ranks hold it while they build, and not while they run.
//
// When a rank returns an error the others are told, so that none waits for it;
// Run returns the error of the rank that failed first.
func Run(ctx context.Context, n int, rank func(comm backend.Communicator, build sync.Locker) error, backends ...backend.Backend) error {
	worlds, err := rendezvous.Local(n)
	if err != nil {
		return fmt.Errorf("euryale: %w", err)
	}
	var build sync.Mutex
	errs := make([]error, n)
	var all sync.WaitGroup
	for r, w := range worlds {
		all.Go(func() { errs[r] = runRank(ctx, w, &build, rank, backends) })
	}
	all.Wait()
	for _, w := range worlds { // some may have left before there was a failure
		if f := w.Failure(); f != nil && errs[f.Rank] != nil {
			return errs[f.Rank] // the others are its consequences
		}
	}
	return cmp.Or(errs...)
}

// runRank is one rank of Run.
func runRank(ctx context.Context, w *rendezvous.World, build sync.Locker, rank func(backend.Communicator, sync.Locker) error, backends []backend.Backend) error {
	comm, err := Connect(ctx, w, backends...)
	if err != nil {
		leave(w, err)
		return fmt.Errorf("euryale: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { comm.Abort(context.Cause(ctx)) })
	defer stop()
	if err := rank(comm, build); err != nil {
		leave(w, err)
		comm.Close()
		return fmt.Errorf("rank %d: %w", w.Rank, err)
	}
	return comm.Close()
}

// Connect makes the communicator of a world that the caller has joined; closing
// it closes the world. Init and Run do this for you. It is collective.
func Connect(ctx context.Context, w *rendezvous.World, backends ...backend.Backend) (backend.Communicator, error) {
	if len(backends) == 0 {
		backends = Backends()
	}
	verify, err := verifying()
	if err != nil {
		return nil, err
	}
	chosen, err := vote(ctx, w, backends)
	if err != nil {
		return nil, err
	}
	comm, err := chosen.Connect(ctx, w)
	if err != nil {
		return nil, err
	}
	comm = check.New(comm)
	if v, ok := backend.As[backend.Verifier](comm); ok {
		v.Verify(verify)
	}
	recorder := trace.New(comm, remembered)
	return &session{Communicator: recorder, recorder: recorder, world: w, traceTo: os.Getenv("EURYALE_TRACE")}, nil
}

// verifying reads EURYALE_CHECK.
func verifying() (bool, error) {
	switch v := os.Getenv("EURYALE_CHECK"); v {
	case "", "on":
		return true, nil
	case "off":
		return false, nil
	default:
		return false, fmt.Errorf("EURYALE_CHECK=%q: use on or off", v)
	}
}

// ballot is what a rank has to say about one backend.
type ballot struct {
	Name    string
	Problem string // "" if available
}

// vote chooses the first backend that is available on every rank. Every rank
// sees every ballot, so all choose alike.
func vote(ctx context.Context, w *rendezvous.World, backends []backend.Backend) (backend.Backend, error) {
	mine, err := json.Marshal(ballots(backends, os.Getenv("EURYALE_BACKEND")))
	if err != nil {
		return nil, err
	}
	notes, err := w.AllGather(ctx, "euryale/vote", mine)
	if err != nil {
		return nil, err
	}
	all := make([][]ballot, len(notes))
	for r, note := range notes {
		if err := json.Unmarshal(note, &all[r]); err != nil {
			return nil, fmt.Errorf("rank %d sent a vote that cannot be read: %w", r, err)
		}
		if len(all[r]) != len(backends) {
			return nil, fmt.Errorf("rank %d was started with %d backends, rank %d with %d: pass the same to Init on every rank", w.Rank, len(backends), r, len(all[r]))
		}
	}
	var problems []error
	for i, b := range backends {
		problem := objection(all, i)
		if problem == nil {
			return b, nil
		}
		problems = append(problems, problem)
	}
	return nil, fmt.Errorf("rank %d: %w: %w", w.Rank, errNoBackend, errors.Join(problems...))
}

func ballots(backends []backend.Backend, only string) []ballot {
	bs := make([]ballot, len(backends))
	for i, b := range backends {
		bs[i].Name = b.Name()
		if only != "" && only != b.Name() {
			bs[i].Problem = fmt.Sprintf("EURYALE_BACKEND asks for %q", only)
		} else if err := b.Available(); err != nil {
			bs[i].Problem = err.Error()
		}
	}
	return bs
}

// objection returns the first rank's objection to backend i, or nil.
func objection(all [][]ballot, i int) error {
	for r, bs := range all {
		if bs[i].Name != all[0][i].Name {
			return fmt.Errorf("backend %d is %q on rank %d and %q on rank 0: pass the same to Init on every rank", i, bs[i].Name, r, all[0][i].Name)
		}
		if bs[i].Problem != "" {
			return fmt.Errorf("%s on rank %d: %s", bs[i].Name, r, bs[i].Problem)
		}
	}
	return nil
}

// session is the outermost communicator: it owns the world.
type session struct {
	backend.Communicator
	recorder *trace.Communicator
	world    *rendezvous.World
	traceTo  string
	once     sync.Once
	err      error
}

// Unwrap implements [backend.Wrapper].
func (s *session) Unwrap() []backend.Communicator { return []backend.Communicator{s.Communicator} }

// Close closes the communicator, leaves the job, and writes the trace. If the
// communicator has failed the job is told, so that nobody waits for this rank.
func (s *session) Close() error {
	s.once.Do(func() {
		if leaf, ok := backend.As[interface{ Err() error }](s.Communicator); ok && leaf.Err() != nil && s.world.Failure() == nil {
			s.world.Fail(leaf.Err())
		}
		s.err = errors.Join(s.Communicator.Close(), s.writeTrace(), s.world.Close())
	})
	return s.err
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
