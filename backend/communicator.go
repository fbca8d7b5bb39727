package backend

import (
	"context"
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/rendezvous"
)

// Backend makes communicators. A backend from outside this module works just as well as one inside:
// pass it to euryale.Init.
type Backend interface {
	// Name is the backend's name in EURYALE_BACKEND and in messages.
	Name() string
	// Available returns nil if this build and machine can use the backend. Otherwise it returns an
	// error that says what is missing and how to get it.
	Available() error
	// Connect makes the communicator of all ranks of w. It is collective: either every rank gets
	// one or every rank gets an error. ErrUnsupported, on every rank, says that the backend does
	// not suit these ranks (there are more of them than devices, say), but another one may. The
	// communicator watches w.Down and aborts itself when a rank is lost.
	Connect(ctx context.Context, w *rendezvous.World) (Communicator, error)
}

// Communicator is a group of ranks that run collectives together.
//
// Every rank starts the same collectives in the same order. Calls on one communicator are ordered
// as they were started, also across queues. Several goroutines may call its methods, if that order
// is still the same on every rank.
type Communicator interface {
	// Name identifies the group, the same on every rank and different from every
	// other group of the job. It is part of a graph op's identity.
	Name() string
	// Rank is this rank's number in the group, 0 to Size()-1.
	Rank() int
	Size() int
	// Device is where buffers must live to be used without a detour over another device.
	Device() Device
	// Capabilities says what the communicator is made of, and what it offers beyond this interface.
	// Ask once and keep the answer: a call may allocate memory.
	Capabilities() Capabilities
	// Start starts c on q (nil: the device's default queue) and returns at once, or when the
	// collective is done if q runs on the caller. Buffers stay in use until the Work is done.
	// [Collective.Check] says what c and the buffers must satisfy.
	//
	// Start returns only errors that are known at once: ErrArgument, ErrUnsupported, or an earlier,
	// sticky *Error. All others come from the Work.
	Start(q Queue, c Collective, dst, src Buffer) (Work, error)
	// Alloc returns nbytes bytes of memory that all ranks can reach, as U8, zeroed: collectives on
	// it need fewer copies than on other memory. It is collective, with the same nbytes on every
	// rank. The memory lives until Free or Close. Host memory stays addressable after Close while
	// anything refers to the communicator, so a goroutine that still uses it does no harm.
	Alloc(nbytes int) (Buffer, error)
	// Free gives memory from Alloc back. Nothing on this rank may use it afterwards. Free is not
	// collective and waits for no other rank: the group gets the memory back at the first Alloc
	// after all ranks have freed it. Memory that is not freed lives until Close, after which Free
	// does nothing. The error is ErrArgument for memory that Alloc has not returned or that was
	// freed.
	Free(Buffer) error
	// Split makes one communicator for each color. It consists of the ranks that pass that color,
	// ordered by key and then by rank. A rank that passes a negative color gets nil. Split is
	// collective.
	Split(color, key int) (Communicator, error)
	// Abort ends every call under way and every later one, on all ranks, with
	// cause. The first cause wins.
	Abort(cause error)
	// Err returns the *Error that ended the communicator for this rank: the first one, with which
	// later calls fail, too. It is nil while the communicator works. A rank that is idle may learn
	// of another rank's failure only in its next call.
	Err() error
	// Close frees the communicator; calls under way end with ErrClosed. A rank that waits for one
	// that has closed also gets ErrClosed. Close is not collective. Calling it again does nothing.
	Close() error
}

// Run starts c on the communicator's default queue and waits for it.
func Run(comm Communicator, c Collective, dst, src Buffer) error {
	if comm == nil { // not by Given, which allocates
		return fmt.Errorf("%w: %v: comm is nil", ErrArgument, c)
	}
	w, err := comm.Start(nil, c, dst, src)
	if err != nil {
		return err
	}
	return w.Join(context.Background())
}

// Barrier returns once every rank has called it.
func Barrier(comm Communicator) error {
	if err := Given("backend.Barrier", "comm", comm); err != nil {
		return err
	}
	b, err := comm.Device().Alloc(1)
	if err != nil {
		return err
	}
	return errors.Join(
		Run(comm, Collective{Kind: AllReduce, Op: Max, Origin: &Origin{Purpose: forBarrier}}, b, b),
		comm.Device().Free(b))
}

// RankOf names this rank of comm for messages: "rank 3 (2 of the group) of run-1/1.0".
func RankOf(comm Communicator) string {
	return comm.Capabilities().Members.Rank(comm.Rank()) + " of " + comm.Name()
}
