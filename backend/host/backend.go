package host

import (
	"context"
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/shm"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Backend connects ranks of one machine.
type Backend struct {
	// Dir is a tmpfs in which unnamed files for shared memory can be made; empty means /dev/shm.
	// All ranks must use the same one.
	Dir string
}

var _ backend.Backend = Backend{}

// Name returns "host".
func (Backend) Name() string { return "host" }

func (b Backend) dir() string {
	if b.Dir == "" {
		return "/dev/shm"
	}
	return b.Dir
}

// Available tries to make shared memory.
func (b Backend) Available() error {
	s, err := shm.New(b.dir(), page)
	if err != nil {
		return err
	}
	return s.Unmap()
}

const (
	// maxRanks keeps at least a kilobyte of a slot for each rank in an all-to-all. 200 ranks on two
	// cores start in 1.6 s, by sockets in 10: see bench/results/2026-11/2026-11-30-starts.md.
	maxRanks = rawBytes >> 10
	// fewRanks share no more memory than containers have, which is 64 MiB by default. Where more do
	// not have theirs, sockets do.
	fewRanks = 64
)

func tooMany(ranks int) error {
	return fmt.Errorf("%w: %d ranks, of at most %d", backend.ErrUnsupported, ranks, maxRanks)
}

// Connect implements [backend.Backend]. All ranks of w must be on one machine.
func (b Backend) Connect(ctx context.Context, w *rendezvous.World) (backend.Communicator, error) {
	c, err := b.connect(ctx, w)
	if err != nil {
		return nil, fmt.Errorf("rank %d of %s: backend host: %w", w.Rank, w.Name, err)
	}
	return c, nil
}

func (b Backend) connect(ctx context.Context, w *rendezvous.World) (backend.Communicator, error) {
	if w.Size > maxRanks {
		return nil, tooMany(w.Size)
	}
	if w.LocalSize < w.Size { // on every rank
		return nil, fmt.Errorf("%w: %d of %d ranks are on this machine: this backend is for one "+
			"machine", backend.ErrUnsupported, w.LocalSize, w.Size)
	}
	whole := group.Whole(w)
	gather := group.OverStore(ctx, w, "host/connect")
	among := group.Sharing{Gather: gather, Rank: w.Rank, Dir: b.dir()}
	places, region := new(group.Places), Region(whole, among)
	err := among.Form(nil, places, region)
	if errors.Is(err, group.ErrNoMemory) { // on every rank
		switch {
		case !shm.BetweenProcesses:
			err = fmt.Errorf("%w: %w", backend.ErrUnsupported, shm.ErrProcesses)
		case w.Size > fewRanks:
			err = fmt.Errorf("%w: %w", backend.ErrUnsupported, err)
		}
	}
	if err != nil {
		return nil, err
	}
	return Join(w, whole, among, places.Of(whole.Ranks), region.Share()), nil
}

// Region returns the step that makes the memory shared by the ranks of a part. It is for a backend
// that also reaches other machines. A rank in no part passes a Part of rank -1: it makes nothing,
// but takes part.
func Region(part group.Part, among group.Sharing) *group.Handover {
	if part.Rank < 0 {
		return among.Handover(among.Rank, 0, nil)
	}
	size := len(part.Ranks)
	return among.Handover(part.Ranks[0], regionBytes(size), func(s *shm.Share) {
		r := newRegion(s, part.Rank, size)
		health{&r}.Close()
	})
}

// Join makes the communicator of a part whose ranks share a machine. places has an entry for each
// of the part's ranks, and region is the memory that [Region] has made.
func Join(
	w *rendezvous.World, part group.Part, among group.Sharing, places []group.Place,
	region *shm.Share,
) backend.Communicator {
	inProcess, cores := group.Census(places, part.Rank)
	spin := spinBudgetFor(len(part.Ranks), inProcess, cores)
	return newComm(part, w, among.Dir, spin, region)
}
