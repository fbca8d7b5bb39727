package lower

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// tiling computes the loss of a large vocabulary in tiles of rows: a few rows of the logits, which
// are a matrix multiplication, what follows from each row alone, such as loss and gradient, and the
// matrix multiplications that read that. So neither logits nor their gradient are ever there as a
// whole.
//
// Each row has the operations that it has without tiles. A matrix multiplication that adds up over
// rows, the gradient of the vocabulary's weights, is added up tile by tile: its bits change.
type tiling struct {
	p      *ir.Program
	logits ir.ID
	rows   int    // of the logits
	tile   int    // rows of a tile
	of     []bool // by value: it has rows of the region, and follows from the logits' row by row
	ends   []bool // by value: a matrix multiplication that reads one of these
	after  []bool // by value: it depends on the logits
	to     []ir.ID
	full   []bool // by value: what to has is there
	q      *ir.Program
}

// Tile returns the program with its largest matrix multiplication, the logits, and what follows
// from them row by row, in so many tiles of rows:
//
//	f(x) = Concat(f(rows of x), f(next rows of x), ...)
//	xᵀy  = (rows of x)ᵀ(rows of y) + (next rows of x)ᵀ(next rows of y) + ..., in another order
func Tile(p *ir.Program, tiles int) (*ir.Program, error) {
	t := &tiling{p: p, logits: -1}
	for i, v := range p.Values {
		op, matmul := v.Op.(ir.MatMul)
		if matmul && !op.TransA && v.Shape.Len() == 2 && (t.logits < 0 ||
			v.Shape.Size() > p.Values[t.logits].Shape.Size()) {
			t.logits = ir.ID(i)
		}
	}
	if t.logits < 0 {
		return nil, fmt.Errorf("%w: tiles of a loss: there is no matrix multiplication",
			backend.ErrUnsupported)
	}
	v := p.Values[t.logits]
	t.rows = v.Shape.At(0)
	if t.tile = t.rows / tiles; t.tile*tiles != t.rows {
		return nil, fmt.Errorf("%w: %d tiles of a loss: the largest matrix multiplication, %s, "+
			"has %d rows, which they do not divide", backend.ErrUnsupported, tiles, v.Name, t.rows)
	}
	if !t.find() {
		return nil, fmt.Errorf("%w: tiles of a loss: something needs all rows of the largest "+
			"matrix multiplication, %s, at once", backend.ErrUnsupported, v.Name)
	}
	q := t.program()
	return q, q.Check()
}

// find finds what is computed in tiles, if it can be.
func (t *tiling) find() bool {
	n := len(t.p.Values)
	t.of, t.ends, t.after = make([]bool, n), make([]bool, n), make([]bool, n)
	t.of[t.logits], t.after[t.logits] = true, true
	effect := make([]bool, n) // it needs one behind the logits, whose place among others must stay
	large := max(t.rows, t.p.Values[t.logits].Shape.Size()/8)
	for i, v := range t.p.Values[t.logits+1:] {
		id := t.logits + 1 + ir.ID(i)
		has := func(is func(a ir.ID) bool) bool { return slices.ContainsFunc(v.Args, is) }
		t.after[id] = has(func(a ir.ID) bool { return t.after[a] })
		effect[id] = ir.Effect(v.Op) || has(func(a ir.ID) bool { return effect[a] })
		// what tiles read must be there before the first
		late := has(func(a ir.ID) bool { return !t.of[a] && (t.after[a] || effect[a]) })
		switch {
		case !has(func(a ir.ID) bool { return t.of[a] }):
		case !late && t.multiplies(v):
			t.ends[id] = true
		case !late && t.byRows(v):
			t.of[id] = true
		case has(func(a ir.ID) bool { return t.of[a] && t.p.Values[a].Shape.Size() > large }):
			return false // it reads all logits
		}
	}
	return !slices.ContainsFunc(t.p.Results, func(r ir.ID) bool {
		return t.of[r] && t.p.Values[r].Shape.Size() > large
	})
}

// led reports whether the first axis of a shape is the rows.
func (t *tiling) led(shape ir.Dims) bool { return shape.Len() > 0 && shape.At(0) == t.rows }

// byRows reports whether each row of a value follows from the same row of its operands.
func (t *tiling) byRows(v ir.Value) bool {
	if !t.led(v.Shape) || slices.ContainsFunc(v.Args, func(a ir.ID) bool {
		return t.of[a] && !t.led(t.p.Values[a].Shape)
	}) {
		return false
	}
	switch op := v.Op.(type) {
	case ir.Unary, ir.Binary, ir.Copy, ir.Cast, ir.Where, ir.Reshape, ir.Broadcast:
		return true
	case ir.Locate:
		return op.Axis > 0
	case ir.Select:
		return op.Axis > 0
	case ir.Reduce:
		return !op.Axes.Has(0)
	}
	return false
}

// multiplies reports whether a value is a matrix multiplication of which one operand is computed in
// tiles, by rows of the result or as a sum over rows.
func (t *tiling) multiplies(v ir.Value) bool {
	op, matmul := v.Op.(ir.MatMul)
	if !matmul || v.Shape.Len() != 2 || t.of[v.Args[0]] == t.of[v.Args[1]] {
		return false
	}
	if op.TransA { // rows are what is added up
		return !op.TransB && t.led(t.p.Values[v.Args[0]].Shape)
	}
	return t.of[v.Args[0]]
}

// program returns the program in tiles. What they need comes before the first of them.
func (t *tiling) program() *ir.Program {
	t.q = &ir.Program{}
	t.to, t.full = make([]ir.ID, len(t.p.Values)), make([]bool, len(t.p.Values))
	for id := range t.p.Values {
		t.emit(ir.ID(id))
	}
	t.q.Results = mapped(t.p.Results, t.to)
	return prune(t.q)
}

// emit makes sure that all of a value is there, and returns it.
func (t *tiling) emit(id ir.ID) ir.ID {
	switch {
	case t.full[id]:
	case t.of[id] || t.ends[id]:
		t.tiles()
	default:
		v := t.p.Values[id]
		v.Args = slices.Clone(v.Args)
		for i, a := range v.Args {
			v.Args[i] = t.emit(a)
		}
		t.to[id], t.full[id] = t.q.Add(v), true
	}
	return t.to[id]
}

// tiles adds all tiles, one behind the other, and what they give.
func (t *tiling) tiles() {
	parts := map[ir.ID][]ir.ID{}
	for from := 0; from < t.rows; from += t.tile {
		done := map[ir.ID]ir.ID{}
		for id, v := range t.p.Values {
			id := ir.ID(id)
			if !t.of[id] && !t.ends[id] {
				continue
			}
			part := t.part(id, from, done)
			if t.sums(v) && from > 0 {
				part = t.q.Add(ir.Value{Op: ir.Binary{Op: fuse.Add}, Args: []ir.ID{parts[id][0],
					part}, Shape: v.Shape, DType: sumOf(v.DType), Name: v.Name})
				parts[id] = nil
			}
			parts[id] = append(parts[id], part)
		}
	}
	for id, v := range t.p.Values {
		id := ir.ID(id)
		switch all := parts[id]; {
		case all == nil:
			continue
		case t.sums(v) && v.DType == sumOf(v.DType):
			t.to[id] = all[0]
		case t.sums(v):
			v.Op, v.Args = ir.Cast{}, all
			t.to[id] = t.q.Add(v)
		default:
			v.Op, v.Args = ir.Concat{}, all
			t.to[id] = t.q.Add(v)
		}
		t.full[id] = true
	}
}

// sums reports whether a value is a matrix multiplication that adds up over rows.
func (t *tiling) sums(v ir.Value) bool {
	op, matmul := v.Op.(ir.MatMul)
	return matmul && op.TransA
}

// part returns the rows of a value from one on that belong to a tile, or what they add to a sum.
func (t *tiling) part(id ir.ID, from int, done map[ir.ID]ir.ID) ir.ID {
	if x, ok := done[id]; ok {
		return x
	}
	v := t.p.Values[id]
	_, broadcast := v.Op.(ir.Broadcast)
	weights := -1 // which operand is whole
	switch _, matmul := v.Op.(ir.MatMul); {
	case t.ends[id] && t.sums(v):
		v.DType = sumOf(v.DType)
	case t.of[id] || t.ends[id]:
		if v.Shape = v.Shape.With(0, t.tile); matmul {
			weights = 1
		}
	case t.perTile(v):
		v.Shape = v.Shape.With(0, t.tile)
	default:
		done[id] = t.q.Add(ir.Value{Op: ir.Slice{Start: from, Step: 1}, Args: []ir.ID{t.emit(id)},
			Shape: v.Shape.With(0, t.tile), DType: v.DType, Name: v.Name})
		return done[id]
	}
	args := slices.Clone(v.Args)
	for i, a := range args {
		if i == weights || broadcast && !t.led(t.p.Values[a].Shape) {
			args[i] = t.emit(a)
		} else {
			args[i] = t.part(a, from, done)
		}
	}
	v.Args = args
	done[id] = t.q.Add(v)
	return done[id]
}

// perTile reports whether each tile has its own of a value that does not follow from the logits:
// what repeats a part of another value or has its rows, and what is as large as logits.
func (t *tiling) perTile(v ir.Value) bool {
	switch v.Op.(type) {
	case ir.Broadcast:
		return true
	case ir.Reshape:
		return t.led(t.p.Values[v.Args[0]].Shape)
	}
	return v.Shape.Size() > t.rows && ir.Elementwise(v.Op) && t.byRows(v)
}

// sumOf is the dtype in which parts of a sum are added up.
func sumOf(d backend.DType) backend.DType {
	if d == backend.BF16 {
		return backend.F32
	}
	return d
}
