package gpu

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"

	peers "github.com/euryale-ml/euryale/internal/kernels/cuda"
)

// Link says how a group's devices are connected, in the one respect that matters
// for the choice of an algorithm.
type Link uint8

// The classes, from the best.
const (
	// Unknown: some pair has no way to reach each other's memory that we know.
	Unknown Link = iota
	// PCIe: every pair reaches each other's memory, but not every pair by NVLink.
	PCIe
	// CubeMesh is a DGX-1: eight devices, two cliques of four, and one link from
	// each device to one of the other clique. Nothing else has NVLinks.
	CubeMesh
	// FullyConnected: every pair has NVLinks, direct or through switches.
	FullyConnected
)

var linkNames = [...]string{Unknown: "unknown", PCIe: "pcie", CubeMesh: "cube-mesh",
	FullyConnected: "fully-connected"}

// String returns the name: "fully-connected".
func (l Link) String() string {
	if int(l) >= len(linkNames) {
		return fmt.Sprintf("Link(%d)", uint8(l))
	}
	return linkNames[l]
}

// ParseLink is the inverse of String.
func ParseLink(name string) (Link, error) {
	if i := slices.Index(linkNames[:], name); i >= 0 {
		return Link(i), nil
	}
	return 0, fmt.Errorf("no link class is called %q: use one of %q", name, linkNames)
}

// wiring are what one rank knows of its device's connections.
type wiring struct {
	Bus      string   // the device's place in the machine
	Direct   []string // the other end of each NVLink to a device: its place
	Switches int      // NVLinks to switches
	Reach    []string // places of the devices whose memory its kernels can use
	Tears    bool     // lines that it writes may arrive in parts: see cuda.WholeLines
}

// wiresOf asks a device for its connections.
func wiresOf(d Device) wiring {
	w := wiring{Bus: d.PCIBusID(), Reach: d.Reachable(), Tears: !peers.WholeLines(
		d.ComputeCapability())}
	w.Direct, w.Switches = d.NVLinks()
	return w
}

// topology is the class of a group and, for a cube mesh, who talks to whom.
type topology struct {
	Link    Link
	NVLinks int // of the pair that has the fewest among those that have any
	// Partners lists the four neighbours of each rank of a cube mesh: columns 0 to 2
	// are the members of its clique, and column 3 is the relay to the other clique. Each
	// column is a perfect matching: if y is x's partner in a column, x is y's. So no link
	// carries two streams at once.
	Partners [][4]int
}

// classify returns the topology of a group. Every rank computes the same one, since all
// ranks know the wiring of all.
func classify(all []wiring) topology {
	nvlinks, reach := matrices(all)
	switch partners := cubeMesh(nvlinks); {
	case allConnected(nvlinks):
		return topology{Link: FullyConnected, NVLinks: fewest(nvlinks)}
	case partners != nil:
		return topology{Link: CubeMesh, NVLinks: fewest(nvlinks), Partners: partners}
	case allConnected(reach):
		return topology{Link: PCIe}
	}
	return topology{}
}

// as returns the topology as one of another class: of a cube mesh that is not there,
// ranks 0 to 3 are one clique, and relays have the same number in theirs.
func (t topology) as(l Link, ranks int) topology {
	if t.Link == l {
		return t
	}
	t = topology{Link: l}
	for r := 0; l == CubeMesh && ranks == cubeSize && r < ranks; r++ {
		t.Partners = append(t.Partners, [4]int{r ^ 1, r ^ 2, r ^ 3, r ^ cliqueSize})
	}
	return t
}

// reaches reports whether rank r uses the memory of rank p.
func (t topology) reaches(r, p int) bool {
	return t.Link != CubeMesh || r == p || slices.Contains(t.Partners[r][:], p)
}

// matrices returns how many NVLinks connect each pair of ranks, and whether each rank can
// use the memory of each other. Two devices with links to switches are connected by as
// many links as the one with fewer has.
func matrices(all []wiring) (nvlinks, reach [][]int) {
	for _, from := range all {
		var links, reached []int
		for _, to := range all {
			n := min(from.Switches, to.Switches)
			for _, end := range from.Direct {
				if strings.EqualFold(end, to.Bus) { // CUDA and NVML need not agree on the case
					n++
				}
			}
			links = append(links, n)
			reached = append(reached, 0)
			if slices.ContainsFunc(from.Reach, func(bus string) bool {
				return strings.EqualFold(bus, to.Bus)
			}) {
				reached[len(reached)-1] = 1
			}
		}
		nvlinks, reach = append(nvlinks, links), append(reach, reached)
	}
	return nvlinks, reach
}

// allConnected reports whether every pair is connected, both ways.
func allConnected(m [][]int) bool {
	for i := range m {
		for j := range m {
			if i != j && m[i][j] == 0 {
				return false
			}
		}
	}
	return true
}

// fewest returns the least number of links between a pair that has any.
func fewest(m [][]int) (least int) {
	for i := range m {
		for j, n := range m[i] {
			if i != j && n > 0 && (least == 0 || n < least) {
				least = n
			}
		}
	}
	return least
}

const (
	cubeSize   = 8
	cliqueSize = 4
)

// cubeMesh returns the partners of each rank, nil if this is no cube mesh.
func cubeMesh(m [][]int) [][4]int {
	if len(m) != cubeSize {
		return nil
	}
	near, ok := neighbours(m)
	if !ok {
		return nil
	}
	partners := make([][4]int, cubeSize)
	for x := range m {
		relay := relayOf(x, near)
		if relay < 0 || relayOf(relay, near) != x {
			return nil
		}
		clique := near[x]&^(1<<relay) | 1<<x
		for y := range m {
			// Each member has all the others as its neighbours.
			if clique&(1<<y) != 0 && (near[y]|1<<y)&clique != clique {
				return nil
			}
		}
		for colour := range cliqueSize - 1 {
			partners[x][colour] = partnerIn(clique, x, colour+1)
		}
		partners[x][cliqueSize-1] = relay
	}
	return partners
}

// neighbours returns the set of each rank's neighbours. ok is false unless all links go
// both ways and every rank has four neighbours.
func neighbours(m [][]int) (near []uint, ok bool) {
	near = make([]uint, len(m))
	for x := range m {
		for y := range m {
			if (m[x][y] > 0) != (m[y][x] > 0) {
				return nil, false
			}
			if x != y && m[x][y] > 0 {
				near[x] |= 1 << y
			}
		}
		if bits.OnesCount(near[x]) != cliqueSize {
			return nil, false
		}
	}
	return near, true
}

// relayOf returns the only neighbour of x that shares no neighbour with it, -1 if
// there is none or more than one.
func relayOf(x int, near []uint) int {
	relay := -1
	for y := range near {
		if near[x]&(1<<y) == 0 || near[x]&near[y] != 0 {
			continue
		}
		if relay >= 0 {
			return -1
		}
		relay = y
	}
	return relay
}

// partnerIn returns x's partner in one of the three perfect matchings of its clique.
// Members are numbered in rank order, and x's partner is the member whose number differs
// in the bits of colour. That is always a matching; a greedy choice can fail to find one.
func partnerIn(clique uint, x, colour int) int {
	var members []int
	for y := range cubeSize {
		if clique&(1<<y) != 0 {
			members = append(members, y)
		}
	}
	return members[slices.Index(members, x)^colour]
}
