package proof

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Verify proves that a plan computes its program. It runs the plan on paper, each kind of run, with
// what each piece of memory means in place of elements: every step gets what it finds in the memory
// of its operands and leaves in that of its results what it computes of them, whatever that
// overwrites. In the end the results must be the program's, variables and what solvers keep
// for them what the updates make of them, in each bucket the right gradients must have been
// exchanged, and operations with an effect must have run in their order.
//
// It takes a time in proportion to the plan. What an operation computes is left to tests: see
// [valueNumbers].
func Verify(p *plan.Plan) error { return verify(p, passesOf) }

// verify takes how loops run.
func verify(p *plan.Plan, passes func(p *fuse.Program) []pass) error {
	m := newValueNumbers(len(p.Program.Values))
	r := &proof{valueNumbers: m, plan: p, passes: passes, live: make([]int, 0, len(p.Buffers)),
		args: make([]operand, 0, 16), gradients: make([]ir.ID, len(p.Updates)),
		computed: map[int]tensor{}}
	for id := range p.Program.Values {
		if op, ok := p.Program.Values[id].Op.(ir.AllReduce); ok {
			r.gradients[op.Index] = ir.ID(id)
		}
	}
	r.wanted, r.due = m.program(p.Program)
	for i := range p.Once {
		r.computed[p.Once[i].Index] = m.hoisted(&p.Once[i])
	}
	r.know()
	for _, kind := range p.Accumulation.Every() {
		if err := r.run(kind); err != nil {
			return fmt.Errorf("plan: %w", err)
		}
	}
	return nil
}

// proof is a run of a plan on paper.
type proof struct {
	*valueNumbers
	plan      *plan.Plan
	passes    func(p *fuse.Program) []pass // of a loop
	wanted    []tensor                     // the values of the program
	gradients []ir.ID                      // of the program: what ranks add up, by update
	computed  map[int]tensor               // what constants are that are computed

	limit   int32   // the first number that no value of the program has
	first   int     // the step that was the first to compute something else, -1 for none
	spaces  []int   // by buffer: its memory, which other buffers may have, too
	buffers []int32 // by origin, whatever the dtype: 1 + the buffer, 0 for none
	present []content
	live    []int   // buffers of the arena that have a value, by place
	due     effects // of the program
	done    effects
	sent    int // the last bucket that has left for an all-reduce
	// exchanges that nobody has waited for, by what ends them
	underWay map[plan.Receive]transfer
	args     []operand // of a step
	gives    []tensor  // what it computes
	arena    []int     // buffers that it writes
	under    []int     // operations of the graph that run beside the step
}

// content is what lies in memory.
type content struct {
	tensor
	step int // that has written it, -1 if none has
	gone int // the step that has written over it, -1 if it is there
	cover
}

// cover is a result of a step that overlaps memory.
type cover struct {
	by     int // 1 + the step's number
	result int // -1 for several
}

// operand is what a step finds in a buffer, and how far it may read.
type operand struct {
	tensor
	span int
}

// know finds which buffers are the same memory, whatever their dtypes.
func (r *proof) know() {
	r.spaces = make([]int, len(r.plan.Buffers))
	r.buffers = make([]int32, len(r.made.keys)+len(r.plan.Buffers))
	for i := range r.plan.Buffers {
		b := &r.plan.Buffers[i]
		r.spaces[i] = i
		switch b.Kind {
		case plan.Arena, plan.Setting, plan.Scalar, plan.OwnShard, plan.Unsharded:
			continue
		}
		if of := &r.buffers[r.origin(memoryOf(b), 0)]; *of == 0 {
			*of = int32(i + 1)
		} else {
			r.spaces[i] = int(*of - 1)
		}
	}
	r.limit = int32(len(r.made.keys))
}

// run runs the steps of a kind of run, and compares.
func (r *proof) run(kind int) error {
	r.fill()
	for i := range r.plan.Steps {
		s := &r.plan.Steps[i]
		if !s.Runs.Has(kind) {
			continue
		}
		if err := r.runStep(i, s); err != nil {
			return fmt.Errorf("step %d, %v of %s: %w", i, s.Op, s.Name, err)
		}
	}
	due := r.due
	if kind >= ir.Idle { // of gathers or updates alone
		due = nil
	}
	err := errors.Join(r.compare(kind), r.ended(kind))
	for of := range r.underWay {
		err = errors.Join(err, fmt.Errorf("in a run of kind %d nobody waits for the %v of "+
			"bucket %d", kind, of.Kind, of.Bucket-1))
	}
	if !slices.Equal(r.done, due) {
		err = errors.Join(err, fmt.Errorf("in a run of kind %d the operations with an effect are "+
			"not those of the program, in its order", kind))
	}
	if err != nil {
		if r.first >= 0 {
			s := &r.plan.Steps[r.first]
			err = fmt.Errorf("%w (step %d, %v of %s, is the first to compute what the program "+
				"does not)", err, r.first, s.Op, s.Name)
		}
		return err
	}
	return nil
}

// fill gives all memory what is in it before a run.
func (r *proof) fill() {
	r.done, r.first, r.live, r.sent, r.under = r.done[:0], -1, r.live[:0], 0, nil
	r.underWay = map[plan.Receive]transfer{}
	r.present = make([]content, len(r.plan.Buffers))
	for i := range r.plan.Buffers {
		b, c := &r.plan.Buffers[i], content{step: -1, gone: -1}
		switch n := b.Bytes / max(1, b.DType.Size()); b.Kind {
		case plan.Scalar:
			c.tensor = r.float(b.DType, math.Float64frombits(b.Bits), n)
		case plan.Arena:
			c.step, c.gone = -2, -2
		case plan.FullBucket, plan.OwnShard, plan.Unsharded:
			c.step, c.gone = -2, -2
		case plan.Gradient:
			if c.tensor = r.outside(memoryOf(b), b.DType, n); !r.plan.Accumulation.Keeps() {
				c.step, c.gone = -2, -2 // nothing yet
			} else if placed(b) {
				r.live = append(r.live, i)
			}
		default:
			c.tensor = r.outside(memoryOf(b), b.DType, n)
		}
		if x, computed := r.computed[b.Index]; computed && b.Kind == plan.Constant {
			c.tensor = x
		}
		r.present[i] = c
	}
	slices.SortFunc(r.live, func(x, y int) int {
		return cmp.Compare(r.plan.Buffers[x].Offset, r.plan.Buffers[y].Offset)
	})
}

// runStep runs a step.
func (r *proof) runStep(i int, s *plan.Step) error {
	if err := r.operands(s); err != nil {
		return err
	}
	if err := cmp.Or(r.alone(i, s), r.beside(i), r.leave(i)); err != nil {
		return err
	}
	if err := r.compute(s); err != nil {
		return err
	}
	other := func(t tensor) bool { return t.value >= r.limit }
	_, update := s.Op.(plan.Joined)
	if !update && s.Runs == 0 && r.first < 0 && slices.ContainsFunc(r.gives, other) {
		r.first = i
	}
	for k := range s.Dsts {
		r.write(s.Dsts[k].Buffer, content{tensor: r.gives[k], step: i, gone: -1})
	}
	return nil
}

// operands finds what lies in the buffers of a step's operands.
func (r *proof) operands(s *plan.Step) error {
	r.args = r.args[:0]
	for k := range s.Args {
		a := &s.Args[k]
		span := a.Span()
		if err := r.fits(a, span); err != nil {
			return err
		}
		at, err := r.find(a)
		if err != nil {
			return err
		}
		r.args = append(r.args, operand{at.tensor, span})
	}
	return nil
}

// fits returns an error if a value, which reaches over span elements, is not what its buffer has.
func (r *proof) fits(a *plan.Ref, span int) error {
	b, size := &r.plan.Buffers[a.Buffer], a.DType.Size()
	if first, end := a.Offset*size, (a.Offset+span)*size; first < 0 || end > b.Bytes {
		return fmt.Errorf("an operand of shape %v reaches over bytes %d to %d of %d",
			a.Shape, first, end, b.Bytes)
	}
	if a.DType != b.DType {
		return fmt.Errorf("a value of %v in the memory of %s, which has %v",
			a.DType, b.Name, b.DType)
	}
	return nil
}

// find returns what lies in the buffer of a value. It must be there, and the last that was written.
func (r *proof) find(a *plan.Ref) (content, error) {
	kind, c := r.plan.Buffers[a.Buffer].Kind, r.present[r.spaces[a.Buffer]]
	switch {
	case c.gone >= 0 && c.step == a.Step:
		return c, fmt.Errorf("the value of step %d is read, but step %d has written over it",
			a.Step, c.gone)
	case c.step == -2:
		return c, fmt.Errorf("the value of step %d is read before it is written", a.Step)
	case c.step != a.Step && kind != plan.Arena && kind != plan.Gradient &&
		!placed(&r.plan.Buffers[a.Buffer]):
		return c, fmt.Errorf("%s is read as it was before the run, but step %d has updated it",
			r.plan.Text(*a), c.step)
	case c.step != a.Step:
		return c, fmt.Errorf("the value of step %d is read, but step %d has written over it",
			a.Step, c.step)
	}
	return c, nil
}

// compute finds what a step computes of what is in the buffers of its operands: what is then in
// those of its results.
func (r *proof) compute(s *plan.Step) error {
	r.gives = r.gives[:0]
	switch op := s.Op.(type) {
	case plan.Loop:
		return r.loop(op.Program, s.Dsts, s.Args, r.args)
	case plan.Joined:
		dsts, refs, args := s.Dsts, s.Args, r.args
		for _, p := range op.Programs {
			o, n := len(p.Outputs), len(p.Inputs)
			if o > len(dsts) || n > len(refs) {
				return errors.New("it has fewer operands than its loops")
			}
			if err := r.loop(p, dsts[:o], refs[:n], args[:n]); err != nil {
				return err
			}
			dsts, refs, args = dsts[o:], refs[n:], args[n:]
		}
		return nil
	case plan.Send:
		return r.send(op, s)
	case plan.Receive:
		return r.receive(op, s)
	}
	return r.operation(s)
}

// loop adds what a loop computes.
func (r *proof) loop(p *fuse.Program, dsts, refs []plan.Ref, args []operand) (err error) {
	if len(p.Inputs) != len(refs) || len(p.Outputs) != len(dsts) {
		return fmt.Errorf("a loop of %d operands and %d results has %d and %d",
			len(p.Inputs), len(p.Outputs), len(refs), len(dsts))
	}
	r.loads = r.loads[:0]
	for k := range p.Inputs {
		in := &p.Inputs[k]
		from, places := &refs[k], looped(refs[k].Offset, p.Shape, in.Strides)
		reach := places.span()
		if in.DType != from.DType || reach > args[k].span {
			return fmt.Errorf("it reads %d elements of %v where %d of %v are",
				reach, in.DType, args[k].span, from.DType)
		}
		r.loads = append(r.loads, r.read(args[k].tensor, &places))
	}
	values := r.valueNumbers.run(p, r.loads)
	for k := range p.Outputs {
		d, out := &dsts[k], &p.Outputs[k]
		y := values[out.Value]
		if out.DType != d.DType {
			return fmt.Errorf("it writes %v where %v are", out.DType, d.DType)
		}
		if out.Folded {
			of, n := r.fold(out.Op, fuse.Type(out.DType), y, p.Shape,
				func(axis int) bool { return p.Reduced[axis] })
			y = tensor{of, r.list(n, 1)}
		}
		if y, err = r.stored(y, d, p.Shape, out); err != nil {
			return err
		}
		r.gives = append(r.gives, y)
	}
	return nil
}

// stored returns what is in the buffer of d when all elements of y are stored: each element of the
// buffer must get one.
func (r *proof) stored(y tensor, d *plan.Ref, shape []int, out *fuse.Output) (tensor, error) {
	to := looped(0, shape, out.Strides)
	if out.Folded {
		to = axes{}
		for i, stride := range out.Strides {
			if stride > 0 || shape[i] == 1 {
				to.add(shape[i], stride)
			}
		}
	}
	repeated := to.repeats()
	if repeated > 1 {
		to.once(repeated)
		if r.layouts.keys[y.layout].repeats()%repeated != 0 {
			return y, errors.New("it writes several values to one place")
		}
		y.layout = r.once(y.layout, repeated)
	}
	n := r.size(y)
	gaps := to.n > 1 || to.n == 1 && to.at[0].stride != 1 || to.size() != n
	if gaps || !r.writable(d) || n*d.DType.Size() != r.plan.Buffers[d.Buffer].Bytes {
		return y, fmt.Errorf("it writes outside of the arena, or with gaps: %d elements for %s",
			n, r.plan.Text(*d))
	}
	return y, nil
}

// operation adds what a step of any other kind computes.
func (r *proof) operation(s *plan.Step) error {
	args := int32(0)
	for k := range s.Args {
		a := &s.Args[k]
		places := strided(a.Offset, a.Shape, a.Strides)
		x := r.read(r.args[k].tensor, &places)
		args = r.operand(args, x, a.Shape, a.DType)
	}
	first := tensor{r.done.apply(r.valueNumbers, s.Op, s.Dsts[0].DType, s.Dsts[0].Shape, args),
		r.list(s.Dsts[0].Shape.Size(), 1)}
	for k := range s.Dsts {
		d, y := &s.Dsts[k], first
		if k > 0 {
			y = r.result(k, first, d.Shape.Size())
		}
		if !r.writable(d) || !fills(s, d) {
			return fmt.Errorf("it writes outside of the arena, or with gaps: %s",
				r.plan.Text(*d))
		}
		r.gives = append(r.gives, r.lying(y, d))
	}
	return nil
}

// writable reports whether a value is all of its buffer, and that is memory which steps may write.
func (r *proof) writable(d *plan.Ref) bool {
	b := &r.plan.Buffers[d.Buffer]
	in, inside := b, b.Offset >= 0
	if b.Within > 0 {
		in = &r.plan.Buffers[b.Within-1]
		inside = b.Offset == in.Offset+b.At && b.At >= 0 && b.At+b.Bytes <= in.Bytes
	}
	inside = inside && (in.Kind == plan.FullBucket || b.Offset+b.Bytes <= r.plan.ArenaBytes)
	return d.Offset == 0 && d.Span()*d.DType.Size() == b.Bytes && d.DType == b.DType &&
		(placed(b) && inside || !placed(b) &&
			(b.Kind == plan.Gradient || b.Kind == plan.PartialSum || b.Written))
}

// fills reports whether a result has no gaps: attention may exchange axes.
func fills(s *plan.Step, d *plan.Ref) bool {
	switch s.Op.(type) {
	case ir.Attention, ir.AttentionGrad:
		return d.Span() == d.Shape.Size()
	}
	return d.Dense()
}

// lying returns the elements of y in the order in which they lie in memory, as strides say that
// have no gaps.
func (r *proof) lying(y tensor, d *plan.Ref) tensor {
	if d.Dense() {
		return y
	}
	rows, order := d.Shape.Strides(), make([]int, d.Shape.Len())
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Compare(d.Strides.At(b), d.Strides.At(a))
	})
	var a axes
	for _, i := range order {
		a.add(d.Shape.At(i), rows.At(i))
	}
	return r.read(y, &a)
}

// write puts a value into the memory of a buffer, over what lies there.
func (r *proof) write(buffer int, c content) {
	if b := &r.plan.Buffers[buffer]; placed(b) {
		from, to := r.covered(buffer)
		for _, x := range r.live[from:to] {
			r.present[x].gone = c.step
		}
		switch {
		case b.Bytes == 0:
		case to == from+1:
			r.live[from] = buffer
		default:
			r.live = slices.Replace(r.live, from, to, buffer)
		}
	}
	r.present[r.spaces[buffer]] = c
}
