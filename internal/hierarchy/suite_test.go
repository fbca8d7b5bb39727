package hierarchy

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/rendezvous"
)

// layeredGroup connects ranks on the host and makes them hierarchical. wrap, if not nil,
// is put around the flat communicator.
func layeredGroup(l Layout, timeout time.Duration, o Options,
	wrap func(backend.Communicator) backend.Communicator) (*backendtest.Group, error) {
	return groupOf(func(int) Layout { return l }, l.Size(), timeout, o, wrap)
}

// groupOf is group, where each rank has its own layout.
func groupOf(layout func(rank int) Layout, size int, timeout time.Duration, o Options,
	wrap func(backend.Communicator) backend.Communicator) (*backendtest.Group, error) {
	ranks, err := testranks.Connect(size, timeout, func(w *rendezvous.World) (backend.Communicator,
		error) {
		return connect(w, layout(w.Rank), o, wrap)
	})
	if err != nil {
		return nil, err
	}
	return &backendtest.Group{Comms: ranks.Ranks, Fail: ranks.Fail, Close: ranks.CloseWorlds}, nil
}

// connect is what a rank does.
func connect(w *rendezvous.World, l Layout, o Options,
	wrap func(backend.Communicator) backend.Communicator) (backend.Communicator, error) {
	return layeredBackend{host.Backend{}, l, o, wrap}.Connect(context.Background(), w)
}

// layeredBackend makes the communicators of another one hierarchical.
type layeredBackend struct {
	backend.Backend
	layout  Layout
	options Options
	wrap    func(backend.Communicator) backend.Communicator // is put around flat, if not nil
}

func (b layeredBackend) Connect(ctx context.Context, w *rendezvous.World) (backend.Communicator,
	error) {
	flat, err := b.Backend.Connect(ctx, w)
	if err != nil {
		return nil, err
	}
	if b.wrap != nil {
		flat = b.wrap(flat)
	}
	o, err := timed(flat, b.options)
	if err != nil {
		return nil, err
	}
	c, err := New(ctx, w, flat, b.layout, o)
	if err != nil {
		return nil, errors.Join(err, flat.Close())
	}
	return c, nil
}

// always makes every call that can be hierarchical so, in small slices.
func always() Options { return Options{Mode: Always, SliceBytes: 16 << 10, Slots: 3} }

// shuffled is a layout that is no grid: places do not follow the ranks.
func shuffled(M, D int) Layout {
	l := Grid(M, D)
	machines := make([][]int, M)
	for r := range l.Size() {
		at := (7*r + 3) % l.Size() // 7 divides no size that is tested
		m, d := l.Place(at)
		if machines[m] == nil {
			machines[m] = make([]int, D)
		}
		machines[m][d] = r
	}
	return layoutOf(machines)
}

// suiteLayouts are those that the whole suite runs on.
var suiteLayouts = map[int]Layout{
	1: Grid(1, 1), 2: Grid(2, 1), 3: unequal["2+1"], 4: Grid(
		2, 2), 5: unequal["3+2"],
	6: shuffled(2, 3), 8: gridOf(2, 4, machineMinor),
}

func TestCommunicator(t *testing.T) {
	sizes := []int{4}
	if full() {
		sizes = []int{1, 2, 3, 4, 5, 6, 8}
	}
	backendtest.RunWrapper(t, backendtest.Options{
		New: func(size int, timeout time.Duration) (*backendtest.Group, error) {
			return layeredGroup(suiteLayouts[size], timeout, always(), nil)
		},
		Sizes: sizes, OwnOrder: true,
	})
}

// As on GPUs: what comes after a phase does not wait for it on the host.
func TestCommunicatorOnGuard(t *testing.T) {
	if !full() {
		t.Skip("the other tests on guarded memory are enough: EURYALE_FULL=1 runs the suite")
	}
	d := guarded(t)
	backendtest.RunWrapper(t, backendtest.Options{
		New: func(size int, timeout time.Duration) (*backendtest.Group, error) {
			wrap := func(c backend.Communicator) backend.Communicator {
				return fakedevice.Over(c, d)
			}
			return layeredGroup(suiteLayouts[size], timeout, always(), wrap)
		},
		Sizes: []int{2, 4}, OwnOrder: true,
		Copy: d.Default().Move,
	})
}

// As euryale.Connect composes it: comparing calls is the communicator's own.
func TestCheckedAndTracedCommunicatorPasses(t *testing.T) {
	if !full() {
		t.Skip("TestCommunicator is enough: EURYALE_FULL=1 runs the suite again")
	}
	backendtest.RunWrapper(t, backendtest.Options{
		New: func(size int, timeout time.Duration) (*backendtest.Group, error) {
			g, err := layeredGroup(suiteLayouts[size], timeout, always(), nil)
			if err != nil {
				return nil, err
			}
			for r, c := range g.Comms {
				g.Comms[r] = backend.WithHooks(group.Compared(c), observe.New(c.Rank(), 100))
			}
			return g, nil
		},
		Sizes: []int{4}, OwnOrder: true,
	})
}
