package gpu

import (
	"context"

	"github.com/euryale-ml/euryale/backend"
	peers "github.com/euryale-ml/euryale/kernels/cuda"
)

// peerDevice is what the ranks of a group need of their devices to reach each other's
// memory: package cuda's, or a test's.
type peerDevice interface {
	backend.Device
	// Model is the name of the product, which measured times are found by.
	Model() string
	// Ordinal is the device's number among those that the process sees.
	Ordinal() int
	// Wires says how the device is connected, as far as is known.
	Wires() Wires
	// Multiprocessors is how many blocks the device can run side by side, at the least; 0 if
	// it does not know.
	Multiprocessors() int
	// EnablePeerAccess lets kernels reach memory of another device that this process sees.
	EnablePeerAccess(ordinal int) error
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
	// Close gives back what EnablePeerAccess took.
	Close() error
}

// exchanger is a queue's kernels that exchange data with peers.
type exchanger interface {
	backend.Arithmetic
	Exchange(p *peers.Peers, x *peers.Exchange) error
}

// drain waits for everything started on a queue so far.
func drain(ctx context.Context, q backend.Queue) error {
	e, err := q.Record()
	if err != nil {
		return err
	}
	return e.Join(ctx)
}
