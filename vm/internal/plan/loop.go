package plan

import (
	"math"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// Loop is an operation that planning makes of element-wise values and reductions: the
// operands of the step are the program's inputs, its results the outputs.
type Loop struct {
	Program *fuse.Program
	Ops     string // what it computes, for people
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

func (b *loopBuilder) step(ops, name string) Step {
	return Step{Loop{b.program, ops}, b.dsts, b.args, name}
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
		x = b.program.Load(r.DType, r.Strides.Slice()...)
		b.args = append(b.args, r)
	}
	b.loaded[r] = x
	return x
}

func (b *loopBuilder) store(x fuse.Value, r Ref) {
	b.program.Store(x, r.DType, r.Strides.Slice()...)
	b.dsts = append(b.dsts, r)
}

// fold adds a reduced output, whose axes are those of the loop that are kept.
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
	for _, m := range g.members { // a view may need a step of its own, before this one
		for _, a := range l.program.Values[m].Args {
			if !slices.Contains(g.members, a) {
				l.ref(a)
			}
		}
	}
	b := newLoop(g.shape, g.axes)
	values := map[ir.ID]fuse.Value{}
	var names []string
	for _, m := range g.members {
		v := l.program.Values[m]
		var args []fuse.Value
		for _, a := range v.Args {
			x, inside := values[a]
			if !inside {
				x = b.load(l.plan, l.ref(a))
			}
			args = append(args, x)
		}
		names = append(names, v.Op.String())
		if r, ok := v.Op.(ir.Reduce); ok {
			l.put(m, l.result(v.Shape, v.DType))
			b.fold(reduceOps[r.Func], args[0], l.refs[m])
			continue
		}
		values[m] = compute(b.program, v, args)
		if slices.ContainsFunc(users[m], func(u ir.ID) bool { return u == m || !slices.Contains(g.members, u) }) {
			l.put(m, l.result(v.Shape, v.DType))
			b.store(values[m], l.refs[m])
		}
	}
	name := l.program.Values[g.members[len(g.members)-1]].Name
	l.plan.Steps = append(l.plan.Steps, b.step(strings.Join(names, " "), name))
}

var reduceOps = map[ir.Func]backend.ReduceOp{ir.Add: backend.Sum, ir.Max: backend.Max, ir.Min: backend.Min}

// compute adds the instructions of one value.
func compute(p *fuse.Program, v ir.Value, args []fuse.Value) fuse.Value {
	switch op := v.Op.(type) {
	case ir.Unary:
		return p.Do(instructions[op.Func], args...)
	case ir.Binary:
		return p.Cast(fuse.Type(v.DType), p.Do(instructions[op.Func], args...))
	case ir.Cast:
		return p.Cast(fuse.Type(v.DType), args[0])
	}
	return args[0] // Copy
}

var instructions = map[ir.Func]fuse.Op{
	ir.Abs: fuse.Abs, ir.Sign: fuse.Sign, ir.Ceil: fuse.Ceil, ir.Floor: fuse.Floor, ir.Sin: fuse.Sin,
	ir.Cos: fuse.Cos, ir.Exp: fuse.Exp, ir.Log: fuse.Log, ir.Log2: fuse.Log2, ir.Neg: fuse.Neg,
	ir.Square: fuse.Square, ir.Sqrt: fuse.Sqrt, ir.Inv: fuse.Inv, ir.InvSqrt: fuse.InvSqrt,
	ir.Cube: fuse.Cube, ir.Tanh: fuse.Tanh, ir.Sigmoid: fuse.Sigmoid, ir.Log1p: fuse.Log1p,
	ir.Expm1: fuse.Expm1, ir.Softplus: fuse.Softplus, ir.Erf: fuse.Erf,
	ir.Add: fuse.Add, ir.Sub: fuse.Sub, ir.Mul: fuse.Mul, ir.Div: fuse.Div, ir.Pow: fuse.Pow,
	ir.Lt: fuse.Less, ir.Gt: fuse.Greater, ir.Lte: fuse.LessEqual, ir.Gte: fuse.GreaterEqual,
	ir.Eq: fuse.Equal, ir.Ne: fuse.NotEqual, ir.Min: fuse.Minimum, ir.Max: fuse.Maximum,
}
