package plan

import (
	"encoding/binary"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// key is what makes values equal: everything that they depend on.
type key struct {
	op    ir.Op
	shape ir.Dims
	dtype backend.DType
	args  string // the IDs
}

// numbering builds a program in which equal values are one value.
type numbering struct {
	program *ir.Program
	seen    map[key]ir.ID
}

func newNumbering() *numbering {
	return &numbering{&ir.Program{}, map[key]ir.ID{}}
}

// add returns the place of the value, which is new unless an equal one is there.
func (n *numbering) add(v ir.Value) ir.ID {
	if ir.Effect(v.Op) {
		return n.program.Add(v)
	}
	var args []byte
	for _, a := range v.Args {
		args = binary.AppendVarint(args, int64(a))
	}
	k := key{v.Op, v.Shape, v.DType, string(args)}
	if id, ok := n.seen[k]; ok {
		return id
	}
	id := n.program.Add(v)
	n.seen[k] = id
	return id
}

func (n *numbering) of(id ir.ID) ir.Value { return n.program.Values[id] }

// rewrite returns the program with every value given by f, which gets the value with its
// operands already rewritten.
func rewrite(p *ir.Program, f func(n *numbering, v ir.Value) ir.ID) *ir.Program {
	n := newNumbering()
	to := make([]ir.ID, len(p.Values))
	for i, v := range p.Values {
		args := make([]ir.ID, len(v.Args))
		for j, a := range v.Args {
			args[j] = to[a]
		}
		v.Args = args
		to[i] = f(n, v)
	}
	for _, r := range p.Results {
		n.program.Results = append(n.program.Results, to[r])
	}
	return n.program
}

// simplify makes equal values one, and removes views that change nothing.
func simplify(p *ir.Program) *ir.Program {
	return rewrite(p, (*numbering).simplest)
}

// simplest adds v, or finds what is equal to it.
func (n *numbering) simplest(v ir.Value) ir.ID {
	if !ir.View(v.Op) {
		return n.add(n.folded(v))
	}
	x := n.of(v.Args[0])
	switch op := v.Op.(type) {
	case ir.Reshape:
		if _, again := x.Op.(ir.Reshape); again {
			v.Args = x.Args
			x = n.of(v.Args[0])
		}
		if x.Shape == v.Shape {
			return v.Args[0]
		}
	case ir.Permute:
		if inner, again := x.Op.(ir.Permute); again {
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

// together returns the program with reductions of reductions as one, where nothing else reads the
// inner one: the gradient of a bias of images, say, which Gorgonia sums axis by axis.
func together(p *ir.Program) *ir.Program {
	users := outside(p)
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
	return &ir.Program{Values: values, Results: p.Results, Precision: p.Precision}
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
