package host

import (
	"context"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/shm"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Backend connects ranks of one machine.
type Backend struct {
	// Dir is a tmpfs where unnamed files for shared memory can be made; empty
	// means /dev/shm. All ranks must use the same.
	Dir string
}

// New returns the backend with its defaults.
func New() Backend { return Backend{} }

var _ backend.Backend = Backend{}

// Name returns "host".
func (Backend) Name() string { return "host" }

func (b Backend) dir() string {
	if b.Dir == "" {
		return "/dev/shm"
	}
	return b.Dir
}

// Available tries whether shared memory can be made.
func (b Backend) Available() error {
	s, err := shm.New(b.dir(), page)
	if err != nil {
		return err
	}
	return s.Unmap()
}

// maxRanks keeps at least a page of a slot for each rank in an all-to-all.
const maxRanks = rawBytes / page

func tooMany(ranks int) error {
	return fmt.Errorf("%w: %d ranks, of at most %d", backend.ErrUnsupported, ranks, maxRanks)
}

// place is what a rank tells the others of itself.
type place struct {
	Process string // the same for ranks of one process
	Cores   []int
}

// Connect implements [backend.Backend]. All ranks of w must be on one machine.
func (b Backend) Connect(ctx context.Context, w *rendezvous.World) (backend.Communicator, error) {
	ctx, cancel := context.WithTimeout(ctx, w.Timeout)
	defer cancel()
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
		return nil, fmt.Errorf("%w: %d of %d ranks are on this machine: this backend is for one machine", backend.ErrUnsupported, w.LocalSize, w.Size)
	}
	places, err := group.Exchange(group.OverStore(ctx, w, "host/place"), nil, ownPlace())
	if err != nil {
		return nil, err
	}
	g := group.OverStore(ctx, w, "host/region")
	s, err := group.Sharing{Gather: g, Rank: w.Rank, Dir: b.dir()}.HandOver(0, regionBytes(w.Size))
	if err != nil {
		return nil, err
	}
	members := make([]int, w.Size)
	for r := range members {
		members[r] = r
	}
	inProcess, cores := census(places, w.Rank)
	return newComm(w.Name, w.Rank, members, w, b.dir(), spinBudgetFor(w.Size, inProcess, cores), s), nil
}

func ownPlace() place {
	var p place
	// The number alone is not enough where ranks run in containers.
	namespace, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		namespace = "unknown"
	}
	p.Process = fmt.Sprintf("%s/%d", namespace, os.Getpid())
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err == nil {
		for cpu := range len(set) * 64 {
			if set.IsSet(cpu) {
				p.Cores = append(p.Cores, cpu)
			}
		}
	}
	return p
}

// census counts the ranks in the process of rank r and the cores that all ranks
// may use between them.
func census(places []place, r int) (inProcess, cores int) {
	all := map[int]bool{}
	for _, p := range places {
		if p.Process == places[r].Process {
			inProcess++
		}
		for _, cpu := range p.Cores {
			all[cpu] = true
		}
	}
	if len(all) == 0 {
		return inProcess, runtime.NumCPU()
	}
	return inProcess, len(all)
}
