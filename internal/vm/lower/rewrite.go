package lower

import (
	"encoding/binary"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
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

// rewrite returns the program with every value given by f, which gets its ID there and the value
// with its operands already rewritten.
func rewrite(p *ir.Program, f func(n *numbering, id ir.ID, v ir.Value) ir.ID) *ir.Program {
	n := &numbering{&ir.Program{Values: make([]ir.Value, 0, len(p.Values))},
		make(map[key]ir.ID, len(p.Values))}
	to := make([]ir.ID, len(p.Values))
	for i, v := range p.Values {
		v.Args = mapped(v.Args, to)
		to[i] = f(n, ir.ID(i), v)
	}
	n.program.Results = mapped(p.Results, to)
	return n.program
}

// mapped returns what becomes of values.
func mapped(ids, to []ir.ID) []ir.ID {
	all := make([]ir.ID, len(ids))
	for i, id := range ids {
		all[i] = to[id]
	}
	return all
}
