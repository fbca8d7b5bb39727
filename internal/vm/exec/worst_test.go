package exec_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/interpret"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// worst runs plans of numbers of 8 bytes as badly as a device may: elements and rows in any order,
// what a step may run in pieces, operations that run beside others at their beginning or at their
// end, results damaged before operands are read. A plan that has what it reads where it reads it
// gives the same.
type worst struct {
	*rand.Rand
	plan   *plan.Plan
	arena  []float64
	others map[[3]int][]float64 // by kind, index and vector
	begun  []begun
}

// begun is an operation that runs beside steps.
type begun struct {
	until int
	end   func() error
}

// damage is what nobody has computed.
const damage = 123456789

func newWorst(p *plan.Plan, inputs [][]float64, r *rand.Rand) *worst {
	w := &worst{Rand: r, plan: p, arena: make([]float64, p.ArenaBytes/8+64),
		others: map[[3]int][]float64{}}
	for i := range w.arena {
		w.arena[i] = damage
	}
	for _, b := range p.Buffers {
		key, n := [3]int{int(b.Kind), b.Index, b.Vector}, b.Bytes/8
		switch {
		case b.Kind == plan.Arena || w.others[key] != nil:
		case b.Kind == plan.Input:
			w.others[key] = slices.Clone(inputs[b.Index])
		case b.Kind == plan.Scalar:
		default: // a setting, or what a solver keeps
			w.others[key] = slices.Repeat([]float64{2}, n)
		}
	}
	return w
}

// at returns the memory of a buffer from its first element on.
func (w *worst) at(buffer int) []float64 {
	switch b := w.plan.Buffers[buffer]; b.Kind {
	case plan.Arena:
		return w.arena[b.Offset/8:]
	case plan.Scalar:
		return []float64{math.Float64frombits(b.Bits)}
	default:
		return w.others[[3]int{int(b.Kind), b.Index, b.Vector}]
	}
}

// places calls f with where each element of a value lies.
func places(offset int, shape, strides []int, f func(at int)) {
	if len(shape) == 0 {
		f(offset)
		return
	}
	for i := range shape[0] {
		places(offset+i*strides[0], shape[1:], strides[1:], f)
	}
}

// gather returns the elements of a value in row-major order.
func (w *worst) gather(r plan.Ref) (x []float64) {
	memory := w.at(r.Buffer)
	places(r.Offset, r.Shape.Slice(), r.Strides.Slice(), func(at int) { x = append(x, memory[at]) })
	return x
}

// scatter stores elements of a value.
func (w *worst) scatter(r plan.Ref, x []float64) {
	memory := w.at(r.Buffer)
	places(r.Offset, r.Shape.Slice(), r.Strides.Slice(), func(at int) {
		memory[at], x = x[0], x[1:]
	})
}

func (w *worst) damage(r plan.Ref) {
	w.scatter(r, slices.Repeat([]float64{damage}, r.Shape.Size()))
}

// run runs all steps.
func (w *worst) run() (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", r)
		}
	}()
	steps := w.plan.Steps
	for i := 0; i < len(steps); {
		w.begun = slices.DeleteFunc(w.begun, func(b begun) bool {
			if b.until < i && err == nil {
				err = b.end()
			}
			return b.until < i
		})
		end := i + 1
		for end < len(steps) && steps[end].Epilogue {
			end++
		}
		if err == nil {
			err = w.chain(i, steps[i:end])
		}
		if err != nil {
			return err
		}
		i = end
	}
	return nil
}

// chain runs a step, and others that it runs.
func (w *worst) chain(i int, steps []plan.Step) error {
	s := steps[0]
	switch op := s.Op.(type) {
	case plan.Loop:
		if len(steps) == 1 {
			w.loop(op.Program, s.Dsts, s.Args)
			return nil
		}
		w.pieces(s.Dsts[0].Shape.Size(), func(of []int) error {
			return w.follow(steps, of)
		})
		return nil
	case plan.Joined:
		dsts, args := s.Dsts, s.Args
		for _, p := range op.Programs {
			o, n := len(p.Outputs), len(p.Inputs)
			w.loop(p, dsts[:o], args[:n])
			dsts, args = dsts[o:], args[n:]
		}
		return nil
	case ir.Opaque:
		return w.beside(s, op)
	case ir.Put:
		return w.operation(s)
	}
	for _, d := range s.Dsts {
		w.damage(d)
	}
	if len(steps) == 1 {
		return w.operation(s)
	}
	return w.pieces(s.Dsts[0].Shape.Size(), func(of []int) error {
		if err := w.elements(s, of); err != nil {
			return err
		}
		return w.follow(steps[1:], of)
	})
}

// pieces calls f for some elements at a time.
func (w *worst) pieces(n int, f func(of []int) error) error {
	all := w.Perm(n)
	for len(all) > 0 {
		k := 1 + w.IntN(len(all))
		if err := f(all[:k]); err != nil {
			return err
		}
		all = all[k:]
	}
	return nil
}

// beside runs an operation of the graph, which may read at its beginning or at its end.
func (w *worst) beside(s plan.Step, op ir.Opaque) error {
	y := negated(w.gather(s.Args[0]))
	late := w.IntN(2) == 0
	w.damage(s.Dsts[0])
	end := func() error {
		if late {
			y = negated(w.gather(s.Args[0]))
		}
		w.scatter(s.Dsts[0], y)
		return nil
	}
	if s.Until == 0 || !op.Placed {
		return end()
	}
	w.begun = append(w.begun, begun{s.Until, end})
	return nil
}

// negated is what operations of the graph compute.
func negated(x []float64) []float64 {
	y := make([]float64, len(x))
	for i := range x {
		y[i] = -x[i]
	}
	return y
}

// value computes an operation from what is in memory now.
func (w *worst) value(s plan.Step) ([]interpret.Array, error) {
	p, outside := &ir.Program{}, interpret.Outside{}
	var args []ir.ID
	for k, a := range s.Args {
		args = append(args, p.Add(ir.Value{Op: ir.Input{Index: k}, Shape: a.Shape, DType: a.DType}))
		outside.Inputs = append(outside.Inputs, interpret.Of(a.Shape, w.gather(a)))
	}
	d := s.Dsts[0]
	p.Add(ir.Value{Op: s.Op, Args: args, Shape: d.Shape, DType: d.DType})
	values, err := interpret.Program(p, outside)
	if err != nil {
		return nil, err
	}
	return values[len(args):], nil
}

func (w *worst) operation(s plan.Step) error {
	y, err := w.value(s)
	if err == nil {
		w.scatter(s.Dsts[0], valuesOf(y[0]))
	}
	return err
}

func valuesOf(a interpret.Array) (x []float64) {
	for _, n := range a.Data {
		x = append(x, n.Value)
	}
	return x
}

// elements computes some elements of an operation's result.
func (w *worst) elements(s plan.Step, of []int) error {
	y, err := w.value(s)
	if err != nil {
		return err
	}
	now, all := w.gather(s.Dsts[0]), valuesOf(y[0])
	for _, i := range of {
		now[i] = all[i]
	}
	w.scatter(s.Dsts[0], now)
	return nil
}

// follow runs steps on some elements which the step before them has finished: loops, and
// concatenations of what they store.
func (w *worst) follow(steps []plan.Step, of []int) error {
	for i, s := range steps {
		switch op := s.Op.(type) {
		case plan.Loop:
			if !onePass(op.Program) {
				w.loop(op.Program, s.Dsts, s.Args)
				continue
			}
			l := w.newLoop(op.Program, s.Dsts, s.Args)
			for _, k := range of {
				l.element(l.index(k))
			}
		case ir.Concat:
			if of = w.concat(s, op.Axis, of); i+1 < len(steps) && len(of) == 0 {
				return nil
			}
		default:
			if err := w.operation(s); err != nil {
				return err
			}
		}
	}
	return nil
}

// concat puts some elements of each operand where they belong, and returns where that is.
func (w *worst) concat(s plan.Step, axis int, of []int) (to []int) {
	d, from := s.Dsts[0], 0
	memory := w.at(d.Buffer)
	for _, a := range s.Args {
		x := w.gather(a)
		for _, k := range of {
			if k >= len(x) {
				continue
			}
			at, rest, row := 0, k, 1
			for i := a.Shape.Len() - 1; i >= 0; i-- {
				c := rest % a.Shape.At(i)
				if rest /= a.Shape.At(i); i == axis {
					c += from
				}
				at, row = at+c*row, row*d.Shape.At(i)
			}
			memory[d.Offset+at] = x[k]
			to = append(to, at)
		}
		from += a.Shape.At(axis)
	}
	return to
}

// onePass reports whether a loop folds nothing.
func onePass(p *fuse.Program) bool {
	return !slices.ContainsFunc(p.Outputs, func(o fuse.Output) bool { return o.Folded }) &&
		!slices.ContainsFunc(p.Code, func(c fuse.Instr) bool { return c.Op.FoldsRows() })
}

// looping is a loop that runs element by element, or row by row.
type looping struct {
	*worst
	p        *fuse.Program
	inputs   [][]float64 // from their first elements on
	outputs  [][]float64
	sums     []map[int]float64 // of folded outputs, by place
	count    float64           // of what a mean divides
	once     []bool            // values that a row has one of
	row      []float64         // these, NaN for those that are not known
	rowFolds bool
}

func (w *worst) newLoop(p *fuse.Program, dsts, args []plan.Ref) *looping {
	l := &looping{worst: w, p: p, once: make([]bool, len(p.Code)), count: 1}
	for k := range p.Inputs {
		l.inputs = append(l.inputs, w.at(args[k].Buffer)[args[k].Offset:])
	}
	for k := range p.Outputs {
		l.outputs = append(l.outputs, w.at(dsts[k].Buffer)[dsts[k].Offset:])
		l.sums = append(l.sums, map[int]float64{})
	}
	for _, c := range p.Code {
		l.rowFolds = l.rowFolds || c.Op.FoldsRows()
	}
	for axis, n := range p.Shape {
		if p.Reduced != nil && p.Reduced[axis] {
			l.count *= float64(n)
		}
	}
	last := len(p.Shape) - 1
	for k, c := range p.Code {
		switch {
		case !l.rowFolds:
		case c.Op == fuse.Load:
			l.once[k] = p.Inputs[c.Args[0]].Strides[last] == 0
		case c.Op == fuse.Index:
			l.once[k] = p.Indices[c.Args[0]][last] == 0
		default:
			l.once[k] = true
			for _, x := range c.Args[:c.Op.Operands()] {
				l.once[k] = l.once[k] && (l.once[x] || c.Op.FoldsRows())
			}
		}
	}
	return l
}

// loop runs a loop: rows in any order, and elements.
func (w *worst) loop(p *fuse.Program, dsts, args []plan.Ref) {
	l := w.newLoop(p, dsts, args)
	for k, out := range p.Outputs {
		if out.Folded {
			w.damage(dsts[k])
		}
	}
	n, length := 1, 1
	for _, extent := range p.Shape {
		n *= extent
	}
	if l.rowFolds {
		length = p.Shape[len(p.Shape)-1]
	}
	for _, row := range w.Perm(n / length) {
		l.begin(row * length)
		for _, k := range w.Perm(length) {
			l.element(l.index(row*length + k))
		}
		l.end(row * length)
	}
	for k, out := range p.Outputs {
		for at, sum := range l.sums[k] {
			if out.Op == backend.Avg {
				sum /= l.count
			}
			l.outputs[k][at] = sum
		}
	}
}

// index returns where element k of the loop is.
func (l *looping) index(k int) []int {
	index := make([]int, len(l.p.Shape))
	for i := len(index) - 1; i >= 0; i-- {
		index[i] = k % l.p.Shape[i]
		k /= l.p.Shape[i]
	}
	return index
}

// begin folds the row of an element, and computes all that it has one of.
func (l *looping) begin(first int) {
	l.row = slices.Repeat([]float64{math.NaN()}, len(l.p.Code))
	for k, c := range l.p.Code {
		switch {
		case !l.once[k]:
		case c.Op.FoldsRows():
			for i := range l.p.Shape[len(l.p.Shape)-1] {
				x := l.values(l.index(first+i), k)[c.Args[0]]
				if i > 0 {
					x = folded(rowFold(c.Op), l.row[k], x)
				}
				l.row[k] = x
			}
		default:
			l.row[k] = l.values(l.index(first), k+1)[k]
		}
	}
}

// rowFold returns what an instruction folds by.
func rowFold(o fuse.Op) backend.ReduceOp {
	for _, op := range []backend.ReduceOp{backend.Sum, backend.Max, backend.Min} {
		if of, _ := fuse.OfRow(op); of == o {
			return op
		}
	}
	panic(o.String())
}

func folded(op backend.ReduceOp, x, y float64) float64 {
	switch op {
	case backend.Max:
		return max(x, y)
	case backend.Min:
		return min(x, y)
	case backend.Prod:
		return x * y
	}
	return x + y
}

// perRow reports whether a row has one element of an output.
func (l *looping) perRow(out *fuse.Output) bool {
	return l.rowFolds && !out.Folded && out.Strides[len(out.Strides)-1] == 0
}

// element reads an element, and stores or folds what it gives.
func (l *looping) element(index []int) {
	values := l.values(index, len(l.p.Code))
	for k := range l.p.Outputs {
		out := &l.p.Outputs[k]
		at, x := offset(index, out.Strides), values[out.Value]
		if sum, ok := l.sums[k][at]; out.Folded && ok {
			x = folded(out.Op, sum, x)
		}
		switch {
		case out.Folded:
			l.sums[k][at] = x
		case !l.perRow(out):
			l.outputs[k][at] = x
		}
	}
}

// end stores what a row has one element of.
func (l *looping) end(first int) {
	for k := range l.p.Outputs {
		if out := &l.p.Outputs[k]; l.perRow(out) {
			l.outputs[k][offset(l.index(first), out.Strides)] = l.row[out.Value]
		}
	}
}

func offset(index, strides []int) (at int) {
	for i := range index {
		at += index[i] * strides[i]
	}
	return at
}

// values computes the first values of an element, from what is in memory now.
func (l *looping) values(index []int, n int) []float64 {
	values := make([]float64, n)
	for k, c := range l.p.Code[:n] {
		if l.once[k] && !math.IsNaN(l.row[k]) {
			values[k] = l.row[k]
			continue
		}
		var x [4]float64
		for i, a := range c.Args[:c.Op.Operands()] {
			x[i] = values[a]
		}
		switch c.Op {
		case fuse.Load:
			values[k] = l.inputs[c.Args[0]][offset(index, l.p.Inputs[c.Args[0]].Strides)]
		case fuse.Const:
			if values[k] = math.Float64frombits(c.Bits); !c.Type.Float() {
				values[k] = float64(int64(c.Bits))
			}
		case fuse.Index:
			values[k] = float64(offset(index, l.p.Indices[c.Args[0]]))
		default:
			values[k] = computed(c.Op, x)
		}
	}
	return values
}

// computed computes an operation on whole numbers.
func computed(o fuse.Op, x [4]float64) float64 {
	truth := func(b bool) float64 {
		if b {
			return 1
		}
		return 0
	}
	switch o {
	case fuse.Neg:
		return -x[0]
	case fuse.Abs:
		return math.Abs(x[0])
	case fuse.Sign:
		return truth(x[0] > 0) - truth(x[0] < 0)
	case fuse.Relu:
		return max(x[0], 0)
	case fuse.Add:
		return x[0] + x[1]
	case fuse.Sub:
		return x[0] - x[1]
	case fuse.Mul:
		return x[0] * x[1]
	case fuse.Maximum:
		return max(x[0], x[1])
	case fuse.Minimum:
		return min(x[0], x[1])
	case fuse.Less:
		return truth(x[0] < x[1])
	case fuse.LessEqual:
		return truth(x[0] <= x[1])
	case fuse.Greater:
		return truth(x[0] > x[1])
	case fuse.GreaterEqual:
		return truth(x[0] >= x[1])
	case fuse.Equal:
		return truth(x[0] == x[1])
	case fuse.NotEqual:
		return truth(x[0] != x[1])
	case fuse.Where:
		if x[0] != 0 {
			return x[1]
		}
		return x[2]
	case fuse.Cast:
		return x[0]
	}
	panic(o.String())
}
