package lowlatency

import (
	"fmt"
	"slices"
	"strings"
)

// Algorithm is a way to run a collective.
type Algorithm uint8

// The algorithms. All of them add in rank order, in 32 bits, and so give the same
// bits.
const (
	// Inner leaves the call to the communicator below.
	Inner Algorithm = iota
	// LL pushes the operand to every rank, and flags with it: one trip, and no
	// barrier. Large operands travel in NCCL's LL128 format.
	LL
	// LL128TwoShot pushes a segment of the operand to each rank, which adds up what
	// it receives and pushes the sum to every rank, and flags with all of it: two
	// trips, and no barrier.
	LL128TwoShot
	// OneShot shows the operand; every rank reads all of them.
	OneShot
	// TwoShot is the same data flow without flags in the data: blocks of threads tell each
	// other when a piece is there.
	TwoShot
	// Mesh is OneShot on a cube mesh: each rank reads its clique and, through its
	// relay, the other one. It is for such machines, and they have no other.
	Mesh
	// Halved is LL128TwoShot of f32 that travels as 16 bits. Only calls that ask for
	// that use it: see [backend.Collective].
	Halved
)

var algorithmNames = [...]string{Inner: "inner", LL: "ll", LL128TwoShot: "ll128-two-shot", OneShot: "one-shot", TwoShot: "two-shot", Mesh: "mesh", Halved: "halved"}

// Algorithms lists those that calls can use where every device reaches every other.
func Algorithms() []Algorithm { return []Algorithm{Inner, LL, LL128TwoShot, OneShot, TwoShot} }

// String returns the name: "two-shot".
func (a Algorithm) String() string {
	if int(a) >= len(algorithmNames) {
		return fmt.Sprintf("Algorithm(%d)", uint8(a))
	}
	return algorithmNames[a]
}

// Algorithms lists those that calls can use on such links.
func (l Link) Algorithms() []Algorithm {
	if l == CubeMesh {
		return []Algorithm{Inner, Mesh}
	}
	return Algorithms()
}

// ParseAlgorithm is the inverse of String, for those that can be asked for by name:
// [Halved] needs a call's leave instead.
func ParseAlgorithm(name string) (Algorithm, error) {
	all := append(Algorithms(), Mesh)
	switch name { // the names before LL had the field's
	case "flagged":
		return LL, nil
	case "flagged-two-shot":
		return LL128TwoShot, nil
	}
	for _, a := range all {
		if a.String() == name {
			return a, nil
		}
	}
	return 0, fmt.Errorf("no algorithm is called %q: use one of %v", name, all)
}

// A schedule is the data flow of an all-reduce: phases, between which ranks wait
// for those that they exchange data with. Within a phase ranks run in any order.
type schedule []phase

type phase []step

// step is what one rank does: it adds up the cells from, in order, and puts the
// result into the cells to.
type step struct {
	rank     int
	from, to []cell
}

// cell is a part of the memory of a rank.
type cell struct {
	rank    int
	name    string // "x" operand, "y" result, "shown" what peers reach, "in3" from rank 3
	segment int    // whole: all of it
}

const whole = -1

// String returns "2.shown[0]".
func (c cell) String() string {
	s := fmt.Sprintf("%d.%s", c.rank, c.name)
	if c.segment != whole {
		s += fmt.Sprintf("[%d]", c.segment)
	}
	return s
}

// String returns "0.y = 0.x + 1.x".
func (s step) String() string {
	return joined(s.to, ", ") + " = " + joined(s.from, " + ")
}

func joined(cells []cell, by string) string {
	texts := make([]string, len(cells))
	for i, c := range cells {
		texts[i] = c.String()
	}
	return strings.Join(texts, by)
}

// scheduleOf returns the data flow of an algorithm among W ranks; partners are
// those of a cube mesh.
func scheduleOf(a Algorithm, W int, partners [][4]int) schedule {
	switch a {
	case LL:
		return pushOnce(W)
	case LL128TwoShot, TwoShot:
		return pushTwice(W)
	case OneShot:
		return oneShot(W)
	case Mesh:
		return mesh(partners)
	}
	return nil
}

// everyone returns one cell for each rank, in rank order.
func everyone(W int, at func(p int) cell) []cell {
	cells := make([]cell, W)
	for p := range cells {
		cells[p] = at(p)
	}
	return cells
}

func shown(p int) cell { return cell{p, "shown", whole} }

// show is the phase in which every rank copies its operand to where others reach
// it. It falls away for memory from Alloc.
func show(W int) phase {
	var ph phase
	for r := range W {
		ph = append(ph, step{r, []cell{{r, "x", whole}}, []cell{shown(r)}})
	}
	return ph
}

func pushOnce(W int) schedule {
	var push, add phase
	for r := range W {
		inbox := func(p int) cell { return cell{p, fmt.Sprintf("in%d", r), whole} }
		to := slices.DeleteFunc(everyone(W, inbox), func(c cell) bool { return c.rank == r })
		push = append(push, step{r, []cell{{r, "x", whole}}, to})
		add = append(add, step{r, everyone(W, func(p int) cell {
			if p == r {
				return cell{r, "x", whole}
			}
			return cell{r, fmt.Sprintf("in%d", p), whole}
		}), []cell{{r, "y", whole}}})
	}
	return schedule{push, add}
}

func pushTwice(W int) schedule {
	var push, add, collect phase
	for r := range W {
		inbox := func(at, from, segment int) cell { return cell{at, fmt.Sprintf("in%d", from), segment} }
		mine, sums := everyone(W, func(p int) cell { return inbox(r, p, r) }), []cell{{r, "y", r}}
		mine[r] = cell{r, "x", r}
		for p := range W {
			if p != r {
				push = append(push, step{r, []cell{{r, "x", p}}, []cell{inbox(p, r, p)}})
				sums = append(sums, cell{p, fmt.Sprintf("sum%d", r), r})
				collect = append(collect, step{r, []cell{{r, fmt.Sprintf("sum%d", p), p}}, []cell{{r, "y", p}}})
			}
		}
		add = append(add, step{r, mine, sums})
	}
	return schedule{push, add, collect}
}

func oneShot(W int) schedule {
	var add phase
	for r := range W {
		add = append(add, step{r, everyone(W, shown), []cell{{r, "y", whole}}})
	}
	return schedule{show(W), add}
}

// mesh keeps what it has read instead of adding it up on the way, so that everyone can
// add in rank order: its relay has kept the rest.
func mesh(partners [][4]int) schedule {
	W := len(partners)
	var read, add phase
	for r, row := range partners {
		kept := func(at, p int) cell {
			if at == p {
				return shown(p)
			}
			return cell{at, fmt.Sprintf("in%d", p), whole}
		}
		for _, p := range row[:cliqueSize-1] {
			read = append(read, step{r, []cell{shown(p)}, []cell{kept(r, p)}})
		}
		relay := row[cliqueSize-1]
		add = append(add, step{r, everyone(W, func(p int) cell {
			if p == r || slices.Contains(row[:cliqueSize-1], p) {
				return kept(r, p)
			}
			return kept(relay, p)
		}), []cell{{r, "y", whole}}})
	}
	return schedule{show(W), read, add}
}

// String lists the phases.
func (s schedule) String() string {
	var b strings.Builder
	for i, ph := range s {
		fmt.Fprintf(&b, "  phase %d\n", i+1)
		for _, st := range ph {
			fmt.Fprintf(&b, "    rank %d: %v\n", st.rank, st)
		}
	}
	return b.String()
}
