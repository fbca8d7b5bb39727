package backendtest

import (
	"context"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Group is a fresh group of ranks that are goroutines of this process, or one rank of processes.
type Group struct {
	// Comms are the communicators by rank, for [RunRank] that of this one. The suite closes them.
	Comms []backend.Communicator
	// Fail loses a rank of the job, as its death would. A nil Fail skips the
	// scenarios that need it.
	Fail func(rank int, cause error)
	// Close frees what is left once Comms are closed; nil if nothing is.
	Close func() error
}

// Options say what the suite tests and what it may expect.
type Options struct {
	// New makes a fresh group of size ranks whose waits for another rank last at
	// most timeout.
	New func(size int, timeout time.Duration) (*Group, error)
	// Sizes are the group sizes to test; nil means 1, 2, 3, 8, and with
	// EURYALE_FULL=1 all from 1 to 9.
	Sizes []int
	// Unsupported lists what the implementation does not offer, where op is Sum
	// for kinds that do not reduce; nil means nothing. An ErrUnsupported that is
	// not listed fails, and so does a listed call that works.
	Unsupported func(kind backend.Kind, d backend.DType, op backend.ReduceOp) bool
	// Unverified says that calls are not compared across the ranks, so that the
	// scenarios with ranks that disagree are skipped. Init compares
	// them then, by one all-gather for each call.
	Unverified bool
	// OwnOrder says that floats are not combined in rank order: results are then
	// compared bit for bit where sums are exact, and elsewhere within the bound
	// of any order.
	OwnOrder bool
	// Tree lists which sums in the association [backend.Tree] it offers, if its Capabilities have
	// Tree; nil means all.
	Tree func(kind backend.Kind, d backend.DType, ranks int) bool
	// Integers is the type of the integers that most scenarios reduce and move: I64, which 0
	// stands for, or F32, for implementations that have another way for floats. All are below
	// 2^24 then.
	Integers backend.DType
	// Copy copies between host and device memory of the same length; nil says
	// that buffers are host memory.
	Copy func(dst, src backend.Buffer) error
}

// Over returns an Options.New that connects b, and wraps each communicator in
// wrap, the first one innermost.
func Over(b backend.Backend, wrap ...func(backend.Communicator) backend.Communicator) func(int,
	time.Duration) (*Group, error) {
	return func(size int, timeout time.Duration) (*Group, error) {
		ranks, err := testranks.Connect(size, timeout, func(w *rendezvous.World) (
			backend.Communicator, error) {
			return b.Connect(context.Background(), w)
		})
		if err != nil {
			return nil, err
		}
		for r := range ranks.Ranks {
			for _, f := range wrap {
				ranks.Ranks[r] = f(ranks.Ranks[r])
			}
		}
		return &Group{Comms: ranks.Ranks, Fail: ranks.Fail, Close: ranks.CloseWorlds}, nil
	}
}
