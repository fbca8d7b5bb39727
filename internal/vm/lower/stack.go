package lower

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// stack makes matrix multiplications of one value by several matrices of BF16 that no run changes
// a single one: queries, keys and values of a block that generates, say. A matrix is in one stack,
// and what else a run reads of it is its part of that, so that there is one copy of each.
//
//	x A, x B = Slices(x Concat(A, B))
func stack(p *ir.Program, frozen []ir.Op) *ir.Program {
	fixed := newHoisting(p, frozen).fixed
	products, matrices := stacks(p, fixed)
	emitted := map[ir.ID]ir.ID{}
	return rewrite(p, func(n *numbering, id ir.ID, v ir.Value) ir.ID {
		for i, a := range p.Values[id].Args {
			if s := matrices[a]; s != nil && (!fixed[id] || ir.View(v.Op)) {
				v.Args[i] = s.part(n, p, a, emitted)
			}
		}
		if s := products[id]; s != nil {
			return s.product(n, p, v, p.Values[id])
		}
		return n.simplest(v)
	})
}

// stacked is matrices that become one, along an axis.
type stacked struct {
	axis     int
	matrices []ir.ID
	all      ir.ID           // the one
	parts    map[ir.ID]ir.ID // of it, by matrix, once it is there
}

// stacks returns the stacks, by product and by matrix, given which values no run changes.
func stacks(p *ir.Program, fixed []bool) (products, matrices map[ir.ID]*stacked) {
	type alike struct {
		x     ir.ID
		op    ir.MatMul
		dtype backend.DType
		axis  int
	}
	of, order := map[alike][]ir.ID{}, []alike(nil)
	for i, v := range p.Values {
		op, ok := v.Op.(ir.MatMul)
		if !ok || v.Shape.Len() != 2 || fixed[v.Args[0]] || !fixed[v.Args[1]] ||
			p.Values[v.Args[1]].DType != backend.BF16 {
			continue
		}
		_, axis := matrixOf(p, v)
		k := alike{v.Args[0], op, v.DType, axis}
		if of[k] == nil {
			order = append(order, k)
		}
		of[k] = append(of[k], ir.ID(i))
	}
	products, matrices = map[ir.ID]*stacked{}, map[ir.ID]*stacked{}
	for _, k := range order {
		var all []ir.ID
		for _, id := range of[k] {
			m, _ := matrixOf(p, p.Values[id])
			all = append(all, m)
		}
		s := matrices[all[0]]
		if s == nil || s.axis != k.axis || !slices.Equal(slices.Sorted(slices.Values(all)),
			slices.Sorted(slices.Values(s.matrices))) {
			s = &stacked{axis: k.axis, matrices: slices.DeleteFunc(slices.Clone(all),
				func(m ir.ID) bool { return matrices[m] != nil })}
		}
		for i, m := range all {
			if len(s.matrices) > 1 && slices.Contains(s.matrices, m) {
				products[of[k][i]], matrices[m] = s, s
			}
		}
	}
	return products, matrices
}

// matrixOf returns the second operand of a product, or what is transposed for it, and the axis
// along which others are put to it.
func matrixOf(p *ir.Program, product ir.Value) (m ir.ID, axis int) {
	if axis = 1; product.Op.(ir.MatMul).TransB {
		axis = 0
	}
	m = product.Args[1]
	if by := p.Values[m]; by.Op == (ir.Permute{Axes: ir.Of(1, 0)}) {
		return by.Args[0], 1 - axis
	}
	return m, axis
}

// part returns what a matrix has become.
func (s *stacked) part(n *numbering, p *ir.Program, matrix ir.ID, emitted map[ir.ID]ir.ID) ir.ID {
	if s.parts != nil {
		return s.parts[matrix]
	}
	var args []ir.ID
	length, at := 0, 0
	for _, m := range s.matrices {
		args = append(args, n.emit(p, m, emitted))
		length += p.Values[m].Shape.At(s.axis)
	}
	v := p.Values[s.matrices[0]]
	v.Op, v.Args, v.Shape = ir.Concat{Axis: s.axis}, args, v.Shape.With(s.axis, length)
	s.all, s.parts = n.add(v), map[ir.ID]ir.ID{}
	for _, m := range s.matrices {
		length := p.Values[m].Shape.At(s.axis)
		s.parts[m] = n.slice(s.all, s.axis, at, length)
		at += length
	}
	return s.parts[matrix]
}

// product returns the part that a product is of the one by all matrices, given both as rewritten
// and as it was.
func (s *stacked) product(n *numbering, p *ir.Program, v, before ir.Value) ir.ID {
	matrix, _ := matrixOf(p, before)
	part, _ := n.of(s.parts[matrix]).Op.(ir.Slice)
	by, columns := n.of(s.all), v.Shape.At(1)
	v.Args[1], v.Shape = s.all, v.Shape.With(1, by.Shape.At(s.axis))
	if (s.axis == 0) != v.Op.(ir.MatMul).TransB {
		by.Op, by.Args = ir.Permute{Axes: ir.Of(1, 0)}, []ir.ID{s.all}
		by.Shape = ir.Of(by.Shape.At(1), by.Shape.At(0))
		v.Args[1] = n.simplest(by)
	}
	return n.slice(n.simplest(v), 1, part.Start, columns)
}

// emit adds a value of p that no run changes, after its operands, if it is not there.
func (n *numbering) emit(p *ir.Program, id ir.ID, emitted map[ir.ID]ir.ID) ir.ID {
	if to, ok := emitted[id]; ok {
		return to
	}
	v := p.Values[id]
	args := make([]ir.ID, len(v.Args))
	for i, a := range v.Args {
		args[i] = n.emit(p, a, emitted)
	}
	v.Args = args
	emitted[id] = n.simplest(v)
	return emitted[id]
}

func (n *numbering) slice(x ir.ID, axis, start, length int) ir.ID {
	v := n.of(x)
	return n.simplest(ir.Value{Op: ir.Slice{Axis: axis, Start: start, Step: 1}, Args: []ir.ID{x},
		Shape: v.Shape.With(axis, length), DType: v.DType, Name: v.Name})
}
