package plan

import (
	"cmp"
	"slices"

	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// Sizes, in elements, of loops that cost no more than their launch, and of those that cost much more.
const (
	smallLoop = 1 << 13
	largeLoop = 1 << 20
)

// Limits of one loop. A CUDA kernel's parameters are 4 KiB; long loops gain nothing more
// from being one.
const (
	maxLoopValues   = 64
	maxLoopOperands = 24
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
}

// grouping divides the values of a program into steps.
type grouping struct {
	program *ir.Program
	users   [][]ir.ID      // by value, see outside
	of      []*group       // by value, nil for views and leaves
	effect  []ir.ID        // by value: the value with an effect before it, -1 if none
	anew    map[ir.ID]bool // values that are computed again, see again.go
}

// groups divides the program into steps, in an order in which operands come first.
//
// A value joins the loops of its operands if they run over the same elements, or rows of them, unless
// something outside of the loop would have to run between its parts. users are those of each
// value, itself among them if it is a result; anew are those that do not join the loops of their
// operands, except of each other.
func groups(p *ir.Program, users [][]ir.ID, anew map[ir.ID]bool) []*group {
	return newGrouping(p, users, anew).ordered()
}

func newGrouping(p *ir.Program, users [][]ir.ID, anew map[ir.ID]bool) *grouping {
	g := &grouping{program: p, users: users, of: make([]*group, len(p.Values)), effect: make([]ir.ID, len(p.Values)), anew: anew}
	last := ir.ID(-1)
	for i, v := range p.Values {
		if ir.View(v.Op) || ir.Leaf(v.Op) {
			continue
		}
		id := ir.ID(i)
		if g.effect[id] = last; ir.Effect(v.Op) {
			last = id
		}
		own := g.single(id)
		g.of[id] = own
		for _, a := range v.Args {
			other := g.of[g.base(a)]
			if other == nil || other == own || anew[id] && !anew[a] {
				continue
			}
			if both, ok := g.together(other, own); ok {
				own = g.merge(other, own, both)
			}
		}
		g.besides(own)
	}
	return g
}

// besides merges a group that folds with others that fold the same operands along the same axes, other than
// rows, or one of each kind: the sums of columns that are the gradients of gain and bias, say, and the gradient of a layer
// norm. The results of folds are small, so that nothing large lives longer.
func (g *grouping) besides(own *group) {
	if own.axes.Len() == 0 {
		return
	}
	for _, m := range own.members {
		for _, a := range g.program.Values[m].Args {
			for _, u := range g.users[a] {
				other := g.of[u]
				if u == a || other == nil || other == own || other.axes.Len() == 0 || other.rows == own.rows && (own.rows || other.axes != own.axes) {
					continue
				}
				if both, ok := g.together(other, own); ok && (both.columns || !both.rows) {
					own = g.merge(other, own, both)
				}
			}
		}
	}
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
	if !a.loop || !b.loop || len(a.members)+len(b.members) > maxLoopValues {
		return both, false
	}
	both, ok = g.joined(a, b)
	if !ok || !g.reads(a, b, &both) || !g.reads(b, a, &both) {
		return both, false
	}
	if both.rows && (!rowable(both.shape, both.axes) || g.crosses(a.members) || g.crosses(b.members)) {
		return both, false
	}
	return both, g.operands(a, b) <= maxLoopOperands && !g.between(a, b) && !(both.shape.Size() <= smallLoop && g.delays(a, b))
}

// delays reports whether a would wait, together with b, for a large loop that b needs and a does not. What else
// reads a could not be part of that loop then: the gradient of a cross-entropy reads the number of labels, as the
// loss does, which also needs the loop over all logits.
func (g *grouping) delays(a, b *group) bool {
	seen := map[*group]bool{a: true, b: true}
	var visit func(x *group, found func(*group) bool) bool
	visit = func(x *group, found func(*group) bool) bool {
		for _, before := range g.needs(x) {
			if !seen[before] {
				seen[before] = true
				if found(before) || visit(before, found) {
					return true
				}
			}
		}
		return false
	}
	visit(a, func(*group) bool { return false }) // what a needs anyway
	return visit(b, func(x *group) bool { return x.loop && x.shape.Size() >= largeLoop })
}

// base returns the value whose memory x is a view of.
func (g *grouping) base(x ir.ID) ir.ID {
	for ir.View(g.program.Values[x].Op) {
		x = g.program.Values[x].Args[0]
	}
	return x
}

// operands returns at most how many inputs and outputs a loop of both groups has: some of the
// outputs may join it later.
func (g *grouping) operands(a, b *group) int {
	inside := func(x ir.ID) bool { return g.of[x] == a || g.of[x] == b }
	inputs, outputs := map[ir.ID]bool{}, 0
	for _, m := range slices.Concat(a.members, b.members) {
		for _, x := range g.program.Values[m].Args {
			if !inside(g.base(x)) {
				inputs[x] = true
			}
		}
		if escapes(g.program, g.users, m, inside) {
			outputs++
		}
	}
	return len(inputs) + outputs
}

// between reports whether something outside of both groups depends on one of them, and one of
// them on it.
func (g *grouping) between(a, b *group) bool {
	first := min(a.members[0], b.members[0])
	seen := map[*group]bool{a: true, b: true}
	var reaches func(x *group) bool
	reaches = func(x *group) bool {
		for _, before := range g.needs(x) {
			if before == a || before == b {
				return true
			}
			// What ends before both begin cannot depend on them.
			if !seen[before] && before.members[len(before.members)-1] > first {
				seen[before] = true
				if reaches(before) {
					return true
				}
			}
		}
		return false
	}
	for _, x := range slices.Concat(g.needs(a), g.needs(b)) {
		if x != a && x != b && !seen[x] {
			seen[x] = true
			if reaches(x) {
				return true
			}
		}
	}
	return false
}

// needs returns the groups that must run before x.
func (g *grouping) needs(x *group) []*group {
	var needs []*group
	add := func(id ir.ID) {
		if y := g.of[id]; y != nil && y != x && !slices.Contains(needs, y) {
			needs = append(needs, y)
		}
	}
	for _, m := range x.members {
		for _, a := range g.program.Values[m].Args {
			add(g.base(a))
		}
		if e := g.effect[m]; e >= 0 && ir.Effect(g.program.Values[m].Op) {
			add(e)
		}
	}
	return needs
}

// merge makes two groups one, which is a loop of the kind of both.
func (g *grouping) merge(a, b *group, both group) *group {
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
func (g *grouping) ordered() []*group {
	var all []*group
	for i, x := range g.of {
		if x != nil && x.members[len(x.members)-1] == ir.ID(i) {
			all = append(all, x)
		}
	}
	slices.SortFunc(all, func(a, b *group) int {
		return cmp.Compare(a.members[len(a.members)-1], b.members[len(b.members)-1])
	})
	var order []*group
	done := map[*group]bool{}
	var visit func(x *group)
	visit = func(x *group) {
		if done[x] {
			return
		}
		done[x] = true
		for _, before := range g.needs(x) {
			visit(before)
		}
		order = append(order, x)
	}
	for _, x := range all {
		visit(x)
	}
	return order
}
