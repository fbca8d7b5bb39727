package hosted

import (
	"context"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Site is how the ranks of a part connect.
type Site struct {
	// Inside is the part if it is in shared memory: on one machine of several. Otherwise Across
	// is. The other one has Rank -1.
	Inside, Across group.Part

	world    *rendezvous.World
	among    group.Sharing
	nodes    []int
	places   *group.Places // of all ranks that gather
	region   *group.Handover
	boarding *group.Boarding
}

// NewSite returns how the ranks of a part connect, among those that gather. Without memory they
// use connections also on one machine.
func NewSite(
	w *rendezvous.World, part group.Part, among group.Sharing, places *group.Places, memory bool,
) (*Site, error) {
	nodes, err := w.Nodes(context.Background())
	if err != nil {
		return nil, err
	}
	memory = memory && part.Together(nodes)
	s := &Site{
		Inside: group.Part{Rank: -1}, Across: part,
		world: w, among: among, nodes: nodes, places: places,
	}
	if memory && w.LocalSize < w.Size {
		s.Inside, s.Across = s.Across, s.Inside
	}
	s.region = host.Region(s.Inside, among)
	s.boarding = among.Boarding(w, s.Across, memory)
	return s, nil
}

// Steps returns the steps of connecting, except the places, which one step tells for all
// parts.
func (s *Site) Steps() []group.Resource { return append(s.boarding.Steps(), s.region) }

// Board returns the board of a part across, once the steps were taken.
func (s *Site) Board() group.Board { return s.boarding.Board() }

// Local returns the communicator of a part inside, and nil for one across.
func (s *Site) Local() backend.Communicator {
	if s.Inside.Rank < 0 {
		return nil
	}
	places := s.places.Of(s.Inside.Ranks)
	return host.Join(s.world, s.Inside, s.among, places, s.region.Share())
}

// Here counts the ranks of a part across that are on this machine, those of them that are in this
// process, and the cores that they may use.
func (s *Site) Here() (ranks, inProcess, cores int) {
	var here []int
	me := 0
	for i, r := range s.Across.Ranks {
		if s.nodes[s.Across.Members[i]] != s.nodes[s.world.Rank] {
			continue
		}
		if i == s.Across.Rank {
			me = len(here)
		}
		here = append(here, r)
	}
	inProcess, cores = group.Census(s.places.Of(here), me)
	return len(here), inProcess, cores
}
