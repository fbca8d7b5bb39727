package hosted

import (
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Site is where the ranks of a part are.
type Site struct {
	// Inside is the part if it is in shared memory: on one machine of several. Otherwise Across
	// is. The other one has Rank -1.
	Inside, Across group.Part
	Here           []group.Place // of the ranks of the part that are on this machine
	Me             int           // this rank among them
	Addrs          []string      // of the ranks of the part
}

// Locate finds out where the ranks of a part are, among those that gather, and tells them where
// this one listens, "" for nowhere. It is collective.
func Locate(w *rendezvous.World, part group.Part, among group.Sharing, addr string) (Site, error) {
	type end struct {
		Addr  string
		Node  int
		Place group.Place
	}
	all, err := group.Exchange(among.Gather, among.Members, end{addr, w.Node, group.Here()})
	if err != nil {
		return Site{}, err
	}
	s := Site{Inside: group.Part{Rank: -1}, Across: part}
	for i, r := range part.Ranks {
		s.Addrs = append(s.Addrs, all[r].Addr)
		if all[r].Node != w.Node {
			continue
		}
		if i == part.Rank {
			s.Me = len(s.Here)
		}
		s.Here = append(s.Here, all[r].Place)
	}
	if w.LocalSize < w.Size && len(s.Here) == len(part.Ranks) {
		s.Inside, s.Across = s.Across, s.Inside
	}
	return s, nil
}

// Crowded reports whether this machine has more of the ranks than cores for them.
func (s Site) Crowded() bool {
	if len(s.Here) == 0 {
		return false
	}
	_, cores := group.Census(s.Here, s.Me)
	return len(s.Here) > cores
}
