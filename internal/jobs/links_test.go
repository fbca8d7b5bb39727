package jobs_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/hierarchy"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/rendezvous"
)

// tuned makes a file the user's, with what was measured of two machines of two ranks
// on the host.
func tuned(t *testing.T) (file string, inside hierarchy.Link) {
	t.Helper()
	t.Setenv("EURYALE_TUNING", filepath.Join(t.TempDir(), "tuning.json"))
	inside = hierarchy.Link{Latency: 123 * time.Microsecond, Bandwidth: 7e9}
	links := hierarchy.Links{Inside: inside, Between: hierarchy.Link{Bandwidth: 1}}
	file = require.Value(hierarchy.Measurement{Model: host.Device{}.Name(), Machines: 2, Devices: 2,
		Declared: true, Links: links}.Keep())(t)
	return file, inside
}

func TestMeasuredLinksAreUsed(t *testing.T) {
	t.Setenv("EURYALE_TOPOLOGY", "2x2")
	t.Setenv("EURYALE_HIERARCHY", "auto")
	_, inside := tuned(t)
	require.NoError(t, euryale.Run(context.Background(), 4, func(comm backend.Communicator,
		_ sync.Locker) error {
		h, _ := backend.As[*hierarchy.Communicator](comm)
		// This is one machine, whatever is declared.
		if got := h.Plan().Options.Links; got.Inside != inside || got.Between != inside {
			return fmt.Errorf("links %+v", got)
		}
		x := backend.Of(make([]float32, 8<<20))
		if err := backend.Run(comm, backend.Collective{Kind: backend.AllReduce}, x, x); err != nil {
			return err
		}
		if s := h.Stats(); s.Flat != 1 || s.Calls != 0 {
			return fmt.Errorf("on one machine the call was not flat: %+v", s)
		}
		return nil
	}, host.Backend{}))
}

// A typing error is refused by all ranks, and takes no memory.
func TestFoundSpansTakeAllMemory(t *testing.T) {
	t.Setenv("EURYALE_TOPOLOGY", "2x1")
	t.Setenv("EURYALE_HIERARCHY", "always,spans=99999999999")
	err := euryale.Run(context.Background(), 2, func(backend.Communicator, sync.Locker) error {
		return nil
	}, host.Backend{})
	require.Fails(t, "euryale.Run", err, backend.ErrArgument, "1048576 spans at most")
}

// What EURYALE_HIERARCHY says besides the mode reaches every rank.
func TestOptionsOfTheHierarchyAreUsed(t *testing.T) {
	t.Setenv("EURYALE_TOPOLOGY", "2x2")
	t.Setenv("EURYALE_HIERARCHY", "always,exchange=bf16,spans=64,slots=3,slice=65536")
	const n = 1 << 10
	require.NoError(t, euryale.Run(context.Background(), 4, func(comm backend.Communicator,
		_ sync.Locker) error {
		h, _ := backend.As[*hierarchy.Communicator](comm)
		o := h.Plan().Options
		o.Links = nil
		if want := (hierarchy.Options{Mode: hierarchy.Always, Exchange: backend.BF16, Spans: 64,
			Slots: 3, SliceBytes: 1 << 16}); o != want {
			return fmt.Errorf("options %+v, want %+v", o, want)
		}
		x := backend.Of(make([]float32, n))
		if err := backend.Run(comm, backend.Collective{Kind: backend.AllReduce}, x, x); err != nil {
			return err
		}
		// Half of the operand's bytes, a rank's share, go to the other machine as 16 bits.
		if got := h.Stats().Between(); got != n*2/2 {
			return fmt.Errorf("%d bytes between machines, want %d", got, n)
		}
		session, _ := backend.As[interface{ Recorder() *observe.Recorder }](comm)
		if events := session.Recorder().Events(); !slices.ContainsFunc(events,
			func(e observe.Event) bool { return e.Part == "add" && e.Header.Count == n }) {
			return fmt.Errorf("no phase is on the timeline: %+v", events)
		}
		return nil
	}, host.Backend{}))
}

// slotted is a backend whose ranks have devices on a PCI bus, in the reverse order.
type slotted struct{ host.Backend }

func (b slotted) Connect(ctx context.Context, w *rendezvous.World) (backend.Communicator, error) {
	comm, err := b.Backend.Connect(ctx, w)
	if err != nil {
		return nil, err
	}
	return inSlot{comm, card{comm.Device(), w.Size - w.Rank}}, nil
}

type inSlot struct {
	backend.Communicator
	card card
}

func (c inSlot) Device() backend.Device { return c.card }

type card struct {
	backend.Device
	slot int
}

func (c card) PCIBusID() string { return fmt.Sprintf("0000:%02x:00.0", c.slot) }

// Places on a machine follow the bus, and not the ranks: NCCL_HOSTID makes two machines
// of the ranks, which are processes.
func TestPlacesFollowThePCIBus(t *testing.T) {
	for r, p := range proctest.Start(t, "says its place", 4) {
		want := fmt.Sprintf("rank %d is at place %d of machine %d", r, 1-r%2, r/2)
		said := p.End()
		require.Check(t, strings.Contains(said, want), "rank %d said %q, want %q", r, said, want)
	}
}

// saysItsPlace is a rank of that test.
func saysItsPlace() error {
	if err := os.Setenv("NCCL_HOSTID", fmt.Sprint("half ", os.Getenv("RANK") >= "2")); err != nil {
		return err
	}
	comm, err := euryale.Init(context.Background(), slotted{})
	if err != nil {
		return err
	}
	h, ok := backend.As[*hierarchy.Communicator](comm)
	if !ok {
		return errors.Join(errors.New("there is one machine"), comm.Close())
	}
	m, d := h.Plan().Layout.Place(comm.Rank())
	fmt.Printf("rank %d is at place %d of machine %d\n", comm.Rank(), d, m)
	return comm.Close()
}

func TestBrokenTuningFileIsNamed(t *testing.T) {
	file, _ := tuned(t)
	require.NoError(t, os.WriteFile(file, []byte("no JSON"), 0o600))
	t.Setenv("EURYALE_TOPOLOGY", "2x2")
	err := euryale.Run(context.Background(), 4, func(backend.Communicator, sync.Locker) error {
		return nil
	}, host.Backend{})
	require.Fails(t, "euryale.Run", err, file, "delete it")
}
