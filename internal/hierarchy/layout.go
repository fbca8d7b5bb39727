package hierarchy

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Layout says on which machine each rank is, and at which place there. It is the same on every
// rank. Make one with [Grid], [Parse] or [Discover].
type Layout struct {
	machines [][]int // the ranks of each machine, by place
	at       []place // by rank
	runs     []run   // how chunks are put in the order of devices; nil if machines differ
	grouped  []run   // how they are put in the order of machines
}

// place is where a rank is.
type place struct{ machine, device int }

// numbering is how the ranks of a grid are numbered.
type numbering uint8

// The orders. Results are the same with any numbering, and so is the traffic
// between machines; an all-gather of one slice saves a copy in machineMinor.
const (
	// machineMajor numbers machine by machine, r = m*D+d, as launchers do.
	machineMajor numbering = iota
	// machineMinor numbers rail by rail, r = d*M+m.
	machineMinor
)

// Grid returns the layout of M machines with D devices each, whose ranks are numbered machine by
// machine, as launchers do. [Parse] reads others.
func Grid(M, D int) Layout { return gridOf(M, D, machineMajor) }

// gridOf is Grid with any order.
func gridOf(M, D int, order numbering) Layout {
	machines := make([][]int, M)
	for m := range machines {
		for d := range D {
			r := m*D + d
			if order == machineMinor {
				r = d*M + m
			}
			machines[m] = append(machines[m], r)
		}
	}
	return layoutOf(machines)
}

// Identity is what a rank tells about itself, so that every rank can derive the [Layout].
type Identity struct {
	// Machine is the same for ranks of one machine: World.Node, say, and what NCCL takes
	// for the machine's name (NCCL_HOSTID).
	Machine string
	// Bus is the address of the rank's GPU on the PCI bus, "" on the host. Places follow its order,
	// so that rails connect GPUs with the same position.
	Bus string
}

// Discover returns the layout of ranks with these identities: machines in the order of their first
// ranks, places by bus and then by rank. Machines may have different numbers of ranks.
func Discover(ids []Identity) Layout {
	names := make([]string, len(ids))
	for r, id := range ids {
		names[r] = id.Machine
	}
	l := grouped(names)
	for _, ranks := range l.machines {
		slices.SortStableFunc(ranks, func(a, b int) int {
			return strings.Compare(ids[a].Bus, ids[b].Bus)
		})
	}
	return layoutOf(l.machines)
}

// layoutOf indexes the ranks of the machines, which must be 0, 1, ... in any order.
func layoutOf(machines [][]int) Layout {
	size := 0
	for _, ranks := range machines {
		size += len(ranks)
	}
	l := Layout{machines: machines, at: make([]place, size)}
	for m, ranks := range machines {
		for d, r := range ranks {
			l.at[r] = place{m, d}
		}
	}
	if l.uneven() == "" {
		l.runs = runsOf(machines)
	}
	for _, ranks := range machines {
		for _, r := range ranks {
			l.grouped = extend(l.grouped, r)
		}
	}
	return l
}

// Parse returns the layout of size ranks that a text declares, whatever the machines are like:
//
//	2x4           2 machines of 4 devices, r = m*4+d
//	2x4:minor     the same, r = d*2+m
//	0,1,1,0       the machine of each rank, in any order
//
// An error says what is wrong with the text and what could stand there.
func Parse(text string, size int) (Layout, error) {
	l, err := parse(strings.TrimSpace(text), size)
	if err != nil {
		return Layout{}, fmt.Errorf("hierarchy: topology %q: %w", text, err)
	}
	return l, nil
}

func parse(text string, size int) (Layout, error) {
	if strings.Contains(text, ",") {
		return parseList(strings.Split(text, ","), size)
	}
	grid, suffix, _ := strings.Cut(text, ":")
	order, ok := map[string]numbering{"": machineMajor, "major": machineMajor,
		"minor": machineMinor}[suffix]
	if !ok {
		return Layout{}, fmt.Errorf("%q is no order of the ranks: write :major for machine by "+
			"machine (also without it) or :minor for rail by rail", suffix)
	}
	left, right, _ := strings.Cut(grid, "x")
	M, errM := strconv.Atoi(left)
	D, errD := strconv.Atoi(right)
	if errors.Join(errM, errD) != nil || M < 1 || D < 1 {
		return Layout{}, errors.New("write machines x devices, such as 2x4, or the machine of " +
			"each rank, such as 0,0,1,1")
	}
	if M > size || D > size || M*D != size {
		return Layout{}, fmt.Errorf("%d machines of %d devices are %d ranks, but there are %d: "+
			"declare what the job has, or start %d ranks", M, D, M*D, size, M*D)
	}
	return gridOf(M, D, order), nil
}

func parseList(list []string, size int) (Layout, error) {
	if len(list) != size {
		return Layout{}, fmt.Errorf("it names the machines of %d ranks, but there are %d: write "+
			"one number for each", len(list), size)
	}
	names := make([]string, size)
	for r, text := range list {
		if m, err := strconv.Atoi(strings.TrimSpace(text)); err != nil || m < 0 {
			return Layout{}, fmt.Errorf("the machine of rank %d is %q: write a number from 0", r,
				text)
		}
		names[r] = strings.TrimSpace(text)
	}
	return grouped(names), nil
}

// grouped puts ranks with the same name on one machine. Machines are numbered by
// their first ranks, places follow the ranks.
func grouped(names []string) Layout {
	number := map[string]int{}
	var machines [][]int
	for r, name := range names {
		m, known := number[name]
		if !known {
			m = len(machines)
			number[name], machines = m, append(machines, nil)
		}
		machines[m] = append(machines[m], r)
	}
	return layoutOf(machines)
}

// Size returns the number of ranks.
func (l Layout) Size() int { return len(l.at) }

// Machines returns the number of machines, M.
func (l Layout) Machines() int { return len(l.machines) }

// Devices returns the number of ranks of every machine, D, or 0 if machines differ.
func (l Layout) Devices() int {
	if l.uneven() != "" {
		return 0
	}
	return len(l.machines[0])
}

// fewest and most return the number of ranks of the smallest and of the largest machine.
func (l Layout) fewest() int {
	least := l.Size()
	for _, ranks := range l.machines {
		least = min(least, len(ranks))
	}
	return least
}

func (l Layout) most() (n int) {
	for _, ranks := range l.machines {
		n = max(n, len(ranks))
	}
	return n
}

// shares returns into how many equal parts operands are cut: one of each machine for each rail.
// There are as many rails as the smallest machine has ranks. Ranks at later places are on no rail,
// and have empty shards inside their machine.
func (l Layout) shares() int { return l.Machines() * l.fewest() }

// Place returns the machine of a rank and its place there.
func (l Layout) Place(rank int) (machine, device int) {
	return l.at[rank].machine, l.at[rank].device
}

// Rank returns the rank at a place.
func (l Layout) Rank(machine, device int) int { return l.machines[machine][device] }

// String returns the shape of a grid, else the machine of each rank: what Parse reads, if places
// follow the ranks.
func (l Layout) String() string {
	if D := l.Devices(); D > 0 {
		M := l.Machines()
		switch {
		case l.equal(Grid(M, D)):
			return fmt.Sprintf("%dx%d", M, D)
		case l.equal(gridOf(M, D, machineMinor)):
			return fmt.Sprintf("%dx%d:minor", M, D)
		}
	}
	text := make([]string, l.Size())
	for r, p := range l.at {
		text[r] = strconv.Itoa(p.machine)
	}
	return strings.Join(text, ",")
}

func (l Layout) equal(other Layout) bool { return slices.Equal(l.at, other.at) }

// uneven says why the ranks are not a grid, "" if they are.
func (l Layout) uneven() string {
	if len(l.machines) == 0 {
		return "there are no ranks"
	}
	for m, ranks := range l.machines {
		if len(ranks) != len(l.machines[0]) {
			return fmt.Sprintf(
				"machine 0 has %d ranks and machine %d has %d: start as many on each",
				len(l.machines[0]), m, len(ranks))
		}
	}
	return ""
}

// of returns the layout of a part, given the ranks that its members had here.
func (l Layout) of(members []int) Layout {
	machines := make([][]int, l.Machines())
	for _, r := range members {
		m := l.at[r].machine
		machines[m] = append(machines[m], r)
	}
	for _, ranks := range machines {
		slices.SortFunc(ranks, func(a, b int) int { return l.at[a].device - l.at[b].device })
		for i, r := range ranks {
			ranks[i] = slices.Index(members, r)
		}
	}
	return layoutOf(slices.DeleteFunc(machines, func(ranks []int) bool { return len(ranks) == 0 }))
}

// run is rows of an operand, one for each rank, that follow each other among the
// devices' rows, or the machines': row k of rows belongs to rank first + k*stride.
type run struct{ row, first, stride, rows int }

// runsOf lists the ranks device by device, and on each device machine by machine:
// one run where the numbering is machineMinor, one for each device in machineMajor.
func runsOf(machines [][]int) (all []run) {
	for d := range machines[0] {
		for _, ranks := range machines {
			all = extend(all, ranks[d])
		}
	}
	return all
}

// minor reports whether the chunks of each device are next to each other.
func (l Layout) minor() bool { return len(l.runs) == 1 && l.runs[0].stride == 1 }

func extend(all []run, rank int) []run {
	if n := len(all); n > 0 {
		last := &all[n-1]
		step := rank - (last.first + (last.rows-1)*last.stride)
		if step > 0 && (last.rows == 1 || step == last.stride) {
			last.stride, last.rows = step, last.rows+1
			return all
		}
		return append(all, run{last.row + last.rows, rank, 1, 1})
	}
	return append(all, run{0, rank, 1, 1})
}
