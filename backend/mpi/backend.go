package mpi

import (
	"context"
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/internal/hosted"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Backend connects ranks that an MPI launcher has started.
type Backend struct {
	// Dir is a tmpfs where ranks that are all on one machine share their board; empty means
	// /dev/shm. All ranks must use the same.
	Dir string
}

var _ backend.Backend = Backend{}

// Name returns "mpi".
func (Backend) Name() string { return "mpi" }

// Available opens the library. It does not begin MPI.
func (Backend) Available() error {
	_, err := here.open()
	return err
}

// Describe returns the version of the library, and where it is.
func (Backend) Describe() (string, error) {
	lib, err := here.open()
	if err != nil {
		return "", err
	}
	return lib.describe(), nil
}

// Close ends MPI for this process, which waits until every rank does so. After a failure, or if
// MPI has not begun, it does nothing.
func (Backend) Close() error {
	if err := here.finalize(); err != nil {
		return fmt.Errorf("backend mpi: %w", err)
	}
	return nil
}

// Connect implements [backend.Backend]. It begins MPI if this process has not done so. MPI must
// give every rank of the job the number that it has there.
func (b Backend) Connect(ctx context.Context, w *rendezvous.World) (backend.Communicator, error) {
	among := group.Sharing{Gather: group.OverStore(ctx, w, "mpi/connect"), Rank: w.Rank, Dir: b.Dir}
	if among.Dir == "" {
		among.Dir = "/dev/shm"
	}
	world, err := here.initialize(w, among.Gather)
	var c backend.Communicator
	if err == nil {
		c, err = connect(w, group.Whole(w), among, world)
	}
	if err != nil {
		return nil, fmt.Errorf("rank %d of %s: backend mpi: %w", w.Rank, w.Name, err)
	}
	return c, nil
}

// connect makes the communicator of a part of the ranks of an MPI communicator: in shared memory if
// the job has several machines and the part is on one of them. It fails on all ranks or on none. A
// rank in no part gets nil, but takes part.
func connect(w *rendezvous.World, part group.Part, among group.Sharing,
	parent handle) (backend.Communicator, error) {
	places := new(group.Places)
	site, err := hosted.NewSite(w, part, among, places, true)
	if err != nil {
		return nil, err
	}
	color := part.Number
	if site.Across.Rank < 0 {
		color = -1
	}
	mine, err := here.split(w, parent, color, site.Across.Rank)
	if err := among.Form(err, append(site.Steps(), places)...); err != nil {
		return nil, err // MPI keeps its communicator: to free it takes all ranks
	}
	if site.Across.Rank < 0 {
		return site.Local(), nil
	}
	board := site.Board()
	_, shared := board.(*group.Memory)
	ranks, _, cores := site.Here()
	return hosted.New(hosted.Config{
		Backend: Backend{}.Name(), World: w, Part: part, Among: among, Board: board,
		Compares: shared,
		NewEngine: func(c *hosted.Comm) hosted.Engine {
			return &engine{
				Comm: c, lib: here.lib, mpi: mine, request: new(request),
				numbers: make([]handle, max(1, messages*(c.Size()-1))),
				terms:   make([]backend.Buffer, c.Size()), shared: shared, crowded: ranks > cores,
			}
		},
		Connect: func(parts []group.Part, among group.Sharing, problem error) (
			all []backend.Communicator, err error,
		) {
			if err := among.Gather.Vote(among.Members, problem); err != nil {
				return nil, err
			}
			for _, part := range parts { // each by a collective call of MPI
				c, err := connect(w, part, among, mine)
				if err != nil {
					return nil, errors.Join(err, hosted.CloseAll(all))
				}
				all = append(all, c)
			}
			return all, nil
		},
	}), nil
}
