package lower

import (
	"slices"

	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// InShape returns the program with element-wise values in the shape in which others read them, and
// reductions in the shape of their operand. A loop computes values of one shape, so that a reshape
// between two of them, as behind the bias of a layer, would part them.
//
//	f(Reshape(x), ...) = Reshape(f(x, ...)), where x has fewer axes: see flat
//	Reshape(f(x))      = f(Reshape(x))
//	Reduce(Reshape(x)) = Reduce(x), along the axes that become those
func InShape(p *ir.Program) *ir.Program {
	p = prune(flat(p))
	moved := shapesOfReaders(p)
	return prune(rewrite(p, func(n *numbering, id ir.ID, v ir.Value) ir.ID {
		shape, moves := moved[id]
		for i, a := range p.Values[id].Args {
			if want := p.Values[a].Shape; moves {
				v.Args[i] = n.reshape(v.Args[i], shape)
			} else if v.Op != (ir.Reshape{}) {
				v.Args[i] = n.reshape(v.Args[i], want)
			}
		}
		if moves {
			v.Shape = shape
		}
		if op, ok := v.Op.(ir.Reduce); ok {
			return n.reduceAsComputed(v, op)
		}
		return n.simplest(v)
	}))
}

// reshape returns x in a shape.
func (n *numbering) reshape(x ir.ID, shape ir.Dims) ir.ID {
	v := n.of(x)
	v.Op, v.Args, v.Shape = ir.Reshape{}, []ir.ID{x}, shape
	return n.simplest(v)
}

// reduceAsComputed adds a reduction, of what its operand is a reshape of if that gives the same
// result.
func (n *numbering) reduceAsComputed(v ir.Value, op ir.Reduce) ir.ID {
	if x := n.of(v.Args[0]); x.Op == (ir.Reshape{}) {
		from := n.of(x.Args[0]).Shape
		axes, ok := axesBefore(from, x.Shape, op.Axes)
		shape := from
		for _, axis := range slices.Backward(axes) {
			shape = shape.Without(axis)
		}
		if ok && len(axes) > 0 && shape == v.Shape {
			v.Op, v.Args = ir.Reduce{Op: op.Op, Axes: ir.Of(axes...)}, x.Args
		}
	}
	return n.simplest(v)
}

// axesBefore returns the axes of a shape, in order, that become axes of another one by a reshape,
// false if they do not become these alone.
func axesBefore(from, to, axes ir.Dims) (before []int, ok bool) {
	for i, j := 0, 0; i < from.Len() && j < to.Len(); {
		first, second := i, j // of the next axes of the two that have as many elements
		n, m := from.At(i), to.At(j)
		for i, j = i+1, j+1; n != m; {
			switch {
			case n < m && i < from.Len():
				n *= from.At(i)
				i++
			case n > m && j < to.Len():
				m *= to.At(j)
				j++
			default:
				return nil, false
			}
		}
		reduced := 0
		for axis := second; axis < j; axis++ {
			if axes.Has(axis) {
				reduced++
			}
		}
		if reduced > 0 && reduced < j-second {
			return nil, false
		}
		for axis := first; axis < i && reduced > 0; axis++ {
			before = append(before, axis)
		}
	}
	return before, true
}

// flat returns the program with element-wise values of rows in the shape with the fewest axes in
// which one of their operands, or of their readers, has these rows: sums of a residual stream and
// of its gradient, say, in the shape of the norms and products between them.
func flat(p *ir.Program) *ir.Program {
	users := p.Users()
	return rewrite(p, func(n *numbering, id ir.ID, v ir.Value) ir.ID {
		shape := v.Shape
		if !anyShape(v.Op) || slices.Contains(p.Results, id) {
			return n.simplest(v)
		}
		fewer := func(s ir.Dims) {
			if s.Len() < shape.Len() && sameRows(s, v.Shape) {
				shape = s
			}
		}
		before := func(a ir.ID) ir.Dims { // the shape of what an operand is a reshape of
			if x := n.of(a); x.Op == (ir.Reshape{}) {
				return n.of(x.Args[0]).Shape
			}
			return n.of(a).Shape
		}
		for _, a := range v.Args {
			fewer(before(a))
		}
		for _, u := range users[id] {
			if p.Values[u].Op == (ir.Reshape{}) {
				fewer(p.Values[u].Shape)
			}
		}
		if shape == v.Shape || slices.ContainsFunc(v.Args, func(a ir.ID) bool {
			return before(a) != shape && !readable(n.program, a, shape)
		}) {
			return n.simplest(v)
		}
		own := v.Shape
		v.Shape = shape
		for i, a := range v.Args {
			v.Args[i] = n.reshape(a, shape)
		}
		return n.reshape(n.simplest(v), own)
	})
}

// sameRows reports whether two shapes of as many elements have rows of the same length.
func sameRows(a, b ir.Dims) bool {
	m, n := a.Len(), b.Len()
	return m > 1 && n > 1 && a.At(m-1) == b.At(n-1) && a.At(m-1) > 1
}

// shapesOfReaders returns the shapes of those element-wise values that loops read in one other
// shape, and whose operands can be read in it without a copy.
func shapesOfReaders(p *ir.Program) map[ir.ID]ir.Dims {
	users, moved := p.Users(), map[ir.ID]ir.Dims{}
	for i, v := range slices.Backward(p.Values) {
		if !anyShape(v.Op) || slices.Contains(p.Results, ir.ID(i)) {
			continue
		}
		var shapes []ir.Dims // in which loops read it
		ask := func(of ir.Dims, readers []ir.ID) {
			for _, u := range readers {
				shape, moves := moved[u]
				if !moves {
					shape = of
				}
				if ir.Elementwise(p.Values[u].Op) && !slices.Contains(shapes, shape) {
					shapes = append(shapes, shape)
				}
			}
		}
		ask(v.Shape, users[i])
		for _, u := range users[i] {
			if by := p.Values[u]; by.Op == (ir.Reshape{}) {
				ask(by.Shape, users[u])
			}
		}
		if len(shapes) == 1 && shapes[0] != v.Shape && !slices.ContainsFunc(v.Args,
			func(a ir.ID) bool { return !readable(p, a, shapes[0]) }) {
			moved[ir.ID(i)] = shapes[0]
		}
	}
	return moved
}

// anyShape reports whether an operation does the same to each element, whatever the shape.
func anyShape(op ir.Op) bool {
	switch op.(type) {
	case ir.Unary, ir.Binary, ir.Copy, ir.Cast, ir.Where:
		return true
	}
	return false
}

// readable reports whether loops can read a value in another shape without a copy: one that is
// computed, or one that is repeated along whole axes of that shape.
func readable(p *ir.Program, x ir.ID, shape ir.Dims) bool {
	v := p.Values[x]
	strides := v.Shape.Strides()
	if v.Op == (ir.Broadcast{}) {
		from := p.Values[v.Args[0]].Shape
		strides = from.Strides()
		for i := range from.Len() {
			if from.At(i) != v.Shape.At(i) {
				strides = strides.With(i, 0)
			}
		}
		v = p.Values[v.Args[0]]
	}
	for v.Op == (ir.Reshape{}) {
		v = p.Values[v.Args[0]]
	}
	_, ok := ir.Reshaped(p.Values[x].Shape, strides, shape)
	return ok && !ir.View(v.Op)
}
