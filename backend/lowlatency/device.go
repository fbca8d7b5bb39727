package lowlatency

import (
	"context"

	"github.com/euryale-ml/euryale/backend"
	peers "github.com/euryale-ml/euryale/kernels/cuda"
)

// Device is what the ranks of a group need of their devices to reach each other's
// memory: package cuda's, or a test's.
type Device interface {
	backend.Device
	// Model is the name of the product, which measured times are found by.
	Model() string
	// Ordinal is the device's number among those that the process sees.
	Ordinal() int
	// Wires says how the device is connected, as far as is known.
	Wires() Wires
	// Befriend lets kernels reach memory of another device that this process sees.
	Befriend(ordinal int) error
	// Export names memory from Alloc for another process, and Import finds what
	// another one has named, until CloseImport.
	Export(b backend.Buffer) ([]byte, error)
	Import(name []byte) (backend.Buffer, error)
	CloseImport(b backend.Buffer) error
	// Disown takes memory from Alloc out of the device's books: Free, and Close of this,
	// work on it even if the device itself is closed before.
	Disown(b backend.Buffer) error
	// AllocHost returns host memory that kernels can use at its own address.
	AllocHost(nbytes int) (backend.Buffer, error)
	FreeHost(b backend.Buffer) error
	// Close gives back what Befriend took.
	Close() error
}

// holder is a device that can tell whether an address is memory of its own.
type holder interface{ Holds(addr uintptr) bool }

// counter is a device that can tell how many blocks it can run side by side, at the least; 0 if
// it does not know.
type counter interface{ Multiprocessors() int }

// exchanger is a queue that exchanges data with peers.
type exchanger interface {
	backend.Arithmetic
	Exchange(p *peers.Peers, x *peers.Exchange) error
}

// Carrier is a communicator that runs calls of others as its own.
type Carrier interface {
	backend.Communicator
	// Carry starts a call that launch puts on the queue in place of the
	// communicator's own way. It is numbered, compared between the ranks, ordered
	// across queues, watched and joined like every call of the communicator. The
	// caller has checked it: count is what Check has returned. launch is called
	// before Carry returns, once at most, and records event, if that is not 0, behind
	// what it starts. outcome is asked by each Join of the call that has found it to have
	// ended well: it may know better.
	Carry(q backend.Queue, c backend.Collective, count int, dst, src backend.Buffer,
		launch func(q backend.Queue, event uintptr) error, outcome func(backend.Header) error) (backend.Work, error)
	// Ended is closed when the communicator has failed or was closed, here or
	// elsewhere: what a launch has left on a queue must end then. It is known before
	// which calls are done: an end that comes of Ended is none of a call.
	Ended() <-chan struct{}
}

// noticer is a Carrier that says, once, what calls on host memory cost.
type noticer interface{ HostMemory(what backend.Collective) }

// drain waits for everything started on a queue so far.
func drain(ctx context.Context, q backend.Queue) error {
	e, err := q.Record()
	if err != nil {
		return err
	}
	return e.Join(ctx)
}
