package plan

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// layouter gives every value a place.
type layouter struct {
	run      *ir.Program
	program  *ir.Program // of a step, which begins with that of a run
	training *lower.Training
	updates  []lower.Update
	users    [][]ir.ID // of a run: see [ir.Program.Users]
	plan     *Plan
	refs     []Ref
	placed   []bool
	dense    map[Ref]Ref     // copies of views in row-major order
	beside   map[ir.ID][]Ref // what the operation of a value gives besides, from result 1 on
	bucketing
	settings map[setting]Ref // which all updates share
	value    []fuse.Value    // of the end of a step: its number in the loop that had it last
}

// setting is a number of a step, and its type.
type setting struct {
	ir.Setting
	dtype backend.DType
}

// layout makes the steps of a training whose run is p: views become strides, every other value gets
// its own buffer. The last results of p are the gradients of updates.
func (limits Limits) layout(p *ir.Program, copies map[ir.ID]bool, t *lower.Training,
	plain bool) (*Plan, error) {
	wanted := p.Users()
	n := len(t.Values)
	l := &layouter{p, t.Program, t, t.Updates, wanted, &Plan{}, make([]Ref, n), make([]bool, n),
		map[Ref]Ref{}, map[ir.ID][]Ref{}, exchanging(p, t, wanted),
		map[setting]Ref{}, make([]fuse.Value, n)}
	l.shareBuckets()
	l.findParameters()
	all, err := limits.groups(p, wanted, copies, l.bucketing, plain)
	if err != nil {
		return nil, err
	}
	all = l.withoutLookups(l.casts(all))
	l.findReads(all)
	for i, g := range all {
		l.unshardGroup(i)
		if g.loop {
			l.loop(g, wanted)
		} else {
			l.appendStep(g.members[0])
		}
		l.send(i + 1)
	}
	l.send(len(all)) // gradients that no step computes
	for _, r := range t.Results {
		if r < t.First { // not the norm
			l.plan.Results = append(l.plan.Results, l.before(r))
		}
	}
	l.update()
	return l.plan, nil
}

// ref returns where a value lies: a leaf or a view gets its place when it is needed.
func (l *layouter) ref(id ir.ID) Ref {
	if v := l.program.Values[id]; !l.placed[id] {
		update, sharded := l.sharded(id)
		switch {
		case ir.View(v.Op):
			l.setRef(id, l.view(v))
		case sharded:
			l.unshardValue(id, update)
		default:
			l.setRef(id, l.leaf(v))
		}
	}
	return l.refs[id]
}

func (l *layouter) setRef(id ir.ID, r Ref) { l.refs[id], l.placed[id] = r, true }

func (l *layouter) buffer(b Buffer, shape ir.Dims, dtype backend.DType, step int) Ref {
	b.DType, b.Bytes = dtype, shape.Size()*dtype.Size()
	if b.Kind == Gradient && l.updates[b.Index].Shard.Divides() {
		u := &l.updates[b.Index]
		l.shards.memory[u.Bucket-1].place(&b, u.Shard)
	}
	l.plan.Buffers = append(l.plan.Buffers, b)
	return Ref{Buffer: len(l.plan.Buffers) - 1, Shape: shape, Strides: shape.Strides(),
		DType: dtype, Step: step}
}

func (l *layouter) leaf(v ir.Value) Ref {
	b := Buffer{}
	switch op := v.Op.(type) {
	case ir.Input:
		b = Buffer{Kind: Input, Index: op.Index}
	case ir.Constant:
		b = Buffer{Kind: Constant, Index: op.Index}
	case ir.Scalar:
		b = Buffer{Kind: Scalar, Bits: op.Bits}
	case ir.State:
		b = Buffer{Kind: State, Index: op.Input, Vector: op.Vector}
	case ir.PartialSum:
		b = Buffer{Kind: Gradient, Index: op.Index, Vector: op.Vector}
		if op.Inner {
			b.Kind = PartialSum
		}
	case ir.Setting:
		x := setting{op, v.DType}
		r, ok := l.settings[x]
		if !ok {
			r = l.buffer(Buffer{Kind: Setting, Index: op.Index}, ir.Dims{}, v.DType, -1)
			l.settings[x] = r
		}
		return r
	}
	b.Name = v.Name
	return l.buffer(b, v.Shape, v.DType, -1)
}

// appendStep appends the step that computes one value, after copies of operands that it cannot
// read as they lie.
func (l *layouter) appendStep(id ir.ID) {
	v := l.program.Values[id]
	args := make([]Ref, len(v.Args))
	for i, a := range v.Args {
		args[i] = l.ref(a)
		if !reads(v.Op, args[i]) {
			args[i] = l.copy(args[i], v.Name)
		}
	}
	if _, ok := v.Op.(ir.Put); ok {
		args[0] = l.over(id, args[0])
		y := args[0]
		y.Step = len(l.plan.Steps)
		l.setRef(id, y)
	} else {
		l.setRef(id, l.resultOf(id))
	}
	dsts := []Ref{l.refs[id]}
	for _, r := range ir.Besides(v, func(i int) ir.Value { return l.program.Values[v.Args[i]] }) {
		dsts = append(dsts, l.result(r.Shape, r.DType, v.Name))
	}
	switch v.Op.(type) {
	case ir.Attention, ir.AttentionGrad:
		l.exchangeHeads(id, dsts)
	}
	l.beside[id] = dsts[1:]
	if update, direct := l.direct[id]; direct && l.training.Accumulation.Several() &&
		len(dsts) == 1 && dsts[0].Dense() {
		s := Step{Op: v.Op, Dsts: dsts, Args: args, Name: v.Name}
		s.Runs = l.firstRuns(update, s)
		dsts[0].Step = len(l.plan.Steps)
		l.setRef(id, dsts[0])
		if s.Runs != 0 {
			l.plan.Steps = append(l.plan.Steps, s)
		}
		return
	}
	l.plan.Steps = append(l.plan.Steps, Step{Op: v.Op, Dsts: dsts, Args: args, Name: v.Name})
}

// exchangeHeads lays results of attention [B, H, n, size] out as [B, n, H, size] where that is how
// they are read, as in most models, so that what follows needs no copies.
func (l *layouter) exchangeHeads(id ir.ID, dsts []Ref) {
	for i := range dsts {
		if s := dsts[i].Shape; s.Len() == 4 && l.readByRows(id, i) {
			row := ir.Of(s.At(0), s.At(2), s.At(1), s.At(3)).Strides()
			dsts[i].Strides = ir.Of(row.At(0), row.At(2), row.At(1), row.At(3))
		}
	}
	l.setRef(id, dsts[0])
}

// readByRows reports whether result number i of a value is read with its heads exchanged, and in no
// other way except by attention, which reads both.
func (l *layouter) readByRows(id ir.ID, i int) bool {
	exchanged, heads := false, ir.Op(ir.Permute{Axes: ir.Of(0, 2, 1, 3)})
	for _, u := range l.users[id] {
		op := l.program.Values[u].Op
		r, other := op.(ir.Result)
		_, attention := op.(ir.AttentionGrad)
		switch {
		case other && r.Index == i:
			return l.readByRows(u, 0)
		case other || i > 0 || attention && u != id:
		case op != heads:
			return false
		default:
			exchanged = true
		}
	}
	return exchanged
}

// result returns memory for a result of the next step.
func (l *layouter) result(shape ir.Dims, dtype backend.DType, name string) Ref {
	return l.buffer(Buffer{Kind: Arena, Name: name}, shape, dtype, len(l.plan.Steps))
}

// resultOf returns memory for a value that the next step computes.
func (l *layouter) resultOf(id ir.ID) Ref {
	v := l.program.Values[id]
	if update, direct := l.direct[id]; direct && !l.training.Accumulation.Several() {
		return l.buffer(Buffer{Kind: Gradient, Index: update, Name: v.Name}, v.Shape, v.DType,
			len(l.plan.Steps))
	}
	return l.result(v.Shape, v.DType, v.Name)
}

// copy returns r in row-major order.
func (l *layouter) copy(r Ref, name string) Ref {
	c, ok := l.dense[r]
	if !ok {
		c = l.copyTo(l.result(r.Shape, r.DType, name), r, name)
		l.dense[r] = c
	}
	return c
}

// copyTo appends a copy of r to memory of the next step, and returns that.
func (l *layouter) copyTo(to, r Ref, name string) Ref {
	b := newLoop(r.Shape, ir.Dims{})
	b.store(b.load(l.plan, r), to)
	l.plan.Steps = append(l.plan.Steps, b.newStep(name, "copy"))
	return to
}

// reads reports whether an operation can read an operand that lies as r.
func reads(op ir.Op, r Ref) bool {
	switch op := op.(type) {
	case ir.Concat, ir.Unslice:
		return true
	case ir.Opaque:
		return !op.Placed || r.Dense()
	case ir.MatMul:
		return matrices(r)
	case ir.Attention, ir.AttentionGrad:
		return r.Dense() || r.Shape.Len() == 4 && (r.Strides.At(3) == 1 || r.Shape.At(3) == 1)
	}
	return r.Dense()
}

// matrices reports whether BLAS can read r: rows or columns without gaps that do not overlap.
func matrices(r Ref) bool {
	n := r.Shape.Len()
	rows, columns := r.Shape.At(n-2), r.Shape.At(n-1)
	row, column := r.Strides.At(n-2), r.Strides.At(n-1)
	return (column == 1 || columns == 1) && (row >= columns || rows == 1) ||
		(row == 1 || rows == 1) && (column >= rows || columns == 1)
}

// view returns where the result of a view lies.
func (l *layouter) view(v ir.Value) Ref {
	x := l.ref(v.Args[0])
	y := x
	y.Shape = v.Shape
	switch op := v.Op.(type) {
	case ir.Permute:
		for i := range op.Axes.Len() {
			y.Strides = y.Strides.With(i, x.Strides.At(op.Axes.At(i)))
		}
	case ir.Slice:
		y.Offset += op.Start * x.Strides.At(op.Axis)
		y.Strides = x.Strides.With(op.Axis, op.Step*x.Strides.At(op.Axis))
	case ir.Broadcast:
		for i := range v.Shape.Len() {
			if x.Shape.At(i) != v.Shape.At(i) {
				y.Strides = y.Strides.With(i, 0)
			}
		}
	case ir.Result:
		return l.beside[v.Args[0]][op.Index-1]
	case ir.Reshape:
		strides, ok := ir.Reshaped(x.Shape, x.Strides, v.Shape)
		if !ok {
			y = l.copy(x, v.Name)
			y.Shape, strides = v.Shape, v.Shape.Strides()
		}
		y.Strides = strides
	}
	return y
}
