package lowlatency

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	peers "github.com/euryale-ml/euryale/kernels/cuda"
)

// card is what a rank tells the others of itself. What the group does follows from
// the cards, so that no rank decides alone.
type card struct {
	Problem  string // why the rank cannot take part
	Machine  string // the same on one machine
	Process  string // the same in one process, and in no other
	Ordinal  int    // of the device, in its process
	Model    string
	Wires    Wires
	Room     int // multiprocessors of the device, 0 if that is not known
	Settings settings
}

// plan is what the cards say.
type plan struct {
	settings
	Topology
	cards []card
	lines bool // lines arrive at once
}

// decide returns the plan, or why there is none.
func decide(cards []card) (p plan, why string) {
	p = plan{settings: cards[0].Settings, cards: cards}
	if n := len(cards); n < 2 || n > peers.MaxPeers {
		return p, fmt.Sprintf("the group has %d ranks: it takes 2 to %d", n, peers.MaxPeers)
	}
	places := map[string]int{}
	wires := make([]Wires, len(cards))
	for r, c := range cards {
		if c.Problem != "" {
			return p, fmt.Sprintf("rank %d cannot: %s", r, c.Problem)
		}
		if c.Machine != cards[0].Machine {
			return p, fmt.Sprintf("rank %d is on another machine than rank 0", r)
		}
		if c.Model != cards[0].Model {
			return p, fmt.Sprintf("rank 0 has a %s, rank %d a %s", cards[0].Model, r, c.Model)
		}
		bus := strings.ToLower(c.Wires.Bus)
		other, taken := places[bus]
		if taken && (!p.Shared || cards[other].Process != c.Process) {
			return p, fmt.Sprintf("ranks %d and %d share the device at %s", other, r, c.Wires.Bus)
		}
		places[bus], wires[r] = r, c.Wires
	}
	p.Blocks = p.grid()
	p.Topology = Classify(wires)
	if p.settings.Link != Unknown {
		p.Topology = p.Topology.as(p.settings.Link, len(cards))
	}
	p.lines = p.Topology.Link == FullyConnected && !slices.ContainsFunc(wires, func(w Wires) bool { return w.Tears })
	switch {
	case p.Topology.Link == Unknown:
		return p, "the devices do not all reach each other's memory, as far as NVML and the driver say"
	case p.Topology.Link == CubeMesh && p.Topology.Partners == nil:
		return p, fmt.Sprintf("the group has %d ranks: a cube mesh has %d", len(cards), cubeSize)
	}
	return p, ""
}

// spare is how many multiprocessors grids leave to the kernels of other groups, which may
// have been started in another order on another rank: those of both groups then go on,
// block by block, where one whose blocks are all there would wait for the other for ever.
const spare = 4

// grid returns the most blocks of a grid, each of which takes a multiprocessor, 0 for no limit.
func (p plan) grid() int {
	most := p.Blocks
	for _, c := range p.cards {
		if room := max(c.Room-spare, 1); c.Room > 0 && (most == 0 || room < most) {
			most = room
		}
	}
	return most
}

// introduce does what a rank can do alone.
func (o Options) introduce(inner backend.Communicator) (Device, card) {
	mine := card{Settings: o.settings(), Machine: machine(), Process: process()}
	if o.process != nil {
		mine.Process = o.process()
	}
	refuse := func(format string, args ...any) (Device, card) {
		mine.Problem = fmt.Sprintf(format, args...)
		return nil, mine
	}
	if o.Off {
		return refuse("it is switched off there")
	}
	if _, ok := backend.As[Carrier](inner); !ok {
		return refuse("a %T cannot run calls of others as its own", inner)
	}
	adapt := o.adapt
	if adapt == nil {
		adapt = asPeer
	}
	dev, err := adapt(inner.Device())
	if err != nil {
		return refuse("%v", err)
	}
	if q := dev.Default(); !exchanges(q) {
		dev.Close() // nothing depends on it
		return refuse("the queues of %s, a %T, cannot exchange data", dev.Name(), q)
	}
	mine.Ordinal, mine.Model, mine.Wires = dev.Ordinal(), dev.Model(), dev.Wires()
	if d, ok := dev.(counter); ok {
		mine.Room = d.Multiprocessors()
	}
	return dev, mine
}

func exchanges(q backend.Queue) bool {
	_, ok := q.(exchanger)
	return ok
}

// machine identifies this start of this machine, which containers share, unlike
// its name.
func machine() string { return strings.TrimSpace(read("/proc/sys/kernel/random/boot_id")) }

// process identifies this process: its number alone is not enough where ranks run
// in containers. If it cannot be told, ranks pass for being in different processes,
// and a wrong guess is found when they open each other's memory.
func process() string {
	namespace, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		namespace = read("/proc/self/stat") // it has the time when the process began
	}
	return fmt.Sprintf("%s/%d", namespace, os.Getpid())
}

func read(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return string(text)
}
