package gpu

import (
	"context"

	"github.com/euryale-ml/euryale/backend"
	peers "github.com/euryale-ml/euryale/internal/kernels/cuda"
)

// Device is what this package needs of a GPU: package cuda's. Bus ids are PCI bus ids, which
// are the same for all processes.
type Device interface {
	backend.Device
	// Ordinal is the device's number among those that the process sees.
	Ordinal() int
	// Model is the name of the product, by which measured times are found.
	Model() string
	// ComputeCapability is 90 for 9.0.
	ComputeCapability() int
	// Multiprocessors is how many blocks the device runs side by side at the least, 0 if that
	// is not known.
	Multiprocessors() int
	// PCIBusID is the device's own; Reachable has the IDs of devices whose memory its kernels can
	// use; NVLinks are those at the far ends of its links, and the number of links to switches.
	PCIBusID() string
	Reachable() []string
	NVLinks() (direct []string, switches int)

	// NewEvent returns an event, which RecordEvent, or NCCL, marks a stream with. EventDone asks
	// for the last mark, and WaitEvent orders a stream after it. For RecordEvent and WaitEvent
	// the device is bound.
	NewEvent() (event uintptr, err error)
	FreeEvent(event uintptr) error
	EventDone(event uintptr) (bool, error)
	RecordEvent(stream, event uintptr) error
	WaitEvent(stream, event uintptr) error

	// Prepare loads families of internal/kernels/cuda, so that their first launch does not wait for
	// what runs on the device.
	Prepare(families ...string) error
	// Bind makes the device's context current on this thread, until unbind.
	Bind() (unbind func(), err error)
	// Holds reports whether an address is memory of this device.
	Holds(addr uintptr) bool
	// EnablePeerAccess lets kernels reach memory of another device that this process sees.
	EnablePeerAccess(ordinal int) error
	// Export names memory from Alloc for another process, and Import finds what
	// another one has named, until CloseImport.
	Export(b backend.Buffer) ([]byte, error)
	Import(name []byte) (backend.Buffer, error)
	CloseImport(b backend.Buffer) error
	// AllocHost returns host memory that kernels can use at its own address.
	AllocHost(nbytes int) (backend.Buffer, error)
	FreeHost(b backend.Buffer) error

	// Disown takes memory from Alloc out of the device's books, so that Close does not free it.
	Disown(b backend.Buffer) error
	// Retain lets Free of disowned memory, FreeHost and CloseImport work until Release, if
	// need be after Close.
	Retain() error
	Release() error
	// Close frees what the device has.
	Close() error
}

// stream is a queue of a Device.
type stream interface {
	backend.Queue
	// Stream returns the CUstream.
	Stream() uintptr
	// Recording implements [backend.GraphQueue].
	Recording() *backend.Recording
	// Joined reports whether what is recorded on the queue from now on comes after an event of
	// the same recording.
	Joined(e backend.Event) bool
	// Fill: for i { dst[i] = bits }, as many of the low ones as an element has. dst may be pinned
	// memory, by its address on the device.
	Fill(dst backend.Buffer, bits uint64) error
	// Push: for i { dst[i] = src[i] }, by a copy engine. dst may be memory of another device that
	// kernels reach.
	Push(dst, src backend.Buffer) error
}

// exchanger is a queue's kernels that exchange data with peers.
type exchanger interface {
	backend.Arithmetic
	Exchange(p *peers.Peers, x *peers.PeerCall) error
}

// drain waits for everything started on a queue so far.
func drain(ctx context.Context, q backend.Queue) error {
	e, err := q.Record()
	if err != nil {
		return err
	}
	return e.Join(ctx)
}
