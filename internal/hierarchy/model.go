package hierarchy

import (
	"cmp"
	"fmt"
	"math"
	"sort"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// Mode says how to choose.
type Mode uint8

// The modes. Auto is the faster of both by the model.
const (
	Auto Mode = iota
	Always
	Never
)

var modes = [...]string{Auto: "auto", Always: "always", Never: "never"}

// Plan is everything that the choice between flat and hierarchical depends on. It is the same on
// every rank, and its methods are functions of it alone. Make one with [NewPlan].
type Plan struct {
	Layout  Layout
	Options Options
	// Direct says that flat sends to each rank directly, see [backend.Capabilities].
	Direct bool
}

// NewPlan returns a plan, with the defaults of o. It returns ErrArgument if o is wrong.
func NewPlan(l Layout, o Options) (Plan, error) {
	o, err := o.filled()
	return Plan{Layout: l, Options: o}, err
}

// layered reports whether anything can be hierarchical, and is not certain to be slower.
func (p Plan) layered() bool {
	return p.Layout.Machines() > 1 && p.Options.Mode != Never && (p.Options.Mode == Always ||
		p.even() == "")
}

// even says why nothing is gained by going between machines as rarely as possible, ""
// if something may be.
func (p Plan) even() string {
	switch {
	case p.Options.Links.Inside == p.Options.Links.Between:
		return "links inside and between machines are equally fast"
	case p.Layout.Devices() == 1:
		return "machines of one device each have nothing to bring together"
	}
	return ""
}

// Pieces of slices are multiples of cacheLine, in bytes, so that no two ranks write the same line.
const cacheLine = 64

// pieces returns how the share of one rank, an operand of n elements divided by the ranks, is cut:
// into slices of piece elements, except a shorter last one.
func (p Plan) pieces(what backend.Collective, d backend.DType, n int) (piece, slices int) {
	share := n / p.Layout.shares()
	line := cacheLine / d.Size()
	piece = share
	if p.Options.SliceBytes == 0 {
		lines := (share + line - 1) / line
		each := (lines-1)/p.fastest(what, d, n, lines) + 1
		piece = min(share, each*line)
	}
	if p.Options.SliceBytes > 0 || p.needsSlots(what.Kind) {
		room := p.slotBytes()
		if what.Kind == backend.AllToAll { // two slices
			room /= 2
		}
		most := max(room/(d.Size()*p.Layout.shares()), 1)
		if most > line {
			most -= most % line
		}
		piece = min(piece, most)
	}
	return piece, (share + piece - 1) / piece
}

// fastest returns how many slices, most at most, are predicted to be the fastest. The predicted
// time is a convex function of their number: the larger of sums of multiples and of fractions of
// it.
func (p Plan) fastest(what backend.Collective, d backend.DType, n, most int) int {
	return 1 + sort.Search(most-1, func(i int) bool {
		return p.layeredTime(what, d, n, i+1) <= p.layeredTime(what, d, n, i+2)
	})
}

// needsSlots reports whether slices may need scratch memory.
func (p Plan) needsSlots(kind backend.Kind) bool {
	switch kind {
	case backend.AllReduce:
		return p.Layout.fewest() == 1 || p.Options.Exchange != 0
	case backend.Broadcast:
		return false
	}
	return true
}

// slotBytes is the most of an operand that a slot has room for.
func (p Plan) slotBytes() int { return cmp.Or(p.Options.SliceBytes, defaultSlotBytes) }

// Choice is how a collective runs, and why.
type Choice struct {
	Hierarchical bool
	Reason       string
	// Predicted by the model; Layered is 0 where hierarchical is not possible.
	Flat, Layered time.Duration
	// Slices is the number of parts into which it is cut.
	Slices int
	piece  int // of a rank's share, in elements
}

// Choose returns how a collective runs on n elements of its largest operand.
func (p Plan) Choose(what backend.Collective, d backend.DType, n int) Choice {
	c := Choice{Flat: p.flatTime(what.Kind, n*d.Size())}
	if c.Reason = p.obstacle(what, d, n); c.Reason != "" {
		return c
	}
	c.piece, c.Slices = p.pieces(what, d, n)
	c.Layered = p.Options.Links.Call + time.Duration(
		math.Round(p.layeredTime(what, d, n, c.Slices)))
	switch o := p.Options; {
	case o.Mode == Always:
		c.Hierarchical, c.Reason = true, "it is asked for always"
	case p.even() != "":
		c.Reason = p.even()
	case c.Layered < c.Flat:
		c.Hierarchical, c.Reason = true, "it is predicted to be faster"
	default:
		c.Reason = "it is predicted to be faster"
	}
	return c
}

// obstacle says why a collective can only run flat, "" if it need not run flat.
func (p Plan) obstacle(what backend.Collective, d backend.DType, n int) string {
	l, uneven := p.Layout, p.Layout.uneven()
	chunks := what.Kind == backend.ReduceScatter || what.Kind == backend.AllGather ||
		what.Kind == backend.AllToAll
	switch {
	case l.Size() == 0:
		return uneven
	case l.Machines() == 1:
		return "there is one machine"
	case p.Options.Mode == Never:
		return "hierarchical is switched off"
	case what.Association == backend.Tree:
		return "the tree of its sum is over all ranks"
	case !chunks && what.Kind != backend.AllReduce && what.Kind != backend.Broadcast:
		return fmt.Sprintf("%v is never hierarchical", what.Kind)
	case what.Kind == backend.AllToAll && l.most() == 1:
		return "machines of one device each have nothing to bring together"
	case uneven != "" && (chunks || p.averages(what, d)):
		return uneven
	case what.Splits != nil:
		return "its chunks are uneven"
	case n < l.Size():
		return "it has fewer elements than there are ranks"
	case p.averages(what, d) && l.Machines() > maxTerms:
		return fmt.Sprintf("the averages of %d machines are too many for the kernels of GPUs, "+
			"which take %d", l.Machines(), maxTerms)
	case !what.Kind.Reduces() || what.Op != backend.Avg:
		return ""
	}
	if D := l.Devices(); d == backend.F16 && D&(D-1) != 0 {
		return fmt.Sprintf("the average of f16 inside a machine is exact for a power of two of "+
			"devices only, not for %d", D)
	}
	return ""
}

// leg is what the busiest rank sends in one go over one kind of link: messages one after the other,
// as a rank with one port for it does, and their total bytes.
type leg struct {
	between  bool
	messages int
	bytes    float64
}

// time is what a leg takes, in nanoseconds.
func (l Links) time(g leg) float64 {
	link := l.Inside
	if g.between {
		link = l.Between
	}
	return link.time(g.messages, g.bytes)
}

// flatTime returns the time of the flat communicator.
func (p Plan) flatTime(kind backend.Kind, nbytes int) time.Duration {
	least := math.Inf(1)
	for _, way := range p.flatLegs(kind, float64(nbytes)) {
		inside, between := 0.0, 0.0 // at once, by ports of their own
		for _, g := range way {
			if took := p.Options.Links.time(g); g.between {
				between += took
			} else {
				inside += took
			}
		}
		least = min(least, max(inside, between))
	}
	return p.Options.Links.Step + time.Duration(math.Round(least))
}

// flatLegs returns what the busiest rank sends of nbytes bytes in a flat call, in each way that
// flat has. Each step of a ring waits for its slowest link. Direct sends the parts of an operand to
// their ranks, and for an all-reduce or a broadcast on to all, or everything to everyone in one go.
func (p Plan) flatLegs(kind backend.Kind, nbytes float64) [][]leg {
	// fewest have most others elsewhere
	W, D, several := p.Layout.Size(), p.Layout.fewest(), p.Layout.Machines() > 1
	steps := W - 1
	if kind == backend.AllReduce {
		steps *= 2
	}
	if !p.Direct {
		return [][]leg{{{several, steps, kind.BusFactor(W) * nbytes}}}
	}
	// to is what goes to every other rank, each of them the same.
	to := func(each float64) []leg {
		return []leg{{false, D - 1, float64(D-1) * each}, {true, W - D, float64(W-D) * each}}
	}
	part := to(nbytes / float64(W))
	switch kind {
	case backend.AllReduce:
		return [][]leg{to(nbytes), append(part, part...)}
	case backend.Broadcast: // root's parts, which their ranks send on
		part = to(nbytes / float64(max(W-1, 1)))
		return [][]leg{to(nbytes), append(part, part...)}
	default:
		return [][]leg{part}
	}
}

// layeredLegs returns what the busiest rank sends of nbytes bytes in each phase of a hierarchical
// call.
func (l Layout) layeredLegs(kind backend.Kind, nbytes float64) []leg {
	M, D := l.Machines(), l.most()
	shard := nbytes / float64(l.fewest())
	inside, between := leg{false, D - 1, float64(D-1) * shard},
		leg{true, M - 1, float64(M-1) / float64(M) * shard}
	switch kind {
	case backend.AllReduce:
		return []leg{inside, between, between, inside}
	case backend.AllToAll:
		return []leg{inside, {true, M - 1, float64(M-1) / float64(M) * nbytes}}
	case backend.Broadcast: // inside root's machine, on the rails, and inside the others
		return []leg{{false, D - 1, nbytes}, {true, M - 1, float64(M-1) * shard}, inside}
	default:
		return []leg{inside, between}
	}
}

// layeredTime returns the time of a pipeline of slices, in nanoseconds: the first one goes through
// all phases, and each later one adds its time on the busiest resource: a kind of link, or the
// host, which starts every phase.
func (p Plan) layeredTime(what backend.Collective, d backend.DType, n, slices int) float64 {
	links, step := p.Options.Links, float64(p.Options.Links.Step)
	inside, between, host := 0.0, 0.0, step // of the addition, or of a copy
	// three copies, where other layered calls have one at most
	if what.Kind == backend.AllToAll {
		inside, host = links.time(leg{bytes: 3 * float64(n*d.Size()) / float64(slices)})+2*step,
			host+2*step
	}
	for _, g := range p.Layout.layeredLegs(what.Kind, float64(n*d.Size())/float64(slices)) {
		if g.messages == 0 { // one device
			continue
		}
		host += step
		if g.between {
			g.bytes = p.thinned(what, d, g.bytes)
			between += links.time(g) + step
		} else {
			inside += links.time(g) + step
		}
	}
	return inside + between + step + float64(slices-1)*max(inside, between, host)
}

// exchangeType is what values are rounded to between machines, 0 for nothing.
func (p Plan) exchangeType(what backend.Collective, d backend.DType) backend.DType {
	if d == backend.F32 && !what.Exact && what.Kind.Reduces() && (what.Op == backend.Sum ||
		what.Op == backend.Avg) {
		return p.Options.Exchange
	}
	return 0
}

// averages reports whether an average is an average of the machines' averages, rather than a sum
// that is divided at the end. An average of f16 is, or of what travels as f16, whose sum may be too
// large.
func (p Plan) averages(what backend.Collective, d backend.DType) bool {
	return what.Kind.Reduces() && what.Op == backend.Avg &&
		(d == backend.F16 || p.exchangeType(what, d) == backend.F16)
}

// thinned is what is left of nbytes bytes between machines when they are rounded there.
func (p Plan) thinned(what backend.Collective, d backend.DType, nbytes float64) float64 {
	if wire := p.exchangeType(what, d); wire != 0 {
		return nbytes * float64(wire.Size()) / float64(d.Size())
	}
	return nbytes
}

// traffic is the bytes that a rank sends, for each kind of link.
type traffic struct{ Inside, Between float64 }

// total is what legs send over each kind of link.
func total(legs []leg) (t traffic) {
	for _, g := range legs {
		if g.between {
			t.Between += g.bytes
		} else {
			t.Inside += g.bytes
		}
	}
	return t
}

// layeredTraffic returns what each rank sends when nbytes bytes are moved hierarchically: between
// machines 2(M-1)/M of its share nbytes/D of an all-reduce, half of that otherwise. It ignores
// [Options].Exchange, which halves that for sums of f32.
func (l Layout) layeredTraffic(kind backend.Kind, nbytes int) traffic {
	return total(l.layeredLegs(kind, float64(nbytes)))
}

// flatTraffic says what a flat call moves: round a ring of all ranks 2(W-1)/W of the bytes of an
// all-reduce, on a link between machines if there are several.
func (p Plan) flatTraffic(kind backend.Kind, nbytes int) string {
	ways := p.flatLegs(kind, float64(nbytes))
	t := total(ways[len(ways)-1])
	if p.Direct {
		return fmt.Sprintf("%s inside and %s between machines from each rank", bytesText(t.Inside),
			bytesText(t.Between))
	}
	return bytesText(t.Inside+t.Between) + " over the busiest link"
}

// Explain says how a collective on nbytes bytes of its largest operand runs, why,
// and how long both ways are predicted to take, for a person to read.
func (p Plan) Explain(what backend.Collective, d backend.DType, nbytes int) string {
	if d.Size() == 0 {
		return fmt.Sprintf("%v: %v is no dtype", what, d)
	}
	c := p.Choose(what, d, nbytes/d.Size())
	way := "flat"
	if c.Hierarchical {
		way = "hierarchical"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%v of %d bytes of %v on %s: %s, because %s\n", what, nbytes, d,
		p.Layout.describe(), way, c.Reason)
	fmt.Fprintf(&b, "  flat          %10v  %s\n", round(c.Flat), p.flatTraffic(what.Kind, nbytes))
	if c.Slices > 0 {
		t, as := p.Layout.layeredTraffic(what.Kind, nbytes), ""
		if wire := p.exchangeType(what, d); wire != 0 {
			as = fmt.Sprintf(", as %v,", wire)
		}
		fmt.Fprintf(&b, "  hierarchical  %10v  %s inside and %s%s between machines from each "+
			"rank, in %s\n",
			round(c.Layered), bytesText(t.Inside), bytesText(p.thinned(what, d, t.Between)), as,
			count(c.Slices, "slice"))
		least := max(p.Options.Links.time(leg{bytes: t.Inside}),
			p.Options.Links.time(leg{between: true, bytes: p.thinned(what, d, t.Between)}))
		fmt.Fprintf(&b, "  bound         %10v  these bytes alone on the busier kind of link\n",
			round(time.Duration(least)))
	}
	fmt.Fprintf(&b, "  links         %v\n", *p.Options.Links)
	return b.String()
}

func (l Layout) describe() string {
	if D := l.Devices(); D > 0 {
		return fmt.Sprintf("%s x %s", count(l.Machines(), "machine"), count(D, "device"))
	}
	return fmt.Sprintf("%s with %s", count(l.Machines(), "machine"), count(l.Size(), "rank"))
}

// count says how many there are.
func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func round(t time.Duration) time.Duration { return t.Round(100 * time.Nanosecond) }

// bytesText prints bytes in the unit, in steps of a thousand, that suits them.
func bytesText(n float64) string {
	for _, u := range []struct {
		size float64
		name string
	}{{1e9, "GB"}, {1e6, "MB"}, {1e3, "kB"}} {
		if n >= u.size {
			return fmt.Sprintf("%.3g %s", n/u.size, u.name)
		}
	}
	return fmt.Sprintf("%.3g B", n)
}
