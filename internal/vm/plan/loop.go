package plan

import (
	"math"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Loop is an operation that planning makes of element-wise values and reductions: the
// operands of the step are the program's inputs, its results the outputs.
type Loop struct {
	Program *fuse.Program
	Ops     string // what it computes, for people
	Count   int    // how many operations of the program it computes
}

// String implements [ir.Op].
func (l Loop) String() string { return "loop " + l.Ops }

// loopBuilder makes the program of one loop.
type loopBuilder struct {
	program *fuse.Program
	loaded  map[Ref]fuse.Value
	args    []Ref
	dsts    []Ref
}

func newLoop(shape, reduced ir.Dims) *loopBuilder {
	p := &fuse.Program{Shape: shape.Slice()}
	if reduced.Len() > 0 {
		p.Reduced = make([]bool, shape.Len())
		for i := range p.Reduced {
			p.Reduced[i] = reduced.Has(i)
		}
	}
	return &loopBuilder{program: p, loaded: map[Ref]fuse.Value{}}
}

func (b *loopBuilder) newStep(name string, ops ...string) Step {
	return Step{Op: Loop{b.program, strings.Join(ops, " "), len(ops)}, Dsts: b.dsts, Args: b.args,
		Name: name}
}

// load returns the element of r; that of a number is a constant of the program.
func (b *loopBuilder) load(p *Plan, r Ref) fuse.Value {
	x, ok := b.loaded[r]
	switch buffer := p.Buffers[r.Buffer]; {
	case ok:
		return x
	case buffer.Kind == Scalar && fuse.Type(r.DType) == r.DType:
		x = b.program.Const(r.DType, math.Float64frombits(buffer.Bits))
	default:
		x = b.program.Load(r.DType, b.strides(r).Slice()...)
		b.args = append(b.args, r)
	}
	b.loaded[r] = x
	return x
}

func (b *loopBuilder) store(x fuse.Value, r Ref) {
	b.program.Store(x, r.DType, b.strides(r).Slice()...)
	b.dsts = append(b.dsts, r)
}

// strides returns the strides of r along the axes of the loop: r may have one element for each row.
func (b *loopBuilder) strides(r Ref) ir.Dims {
	loop := ir.Of(b.program.Shape...)
	if r.Shape == loop {
		return r.Strides
	}
	last := loop.Len() - 1
	if r.Strides.Len() == last {
		return r.Strides.Insert(last, 0)
	}
	return r.Strides.With(last, 0)
}

// fold adds a reduced output, which has the loop's axes that are not reduced.
func (b *loopBuilder) fold(op backend.ReduceOp, x fuse.Value, r Ref) {
	strides := make([]int, len(b.program.Shape))
	kept := 0
	for i := range strides {
		if !b.program.Reduced[i] {
			strides[i] = r.Strides.At(kept)
			kept++
		}
	}
	b.program.Fold(op, x, r.DType, strides...)
	b.dsts = append(b.dsts, r)
}

// loop appends the step of a group of element-wise values and reductions.
func (l *layouter) loop(g *group, users [][]ir.ID) {
	inside := func(x ir.ID) bool { return slices.Contains(g.members, x) }
	for _, m := range g.members { // a view may need a step of its own, before this one
		for _, a := range l.program.Values[m].Args {
			if !inside(l.member(a, g)) {
				l.ref(a)
			}
		}
	}
	reduced := g.axes
	if g.rows { // its reductions along rows are values
		reduced = ir.Dims{}
		for axis := 0; g.columns && axis < g.shape.Len()-1; axis++ {
			reduced = reduced.Insert(axis, axis)
		}
	}
	b := newLoop(g.shape, reduced)
	values := map[ir.ID]fuse.Value{}
	var names []string
	for _, m := range g.members {
		v := l.program.Values[m]
		var args []fuse.Value
		for _, a := range v.Args {
			x, known := values[l.member(a, g)]
			if !known {
				x = b.load(l.plan, l.ref(a))
			}
			args = append(args, x)
		}
		names = append(names, v.Op.String())
		r, reduced := v.Op.(ir.Reduce)
		if reduced && (!g.rows || r.Axes != g.axes) {
			l.setRef(m, l.resultOf(m))
			b.fold(r.Op, args[0], l.refs[m])
			continue
		}
		if o, ok := fuse.OfRow(r.Op); reduced && ok {
			values[m] = b.program.Do(o, args[0])
		} else {
			values[m] = v.Compute(b.program, args)
		}
		if l.program.Escapes(users, m, inside) {
			l.setRef(m, l.resultOf(m))
			b.store(values[m], l.refs[m])
		}
	}
	name := l.program.Values[g.members[len(g.members)-1]].Name
	l.plan.Steps = append(l.plan.Steps, b.newStep(name, names...))
}

// member returns the value that a is to the members of a loop: they read those of each other along
// rows, too.
func (l *layouter) member(a ir.ID, g *group) ir.ID {
	if from, ok := alongRows(l.program, a, g.shape); g.rows && ok {
		return from
	}
	return a
}
