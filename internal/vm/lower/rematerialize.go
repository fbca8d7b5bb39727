package lower

import (
	"slices"

	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// Loop is what computes some element-wise values and reductions in one pass over their operands.
type Loop struct {
	Shape  ir.Dims
	Values []ir.ID
}

// Rematerialize returns the program in which later loops compute values, of at least so many bytes
// and by at most so many operations, from what is in memory anyway, and do not load what an earlier
// loop has stored: the normalised activations of a layer norm, say, from those that the next layers
// keep, or the derivative of an activation. Loops are by value, nil where none computes it.
//
//	x = a copy of x, by the same operations of the same operands
//
// It returns the copies, too: each is for one loop, and does not join those of its operands.
func Rematerialize(p *ir.Program, loops []*Loop, bytes, ops int) (*ir.Program, map[ir.ID]bool) {
	r := &rematerializing{program: p, users: p.Users(), of: loops, bytes: bytes, ops: ops,
		recipes: map[ir.ID]*recipe{}, q: &ir.Program{}, done: map[copyOf]ir.ID{}}
	for i := range p.Values {
		if of, ok := r.recipe(ir.ID(i)); ok {
			r.recipes[ir.ID(i)] = of
		}
	}
	if len(r.recipes) == 0 {
		return p, nil
	}
	r.to = make([]ir.ID, len(p.Values))
	for i, v := range p.Values {
		r.to[i] = r.value(ir.ID(i), v)
	}
	r.q.Results = mapped(p.Results, r.to)
	q, to := pruned(r.q)
	copies := map[ir.ID]bool{}
	for _, id := range r.done {
		copies[to[id]] = true
	}
	return q, copies
}

// rematerializing writes a program with copies.
type rematerializing struct {
	program    *ir.Program
	users      [][]ir.ID
	of         []*Loop // by value
	bytes, ops int
	recipes    map[ir.ID]*recipe
	q          *ir.Program
	to         []ir.ID // by value of the old program
	done       map[copyOf]ir.ID
}

// recipe is how a value is rematerialized.
type recipe struct {
	values []ir.ID // in order, itself last
	loads  []ir.ID // what they read
	ops    int     // with those of recipes of what they read
}

// copyOf is a value that is rematerialized for a loop.
type copyOf struct {
	value ir.ID
	loop  *Loop
}

// recipe returns that of a value of a loop which others only read in loops of the same shape, if it
// is worth computing it there: if what they load instead has no more bytes than the value, which is
// then not stored. What they load anyway does not count, and in place of what has a recipe, what
// that loads.
func (r *rematerializing) recipe(m ir.ID) (*recipe, bool) {
	v, own := r.program.Values[m], r.of[m]
	bytes := v.Shape.Size() * v.DType.Size()
	if own == nil || v.Shape != own.Shape || bytes < r.bytes || !r.cheap(m) || !r.readByLoops(m) {
		return nil, false
	}
	of, loaded := &recipe{}, 0
	seen := map[ir.ID]bool{}
	var visit func(x ir.ID)
	visit = func(x ir.ID) {
		if seen[x] {
			return
		}
		seen[x] = true
		if x != m && !r.inside(x, own) {
			if other := r.recipes[x]; other != nil {
				of.ops += other.ops
				for _, a := range other.loads {
					visit(a)
				}
				return
			}
			of.loads = append(of.loads, x)
			if !r.readByAll(x, m) {
				loaded += r.loaded(x, own.Shape)
			}
			return
		}
		for _, a := range r.program.Values[x].Args {
			visit(a)
		}
		of.values = append(of.values, x)
	}
	visit(m)
	of.ops += len(of.values)
	return of, loaded <= bytes && of.ops <= r.ops && !slices.ContainsFunc(of.values,
		func(x ir.ID) bool { return !r.cheap(x) })
}

// readByAll reports whether all loops that read m read x, too, maybe to rematerialize something.
func (r *rematerializing) readByAll(x, m ir.ID) bool {
	reads := func(y ir.ID) bool {
		return slices.ContainsFunc(r.program.Values[y].Args, func(a ir.ID) bool {
			return a == x || r.recipes[a] != nil && slices.Contains(r.recipes[a].loads, x)
		})
	}
	return !slices.ContainsFunc(r.users[m], func(u ir.ID) bool {
		return r.of[u] != r.of[m] && !slices.ContainsFunc(r.of[u].Values, reads)
	})
}

// cheap reports whether a value is computed element by element, from its operands alone.
func (r *rematerializing) cheap(x ir.ID) bool {
	switch r.program.Values[x].Op.(type) {
	case ir.Unary, ir.Binary, ir.Where, ir.Cast:
		return true
	}
	return false
}

// readByLoops reports whether something outside of its loop reads m, and only element-wise values
// and reductions of other loops do.
func (r *rematerializing) readByLoops(m ir.ID) bool {
	elsewhere := false
	for _, u := range r.users[m] {
		other := r.of[u]
		if u == m || other == nil || other.Shape != r.of[m].Shape {
			return false
		}
		elsewhere = elsewhere || other != r.of[m]
	}
	return elsewhere
}

// inside reports whether x is computed by the loop from which it is read, and is not in memory
// anyway.
func (r *rematerializing) inside(x ir.ID, own *Loop) bool {
	return r.of[x] == own && r.program.Values[x].Shape == own.Shape &&
		!r.program.Escapes(r.users, x, func(u ir.ID) bool { return r.of[u] == own })
}

// loaded returns how many bytes a loop loads of x: of what it repeats, next to nothing.
func (r *rematerializing) loaded(x ir.ID, shape ir.Dims) int {
	for ; ir.View(r.program.Values[x].Op); x = r.program.Values[x].Args[0] {
		if _, repeats := r.program.Values[x].Op.(ir.Broadcast); repeats {
			return 0
		}
	}
	v := r.program.Values[x]
	if v.Shape.Size() < shape.Size() {
		return 0
	}
	return v.Shape.Size() * v.DType.Size()
}

// value adds a value, and before it what its loop rematerializes of its operands.
func (r *rematerializing) value(id ir.ID, v ir.Value) ir.ID {
	args := mapped(v.Args, r.to)
	for i, a := range v.Args {
		if of := r.recipes[a]; of != nil && r.of[id] != r.of[a] {
			args[i] = r.copy(of, r.of[id])
		}
	}
	v.Args = args
	return r.q.Add(v)
}

// copy adds the values of a recipe for a loop, unless it has them, and returns the last.
func (r *rematerializing) copy(of *recipe, loop *Loop) (last ir.ID) {
	for _, x := range of.values {
		var known bool
		if last, known = r.done[copyOf{x, loop}]; known {
			continue
		}
		v := r.program.Values[x]
		args := mapped(v.Args, r.to)
		for i, a := range v.Args {
			if c, copied := r.done[copyOf{a, loop}]; copied {
				args[i] = c
			} else if other := r.recipes[a]; other != nil {
				args[i] = r.copy(other, loop)
			}
		}
		v.Args = args
		last = r.q.Add(v)
		r.done[copyOf{x, loop}] = last
	}
	return last
}
