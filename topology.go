package euryale

import (
	"context"
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/hierarchy"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/rendezvous"
)

// withHierarchy makes the collectives of ranks on several machines hierarchical. On one
// machine it returns comm as it is, unless EURYALE_TOPOLOGY declares several. It
// owns comm, also when it fails. If EURYALE_HIERARCHY asks for spans, the recorder has them.
func withHierarchy(ctx context.Context, w *rendezvous.World, comm backend.Communicator, infos []rankInfo, recorder *observe.Recorder) (backend.Communicator, error) {
	layout, o, err := topology(ctx, w, comm.Device(), infos)
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

// topology returns where the ranks are: what EURYALE_TOPOLOGY declares, else what
// they find out; and how they run there, with devices like d. The outcome is the same
// on every rank, but for the links: those of rank 0 count.
func topology(
	ctx context.Context, w *rendezvous.World, d backend.Device, infos []rankInfo,
) (l hierarchy.Layout, o hierarchy.Options, err error) {
	for r, i := range infos {
		if first := infos[0]; i.Topology != first.Topology || i.Hierarchy != first.Hierarchy {
			return l, o, fmt.Errorf("rank %d: rank 0 has EURYALE_TOPOLOGY=%q and EURYALE_HIERARCHY=%q, rank %d has %q and %q: set the same on every rank",
				w.Rank, first.Topology, first.Hierarchy, r, i.Topology, i.Hierarchy)
		}
	}
	ids, err := identities(ctx, w, d, infos)
	if err != nil {
		return l, o, err
	}
	found, declared := hierarchy.Discover(ids), infos[0].Topology
	if l = found; declared != "" {
		if l, err = hierarchy.Parse(declared, w.Size); err != nil {
			return l, o, fmt.Errorf("rank %d: EURYALE_TOPOLOGY: %w", w.Rank, err)
		}
	}
	if w.Rank == 0 {
		s := hierarchy.Setting{Layout: l, Model: modelOf(d), Declared: declared != "", Together: found.Machines() == 1}
		o, _, err = s.Options(infos[0].Hierarchy)
	} else {
		o, err = hierarchy.ParseOptions(infos[0].Hierarchy, declared != "")
	}
	if err != nil {
		return l, o, fmt.Errorf("rank %d: %w", w.Rank, err)
	}
	return l, o, nil
}

// identities returns which ranks share a machine, and where their devices are. Devices on a bus are
// known only now, so their ranks tell each other.
func identities(
	ctx context.Context, w *rendezvous.World, d backend.Device, infos []rankInfo,
) ([]hierarchy.Identity, error) {
	nodes, err := w.Nodes(ctx)
	if err != nil {
		return nil, err
	}
	ids := make([]hierarchy.Identity, len(infos))
	for r, i := range infos {
		// The World knows which ranks share a machine. NCCL_HOSTID may part one.
		ids[r].Machine = fmt.Sprintf("%d %s", nodes[r], i.NCCLHost)
	}
	g, ok := d.(interface{ PCIBusID() string })
	if !ok {
		return ids, nil
	}
	buses, err := w.AllGather(ctx, "euryale/bus", []byte(g.PCIBusID()))
	for r := range buses {
		ids[r].Bus = string(buses[r])
	}
	return ids, err
}
