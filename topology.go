package euryale

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/hierarchy"
	"github.com/euryale-ml/euryale/rendezvous"
)

// layered makes the collectives of ranks on several machines hierarchical. On one
// machine it returns comm as it is, unless EURYALE_TOPOLOGY declares several. It
// owns comm, also when it fails.
func layered(ctx context.Context, w *rendezvous.World, comm backend.Communicator) (backend.Communicator, error) {
	layout, o, err := topology(ctx, w, modelOf(comm.Device()))
	if err == nil && layout.Machines() == 1 {
		return comm, nil
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

// place is what a rank tells the others of where it is.
type place struct {
	Identity hierarchy.Identity
	Topology string // EURYALE_TOPOLOGY
	Mode     string // EURYALE_HIERARCHY
}

// topology returns where the ranks are: what EURYALE_TOPOLOGY declares, else what
// they find out, and how fast links between devices of a model are there. The outcome
// is the same on every rank, but for the links: those of rank 0 count.
func topology(ctx context.Context, w *rendezvous.World, model string) (l hierarchy.Layout, o hierarchy.Options, err error) {
	places, err := exchangePlaces(ctx, w)
	if err != nil {
		return l, o, err
	}
	declared := places[0].Topology
	if o.Mode, err = hierarchyMode(places[0].Mode, declared != ""); err != nil {
		return l, o, fmt.Errorf("rank %d: %w", w.Rank, err)
	}
	ids := make([]hierarchy.Identity, len(places))
	for r, p := range places {
		ids[r] = p.Identity
	}
	found := hierarchy.Discover(ids)
	if l = found; declared != "" {
		if l, err = hierarchy.Parse(declared, w.Size); err != nil {
			return l, o, fmt.Errorf("rank %d: EURYALE_TOPOLOGY: %w", w.Rank, err)
		}
	}
	links, err := speeds(w.Rank, model, l, declared != "")
	if found.Machines() == 1 { // there is one kind of link, whatever is declared
		links.Between = links.Inside
	}
	o.Links = &links
	return l, o, err
}

// speeds returns the links as they were measured, or round numbers.
func speeds(rank int, model string, l hierarchy.Layout, declared bool) (hierarchy.Links, error) {
	if rank != 0 || l.Machines() == 1 { // others' do not count, or nothing is chosen by them
		return hierarchy.DefaultLinks(), nil
	}
	m, found, err := hierarchy.Measured(model, l, declared)
	if !found {
		return hierarchy.DefaultLinks(), err
	}
	return m.Links, nil
}

// exchangePlaces gives every rank the place of every rank. All must declare the
// same.
func exchangePlaces(ctx context.Context, w *rendezvous.World) ([]place, error) {
	mine, err := json.Marshal(place{hierarchy.Here(""), os.Getenv("EURYALE_TOPOLOGY"), os.Getenv("EURYALE_HIERARCHY")})
	if err != nil {
		return nil, err
	}
	notes, err := w.AllGather(ctx, "euryale/place", mine)
	if err != nil {
		return nil, err
	}
	places := make([]place, len(notes))
	for r, note := range notes {
		p := &places[r]
		if err := json.Unmarshal(note, p); err != nil {
			return nil, fmt.Errorf("rank %d: rank %d sent a place that cannot be read: %w", w.Rank, r, err)
		}
		if p.Topology != places[0].Topology || p.Mode != places[0].Mode {
			return nil, fmt.Errorf("rank %d: rank 0 has EURYALE_TOPOLOGY=%q and EURYALE_HIERARCHY=%q, rank %d has %q and %q: set the same on every rank",
				w.Rank, places[0].Topology, places[0].Mode, r, p.Topology, p.Mode)
		}
	}
	return places, nil
}

// hierarchyMode reads EURYALE_HIERARCHY. Who declares a topology means it.
func hierarchyMode(text string, declared bool) (hierarchy.Mode, error) {
	switch {
	case text == "" && declared:
		return hierarchy.Always, nil
	case text == "":
		return hierarchy.Auto, nil
	}
	mode, err := hierarchy.ParseMode(text)
	if err != nil {
		return mode, fmt.Errorf("EURYALE_HIERARCHY=%q: %w", text, err)
	}
	return mode, nil
}
