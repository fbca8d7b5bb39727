package euryale

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/hierarchy"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/rendezvous"
)

// withHierarchy makes the collectives of ranks on several machines hierarchical. On one
// machine it returns comm as it is, unless EURYALE_TOPOLOGY declares several. It
// owns comm, also when it fails. If EURYALE_HIERARCHY asks for spans, the recorder has them.
func withHierarchy(ctx context.Context, w *rendezvous.World, comm backend.Communicator, recorder *observe.Recorder) (backend.Communicator, error) {
	layout, o, err := topology(ctx, w, comm.Device())
	if err == nil && layout.Machines() == 1 {
		return comm, nil
	}
	if _, wrong := hierarchy.NewPlan(layout, o); err == nil && wrong == nil && o.Spans > 0 { // else New says what is wrong
		o.Hooks, err = recorder, recorder.TimeParts(comm.Device(), o.Spans)
	}
	var h *hierarchy.Communicator
	if err == nil {
		h, err = hierarchy.New(ctx, w, comm, layout, o)
	}
	if err != nil {
		return nil, errors.Join(err, comm.Close())
	}
	return h, nil
}

// modelOf returns what measured speeds of links are found by.
func modelOf(d backend.Device) string {
	if m, ok := d.(interface{ Model() string }); ok {
		return m.Model()
	}
	return d.Name()
}

// busOf returns where a device is on the PCI bus, "" if it is on none.
func busOf(d backend.Device) string {
	if g, ok := d.(interface{ PCIBusID() string }); ok {
		return g.PCIBusID()
	}
	return ""
}

// place is what a rank tells the others of where it is.
type place struct {
	Identity  hierarchy.Identity
	Topology  string // EURYALE_TOPOLOGY
	Hierarchy string // EURYALE_HIERARCHY
}

// topology returns where the ranks are: what EURYALE_TOPOLOGY declares, else what
// they find out; and how they run there, with devices like d. The outcome is the same
// on every rank, but for the links: those of rank 0 count.
func topology(ctx context.Context, w *rendezvous.World, d backend.Device) (l hierarchy.Layout, o hierarchy.Options, err error) {
	places, err := exchangePlaces(ctx, w, busOf(d))
	if err != nil {
		return l, o, err
	}
	ids := make([]hierarchy.Identity, len(places))
	for r, p := range places {
		ids[r] = p.Identity
	}
	found, declared := hierarchy.Discover(ids), places[0].Topology
	if l = found; declared != "" {
		if l, err = hierarchy.Parse(declared, w.Size); err != nil {
			return l, o, fmt.Errorf("rank %d: EURYALE_TOPOLOGY: %w", w.Rank, err)
		}
	}
	if w.Rank == 0 {
		s := hierarchy.Setting{Layout: l, Model: modelOf(d), Declared: declared != "", Together: found.Machines() == 1}
		o, _, err = s.Options(places[0].Hierarchy)
	} else {
		o, err = hierarchy.ParseOptions(places[0].Hierarchy, declared != "")
	}
	if err != nil {
		return l, o, fmt.Errorf("rank %d: %w", w.Rank, err)
	}
	return l, o, nil
}

// exchangePlaces gives every rank the place of every rank, and tells them where this one's
// device is. All must declare the same.
func exchangePlaces(ctx context.Context, w *rendezvous.World, bus string) ([]place, error) {
	// The World knows which ranks share a machine. NCCL_HOSTID may part one.
	id := hierarchy.Identity{Machine: fmt.Sprintf("%d %s", w.Node, os.Getenv("NCCL_HOSTID")), Bus: bus}
	mine := place{id, os.Getenv("EURYALE_TOPOLOGY"), os.Getenv("EURYALE_HIERARCHY")}
	places, err := group.Exchange(group.OverStore(ctx, w, "euryale/place"), nil, mine)
	if err != nil {
		return nil, err
	}
	for r, p := range places {
		if p.Topology != places[0].Topology || p.Hierarchy != places[0].Hierarchy {
			return nil, fmt.Errorf("rank %d: rank 0 has EURYALE_TOPOLOGY=%q and EURYALE_HIERARCHY=%q, rank %d has %q and %q: set the same on every rank",
				w.Rank, places[0].Topology, places[0].Hierarchy, r, p.Topology, p.Hierarchy)
		}
	}
	return places, nil
}
