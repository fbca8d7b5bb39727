package gpu

import (
	"fmt"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	peers "github.com/euryale-ml/euryale/internal/kernels/cuda"
)

// rankInfo is what each rank tells the others before it makes anything. Every rank plans the
// group from the infos of all ranks, so all plan the same.
type rankInfo struct {
	Error       string // why the rank cannot take part
	Unsupported bool   // it never could, with what it has
	Node        int    // the machine
	Host        string // the machine that it is on for NCCL, if that is not this one
	Bus         string // where its device is in the machine
	Version     int    // of NCCL
	ID          []byte // of the group, from rank 0

	Refusal    string // why the device's memory cannot be shared
	Process    string // the same in one process, and in no other
	Ordinal    int    // of the device, in its process
	Model      string
	Capability int // compute capability, 90 for 9.0
	Wires      wiring
	Room       int // multiprocessors of the device, 0 if that is not known
	Settings   settings
}

// plan is how the ranks of a group share memory.
type plan struct {
	lines bool // lines arrive at once
	settings
	topology
	ranks []rankInfo
}

// machine is what times are measured of.
func (p plan) machine() Survey {
	return Survey{Model: p.ranks[0].Model, Capability: p.ranks[0].Capability,
		Link: p.topology.Link, NVLinks: p.topology.NVLinks, Ranks: len(p.ranks)}
}

// decide returns the plan of a group, or why its ranks share no memory.
func decide(s settings, ranks []rankInfo) (p plan, why string) {
	p = plan{settings: s, ranks: ranks}
	if n := len(ranks); n < 2 || n > peers.MaxPeers {
		return p, fmt.Sprintf("the group has %d ranks: it takes 2 to %d", n, peers.MaxPeers)
	}
	places := map[string]int{}
	wires := make([]wiring, len(ranks))
	for r, c := range ranks {
		if c.Refusal != "" {
			return p, fmt.Sprintf("rank %d cannot: %s", r, c.Refusal)
		}
		if c.Node != ranks[0].Node {
			return p, fmt.Sprintf("rank %d is on another machine than rank 0", r)
		}
		if c.Model != ranks[0].Model {
			return p, fmt.Sprintf("rank 0 has a %s, rank %d a %s", ranks[0].Model, r, c.Model)
		}
		bus := strings.ToLower(c.Wires.Bus)
		other, taken := places[bus]
		if taken && (!p.Shared || ranks[other].Process != c.Process) {
			return p, fmt.Sprintf("ranks %d and %d share the device at %s", other, r, c.Wires.Bus)
		}
		places[bus], wires[r] = r, c.Wires
	}
	p.Blocks = p.grid()
	p.topology = classify(wires)
	if p.settings.Link != Unknown {
		p.topology = p.topology.as(p.settings.Link, len(ranks))
	}
	p.lines = p.topology.Link == FullyConnected && !slices.ContainsFunc(wires, func(w wiring) bool {
		return w.Tears
	})
	switch {
	case p.topology.Link == Unknown:
		return p, "the devices do not all reach each other's memory, as far as NVML and the " +
			"driver say"
	case p.topology.Link == CubeMesh && p.topology.Partners == nil:
		return p, fmt.Sprintf("the group has %d ranks: a cube mesh has %d", len(ranks), cubeSize)
	}
	return p, ""
}

// leftFree is how many multiprocessors a grid leaves to kernels of other groups. Another rank may
// have started the kernels of two groups in the other order: a grid that filled the device
// would then wait forever for a kernel that cannot start.
const leftFree = 4

// grid returns the most blocks of a grid, each of which takes a multiprocessor, 0 for no limit.
func (p plan) grid() int {
	most := p.Blocks
	for _, c := range p.ranks {
		if room := max(c.Room-leftFree, 1); c.Room > 0 && (most == 0 || room < most) {
			most = room
		}
	}
	return most
}

// shares says how the rank's device shares its memory, or why it does not.
func (b *Backend) shares(o Options, dev Device, mine *rankInfo) {
	mine.Settings, mine.Process = o.settings(), b.process()
	if o.Off {
		mine.Refusal = "it is switched off there"
		return
	}
	if q := dev.Default(); !exchanges(q) {
		mine.Refusal = fmt.Sprintf("the queues of %s, a %T, cannot exchange data", dev.Name(), q)
	}
	mine.Ordinal, mine.Model, mine.Capability = dev.Ordinal(), dev.Model(), dev.ComputeCapability()
	mine.Wires, mine.Room = wiresOf(dev), dev.Multiprocessors()
}

func exchanges(q backend.Queue) bool {
	_, ok := q.(exchanger)
	return ok
}
