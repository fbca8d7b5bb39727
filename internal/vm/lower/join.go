package lower

import (
	"cmp"
	"slices"

	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// join makes the gradient of parts that side by side are a whole, such as queries, keys and values
// of one matrix multiplication, their concatenation: graphs add up arrays of zeros with a part in
// each.
//
//	Unslice(x) + Unslice(y)  = Concat(x, y)
//	Permute(Concat(x, y))    = Concat(Permute(x), Permute(y))
func join(p *ir.Program) *ir.Program {
	return inOrder(rewrite(p, func(n *numbering, _ ir.ID, v ir.Value) ir.ID {
		if parts, axis, ok := n.parts(v); ok {
			v = ir.Value{Op: ir.Concat{Axis: axis}, Args: parts, Shape: v.Shape, DType: v.DType,
				Name: v.Name}
		}
		return n.simplest(v)
	}))
}

// maxParts bounds how many operands of a sum are looked at.
const maxParts = 64

// parts returns the parts that a sum puts side by side along an axis; false if it is another one.
func (n *numbering) parts(v ir.Value) (parts []ir.ID, axis int, ok bool) {
	var zeroed []ir.Value // in order
	var add func(v ir.Value) bool
	add = func(v ir.Value) bool {
		switch op := v.Op.(type) {
		case ir.Unslice:
			zeroed = append(zeroed, v)
			return op.Step == 1 && op.Axis == zeroed[0].Op.(ir.Unslice).Axis &&
				len(zeroed) <= maxParts
		case ir.Binary:
			return op.Op == fuse.Add && add(n.of(v.Args[0])) && add(n.of(v.Args[1]))
		}
		return false
	}
	if _, sum := v.Op.(ir.Binary); !sum || !add(v) {
		return nil, 0, false
	}
	start := func(v ir.Value) int { return v.Op.(ir.Unslice).Start }
	slices.SortFunc(zeroed, func(a, b ir.Value) int { return cmp.Compare(start(a), start(b)) })
	axis = zeroed[0].Op.(ir.Unslice).Axis
	end := 0
	for _, z := range zeroed {
		if start(z) != end {
			return nil, 0, false
		}
		end += n.of(z.Args[0]).Shape.At(axis)
		parts = append(parts, z.Args[0])
	}
	return parts, axis, end == v.Shape.At(axis)
}

// inOrder permutes parts before they are concatenated, so that each is copied once, in the order in
// which it is wanted.
func inOrder(p *ir.Program) *ir.Program {
	users := p.Users()
	return rewrite(p, func(n *numbering, id ir.ID, v ir.Value) ir.ID {
		permute, ok := v.Op.(ir.Permute)
		if full, joined := n.concat(v); ok && joined && len(users[p.Values[id].Args[0]]) == 1 {
			for j, part := range full.Args {
				x := n.of(part)
				shape, _ := ir.Permuted(x.Shape, permute.Axes)
				full.Args[j] = n.simplest(ir.Value{Op: permute, Args: []ir.ID{part}, Shape: shape,
					DType: x.DType, Name: v.Name})
			}
			v = ir.Value{Op: ir.Concat{Axis: slices.Index(permute.Axes.Slice(),
				full.Op.(ir.Concat).Axis)},
				Args: full.Args, Shape: v.Shape, DType: v.DType, Name: v.Name}
		}
		return n.simplest(v)
	})
}

// concat returns the operand of v if it is a concatenation, with operands of its own.
func (n *numbering) concat(v ir.Value) (ir.Value, bool) {
	if len(v.Args) == 0 {
		return v, false
	}
	x := n.of(v.Args[0])
	_, ok := x.Op.(ir.Concat)
	x.Args = slices.Clone(x.Args)
	return x, ok
}
