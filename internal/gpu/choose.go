package gpu

import (
	"fmt"
	"math"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	peers "github.com/euryale-ml/euryale/internal/kernels/cuda"
)

// The choice of an algorithm is made here, once for each call, by a table of what the
// algorithms can do and a table of how long they take.

// algorithm is what an [Algorithm] can do, and how it starts a call.
type algorithm struct {
	// it is for a cube mesh; others are for links between all pairs
	mesh  bool
	kinds []backend.Kind // that it runs beside all-reduces; all-reduces alone, if nil
	lines bool           // it needs lines to arrive whole
	// what does its calls where they are too large, or lines do not arrive whole
	next Algorithm
	// the largest operand in bytes, nil for any
	most func(c *choice) int
	// the kernel of an all-reduce, and where its operands are; nil for NCCL
	place func(m *peerMemory, x *peers.PeerCall, k *call)
	name  string
}

var algorithms = [algorithmCount]algorithm{
	byNCCL: {name: "nccl"},
	byLL: {name: "ll", most: (*choice).mostLL, next: byLL128TwoShot, kinds: []backend.Kind{
		backend.ReduceScatter, backend.AllGather, backend.AllToAll}, place: (*peerMemory).placeLL},
	byLL128TwoShot: {name: "ll128-two-shot", lines: true, next: byTwoShot,
		place: (*peerMemory).placeLL128TwoShot},
	byOneShot: {name: "one-shot", place: (*peerMemory).placeOneShot},
	byTwoShot: {name: "two-shot", place: (*peerMemory).placeTwoShot},
	byMesh:    {name: "mesh", mesh: true, place: (*peerMemory).placeMesh},
	byHalved:  {name: "halved", lines: true, place: (*peerMemory).placeHalved},
	byPush: {name: "push", kinds: []backend.Kind{backend.ReduceScatter, backend.AllGather,
		backend.AllToAll}, most: func(*choice) int { return peers.MaxPiece }},

	byCopyEngines: {name: "copy-engines"},
}

// packetBytes is the largest operand that travels in packets, of which half is flags.
// Larger ones travel in lines, of which a sixteenth is: bench/results/2026-11 has both among four
// ranks (2026-11-21-h200x4-lowlatency.txt) and among two (2026-11-21-h200x2-lowlatency.txt).
const packetBytes = 128 << 10

// mostLL is what each rank can push to all others: in lines, where those arrive whole.
func (c *choice) mostLL() int {
	if !c.plan.lines {
		return packetBytes
	}
	return llBytes(c.size)
}

// choice is what the algorithm of a group's calls depends on, the same on every rank. What
// every call reads is together, in it and in its plan: see [Communicator].
type choice struct {
	why    string // the ranks share no memory, so that NCCL does everything; "" if they do
	lacks  string // why nothing was measured where the table has nothing, "" if that is not known
	size   int    // ranks
	plan   plan
	limits limits
}

// limits are thresholds by what they depend on: every call looks them up.
type limits [backend.Scatter + 1][backend.U8 + 1][]limit

func newChoice(p plan, why string) *choice {
	c := &choice{plan: p, size: len(p.ranks), why: why}
	c.goBy(p.Table)
	return c
}

// goBy chooses by a table from now on.
func (c *choice) goBy(t Table) {
	c.plan.Table = t
	for _, k := range backend.Kinds() {
		for _, d := range backend.DTypes() {
			c.limits[k][d] = c.row(k, d).limits()
		}
	}
}

// row is what was measured of a collective on this machine, nil if nothing was.
func (c *choice) row(k backend.Kind, d backend.DType) *Row {
	return c.plan.Table.find(c.plan.machine(), k, d)
}

// eligible reports whether there are kernels for a call.
func eligible(what *backend.Collective, d backend.DType) bool {
	switch what.Kind {
	case backend.AllReduce, backend.ReduceScatter:
		return what.Splits == nil && peers.Adds(d, what.Op)
	case backend.AllGather, backend.AllToAll:
		return d.Valid()
	}
	return false
}

// longest returns the bytes of the longest chunk, of a call of so many bytes.
func longest(what *backend.Collective, d backend.DType, nbytes int) int {
	if what.Splits != nil && what.Kind != backend.AllReduce {
		return slices.Max(what.Splits) * d.Size()
	}
	return nbytes
}

// choose returns the algorithm for a call. It depends on what is the same on every
// rank, and on nothing else: not on where or how aligned the operands are.
func (c *choice) choose(what *backend.Collective, d backend.DType, nbytes int) Algorithm {
	if c.why != "" || nbytes == 0 {
		return byNCCL
	}
	if what.Rows != nil {
		return c.permute(what, d, longest(what, d, nbytes))
	}
	if c.beside(what, d, nbytes) {
		return byCopyEngines
	}
	if !eligible(what, d) {
		return byNCCL
	}
	if what.AllowHalf != 0 {
		return c.halve(nbytes)
	}
	if inTree(what, c.size) {
		return c.tree(what, d, nbytes)
	}
	return c.fastest(what, d, nbytes)
}

// fastest is choose among those that are not for special calls.
func (c *choice) fastest(what *backend.Collective, d backend.DType, nbytes int) Algorithm {
	nbytes = longest(what, d, nbytes)
	return c.possible(c.preferred(what, d, nbytes), what.Kind, nbytes)
}

// besideBytes is the smallest call that copy engines run beside what devices compute, where the
// table does not say it: by its largest operand.
const besideBytes = 4 << 20

// beside reports whether copy engines run a call, of even or uneven chunks.
func (c *choice) beside(what *backend.Collective, d backend.DType, nbytes int) bool {
	if !what.Beside && c.plan.Force != byCopyEngines {
		return false
	}
	whole := *what
	if whole.Kind != backend.AllReduce {
		whole.Splits = nil
	}
	if !eligible(&whole, d) || what.Kind == backend.AllToAll || what.AllowHalf != 0 ||
		inTree(what, c.size) || what.Algorithm != backend.Auto ||
		c.plan.topology.Link != FullyConnected {
		return false
	}
	if what.Kind != backend.AllReduce && what.Splits == nil {
		nbytes *= c.size
	}
	return c.plan.Force == byCopyEngines || c.plan.Force == byNCCL && !c.plan.Shared &&
		c.row(what.Kind, d).besides(nbytes)
}

// inTree reports whether a call among so many ranks adds in a tree: two operands have one order.
func inTree(what *backend.Collective, ranks int) bool {
	return what.Association == backend.Tree &&
		(ranks > 2 || ranks == 2 && what.Kind == backend.AllReduce && what.Splits != nil)
}

// roundsInTree reports whether a sum in a tree of a type would be rounded more than once.
func (c *choice) roundsInTree(d backend.DType) bool {
	return c.size > 2 && d.Float() && d.Size() == 2
}

// trees are the types of all-reduces in a tree that are not refused.
func (c *choice) trees() []backend.DType {
	return slices.DeleteFunc(backend.DTypes(), c.roundsInTree)
}

// tree is choose for calls in a tree, for which there are kernels of two algorithms. Which one is
// faster was not measured: one shot takes those for which packets would be used. Others are
// composed of NCCL's messages and additions of two operands.
func (c *choice) tree(what *backend.Collective, d backend.DType, nbytes int) Algorithm {
	switch {
	case d != backend.F32, c.plan.topology.Link == CubeMesh:
		return byNCCL
	case what.Kind == backend.ReduceScatter:
		return byPush
	case what.Algorithm == backend.OneShot,
		what.Algorithm == backend.Auto && nbytes <= packetBytes:
		return byOneShot
	}
	return byTwoShot
}

// preferred is what is asked for, or else was measured to be the fastest.
func (c *choice) preferred(what *backend.Collective, d backend.DType, nbytes int) Algorithm {
	use := pick(c.limits[what.Kind][d], nbytes)
	switch force := c.plan.Force; {
	case force == byNCCL, force == byCopyEngines: // which has calls of its own
	case force != byPush || algorithms[byPush].runs(what.Kind):
		use = force
	}
	switch what.Algorithm {
	case backend.OneShot:
		use = byOneShot
	case backend.TwoShot:
		use = byTwoShot
	}
	if c.plan.topology.Link == CubeMesh && use != byNCCL {
		return byMesh // there is no other
	}
	return use
}

// runs reports whether an algorithm runs collectives of a kind.
func (a *algorithm) runs(k backend.Kind) bool {
	if k == backend.AllReduce {
		return a.place != nil
	}
	return slices.Contains(a.kinds, k)
}

// possible returns use, or what takes its place if it cannot do a call.
func (c *choice) possible(use Algorithm, k backend.Kind, nbytes int) Algorithm {
	if use == byOneShot && k != backend.AllReduce {
		use = byPush // older tables and programs call it so
	}
	for {
		a := &algorithms[use]
		switch {
		case use == byHalved, a.mesh != (c.plan.topology.Link == CubeMesh), !a.runs(k):
			return byNCCL
		case k != backend.AllReduce && use == byLL && !c.plan.lines,
			a.lines && !c.plan.lines, a.most != nil && nbytes > a.most(c):
			if use = a.next; use != byNCCL && k != backend.AllReduce {
				use = byPush
			}
		default:
			return use
		}
	}
}

// permute is choose for an all-to-all with Rows whose longest piece has so many bytes: one of our
// kernels at every size where NVLink connects every pair, ranks share a device, or push is forced.
// Bytes were counted: of x bytes NCCL moves (W-1)/W over the links, as our kernels do, and the two
// permutations around it read and write x each, which is 4x of the device's memory and two launches
// more. Push reads x and writes it, and in between what comes through staging. Among two ranks on
// one H200, where only these passes count, it took 0.5 to 0.7 of the time
// (bench/results/2026-11/2026-11-23-h200-alltoall.md).
func (c *choice) permute(what *backend.Collective, d backend.DType, nbytes int) Algorithm {
	link := c.plan.topology.Link
	wanted := link == FullyConnected || c.plan.Shared || c.plan.Force == byPush
	if !wanted || link == CubeMesh {
		return byNCCL
	}
	use := byPush
	row := c.row(what.Kind, d)
	if c.plan.Force != byPush && (row == nil && nbytes <= packetBytes ||
		row != nil && row.faster(byLL, byPush, nbytes)) {
		use = byLL
	}
	return c.possible(use, what.Kind, nbytes)
}

// runsRows implements Rows of [backend.Capabilities].
func (c *Communicator) runsRows(what backend.Collective, d backend.DType, count int) bool {
	return count <= math.MaxInt/d.Size() && what.Rows != nil &&
		c.choose(&what, d, count*d.Size()) != byNCCL
}

// halve is choose for calls that may travel as 16 bits.
func (c *choice) halve(nbytes int) Algorithm {
	if c.plan.lines && c.plan.Halved > 0 && nbytes >= c.plan.Halved {
		return byHalved
	}
	return byNCCL
}

// explain says how a call is run, and why. lacking is how many bytes Alloc has given out
// that others do not reach.
func (c *choice) explain(what backend.Collective, d backend.DType, nbytes, lacking int) string {
	text := fmt.Sprintf("%v of %s %v among %d ranks", what, size(nbytes), d, c.size)
	if c.why != "" {
		return fmt.Sprintf("%s: nccl: %s", text, c.why)
	}
	use := c.choose(&what, d, nbytes)
	text = fmt.Sprintf("%s of %s, %v: %v", text, c.plan.ranks[0].Model, c.plan.topology.Link, use)
	switch {
	case what.Rows != nil && use != byNCCL:
		return text + ": pieces are permuted on their way"
	case use == byCopyEngines:
		return text + ": devices compute meanwhile"
	case !eligible(&what, d):
		return text + ": there are kernels for sums and averages of f32, f16 and bf16, by " +
			"all-reduce and even reduce-scatter, and for all-gather and all-to-all"
	case use == byHalved:
		return fmt.Sprintf("%s, in 16 bits from %s on", text, size(c.plan.Halved))
	case what.Algorithm != backend.Auto:
		text += ", as the call asks for"
	case c.plan.Force != byNCCL:
		text += fmt.Sprintf(", where %v is forced", c.plan.Force)
	}
	if lacking > 0 {
		text += fmt.Sprintf("\nAlloc has used up its %d windows: %s from it are copied on the "+
			"way to the others", peers.MaxWindows-1, size(lacking))
	}
	row := c.row(what.Kind, d)
	text += "\n" + row.explain(c.plan.ranks[0].Model, nbytes)
	if row == nil && c.lacks != "" {
		text += "; " + c.lacks
	}
	return text
}

// Choose returns the algorithm that a call of the group uses: nbytes is the size of the
// operand, or of a chunk where there are chunks.
func (c *Communicator) Choose(what backend.Collective, d backend.DType, nbytes int) Algorithm {
	return c.choose(&what, d, nbytes)
}

// Chosen implements [backend.Chooser].
func (c *Communicator) Chosen(what *backend.Collective, d backend.DType, nbytes int) string {
	return c.choose(what, d, nbytes).String()
}

// Explain says how a call is run, and why: nbytes is the size of the operand, or of
// a chunk where there are chunks.
func (c *Communicator) Explain(what backend.Collective, d backend.DType, nbytes int) string {
	_, lacking := c.Windows()
	text := c.explain(what, d, nbytes, lacking)
	if c.flagless != "" && c.choose(&what, d, nbytes) == byCopyEngines {
		text += "; kernels wait for other ranks, since streams cannot: " + c.flagless
	}
	return text
}

// Halves reports whether a call of F32 makes use of AllowHalf.
func (c *Communicator) Halves(what backend.Collective, count int) bool {
	return what.AllowHalf != 0 && count <= math.MaxInt/backend.F32.Size() &&
		c.choose(&what, backend.F32, count*backend.F32.Size()) == byHalved
}

// transport is the dtype that operands travel as: see [backend.Capabilities].
func (c *Communicator) transport(what backend.Collective, d backend.DType,
	count int) backend.DType {
	if d == backend.F32 && what.Kind == backend.AllReduce && c.Halves(what, count) {
		return what.AllowHalf
	}
	return d
}

// Refused returns why NCCL does everything, "" if it does not.
func (c *Communicator) Refused() string { return c.why }

// Link returns how the devices are connected.
func (c *Communicator) Link() Link { return c.plan.topology.Link }

// Usage counts the calls of this rank, by algorithm.
type Usage struct {
	NCCL, LL, LL128TwoShot, OneShot, TwoShot, Mesh, Halved, Push, CopyEngines int64
}

// Usage returns the counts so far.
func (c *Communicator) Usage() Usage {
	n := func(a Algorithm) int64 { return c.used[a].Load() }
	return Usage{n(byNCCL), n(byLL), n(byLL128TwoShot), n(byOneShot), n(byTwoShot), n(byMesh),
		n(byHalved), n(byPush), n(byCopyEngines)}
}
