package plan

import (
	"slices"

	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// A loop that folds rows has values of two kinds: those of its shape, and those that have one
// element for each row, along the last axis. Reductions of rows are of the second kind, what is
// computed from them by elements, and what is repeated along rows.

// rowable reports whether a loop may fold its rows.
func (l Limits) rowable(shape, axes ir.Dims) bool {
	last := shape.Len() - 1
	if last < 0 || axes != ir.Of(last) {
		return false
	}
	n := shape.At(last)
	return n > 1 && n <= l.LongRow && (n <= l.ShortRow || shape.Size()/n >= l.ManyRows)
}

// across reports whether a loop that folds its rows may also fold all other axes.
func across(shape, axes ir.Dims) bool {
	last := shape.Len() - 1
	return last > 0 && axes.Len() == last && !axes.Has(last) && shape.At(last) <= fuse.MaxFoldedRow
}

// oncePerRow reports whether a value of shape s has one element for each row of a loop.
func oncePerRow(s, loop ir.Dims) bool {
	last := loop.Len() - 1
	return last >= 0 && (s == loop.Without(last) || s == loop.With(last, 1))
}

// alongRows returns the value with one element for each row of a loop that x is, or that x repeats;
// false if x is another view.
func alongRows(p *ir.Program, x ir.ID, loop ir.Dims) (ir.ID, bool) {
	for ir.View(p.Values[x].Op) {
		v := p.Values[x]
		from := p.Values[v.Args[0]].Shape
		switch v.Op.(type) {
		case ir.Reshape:
			if !oncePerRow(v.Shape, loop) || !oncePerRow(from, loop) {
				return x, false
			}
		case ir.Broadcast:
			if v.Shape != loop || !oncePerRow(from, loop) || from.Len() != loop.Len() {
				return x, false
			}
		default:
			return x, false
		}
		x = v.Args[0]
	}
	return x, oncePerRow(p.Values[x].Shape, loop)
}

// joined returns the shape, the reduced axes and the kind of a loop of two groups; false if there
// is none.
func (g *grouping) joined(a, b *group) (both group, ok bool) {
	if a.shape == b.shape {
		both = group{shape: a.shape, axes: a.axes, rows: a.rows || b.rows, columns: a.columns ||
			b.columns}
		switch {
		case both.axes.Len() == 0:
			both.axes = b.axes
		case a.axes != b.axes && b.axes.Len() > 0:
			if both.axes = ir.Of(a.shape.Len() - 1); a.axes != both.axes {
				a, b = b, a
			}
			both.rows, both.columns = true, true
			return both, a.axes == both.axes && across(b.shape, b.axes)
		}
		return both, true
	}
	wide, once := a, b
	if a.shape.Size() < b.shape.Size() {
		wide, once = b, a
	}
	ok = g.rowable(wide.shape, wide.axes) && once.axes.Len() == 0 &&
		oncePerRow(once.shape, wide.shape) &&
		!slices.ContainsFunc(once.members, func(m ir.ID) bool {
			return ir.ReadsPlace(g.program.Values[m].Op)
		})
	return group{shape: wide.shape, axes: wide.axes, rows: true, columns: wide.columns}, ok
}

// reads reports whether values of b can read those of a in one loop. It sets both.rows if they do
// so along rows.
func (g *grouping) reads(a, b, both *group) bool {
	for _, m := range b.members {
		for _, x := range g.program.Values[m].Args {
			base := g.base[x]
			if g.of[base] != a {
				continue
			}
			fold, reduced := g.program.Values[base].Op.(ir.Reduce)
			if base == x && !reduced {
				continue
			}
			if reduced && fold.Axes != both.axes {
				return false
			}
			if from, ok := alongRows(g.program, x, both.shape); !ok || from != base {
				return false
			}
			both.rows = true
		}
	}
	return true
}

// crosses reports whether members of a loop read operands that lie in memory across its rows.
func (g *grouping) crosses(members []ir.ID) bool {
	across := func(x ir.ID) bool {
		for ; ir.View(g.program.Values[x].Op); x = g.program.Values[x].Args[0] {
			p, ok := g.program.Values[x].Op.(ir.Permute)
			if last := p.Axes.Len() - 1; ok && p.Axes.At(last) != last {
				return true
			}
		}
		return false
	}
	return slices.ContainsFunc(members, func(m ir.ID) bool {
		return slices.ContainsFunc(g.program.Values[m].Args, across)
	})
}
