package euryale

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/gpu"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/backend/mpi"
	"github.com/euryale-ml/euryale/backend/tcp"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/session"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Backends returns the backends of this module, best first: NCCL, which takes a
// build with tag gpu and a GPU for each rank, shared memory, which takes ranks of one
// machine, sockets, and MPI, which takes a build with tag mpi and is used only where
// EURYALE_BACKEND asks for it. What they have to say to the user goes to standard error.
func Backends() []backend.Backend {
	gpus := gpu.New(gpu.Open)
	gpus.Notice = func(text string) { fmt.Fprintln(os.Stderr, "euryale:", text) }
	dir := env.ShmDir.Read(os.Getenv)
	return []backend.Backend{gpus, host.Backend{Dir: dir}, tcp.Backend{Dir: dir},
		mpi.Backend{Dir: dir}}
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
	backends, own := orOwn(backends)
	note, _ := session.Note(backends) // Connect says what is wrong, to all
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

// join makes the World of this process, as the launcher's variables say, with a note for all ranks.
func join(ctx context.Context, note string) (*rendezvous.World, error) {
	if env.Elastic.Text(os.Getenv) != "" {
		return nil, errors.New("the job is elastic (euryale run --elastic), and Init makes a " +
			"communicator of ranks that do not change: use JoinElastic and autograd.NewElastic, " +
			"or leave --elastic out")
	}
	job, err := rendezvous.ReadEnv(os.Getenv)
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

// Connect makes the communicator of a world that the caller has joined; closing
// it closes the world, and without backends of the caller's own the rank's GPU:
// close machines on it before. Init and Run do this for you. It is collective.
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

// JoinElastic connects this process to an elastic job, which euryale run --elastic starts, in place
// of [Init]. The ranks of the job change: a process that dies is lost, and another one takes its
// place. Pass the result to vm.WithElastic or autograd.NewElastic, which close it.
//
// Errors: a process that no launcher of an elastic job has started; a launcher that does not
// answer.
func JoinElastic(ctx context.Context) (*session.Elastic, error) {
	if err := backend.Given("euryale.JoinElastic", "ctx", ctx); err != nil {
		return nil, err
	}
	return session.JoinElastic(ctx, Backends)
}
