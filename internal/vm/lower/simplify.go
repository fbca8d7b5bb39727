package lower

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// simplify makes equal values one, and removes views that change nothing:
//
//	f(x), f(x)          = one value
//	Reshape(Reshape(x)) = Reshape(x), and x if it has that shape; of permutations, too
//	f(1, 2)             = a number
//	Gather(Cast(x))     = Cast(Gather(x)) of 16-bit floats: of the rows, not of the table
func simplify(p *ir.Program) *ir.Program {
	return rewrite(p, func(n *numbering, _ ir.ID, v ir.Value) ir.ID { return n.simplest(v) })
}

// simplest adds v, or finds what is equal to it.
func (n *numbering) simplest(v ir.Value) ir.ID {
	if table, ok := n.tableOfHalf(v); ok {
		wide := v.DType
		v.Args, v.DType = []ir.ID{table, v.Args[1]}, n.of(table).DType
		v.Op, v.Args, v.DType = ir.Cast{}, []ir.ID{n.add(v)}, wide
	}
	if !ir.View(v.Op) {
		return n.add(n.folded(v))
	}
	x := n.of(v.Args[0])
	switch op := v.Op.(type) {
	case ir.Reshape:
		if _, reshape := x.Op.(ir.Reshape); reshape {
			v.Args = x.Args
			x = n.of(v.Args[0])
		}
		if x.Shape == v.Shape {
			return v.Args[0]
		}
	case ir.Permute:
		if inner, permute := x.Op.(ir.Permute); permute {
			for i := range op.Axes.Len() {
				op.Axes = op.Axes.With(i, inner.Axes.At(op.Axes.At(i)))
			}
			v.Op, v.Args = op, x.Args
		}
		if op.Axes == identity(op.Axes.Len()) {
			return v.Args[0]
		}
	case ir.Broadcast, ir.Slice:
		if x.Shape == v.Shape {
			return v.Args[0]
		}
	}
	return n.add(v)
}

// tableOfHalf returns the variable of 16-bit floats of which a Gather takes rows that were widened:
// of pairs of elements, which devices move as words.
func (n *numbering) tableOfHalf(v ir.Value) (table ir.ID, ok bool) {
	op, ok := v.Op.(ir.Gather)
	if !ok || n.of(v.Args[0]).Op != (ir.Cast{}) {
		return 0, false
	}
	width := 1
	for axis := op.Axis + 1; axis < v.Shape.Len(); axis++ {
		width *= v.Shape.At(axis)
	}
	table = n.of(v.Args[0]).Args[0]
	of := n.of(table)
	for of.Op == (ir.Reshape{}) {
		of = n.of(of.Args[0])
	}
	_, variable := of.Op.(ir.Input)
	return table, variable && of.DType.Size() == 2 && width%2 == 0
}

// mergeReductions makes reductions of reductions one, where nothing else reads the inner one: the
// gradient of a bias of images, say, which Gorgonia sums axis by axis.
//
//	Reduce(Reduce(x, a), b) = Reduce(x, a and b), in another order
func mergeReductions(p *ir.Program) *ir.Program {
	users := p.Users()
	values := slices.Clone(p.Values)
	for i, v := range values {
		outer, ok := v.Op.(ir.Reduce)
		if !ok || len(users[v.Args[0]]) > 1 {
			continue
		}
		x := values[v.Args[0]]
		if inner, ok := x.Op.(ir.Reduce); ok && inner.Op == outer.Op {
			var axes []int
			kept := -1 // the number of an axis among those that the inner reduction keeps
			for axis := range values[x.Args[0]].Shape.Len() {
				reduced := inner.Axes.Has(axis)
				if !reduced {
					kept++
				}
				if reduced || outer.Axes.Has(kept) {
					axes = append(axes, axis)
				}
			}
			values[i].Op, values[i].Args = ir.Reduce{Op: outer.Op, Axes: ir.Of(axes...)}, x.Args
		}
	}
	return &ir.Program{Values: values, Results: p.Results}
}

// folded returns v as a number if it is computed from numbers. The result is rounded as at run
// time: float64 holds enough digits for one operation on float32.
func (n *numbering) folded(v ir.Value) ir.Value {
	var x []float64
	for _, a := range v.Args {
		number, ok := n.of(a).Op.(ir.Scalar)
		if !ok || v.DType != backend.F32 && v.DType != backend.F64 {
			return v
		}
		x = append(x, number.Float())
	}
	y, ok := evaluate(v.Op, x)
	if !ok {
		return v
	}
	if v.DType == backend.F32 {
		y = float64(float32(y))
	}
	return ir.Value{Op: ir.ScalarOf(y), Shape: v.Shape, DType: v.DType, Name: v.Name}
}

// evaluate computes what IEEE 754 defines to the last bit.
func evaluate(op ir.Op, x []float64) (float64, bool) {
	switch op {
	case ir.Unary{Op: fuse.Neg}:
		return -x[0], true
	case ir.Binary{Op: fuse.Add}:
		return x[0] + x[1], true
	case ir.Binary{Op: fuse.Sub}:
		return x[0] - x[1], true
	case ir.Binary{Op: fuse.Mul}:
		return x[0] * x[1], true
	case ir.Binary{Op: fuse.Div}:
		return x[0] / x[1], true
	}
	return 0, false
}

func identity(n int) ir.Dims {
	d := ir.Dims{}
	for i := range n {
		d = d.Insert(i, i)
	}
	return d
}
