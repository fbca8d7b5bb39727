package session

import (
	"context"
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/hierarchy"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/rendezvous"
)

// withHierarchy makes the collectives of ranks on several machines hierarchical. On one
// machine it returns comm as it is, unless EURYALE_TOPOLOGY declares several. It
// owns comm, also when it fails. If EURYALE_HIERARCHY asks for spans, the recorder has them.
func withHierarchy(ctx context.Context, w *rendezvous.World, comm backend.Communicator,
	infos []rankInfo, recorder *observe.Recorder) (backend.Communicator, error) {
	layout, o, err := topology(ctx, w, comm.Device(), infos)
	if err == nil && layout.Machines() == 1 {
		return comm, nil
	}
	// else New says what is wrong
	if _, wrong := hierarchy.NewPlan(layout, o); err == nil && wrong == nil && o.Spans > 0 {
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

// likelySplits returns the ways in which hierarchical calls will split the ranks, as far as that is
// known before they connect: whether they run at all depends on what rank 0 has measured.
func likelySplits(ctx context.Context, w *rendezvous.World, infos []rankInfo) ([][]group.Pass,
	error) {
	l, err := layoutOf(ctx, w, nil, infos)
	if err != nil {
		return nil, err
	}
	o, err := hierarchy.ParseOptions(infos[0].Hierarchy, infos[0].Topology != "")
	if err != nil || l.Machines() == 1 || o.Mode == hierarchy.Never || o.Mode == hierarchy.Auto &&
		l.Devices() == 1 {
		return nil, nil // what is wrong is said later
	}
	return l.Ways(), nil
}

// modelOf returns what measured speeds of links are found by.
func modelOf(d backend.Device) string {
	if m, ok := d.(interface{ Model() string }); ok {
		return m.Model()
	}
	return d.Name()
}

// topology returns where the ranks are, and how they run there with devices like d. The outcome is
// the same on every rank, except the links, of which rank 0 has those that count.
func topology(
	ctx context.Context, w *rendezvous.World, d backend.Device, infos []rankInfo,
) (l hierarchy.Layout, o hierarchy.Options, err error) {
	if l, err = layoutOf(ctx, w, d, infos); err != nil {
		return l, o, err
	}
	declared := infos[0].Topology != ""
	if w.Rank == 0 {
		nodes, err := w.Nodes(ctx)
		if err != nil {
			return l, o, err
		}
		together := hierarchy.Discover(identitiesOf(nodes, infos)).Machines() == 1
		s := hierarchy.Setting{Layout: l, Model: modelOf(d), Declared: declared, Together: together}
		o, _, err = s.Options(infos[0].Hierarchy)
		return l, o, named(w, err)
	}
	o, err = hierarchy.ParseOptions(infos[0].Hierarchy, declared)
	return l, o, named(w, err)
}

// named says on which rank an error is.
func named(w *rendezvous.World, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("rank %d: %w", w.Rank, err)
}

// layoutOf returns where the ranks are: what EURYALE_TOPOLOGY declares, else what they find out.
// Without a device, where they are on a bus does not count.
func layoutOf(
	ctx context.Context, w *rendezvous.World, d backend.Device, infos []rankInfo,
) (l hierarchy.Layout, err error) {
	for r, i := range infos {
		if first := infos[0]; i.Topology != first.Topology || i.Hierarchy != first.Hierarchy {
			return l, fmt.Errorf("rank %d: rank 0 has EURYALE_TOPOLOGY=%q and "+
				"EURYALE_HIERARCHY=%q, rank %d has %q and %q: set the same on every rank",
				w.Rank, first.Topology, first.Hierarchy, r, i.Topology, i.Hierarchy)
		}
	}
	if declared := infos[0].Topology; declared != "" {
		if l, err = hierarchy.Parse(declared, w.Size); err != nil {
			return l, named(w, env.Topology.Wrong(declared, err))
		}
		return l, nil
	}
	ids, err := identities(ctx, w, d, infos)
	if err != nil {
		return l, err
	}
	return hierarchy.Discover(ids), nil
}

// identities returns which ranks share a machine, and where their devices are. Devices on a bus are
// known only once they are open, so their ranks tell each other then.
func identities(
	ctx context.Context, w *rendezvous.World, d backend.Device, infos []rankInfo,
) ([]hierarchy.Identity, error) {
	nodes, err := w.Nodes(ctx)
	if err != nil {
		return nil, err
	}
	ids := identitiesOf(nodes, infos)
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

// identitiesOf returns which ranks share a machine: those of one World.Node, but NCCL_HOSTID may
// part them.
func identitiesOf(nodes []int, infos []rankInfo) []hierarchy.Identity {
	ids := make([]hierarchy.Identity, len(infos))
	for r, i := range infos {
		ids[r].Machine = fmt.Sprintf("%d %s", nodes[r], i.NCCLHost)
	}
	return ids
}
