package lower

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// stack makes matrix multiplications of one value by several matrices of BF16 that no run changes
// a single one: queries, keys and values of a block that generates, say. What else reads a matrix
// later reads its part of the stack, so that there is one copy of each.
//
//	x A, x B = Slices(x Concat(A, B))
func stack(p *ir.Program, frozen []ir.Op) *ir.Program {
	groups := stacks(p, newHoisting(p, frozen).fixed)
	emitted, parts := map[ir.ID]ir.ID{}, map[ir.ID]ir.ID{}
	return rewrite(p, func(n *numbering, id ir.ID, v ir.Value) ir.ID {
		for i, a := range v.Args {
			if part, ok := parts[a]; ok {
				v.Args[i] = part
			}
		}
		g := groups[id]
		if g == nil {
			return n.simplest(v)
		}
		if g.product == nil {
			g.emit(n, p, v, emitted, parts)
		}
		return g.product[id]
	})
}

// stacked is several products of one value.
type stacked struct {
	products []ir.ID
	matrices []ir.ID // their second operands, or what these are transposed, by rows
	byRows   bool
	product  map[ir.ID]ir.ID // the part of each, once there is the one
}

// stacks returns the products that become one, by product, given which values no run changes.
func stacks(p *ir.Program, fixed []bool) map[ir.ID]*stacked {
	type shared struct {
		x      ir.ID
		op     ir.MatMul
		dtype  backend.DType
		byRows bool
	}
	all, of := map[shared]*stacked{}, map[ir.ID]*stacked{}
	for i, v := range p.Values {
		op, ok := v.Op.(ir.MatMul)
		if !ok || v.Shape.Len() != 2 || fixed[v.Args[0]] || !fixed[v.Args[1]] ||
			p.Values[v.Args[1]].DType != backend.BF16 {
			continue
		}
		matrix, byRows := v.Args[1], op.TransB
		if by := p.Values[matrix]; by.Op == (ir.Permute{Axes: ir.Of(1, 0)}) && !byRows {
			matrix, byRows = by.Args[0], true
		}
		k := shared{v.Args[0], op, v.DType, byRows}
		if all[k] == nil {
			all[k] = &stacked{byRows: byRows}
		}
		all[k].products = append(all[k].products, ir.ID(i))
		all[k].matrices = append(all[k].matrices, matrix)
	}
	for _, g := range all {
		for _, id := range g.products {
			if len(g.products) > 1 {
				of[id] = g
			}
		}
	}
	return of
}

// emit adds the product, of which v is the first one, and maps matrices to their parts.
func (g *stacked) emit(n *numbering, p *ir.Program, v ir.Value, emitted, parts map[ir.ID]ir.ID) {
	axis, columns := 1, 0
	if g.byRows {
		axis = 0
	}
	var args []ir.ID
	shape := p.Values[g.matrices[0]].Shape
	for _, m := range g.matrices {
		args = append(args, n.emit(p, m, emitted))
		columns += p.Values[m].Shape.At(axis)
	}
	first := n.of(args[0])
	all := n.add(ir.Value{Op: ir.Concat{Axis: axis}, Args: args, Shape: shape.With(axis, columns),
		DType: first.DType, Name: v.Name})
	by, transpose := all, ir.Permute{Axes: ir.Of(1, 0)}
	if op := v.Op.(ir.MatMul); g.byRows && !op.TransB {
		by = n.permute(all, transpose)
	}
	rows := v.Shape.At(0)
	v.Args, v.Shape = []ir.ID{v.Args[0], by}, ir.Of(rows, columns)
	y, at := n.simplest(v), 0
	g.product = map[ir.ID]ir.ID{}
	for i, m := range g.matrices {
		of := p.Values[m].Shape
		part := n.slice(all, axis, at, of.At(axis))
		if parts[args[i]] = part; g.byRows {
			parts[n.permute(args[i], transpose)] = n.permute(part, transpose)
		}
		g.product[g.products[i]] = n.slice(y, 1, at, of.At(axis))
		at += of.At(axis)
	}
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

func (n *numbering) permute(x ir.ID, op ir.Permute) ir.ID {
	v := n.of(x)
	shape, _ := ir.Permuted(v.Shape, op.Axes)
	return n.simplest(ir.Value{Op: op, Args: []ir.ID{x}, Shape: shape, DType: v.DType,
		Name: v.Name})
}

func (n *numbering) slice(x ir.ID, axis, start, length int) ir.ID {
	v := n.of(x)
	return n.simplest(ir.Value{Op: ir.Slice{Axis: axis, Start: start, Step: 1}, Args: []ir.ID{x},
		Shape: v.Shape.With(axis, length), DType: v.DType, Name: v.Name})
}
