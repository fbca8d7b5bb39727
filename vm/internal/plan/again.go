package plan

import (
	"slices"

	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// again returns the program in which later loops compute large values anew from what is in memory
// anyway, instead of loading what an earlier loop has stored: the normalised activations of a layer
// norm, say, from those that the next layers keep, or the derivative of an activation. The second
// result are these values: they do not join the loops of their operands.
func (l Limits) again(p *ir.Program) (*ir.Program, map[ir.ID]bool) {
	if !slices.ContainsFunc(p.Values, func(v ir.Value) bool {
		return v.Shape.Size()*v.DType.Size() >= l.AgainBytes
	}) {
		return p, nil
	}
	g := l.newGrouping(p, outside(p), nil, false)
	recipes := map[ir.ID]*recipe{}
	for i := range p.Values {
		if r, ok := g.recipe(ir.ID(i), recipes); ok {
			recipes[ir.ID(i)] = r
		}
	}
	if len(recipes) == 0 {
		return p, nil
	}
	w := &rewriter{grouping: g, recipes: recipes, program: &ir.Program{}, anew: map[ir.ID]bool{},
		done: map[copyOf]ir.ID{}}
	w.to = make([]ir.ID, len(p.Values))
	for i, v := range p.Values {
		w.to[i] = w.value(ir.ID(i), v)
	}
	for _, r := range p.Results {
		w.program.Results = append(w.program.Results, w.to[r])
	}
	q, to := pruned(w.program)
	anew := map[ir.ID]bool{}
	for id := range w.anew {
		anew[to[id]] = true
	}
	return q, anew
}

// recipe is how a value is computed again.
type recipe struct {
	values []ir.ID // in order, itself last
	loads  []ir.ID // what they read
	ops    int     // with those of recipes of what they read
}

// recipe returns that of a value of a loop which others only read in loops of the same shape, if it
// is worth computing it there: if what they load instead has no more bytes than the value, which is
// then not stored. What they load anyway does not count, and in place of what others compute again,
// before is how, what that loads.
func (g *grouping) recipe(m ir.ID, before map[ir.ID]*recipe) (*recipe, bool) {
	v, own := g.program.Values[m], g.of[m]
	bytes := v.Shape.Size() * v.DType.Size()
	if own == nil || !own.loop || v.Shape != own.shape || bytes < g.AgainBytes || !g.cheap(m) ||
		!g.readByLoops(m) {
		return nil, false
	}
	r, loaded := &recipe{}, 0
	seen := map[ir.ID]bool{}
	var visit func(x ir.ID)
	visit = func(x ir.ID) {
		if seen[x] {
			return
		}
		seen[x] = true
		if x != m && !g.inside(x, own) {
			if other := before[x]; other != nil {
				r.ops += other.ops
				for _, a := range other.loads {
					visit(a)
				}
				return
			}
			r.loads = append(r.loads, x)
			if !g.readByAll(x, m, before) {
				loaded += g.bytes(x, own.shape)
			}
			return
		}
		for _, a := range g.program.Values[x].Args {
			visit(a)
		}
		r.values = append(r.values, x)
	}
	visit(m)
	r.ops += len(r.values)
	return r, loaded <= bytes && r.ops <= g.AgainOps && !slices.ContainsFunc(r.values,
		func(x ir.ID) bool { return !g.cheap(x) })
}

// readByAll reports whether all loops that read m read x, too, maybe to compute something again.
func (g *grouping) readByAll(x, m ir.ID, before map[ir.ID]*recipe) bool {
	reads := func(r ir.ID) bool {
		return slices.ContainsFunc(g.program.Values[r].Args, func(a ir.ID) bool {
			return a == x || before[a] != nil && slices.Contains(before[a].loads, x)
		})
	}
	return !slices.ContainsFunc(g.users[m], func(u ir.ID) bool {
		return g.of[u] != g.of[m] && !slices.ContainsFunc(g.of[u].members, reads)
	})
}

// cheap reports whether a value is computed element by element, from its operands alone.
func (g *grouping) cheap(x ir.ID) bool {
	switch g.program.Values[x].Op.(type) {
	case ir.Unary, ir.Binary, ir.Where, ir.Cast:
		return true
	}
	return false
}

// readByLoops reports whether something outside of its loop reads m, and only element-wise values
// and reductions of other loops do.
func (g *grouping) readByLoops(m ir.ID) bool {
	elsewhere := false
	for _, u := range g.users[m] {
		other := g.of[u]
		if u == m || other == nil || !other.loop || other.shape != g.of[m].shape {
			return false
		}
		elsewhere = elsewhere || other != g.of[m]
	}
	return elsewhere
}

// inside reports whether x is computed by the loop from which it is read, and is not in memory
// anyway.
func (g *grouping) inside(x ir.ID, own *group) bool {
	return g.of[x] == own && g.program.Values[x].Shape == own.shape &&
		!escapes(g.program, g.users, x, func(u ir.ID) bool { return g.of[u] == own })
}

// bytes returns what a loop loads of x: of what it repeats, next to nothing.
func (g *grouping) bytes(x ir.ID, shape ir.Dims) int {
	for ; ir.View(g.program.Values[x].Op); x = g.program.Values[x].Args[0] {
		if _, repeats := g.program.Values[x].Op.(ir.Broadcast); repeats {
			return 0
		}
	}
	v := g.program.Values[x]
	if v.Shape.Size() < shape.Size() {
		return 0
	}
	return v.Shape.Size() * v.DType.Size()
}

// copyOf is a value as a loop computes it again.
type copyOf struct {
	value ir.ID
	loop  *group
}

// rewriter writes a program with copies.
type rewriter struct {
	*grouping
	recipes map[ir.ID]*recipe
	program *ir.Program
	to      []ir.ID // by value of the old program
	anew    map[ir.ID]bool
	done    map[copyOf]ir.ID
}

// value adds a value, and before it what its loop computes again of its operands.
func (w *rewriter) value(id ir.ID, v ir.Value) ir.ID {
	args := make([]ir.ID, len(v.Args))
	for i, a := range v.Args {
		args[i] = w.to[a]
		if r := w.recipes[a]; r != nil && w.of[id] != w.of[a] {
			args[i] = w.copy(r, w.of[id])
		}
	}
	v.Args = args
	return w.program.Add(v)
}

// copy adds the values of a recipe for a loop, unless it has them, and returns the last.
func (w *rewriter) copy(r *recipe, loop *group) (last ir.ID) {
	for _, x := range r.values {
		var known bool
		if last, known = w.done[copyOf{x, loop}]; known {
			continue
		}
		v := w.grouping.program.Values[x]
		args := make([]ir.ID, len(v.Args))
		for i, a := range v.Args {
			args[i] = w.to[a]
			if c, copied := w.done[copyOf{a, loop}]; copied {
				args[i] = c
			} else if other := w.recipes[a]; other != nil {
				args[i] = w.copy(other, loop)
			}
		}
		v.Args = args
		last = w.program.Add(v)
		w.done[copyOf{x, loop}], w.anew[last] = last, true
	}
	return last
}
