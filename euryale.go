package euryale

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/backend/mpi"
	"github.com/euryale-ml/euryale/backend/tcp"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/gpu"
	"github.com/euryale-ml/euryale/internal/session"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Backends returns the backends of this module, best first: NCCL, which needs a build with tag gpu
// and a GPU for each rank; shared memory, for ranks of one machine; sockets; and MPI, which needs a
// build with tag mpi and is used only if EURYALE_BACKEND asks for it. They print notices for the
// user to standard error.
func Backends() []backend.Backend {
	gpus := gpu.New(gpu.Open)
	gpus.Notice = func(text string) { fmt.Fprintln(os.Stderr, "euryale:", text) }
	dir := env.ShmDir.Read(os.Getenv)
	return []backend.Backend{gpus, host.Backend{Dir: dir}, tcp.Backend{Dir: dir},
		mpi.Backend{Dir: dir}}
}

// Init connects this process to the other ranks of its job and returns their communicator. It is
// collective. Without backends it uses those of [Backends]; a backend from outside this module
// works just as well. A process may call it again after Close; the communicator then has another
// name.
//
// Errors: a broken environment, a rank that does not come, no backend that every rank can use. Each
// says what to do.
func Init(ctx context.Context, backends ...backend.Backend) (backend.Communicator, error) {
	if err := backend.Given("euryale.Init", "ctx", ctx, "backends", backends); err != nil {
		return nil, err
	}
	backends, own := orOwn(backends)
	note, _ := session.Note(backends) // Connect reports an error of it to all ranks
	world, err := join(ctx, note)
	if err != nil {
		return nil, fmt.Errorf("euryale: %w", errors.Join(err, session.CloseBackends(own)))
	}
	s, err := session.Connect(ctx, world, backends, own, -1)
	if err != nil {
		session.Leave(world, err)
		return nil, fmt.Errorf("euryale: %w", err)
	}
	s.ReportDown(env.Report.Read(os.Getenv))
	return s, nil
}

// join makes the World of this process from the launcher's variables, with a note for all ranks.
func join(ctx context.Context, note string) (*rendezvous.World, error) {
	if env.Elastic.Text(os.Getenv) != "" {
		return nil, errors.New("the job is elastic (euryale run --elastic), and Init makes a " +
			"communicator of ranks that do not change: use JoinElastic and vm.WithElastic, or " +
			"leave --elastic out")
	}
	job, err := rendezvous.ReadEnv(env.Lookup(os.Environ()))
	if err != nil {
		return nil, err
	}
	job.Note = note
	return rendezvous.Join(ctx, job)
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

// Connect makes the communicator of a world that the caller has joined. Closing it closes the
// world. Without backends of the caller's own, it also closes the rank's GPU: close machines on it
// before. Init and Run do this for you. Connect is collective.
func Connect(ctx context.Context, w *rendezvous.World,
	backends ...backend.Backend) (backend.Communicator, error) {
	if err := backend.Given("euryale.Connect", "ctx", ctx, "w", w, "backends",
		backends); err != nil {
		return nil, err
	}
	backends, own := orOwn(backends)
	s, err := session.Connect(ctx, w, backends, own, -1)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// JoinElastic connects this process to an elastic job, started by euryale run --elastic. Use it
// instead of [Init]. The ranks of the job change: a process that dies is lost, and another one
// replaces it. Pass the result to vm.WithElastic, whose machine closes it.
//
// Errors: the process was not started by the launcher of an elastic job; the launcher does not
// answer.
func JoinElastic(ctx context.Context) (*session.Elastic, error) {
	if err := backend.Given("euryale.JoinElastic", "ctx", ctx); err != nil {
		return nil, err
	}
	return session.JoinElastic(ctx, Backends)
}
