package plan

import (
	"slices"

	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// Limits of what is computed again instead of kept.
const (
	maxRecomputed = 24 // values: loops over large operands wait for memory, not for arithmetic
	smallOperand  = 8  // an operand that is this many times smaller than a value costs nothing to read
)

// recompute returns the program with what the backward pass reads of the forward pass computed again, in
// the loops that read it, where it is made by elements of one operand that is not larger: the derivative
// of an activation, say, of a product. The loop of the forward pass does not write it then, and the
// operand stays in its place. Bits are the same.
func recompute(p *ir.Program) *ir.Program {
	r := &recomputing{program: p, users: outside(p), level: levels(p)}
	var to []ir.ID
	return rewrite(p, func(n *numbering, v ir.Value) ir.ID {
		id := ir.ID(len(to))
		for i, a := range p.Values[id].Args {
			if members, ok := r.again(a, id); ok {
				v.Args[i] = n.duplicate(p, members, to)
			}
		}
		to = append(to, n.add(v))
		return to[id]
	})
}

// duplicate adds values once more, which come in program order, and returns the last one.
func (n *numbering) duplicate(p *ir.Program, members, to []ir.ID) ir.ID {
	copies := map[ir.ID]ir.ID{}
	var last ir.ID
	for _, m := range members {
		v := p.Values[m]
		v.Args = slices.Clone(v.Args)
		for i, a := range v.Args {
			if c, ok := copies[a]; ok {
				v.Args[i] = c
			} else {
				v.Args[i] = to[a]
			}
		}
		last = n.program.Add(v) // equal to a value that is there, and not the same
		copies[m] = last
	}
	return last
}

// recomputing finds what to compute again.
type recomputing struct {
	program *ir.Program
	users   [][]ir.ID
	level   []int
}

// levels returns how many steps that are no loops lead to each value, one behind the other.
func levels(p *ir.Program) []int {
	level := make([]int, len(p.Values))
	for i, v := range p.Values {
		for _, a := range v.Args {
			level[i] = max(level[i], level[a])
		}
		if !ir.View(v.Op) && !ir.Leaf(v.Op) && !loops(v.Op) {
			level[i]++
		}
	}
	return level
}

// loops reports whether loops compute an operation.
func loops(op ir.Op) bool {
	_, reduction := op.(ir.Reduce)
	return reduction || ir.Elementwise(op)
}

// again returns the values to compute again for user, in program order, the last of which is a; false if a
// had better be kept.
func (r *recomputing) again(a, user ir.ID) (members []ir.ID, ok bool) {
	v := r.program.Values[a]
	if !ir.Elementwise(v.Op) || !loops(r.program.Values[user].Op) || r.level[user] <= r.level[a] || r.kept(a) {
		return nil, false
	}
	return r.cone(a)
}

// kept reports whether a value lies in memory whatever loops do.
func (r *recomputing) kept(x ir.ID) bool {
	return slices.ContainsFunc(r.users[x], func(u ir.ID) bool { return u == x || !loops(r.program.Values[u].Op) })
}

// cone returns the element-wise values that a is computed by, down to one operand and small ones; false if
// there are more, if it is larger than a, or if a loop computes one of them, of which the values would
// become a part.
func (r *recomputing) cone(a ir.ID) (members []ir.ID, ok bool) {
	values, of := r.program.Values, r.program.Values[a]
	seen, large, ok := map[ir.ID]bool{}, 0, true
	var visit func(x ir.ID)
	visit = func(x ir.ID) {
		view := false
		for ir.View(values[x].Op) {
			x, view = values[x].Args[0], true
		}
		v := values[x]
		switch {
		case seen[x]:
			return
		case !view && ir.Elementwise(v.Op) && v.Shape == of.Shape:
			for _, y := range v.Args {
				visit(y)
			}
			members = append(members, x)
		case loops(v.Op):
			ok = false
		case v.Shape.Size()*smallOperand > of.Shape.Size():
			large++
			ok = ok && bytes(v) <= bytes(of)
		}
		seen[x] = true
	}
	visit(a)
	slices.Sort(members)
	return members, ok && large == 1 && len(members) <= maxRecomputed
}

// bytes returns how much memory a value takes.
func bytes(v ir.Value) int { return v.Shape.Size() * v.DType.Size() }
