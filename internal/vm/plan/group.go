package plan

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// group is a set of values that one step computes: a loop over element-wise values and
// reductions of them, or one value of any other kind.
type group struct {
	members []ir.ID // in program order
	shape   ir.Dims // of the loop
	axes    ir.Dims // that are reduced, none before the first reduction
	loop    bool
	rows    bool // whether values of the loop read its reductions, along rows: see rows.go
	columns bool // whether it has reductions along all other axes, too

	prev, next *group // in the order of all groups
	place      int64  // there
	mark       int    // of the last search that met it
	compared   int    // with which group it was compared last: see besides
}

// grouping divides the values of a program into steps.
type grouping struct {
	Limits
	program  *ir.Program
	users    [][]ir.ID      // by value, see [ir.Program.Users]
	of       []*group       // by value, nil for views and leaves
	base     []ir.ID        // by value: the one whose memory it is a view of
	needs    [][]ir.ID      // by value: those that a step computes and that must be there before it
	needed   [][]ir.ID      // by value: those that need it
	copies   map[ir.ID]bool // values that are rematerialized, see [lower.Rematerialize]
	large    bool           // whether there are values of LargeLoop elements or more
	order    sequence       // of all groups
	searches int
	counted  []int // by value: the last search that has counted it
}

// groups divides the program into steps, in an order in which operands come first.
//
// A value joins the loops of its operands if they run over the same elements, or rows of them,
// unless something outside of the loop would have to run between its parts. users are the readers
// of each value, itself among them if it is a result; copies are those that do not join the loops
// of their operands, except of each other. In a plain plan each value is a step of its own.
func (l Limits) groups(p *ir.Program, users [][]ir.ID, copies map[ir.ID]bool, x bucketing,
	plain bool) ([]*group, error) {
	g := l.newGrouping(p, users, copies, plain)
	all, err := g.ordered()
	if err == nil && !plain {
		all = g.startEarly(g.hoistGradients(all, x))
	}
	return all, err
}

// rematerialized returns the program in which loops rematerialize values, and which these are.
func (l Limits) rematerialized(p *ir.Program) (*ir.Program, map[ir.ID]bool) {
	if !slices.ContainsFunc(p.Values, func(v ir.Value) bool {
		return v.Shape.Size()*v.DType.Size() >= l.RematerializeBytes
	}) {
		return p, nil
	}
	g, of := l.newGrouping(p, p.Users(), nil, false), map[*group]*lower.Loop{}
	loops := make([]*lower.Loop, len(p.Values))
	for i, x := range g.of {
		if x == nil || !x.loop {
			continue
		}
		if of[x] == nil {
			of[x] = &lower.Loop{Shape: x.shape, Values: x.members}
		}
		loops[i] = of[x]
	}
	return lower.Rematerialize(p, loops, l.RematerializeBytes, l.RematerializeOps)
}

func (l Limits) newGrouping(p *ir.Program, users [][]ir.ID, copies map[ir.ID]bool,
	plain bool) *grouping {
	g := &grouping{Limits: l, program: p, users: users, of: make([]*group, len(p.Values)),
		copies: copies, counted: make([]int, len(p.Values))}
	g.depend()
	for i, v := range p.Values {
		if ir.View(v.Op) || given(v.Op) {
			continue
		}
		id := ir.ID(i)
		own := g.single(id)
		g.of[id] = own
		if plain {
			continue
		}
		g.order.append(own)
		for _, a := range v.Args {
			other := g.of[g.base[a]]
			if other == nil || other == own || copies[id] && !copies[a] || g.addsUp(a) {
				continue
			}
			if both, ok := g.together(other, own); ok {
				own = g.merge(other, own, both)
			}
		}
		g.besides(own)
		if _, concat := v.Op.(ir.Concat); concat {
			g.abreast(v.Args)
		}
	}
	if !plain {
		g.siblings()
	}
	return g
}

// siblings merges loops that wait for the same value and are neighbours: the gradients of a gate
// and of what it lets through, say.
func (g *grouping) siblings() {
	for i := range g.program.Values {
		a := ir.ID(i)
		if g.of[a] == nil || g.of[a].loop || len(g.needed[a]) < 2 {
			continue
		}
		var all *group
		for _, u := range g.needed[a] {
			x := g.of[u]
			if x == all || !x.loop || x.axes.Len() > 0 || !g.waits(x, a) {
				continue
			}
			if all != nil && g.neighbours(all, x) {
				if both, ok := g.together(all, x); ok {
					all = g.merge(all, x, both)
					continue
				}
			}
			all = x
		}
	}
}

// waits reports whether a value is the last one that a group needs, in the order of all groups.
func (g *grouping) waits(x *group, last ir.ID) bool {
	return !slices.ContainsFunc(x.members, func(m ir.ID) bool {
		return slices.ContainsFunc(g.needs[m], func(a ir.ID) bool {
			return g.of[a] != nil && g.of[a] != x && g.of[a].place > g.of[last].place
		})
	})
}

// neighbours reports whether at most Besides values of the program are between two groups: results
// of the later one do not live much longer then.
func (g *grouping) neighbours(a, b *group) bool {
	last := func(x *group) ir.ID { return x.members[len(x.members)-1] }
	return max(a.members[0], b.members[0])-min(last(a), last(b)) <= ir.ID(g.Besides)
}

// abreast merges loops of the parts of a concatenation, which one loop may then store: both halves
// of what rotary positions turn, say.
func (g *grouping) abreast(parts []ir.ID) {
	var all *group
	for _, a := range parts {
		x := g.of[g.base[a]]
		if all == nil || x == nil || x == all {
			all = cmp.Or(all, x)
		} else if both, ok := g.together(all, x); ok && both.axes.Len() == 0 {
			all = g.merge(all, x, both)
		}
	}
}

// given reports whether no group computes a value: ranks gather it before groups read it, or it
// comes from outside.
func given(op ir.Op) bool {
	_, unsharded := op.(ir.AllGather)
	return unsharded || ir.Leaf(op)
}

// addsUp reports whether a value adds the gradient of a tile to others: loops that go on with it
// would keep the products of all.
func (g *grouping) addsUp(id ir.ID) bool {
	v := g.program.Values[id]
	return g.Tiles > 1 && v.Op == ir.Binary{Op: fuse.Add} && slices.ContainsFunc(v.Args,
		func(a ir.ID) bool {
			op, product := g.program.Values[a].Op.(ir.MatMul)
			return product && op.TransA
		})
}

// depend finds what each value needs: its operands, and the value with an effect before it, if it
// has one, too.
func (g *grouping) depend() {
	n := len(g.program.Values)
	g.base, g.needs, g.needed = make([]ir.ID, n), make([][]ir.ID, n), make([][]ir.ID, n)
	last := ir.ID(-1)
	for i, v := range g.program.Values {
		id := ir.ID(i)
		if g.base[id] = id; ir.View(v.Op) {
			g.base[id] = g.base[v.Args[0]]
			continue
		}
		g.large = g.large || v.Shape.Size() >= g.LargeLoop
		for _, a := range v.Args {
			if a = g.base[a]; !given(g.program.Values[a].Op) {
				g.needs[id] = append(g.needs[id], a)
			}
		}
		if ir.Effect(v.Op) {
			if last >= 0 {
				g.needs[id] = append(g.needs[id], last)
			}
			last = id
		}
		for _, a := range g.needs[id] {
			g.needed[a] = append(g.needed[a], id)
		}
	}
}

// besides merges a group that folds with others that fold the same operands along the same axes,
// other than rows, or one of each kind: the sums of columns that are the gradients of gain and
// bias, say, and the gradient of a layer norm. The results of folds are small, so that nothing
// large lives longer.
func (g *grouping) besides(own *group) {
	if own.axes.Len() == 0 {
		return
	}
	g.searches++
	compared := g.searches
	for _, m := range own.members {
		for _, a := range g.program.Values[m].Args {
			for _, u := range g.recent(a, m) {
				other := g.of[u]
				if u == a || other == nil || other == own || other.compared == compared ||
					!other.foldsLike(own) {
					continue
				}
				other.compared = compared
				if both, ok := g.together(other, own); ok && (both.columns || !both.rows) {
					own = g.merge(other, own, both)
					g.searches++
					compared = g.searches // with the others once more
				}
			}
		}
	}
}

// foldsLike reports whether two groups fold along the same axes, other than rows, or are one of
// each kind.
func (x *group) foldsLike(y *group) bool {
	return x.axes.Len() > 0 && (x.rows != y.rows || !y.rows && x.axes == y.axes)
}

// recent returns the users of a value up to one of them, the last Besides: in long recurrences a
// number may have one for each time step.
func (g *grouping) recent(x, user ir.ID) []ir.ID {
	users := g.users[x]
	end, _ := slices.BinarySearch(users, user)
	return users[max(0, end-g.Besides):end]
}

// single returns a group of one value.
func (g *grouping) single(id ir.ID) *group {
	v := g.program.Values[id]
	s := &group{members: []ir.ID{id}, shape: v.Shape, loop: ir.Elementwise(v.Op)}
	if r, ok := v.Op.(ir.Reduce); ok {
		s.shape, s.axes, s.loop = g.program.Values[v.Args[0]].Shape, r.Axes, true
	}
	return s
}

// together returns the loop of two groups, without members; false if they cannot be one.
func (g *grouping) together(a, b *group) (both group, ok bool) {
	if !a.loop || !b.loop || len(a.members)+len(b.members) > g.LoopValues {
		return both, false
	}
	both, ok = g.joined(a, b)
	if !ok || !g.reads(a, b, &both) || !g.reads(b, a, &both) {
		return both, false
	}
	if both.rows && (!g.rowable(both.shape, both.axes) || g.crosses(a.members) ||
		g.crosses(b.members)) {
		return both, false
	}
	return both, g.operands(a, b) <= g.LoopOperands && !g.between(a, b) &&
		!(both.shape.Size() <= g.SmallLoop && g.delays(a, b))
}

// delays reports whether a would wait, together with b, for a large loop that b needs and a does
// not. What else reads a could not be part of that loop then: the gradient of a cross-entropy reads
// the number of labels, as the loss does, which also needs the loop over all logits.
func (g *grouping) delays(a, b *group) bool {
	if !g.large {
		return false
	}
	g.searches++
	own := walk{grouping: g, edges: g.needs, mark: 2 * g.searches, all: []*group{a}}
	w := walk{grouping: g, edges: g.needs, mark: 2*g.searches + 1, all: []*group{b}}
	for steps := 0; steps < g.Search && !own.done(); steps++ {
		own.follow(nil, func(*group) bool { return true })
	}
	found := false
	for steps := 0; steps < g.Search && !w.done() && !found; steps++ {
		w.follow(nil, func(x *group) bool {
			news := x != a && (own.done() || x.place > a.place) // what a needs has been met
			found = found || news && x.loop && x.shape.Size() >= g.LargeLoop
			return news
		})
	}
	return found || !w.done()
}

// operands returns at most how many inputs and outputs a loop of both groups has: some of the
// outputs may join it later.
func (g *grouping) operands(a, b *group) (n int) {
	inside := func(x ir.ID) bool { return g.of[x] == a || g.of[x] == b }
	g.searches++
	for _, members := range [...][]ir.ID{a.members, b.members} {
		for _, m := range members {
			for _, x := range g.program.Values[m].Args {
				if g.counted[x] != g.searches && !inside(g.base[x]) {
					g.counted[x] = g.searches
					n++
				}
			}
			if g.program.Escapes(g.users, m, inside) {
				n++
			}
		}
	}
	return n
}

// between reports whether something outside of both groups depends on one of them, and one of
// them on it.
func (g *grouping) between(a, b *group) bool {
	_, _, way := g.search(earlier(a, b))
	return way
}

// earlier returns two groups in their order.
func earlier(a, b *group) (*group, *group) {
	if b.place < a.place {
		return b, a
	}
	return a, b
}

// merge makes two groups one, which is a loop of the kind of both. Nothing may be between them.
func (g *grouping) merge(a, b *group, both group) *group {
	a, b = earlier(a, b)
	if aside, above, _ := g.search(a, b); above {
		g.order.moveBehind(aside, a.prev) // what b depends on comes before a, where both are then
	} else {
		g.order.moveBehind(append([]*group{a}, aside...), b) // what depends on a comes behind b
	}
	g.order.remove(b)
	a.shape, a.axes, a.rows, a.columns = both.shape, both.axes, both.rows, both.columns
	a.members = append(a.members, b.members...)
	slices.Sort(a.members)
	for _, m := range b.members {
		g.of[m] = a
	}
	return a
}

// ordered returns the groups in an order that keeps to their needs: otherwise by their last
// values.
func (g *grouping) ordered() ([]*group, error) {
	var all []*group
	for i, x := range g.of {
		if x != nil && x.members[len(x.members)-1] == ir.ID(i) {
			all = append(all, x)
		}
	}
	order := make([]*group, 0, len(all))
	const begun, done = -1, -2
	var visit func(x *group) error
	visit = func(x *group) error {
		if x.mark == done {
			return nil
		}
		if x.mark == begun {
			return fmt.Errorf("plan: the step of %s needs its own result",
				g.program.Values[x.members[0]].Name)
		}
		x.mark = begun
		for _, m := range x.members {
			for _, before := range g.needs[m] {
				if y := g.of[before]; y != x {
					if err := visit(y); err != nil {
						return err
					}
				}
			}
		}
		x.mark = done
		order = append(order, x)
		return nil
	}
	for _, x := range all {
		if err := visit(x); err != nil {
			return nil, err
		}
	}
	return order, nil
}
