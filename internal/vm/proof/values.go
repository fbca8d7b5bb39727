package proof

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// valueNumbers gives numbers to what programs and plans compute, so that two values have the same
// number only if they are the same function of what comes from outside: global value numbering
// over tensors. It shares no code with what makes plans, except that an element-wise operation of a
// program becomes instructions by [compute].
//
// The elements of a value have an order, the row-major one, in which it is one long list. A reshape
// is then nothing, and every other view is a way to read a list: see [tensor].
type valueNumbers struct {
	made    numbers[term] // how values are computed
	ops     map[ir.Op]int // numbers of operations
	shapes  numbers[ir.Dims]
	layouts numbers[axes]
	lists   [32]list // some of the layouts that were asked for last
	scratch fuse.Program
	loads   []tensor     // of the operands of a loop
	places  []fuse.Value // of these in the scratch program
	values  []tensor     // of the instructions of a loop
}

// tensor is a list of elements: those of a computed list (value) that a layout names.
type tensor struct{ value, layout int32 }

// axes is a layout: which elements the list has, from element off on, with axes of neighbours that
// could be one taken together, and none of length 1. Two layouts name the same elements only if
// they are equal.
type axes struct {
	off  int
	n    int32
	many bool // more axes than there is room for
	at   [ir.MaxDims]struct{ size, stride int }
}

// list is the layout of n elements, each repeated: its number plus 1.
type list struct {
	n, repeated int
	layout      int32
}

// term is how a value is computed, or a list of operands.
type term struct {
	form  form
	op    fuse.Op // element by element
	dtype backend.DType
	bits  uint64 // of a constant or of another operation, or which of several values it is
	args  [4]tensor
}

// form says what a term is.
type form uint8

const (
	byFunction  form = iota // of args, element by element
	fromOutside             // number bits of what args say
	byReduction             // of args
	byCopy                  // of args, whose layout no other layout can read through
	besides                 // value number bits of the operation that gives args
	byExchange              // of args, of which the second one is what comes before the first
	byGather                // of args, this rank's shard of the variable of update number bits
	underWay                // what an exchange writes
	byOperation             // number bits, of a list of operands
	operandList             // a list, and one operand more
)

// hash returns a hash of what is in use.
func (t *term) hash() hash {
	h := hash(0).and(uint64(t.form) | uint64(t.op)<<8 | uint64(t.dtype)<<16).and(t.bits)
	for i := range t.args {
		if t.args[i] == (tensor{}) {
			break
		}
		h = h.and(uint64(t.args[i].value) | uint64(t.args[i].layout)<<32)
	}
	return h
}

// newValueNumbers has room for about n values.
func newValueNumbers(n int) *valueNumbers {
	return &valueNumbers{made: newNumbers[term](n + n/2), ops: map[ir.Op]int{},
		shapes: newNumbers[ir.Dims](16), layouts: newNumbers[axes](32),
		loads: make([]tensor, 0, 16), values: make([]tensor, 0, 32),
		scratch: fuse.Program{Shape: make([]int, 0, ir.MaxDims), Code: make([]fuse.Instr, 0, 16)}}
}

// add puts an axis inside of the others.
func (a *axes) add(size, stride int) {
	last := a.n - 1
	switch {
	case size == 1:
	case last >= 0 && a.at[last].stride == size*stride:
		a.at[last].size *= size
		a.at[last].stride = stride
	case int(a.n) == len(a.at):
		a.many = true
	default:
		a.at[a.n].size, a.at[a.n].stride = size, stride
		a.n++
	}
}

// size is the number of elements.
func (a *axes) size() int {
	size := 1
	for _, x := range a.at[:a.n] {
		size *= x.size
	}
	return size
}

// repeats is how often each element comes, one right after the other.
func (a *axes) repeats() int {
	if a.n > 0 && a.at[a.n-1].stride == 0 {
		return a.at[a.n-1].size
	}
	return 1
}

// span returns the number of elements from the first one that are reached over.
func (a *axes) span() int {
	last := 0
	for _, x := range a.at[:a.n] {
		if x.size == 0 {
			return 0
		}
		last += (x.size - 1) * x.stride
	}
	return last + 1
}

// layout returns the number of a layout.
func (m *valueNumbers) layout(a *axes) int32 {
	h := hash(0).and(uint64(a.off))
	for _, x := range a.at[:a.n] {
		h = h.and(uint64(x.size)).and(uint64(x.stride))
	}
	return m.layouts.of(a, h)
}

// looped is strided for a loop.
func looped(off int, shape, strides []int) axes {
	a := axes{off: off}
	for i, size := range shape {
		a.add(size, strides[i])
	}
	return a
}

// strided returns the layout of a shape whose axes have strides, from element off on.
func strided(off int, shape, strides ir.Dims) axes {
	a := axes{off: off}
	for i := range shape.Len() {
		a.add(shape.At(i), strides.At(i))
	}
	return a
}

// list returns the layout of n elements, each repeated.
func (m *valueNumbers) list(n, repeated int) int32 {
	last := &m.lists[hash(n).and(uint64(repeated))>>32%hash(len(m.lists))]
	if last.n != n || last.repeated != repeated || last.layout == 0 {
		var a axes
		a.add(n, 1)
		a.add(repeated, 0)
		*last = list{n, repeated, m.layout(&a) + 1}
	}
	return last.layout - 1
}

// once takes n repetitions of each element away.
func (a *axes) once(n int) {
	if a.n--; a.at[a.n].size > n {
		a.at[a.n].size /= n
		a.n++
	} else {
		a.at[a.n].size, a.at[a.n].stride = 0, 0
	}
}

// once returns the layout without n repetitions of each element.
func (m *valueNumbers) once(layout int32, n int) int32 {
	a := m.layouts.keys[layout]
	a.once(n)
	return m.layout(&a)
}

// size returns the number of elements of a tensor.
func (m *valueNumbers) size(t tensor) int { return m.layouts.keys[t.layout].size() }

// read returns the elements of t at the places that a layout names.
func (m *valueNumbers) read(t tensor, a *axes) tensor {
	y, ok := m.readThrough(t, a)
	if !ok {
		y = tensor{m.number(&term{form: byCopy, args: [4]tensor{t}}), m.layout(a)}
	}
	for of := &m.made.keys[y.value]; of.form == byCopy; of = &m.made.keys[y.value] {
		b := m.layouts.keys[y.layout]
		inner, ok := m.readThrough(of.args[0], &b)
		if !ok {
			break
		}
		y = inner
	}
	return y
}

// readThrough returns read(t, a) as elements of the list that t has its elements of; false if no
// layout names them. Places of t have one digit for each of its axes, and reading along an axis
// must change digits without a carry.
func (m *valueNumbers) readThrough(t tensor, a *axes) (tensor, bool) {
	of := &m.layouts.keys[t.layout]
	if of.n == 0 || of.n == 1 && of.at[0].stride == 1 {
		if of.off == 0 {
			return tensor{t.value, m.layout(a)}, true
		}
		y := *a
		y.off += of.off
		return tensor{t.value, m.layout(&y)}, true
	}
	var place [ir.MaxDims]int // the size of what is inside of each axis
	inside := 1
	for j := int(of.n) - 1; j >= 0; j-- {
		place[j] = inside
		inside *= of.at[j].size
	}
	var most [ir.MaxDims]int // the largest digits that are read
	follow := func(at, times int) (stride int) {
		for j := range of.n {
			digit := at / place[j] % of.at[j].size
			most[j] += digit * times
			stride += digit * of.at[j].stride
		}
		return stride
	}
	y := axes{off: of.off + follow(a.off, 1)}
	for _, x := range a.at[:a.n] {
		outer := x
		// of what is read along one axis, one for each axis of t
		var parts []struct{ size, stride int }
		for j := int(of.n) - 1; j > 0; j-- {
			carry := place[j-1] // from the axis j
			if outer.stride == 0 || outer.stride >= carry || carry%outer.stride != 0 {
				continue
			}
			n := carry / outer.stride
			if outer.size <= n || outer.size%n != 0 {
				break
			}
			parts = append(parts, struct{ size, stride int }{n, outer.stride})
			outer.size, outer.stride = outer.size/n, carry
		}
		y.add(outer.size, follow(outer.stride, outer.size-1))
		for _, part := range slices.Backward(parts) {
			y.add(part.size, follow(part.stride, part.size-1))
		}
	}
	for j := range of.n {
		if most[j] >= of.at[j].size {
			return tensor{}, false
		}
	}
	return tensor{t.value, m.layout(&y)}, !y.many
}

// number returns the number of a term.
func (m *valueNumbers) number(t *term) int32 { return m.made.of(t, t.hash()) }

// apply returns the number of an operation on a list of operands, after some effects if it has
// one.
func (m *valueNumbers) apply(op ir.Op, d backend.DType, shape ir.Dims, operands int32,
	effects int) int32 {
	n, ok := m.ops[op]
	if !ok {
		n = len(m.ops)
		m.ops[op] = n
	}
	return m.number(&term{form: byOperation, dtype: d, bits: uint64(n) | uint64(effects)<<32,
		args: [4]tensor{{operands, m.shape(shape)}}})
}

// operand returns a list with one operand more.
func (m *valueNumbers) operand(before int32, t tensor, shape ir.Dims, dtype backend.DType) int32 {
	return m.number(&term{form: operandList, dtype: dtype,
		args: [4]tensor{t, {before, m.shape(shape)}}})
}

// shape returns the number of a shape.
func (m *valueNumbers) shape(s ir.Dims) int32 {
	h := hash(0)
	for i := range s.Len() {
		h = h.and(uint64(s.At(i)))
	}
	return m.shapes.of(&s, h)
}

// outside returns n elements that come from outside.
func (m *valueNumbers) outside(of memory, d backend.DType, n int) tensor {
	return tensor{m.origin(of, d), m.list(n, 1)}
}

// origin returns the number of what a run finds in memory.
func (m *valueNumbers) origin(of memory, d backend.DType) int32 {
	return m.number(&term{form: fromOutside, dtype: d, bits: uint64(of.index),
		args: [4]tensor{{int32(of.kind), int32(of.vector)}}})
}

// result returns n elements that an operation gives besides those of x.
func (m *valueNumbers) result(index int, x tensor, n int) tensor {
	value := m.number(&term{form: besides, bits: uint64(index), args: [4]tensor{x}})
	return tensor{value, m.list(n, 1)}
}

// constant is a number, n times.
func (m *valueNumbers) constant(d backend.DType, bits uint64, n int) tensor {
	return tensor{m.number(&term{op: fuse.Const, dtype: d, bits: bits}), m.list(1, n)}
}

// fold returns the reduction of t, taken in a shape, along axes. What it
// computes does not depend on how axes that are reduced, or kept, together are divided.
func (m *valueNumbers) fold(op backend.ReduceOp, d backend.DType, t tensor, shape []int,
	reduced func(axis int) bool) (y int32, n int) {
	var sizes [ir.MaxDims]int // of kept axes, and of reduced ones less than 0
	last := -1
	n = 1
	for i, size := range shape {
		if size == 1 {
			continue
		}
		sign := 1
		if reduced(i) {
			sign = -1
		} else {
			n *= size
		}
		if last >= 0 && sizes[last]*sign > 0 {
			sizes[last] *= size
		} else {
			last++
			sizes[last] = sign * size
		}
	}
	shape = sizes[:last+1]
	return m.number(&term{form: byReduction, dtype: d, bits: uint64(op),
		args: [4]tensor{t, {0, m.shape(ir.Of(shape...))}}}), n
}

// run returns what each instruction of a loop computes, until the next call. loads are what the
// loop's operands are.
func (m *valueNumbers) run(p *fuse.Program, loads []tensor) []tensor {
	n := 1
	for _, size := range p.Shape {
		n *= size
	}
	values := m.values[:0]
	for i := range p.Code {
		c := &p.Code[i]
		switch {
		case c.Op == fuse.Load:
			values = append(values, loads[c.Args[0]])
		case c.Op == fuse.Const:
			values = append(values, m.constant(c.Type, c.Bits, n))
		case c.Op == fuse.Index:
			places := looped(0, p.Shape, p.Indices[c.Args[0]])
			t := term{op: c.Op, dtype: c.Type, args: [4]tensor{{layout: m.layout(&places)}}}
			values = append(values, m.elementwise(&t, 1, n))
		case c.Op.FoldsRows():
			last := len(p.Shape) - 1
			sum, rows := m.fold(rowFold(c.Op), c.Type, values[c.Args[0]], p.Shape,
				func(axis int) bool { return axis == last })
			values = append(values, tensor{sum, m.list(rows, p.Shape[last])})
		default:
			t, operands := term{op: c.Op, dtype: c.Type, bits: c.Bits}, c.Op.Operands()
			for i, a := range c.Args[:operands] {
				t.args[i] = values[a]
			}
			values = append(values, m.elementwise(&t, operands, n))
		}
	}
	m.values = values
	return values
}

// rowFold returns how an instruction folds rows.
func rowFold(o fuse.Op) backend.ReduceOp {
	for _, op := range []backend.ReduceOp{backend.Sum, backend.Max, backend.Min} {
		if of, ok := fuse.OfRow(op); ok && of == o {
			return op
		}
	}
	return backend.Prod
}

// elementwise returns an instruction's value for n elements. What its operands repeat is computed
// once: a loop over rows has it once for each row, and a program may have it once, too.
func (m *valueNumbers) elementwise(t *term, operands, n int) tensor {
	repeated := n
	for _, a := range t.args[:operands] {
		if repeated > 1 {
			repeated = gcd(repeated, m.layouts.keys[a.layout].repeats())
		}
	}
	if repeated > 1 {
		n /= repeated
		for k := range operands {
			t.args[k].layout = m.once(t.args[k].layout, repeated)
		}
	}
	return tensor{m.number(t), m.list(n, repeated)}
}

func gcd(a, b int) int {
	for b > 1 {
		a, b = b, a%b
	}
	if b == 1 { // as it mostly is
		return 1
	}
	return a
}

// program returns what each value of a program is, and its effects.
func (m *valueNumbers) program(p *ir.Program) (values []tensor, done effects) {
	values = make([]tensor, len(p.Values))
	for i := range p.Values {
		v := &p.Values[i]
		switch {
		case ir.Leaf(v.Op):
			values[i] = m.leaf(v.Op, v.DType, v.Shape.Size())
		case ir.View(v.Op):
			values[i] = m.view(p, v, values)
		case ir.Elementwise(v.Op):
			values[i] = m.element(p, v, values)
		default:
			values[i] = m.other(p, v, values, &done)
		}
	}
	return values, done
}

// hoisted returns what a plan that is proven by itself computes, given what its inputs are.
func (m *valueNumbers) hoisted(o *plan.Once) tensor {
	p := ir.Program{Values: slices.Clone(o.Plan.Program.Values)}
	for i := range p.Values {
		if in, ok := p.Values[i].Op.(ir.Input); ok {
			p.Values[i].Op = o.Leaves[in.Index]
		}
	}
	values, _ := m.program(&p)
	return values[o.Plan.Program.Results[0]]
}

// leaf returns a value from outside.
func (m *valueNumbers) leaf(op ir.Op, d backend.DType, n int) tensor {
	switch op := op.(type) {
	case ir.Scalar:
		return m.float(d, op.Float(), n)
	case ir.Setting:
		return tensor{m.origin(memoryOfLeaf(op), d), m.list(1, n)}
	}
	return m.outside(memoryOfLeaf(op), d, n)
}

// float returns n times a number.
func (m *valueNumbers) float(d backend.DType, x float64, n int) tensor {
	m.reset(ir.Dims{})
	c := m.scratch.Code[m.scratch.Const(fuse.Type(d), x)]
	return m.constant(c.Type, c.Bits, n)
}

// reset makes the scratch program an empty one over a shape.
func (m *valueNumbers) reset(shape ir.Dims) {
	m.loads, m.scratch.Shape = m.loads[:0], m.scratch.Shape[:0]
	m.scratch.Code, m.scratch.Indices = m.scratch.Code[:0], m.scratch.Indices[:0]
	for i := range shape.Len() {
		m.scratch.Shape = append(m.scratch.Shape, shape.At(i))
	}
}

// load adds an operand to the scratch program.
func (m *valueNumbers) load(x tensor, d backend.DType) fuse.Value {
	m.scratch.Code = append(m.scratch.Code, fuse.Instr{Op: fuse.Load, Type: fuse.Type(d),
		Args: [4]fuse.Value{len(m.loads)}})
	m.loads = append(m.loads, x)
	return len(m.scratch.Code) - 1
}

// element returns a value that is computed element by element.
func (m *valueNumbers) element(p *ir.Program, v *ir.Value, values []tensor) tensor {
	m.reset(v.Shape)
	m.places = m.places[:0]
	for _, a := range v.Args {
		m.places = append(m.places, m.load(values[a], p.Values[a].DType))
	}
	result := v.Compute(&m.scratch, m.places)
	return m.run(&m.scratch, m.loads)[result]
}

// view returns a value that shares the memory of its operand.
func (m *valueNumbers) view(p *ir.Program, v *ir.Value, values []tensor) tensor {
	x, shape := values[v.Args[0]], &p.Values[v.Args[0]].Shape
	switch op := v.Op.(type) {
	case ir.Reshape:
		return x
	case ir.Result:
		return m.result(op.Index, x, v.Shape.Size())
	}
	off, strides := 0, shape.Strides()
	switch op := v.Op.(type) {
	case ir.Permute:
		rows := strides
		for i := range op.Axes.Len() {
			strides = strides.With(i, rows.At(op.Axes.At(i)))
		}
	case ir.Slice:
		off = op.Start * strides.At(op.Axis)
		strides = strides.With(op.Axis, op.Step*strides.At(op.Axis))
	case ir.Broadcast:
		for i := range shape.Len() {
			if shape.At(i) != v.Shape.At(i) {
				strides = strides.With(i, 0)
			}
		}
	}
	a := strided(off, v.Shape, strides)
	return m.read(x, &a)
}

// other returns a value of any other kind.
func (m *valueNumbers) other(p *ir.Program, v *ir.Value, values []tensor, done *effects) tensor {
	switch op := v.Op.(type) {
	case ir.Reduce:
		m.reset(p.Values[v.Args[0]].Shape)
		y, n := m.fold(op.Op, fuse.Type(v.DType), values[v.Args[0]], m.scratch.Shape, op.Axes.Has)
		return tensor{y, m.list(n, 1)}
	case ir.AllReduce:
		sums := make([]tensor, len(v.Args))
		for i, a := range v.Args {
			sums[i] = values[a]
		}
		return m.exchanged(sums...)
	case ir.AllGather:
		var shard tensor
		for _, a := range v.Args {
			shard = values[a]
		}
		return m.gathered(op.Index, shard, v.Shape.Size())
	}
	args := int32(0)
	for _, a := range v.Args {
		args = m.operand(args, values[a], p.Values[a].Shape, p.Values[a].DType)
	}
	y := done.apply(m, v.Op, v.DType, v.Shape, args)
	return tensor{y, m.list(v.Shape.Size(), 1)}
}

// effects are the terms of operations with an effect, in the order in which they run.
type effects []int32

// apply is [valueNumbers.apply]. Operations with an effect are not equal: they differ in how
// many were before.
func (e *effects) apply(m *valueNumbers, op ir.Op, d backend.DType, shape ir.Dims,
	operands int32) int32 {
	if !ir.Effect(op) || op.(ir.Opaque).Index == lower.Squares {
		return m.apply(op, d, shape, operands, 0)
	}
	*e = append(*e, m.apply(op, d, shape, operands, len(*e)+1))
	return (*e)[len(*e)-1]
}
