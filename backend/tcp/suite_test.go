package tcp_test

import (
	"context"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/backend/tcp"
	"github.com/euryale-ml/euryale/rendezvous"
)

func TestCommunicator(t *testing.T) {
	backendtest.Run(t, backendtest.Options{New: backendtest.Over(tcp.Backend{})})
}

// encrypted has all connections of ranks use TLS.
type encrypted struct{ tcp.Backend }

func (e encrypted) Connect(ctx context.Context, w *rendezvous.World) (backend.Communicator, error) {
	w.TLS = true
	return e.Backend.Connect(ctx, w)
}

func TestEncryptedCommunicator(t *testing.T) {
	backendtest.RunWrapper(t, backendtest.Options{New: backendtest.Over(encrypted{tcp.Backend{}}),
		Sizes: []int{2}})
}

// machines has ranks take turns between two machines, as far as this package can tell: their
// board is one over sockets, and parts on one machine are in shared memory.
type machines struct{ tcp.Backend }

func (m machines) Connect(ctx context.Context, w *rendezvous.World) (backend.Communicator, error) {
	w.Node, w.LocalSize = w.Rank%2, (w.Size+1)/2
	return m.Backend.Connect(ctx, w)
}

func TestCommunicatorOfTwoMachinesUnraced(t *testing.T) {
	backendtest.Run(t, backendtest.Options{New: backendtest.Over(machines{tcp.Backend{}}),
		Sizes: []int{2, 3}})
}
