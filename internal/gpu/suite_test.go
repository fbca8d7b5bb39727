package gpu

import (
	"context"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/rendezvous"
)

// suite tests ranks that a backend connects which is made of the fake one.
func suite(t *testing.T, connects func(*Backend) backend.Backend,
	sizes ...int) backendtest.Options {
	g := newRig(t)
	g.openDevices(t, slices.Max(sizes))
	record := func(c backend.Communicator) backend.Communicator {
		return backend.WithHooks(c, observe.New(c.Rank(), 100))
	}
	over := backendtest.Over(connects(g.nccl()), group.Compared, record)
	return backendtest.Options{
		New: func(size int, timeout time.Duration) (*backendtest.Group, error) {
			return over(size, timeout)
		},
		Sizes: sizes, OwnOrder: true, Copy: g.Move, Tree: treeOf,
	}
}

// treeOf are the sums in a tree that are not refused.
func treeOf(_ backend.Kind, d backend.DType, ranks int) bool {
	return ranks <= 2 || d != backend.F16 && d != backend.BF16
}

func TestCommunicatorOnFake(t *testing.T) {
	backendtest.Run(t, suite(t, func(b *Backend) backend.Backend { return b }, 1, 2, 3))
}

// machines has ranks take turns between two machines, as far as this package can tell.
type machines struct{ *Backend }

func (m machines) Connect(ctx context.Context, w *rendezvous.World) (backend.Communicator, error) {
	w.Node, w.LocalSize = w.Rank%2, (w.Size+1)/2
	return m.Backend.Connect(ctx, w)
}

func TestCommunicatorOfTwoMachinesOnFake(t *testing.T) {
	sizes := []int{2}
	if os.Getenv("EURYALE_FULL") == "1" {
		sizes = append(sizes, 3)
	}
	backendtest.RunWrapper(t, suite(t, func(b *Backend) backend.Backend {
		return machines{b}
	}, sizes...))
}
