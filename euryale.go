package euryale

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/fault"
	"github.com/euryale-ml/euryale/backend/gpu"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/backend/mpi"
	"github.com/euryale-ml/euryale/backend/tcp"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/rendezvous"
)

// remembered is how many collectives the flight recorder keeps.
const remembered = 2048

// Backends returns the backends of this module, best first: NCCL, which takes a
// build with tag gpu and a GPU for each rank, shared memory, which takes ranks of one
// machine, sockets, and MPI, which takes a build with tag mpi and is used only where
// EURYALE_BACKEND asks for it. What they have to say to the user goes to standard error.
func Backends() []backend.Backend {
	gpus := gpu.New(gpu.Open)
	gpus.Notice = func(text string) { fmt.Fprintln(os.Stderr, "euryale:", text) }
	dir := os.Getenv("EURYALE_SHM_DIR")
	return []backend.Backend{gpus, host.Backend{Dir: dir}, tcp.Backend{Dir: dir}, mpi.Backend{Dir: dir}}
}

// Init connects this process to the other ranks of its job and returns their
// communicator. It is collective. Without backends those of [Backends] are
// used; one from outside this module is as good. A process may call it again after
// Close; the communicator then has another name.
//
// Errors: a broken environment, a rank that does not come, no backend that
// every rank can use. Each says what to do.
func Init(ctx context.Context, backends ...backend.Backend) (backend.Communicator, error) {
	if err := backend.Given("euryale.Init", "ctx", ctx, "backends", backends); err != nil {
		return nil, err
	}
	env, err := rendezvous.ReadEnv(os.Getenv)
	if err != nil {
		return nil, fmt.Errorf("euryale: %w", err)
	}
	backends, own := orOwn(backends)
	env.Note, _ = tellOf(backends) // connect finds the error again, and then the others hear of it
	world, err := rendezvous.Join(ctx, env)
	if err != nil {
		return nil, fmt.Errorf("euryale: %w", errors.Join(err, closeAll(own)))
	}
	comm, err := connect(ctx, world, backends, own)
	if err != nil {
		leave(world, err)
		return nil, fmt.Errorf("euryale: %w", err)
	}
	if s, ok := comm.(*session); ok {
		s.unreport = reportDown(os.Getenv("EURYALE_REPORT"), world)
	}
	return comm, nil
}

// orOwn returns the backends of the caller or, where there are none, this module's, whose devices
// close with the communicator.
func orOwn(backends []backend.Backend) (all, own []backend.Backend) {
	if len(backends) == 0 {
		own = Backends()
		return own, own
	}
	return backends, nil
}

// errNoBackend: no backend works on every rank. All ranks reach this verdict together.
var errNoBackend = errors.New("no backend works on every rank")

// leave tells the other ranks why this one leaves, unless they know already. That
// it may not reach them is no news: they notice that it is gone.
func leave(w *rendezvous.World, why error) {
	if w.Failure() == nil && !errors.Is(why, errNoBackend) {
		w.Fail(why)
	}
	w.Close()
}

// Connect makes the communicator of a world that the caller has joined; closing
// it closes the world, and without backends of the caller's own the rank's GPU:
// close machines on it before. Init and Run do this for you. It is collective.
func Connect(ctx context.Context, w *rendezvous.World, backends ...backend.Backend) (backend.Communicator, error) {
	if err := backend.Given("euryale.Connect", "ctx", ctx, "w", w, "backends", backends); err != nil {
		return nil, err
	}
	backends, own := orOwn(backends)
	return connect(ctx, w, backends, own)
}

// connect is Connect with backends, of which own close with the communicator.
func connect(
	ctx context.Context, w *rendezvous.World, backends, own []backend.Backend,
) (backend.Communicator, error) {
	file, err := openTrace(w.Rank)
	if err != nil {
		return nil, errors.Join(err, closeAll(own))
	}
	recorder := observe.New(w.Rank, remembered)
	if w.LongWait == nil {
		w.LongWait = sayLongWait(os.Stderr, w, recorder)
	}
	comm, err := choose(ctx, w, backends, recorder)
	if err != nil {
		return nil, errors.Join(err, recorder.Close(), closeAll(own), file.discard())
	}
	comm = backend.WithHooks(comm, recorder)
	unwatch, err := lastCallsOnQuit(os.Getenv("EURYALE_LAST_CALLS"), recorder, os.Stderr)
	if err != nil {
		return nil, errors.Join(err, comm.Close(), recorder.Close(), closeAll(own), file.discard())
	}
	file.watch(recorder, w.Down())
	return &session{Base: backend.Wrap(comm), world: w, own: own, recorder: recorder, trace: file, parts: parts{localRanks: w.LocalSize}, unwatch: unwatch}, nil
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
			fmt.Fprintf(to, "euryale: rank %d has waited %v in %s for %s, which did not begin it; "+
				"EURYALE_TIMEOUT=%gs ends this\n",
				w.Rank, waited.Round(time.Second), call, ranks, w.Timeout.Seconds())
		})
	}
}

// choose connects on the backend that the ranks choose. The recorder is told of phases.
func choose(
	ctx context.Context, w *rendezvous.World, backends []backend.Backend, recorder *observe.Recorder,
) (backend.Communicator, error) {
	if err := lowLatency(); err != nil {
		return nil, err
	}
	plan, err := plannedFault(w.Size)
	if err != nil {
		return nil, err
	}
	infos, err := exchangeInfos(ctx, w, backends)
	if err != nil {
		return nil, err
	}
	verify := infos[w.Rank].Verify
	candidates, err := vote(w, backends, infos)
	if err != nil {
		return nil, err
	}
	comm, err := first(ctx, w, candidates, infos)
	if err != nil {
		return nil, err
	}
	// Comparing comes first: a hierarchical call takes part in it.
	if comm, err = withHierarchy(ctx, w, group.Compared(comm), infos, recorder); err != nil {
		return nil, err
	}
	if compare := comm.Capabilities().Verify; compare != nil {
		compare(verify)
	}
	if plan != nil {
		return fault.New(comm, *plan), nil
	}
	return comm, nil
}

// first connects on the first backend that can carry these ranks: more ranks than
// GPUs, say, are found out when they connect. The error is then ErrUnsupported on
// every rank, so all go on to the next.
func first(
	ctx context.Context, w *rendezvous.World, candidates []backend.Backend, infos []rankInfo,
) (backend.Communicator, error) {
	for i, b := range candidates {
		comm, err := connectBy(ctx, w, b, infos)
		if !errors.Is(err, backend.ErrUnsupported) || i == len(candidates)-1 {
			return comm, err
		}
		if w.Rank == 0 {
			_, why, _ := strings.Cut(err.Error(), backend.ErrUnsupported.Error()+": ")
			fmt.Fprintf(os.Stderr, "euryale: using backend %s and not %s: %s\n", candidates[i+1].Name(), b.Name(), why)
		}
	}
	return nil, errNoBackend
}

// connectBy connects on a backend, with the groups of hierarchical calls where it can do that at
// once.
func connectBy(
	ctx context.Context, w *rendezvous.World, b backend.Backend, infos []rankInfo,
) (backend.Communicator, error) {
	if c, ok := b.(group.Connector); ok {
		ways, err := likelySplits(ctx, w, infos)
		if err != nil {
			return nil, err
		}
		return c.ConnectSplit(ctx, w, ways)
	}
	return b.Connect(ctx, w)
}

// lowLatency checks EURYALE_LOWLATENCY, which package gpu goes by, whatever the backend.
func lowLatency() error {
	mode := os.Getenv("EURYALE_LOWLATENCY")
	if _, err := gpu.Parse(mode); err != nil {
		return fmt.Errorf("EURYALE_LOWLATENCY=%q: %w", mode, err)
	}
	return nil
}

// plannedFault reads EURYALE_FAULT. The plan is nil where there is none, and where
// the job has been restarted.
func plannedFault(size int) (*fault.Plan, error) {
	text := os.Getenv("EURYALE_FAULT")
	if text == "" {
		return nil, nil
	}
	plan, err := fault.Parse(text)
	if err == nil {
		err = plan.Check(size)
	}
	if err != nil {
		return nil, fmt.Errorf("EURYALE_FAULT: %w", err)
	}
	if restarts := os.Getenv("TORCHELASTIC_RESTART_COUNT"); restarts != "" && restarts != "0" {
		return nil, nil
	}
	return &plan, nil
}

// closeAll closes the backends that have something to close.
func closeAll(backends []backend.Backend) error {
	var errs []error
	for _, b := range backends {
		if c, ok := b.(io.Closer); ok {
			errs = append(errs, c.Close())
		}
	}
	return errors.Join(errs...)
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

// rankInfo is all that a rank tells the others before they choose a backend. Every rank decides by
// the infos of all, so all decide the same.
type rankInfo struct {
	Verify    bool   // whether it compares calls
	Only      string // the only backend that it may use, "" for any
	Backends  []availability
	NCCLHost  string // NCCL_HOSTID, which may part ranks of one machine
	Topology  string // EURYALE_TOPOLOGY
	Hierarchy string // EURYALE_HIERARCHY
}

// availability is what a rank has to say about one backend.
type availability struct {
	Name    string
	Problem string // "" if available
}

// tellOf returns the rankInfo of this rank as a note.
func tellOf(backends []backend.Backend) (string, error) {
	verify, err := verifying()
	if err != nil {
		return "", err
	}
	only := os.Getenv("EURYALE_BACKEND")
	note, err := json.Marshal(rankInfo{verify, only, availabilities(backends, only),
		os.Getenv("NCCL_HOSTID"), os.Getenv("EURYALE_TOPOLOGY"), os.Getenv("EURYALE_HIERARCHY")})
	return string(note), err
}

// exchangeInfos returns the infos of all ranks: those that they have told in Init, or, where not
// all have joined by it, those that they tell now.
func exchangeInfos(
	ctx context.Context, w *rendezvous.World, backends []backend.Backend,
) ([]rankInfo, error) {
	notes := w.Notes()
	if notes == nil || slices.Contains(notes, "") {
		mine, err := tellOf(backends)
		if err != nil {
			return nil, err
		}
		told, err := w.AllGather(ctx, "euryale/info", []byte(mine))
		if err != nil {
			return nil, err
		}
		notes = nil
		for _, note := range told {
			notes = append(notes, string(note))
		}
	}
	infos := make([]rankInfo, len(notes))
	for r, note := range notes {
		if err := json.Unmarshal([]byte(note), &infos[r]); err != nil {
			return nil, fmt.Errorf("rank %d: what rank %d tells cannot be read: %w", w.Rank, r, err)
		}
	}
	return infos, nil
}

// vote returns the backends that are available on every rank, at least one. Every
// rank sees the same, so all choose the same.
func vote(
	w *rendezvous.World, backends []backend.Backend, all []rankInfo,
) ([]backend.Backend, error) {
	var off []int // ranks that do not compare calls
	for r, info := range all {
		if !info.Verify {
			off = append(off, r)
		}
		if len(info.Backends) != len(backends) {
			return nil, fmt.Errorf("rank %d was started with %d backends, rank %d with %d: pass the same to Init on every rank", w.Rank, len(backends), r, len(info.Backends))
		}
	}
	if len(off) > 0 && len(off) < len(all) {
		return nil, fmt.Errorf("rank %d: EURYALE_CHECK is off on ranks %v of %d, and on elsewhere: ranks compare calls all or none, so set it to the same on every rank (off is faster, on finds ranks that disagree)", w.Rank, off, len(all))
	}
	var candidates []backend.Backend
	var problems []string
	for i, b := range backends {
		asked := func(r rankInfo) bool { return r.Only == "" || r.Only == b.Name() }
		if !slices.ContainsFunc(all, asked) {
			continue
		}
		if problem := unavailable(all, i); problem != nil {
			problems = append(problems, problem.Error())
			if w.Rank == 0 && b.Name() == host.New().Name() && w.LocalSize == w.Size {
				fmt.Fprintf(os.Stderr, "euryale: not using the fastest backend of one machine: %v\n", problem)
			}
			continue
		}
		candidates = append(candidates, b)
	}
	if len(candidates) > 0 {
		return candidates, nil
	}
	if len(problems) == 0 {
		var names []string
		for _, b := range backends {
			names = append(names, b.Name())
		}
		problems = []string{fmt.Sprintf("EURYALE_BACKEND asks for %q: the backends are %s",
			all[w.Rank].Only, strings.Join(names, ", "))}
	}
	return nil, fmt.Errorf("rank %d: %w: %s", w.Rank, errNoBackend, strings.Join(problems, "; "))
}

func availabilities(backends []backend.Backend, only string) []availability {
	all := make([]availability, len(backends))
	for i, b := range backends {
		all[i].Name = b.Name()
		if only != "" && only != b.Name() {
			all[i].Problem = fmt.Sprintf("EURYALE_BACKEND asks for %q", only)
		} else if err := b.Available(); err != nil {
			all[i].Problem = err.Error()
		}
	}
	return all
}

// unavailable returns why backend i is not for these ranks, as the first rank that says so
// does, or nil.
func unavailable(all []rankInfo, i int) error {
	for r, info := range all {
		if name, first := info.Backends[i].Name, all[0].Backends[i].Name; name != first {
			return fmt.Errorf("backend %d is %q on rank %d and %q on rank 0: pass the same to Init on every rank", i, name, r, first)
		}
		if problem := info.Backends[i].Problem; problem != "" {
			return fmt.Errorf("%s on rank %d: %s", info.Backends[i].Name, r, problem)
		}
	}
	return nil
}

// session is the outermost communicator: it owns the world.
type session struct {
	backend.Base
	world    *rendezvous.World
	own      []backend.Backend
	recorder *observe.Recorder
	trace    *traceFile
	parts    parts
	unwatch  func() // SIGQUIT
	unreport func() // the end of reports to a launcher; nil for none
	once     sync.Once
	err      error
}

// Capabilities implements [backend.Communicator].
func (s *session) Capabilities() backend.Capabilities {
	c := s.Communicator.Capabilities()
	c.LocalRanks = s.world.LocalSize
	return c
}

// Recorder returns the flight recorder of this rank.
func (s *session) Recorder() *observe.Recorder { return s.recorder }

// Close closes the communicator and its groups, leaves the job, and writes the trace. If the
// communicator or a group of it has failed the job is told, so that nobody waits
// for this rank, or takes it for the one that is to blame.
func (s *session) Close() error {
	s.once.Do(func() {
		s.unwatch()
		if s.unreport != nil {
			s.unreport()
		}
		s.tell()
		s.err = errors.Join(s.parts.close(), s.Communicator.Close(), s.recorder.Close(), closeAll(s.own))
		s.trace.close()
		s.err = errors.Join(s.err, s.world.Close())
	})
	return s.err
}
