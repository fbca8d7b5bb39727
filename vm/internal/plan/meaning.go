package plan

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// meaning gives numbers to what programs and plans compute, so that two values have the same number
// only if they are the same function of what comes from outside: global value numbering over
// tensors. It shares no code with what makes plans, except that an element-wise operation of a
// program becomes instructions by [compute].
//
// The elements of a value have an order, the row-major one, in which it is one long list. A reshape
// is then nothing, and every other view is a way to read a list: see [tensor].
type meaning struct {
	instrs  map[instruction]int32
	terms   map[term]int32
	lists   map[list]int32
	shapes  map[ir.Dims]int32
	layouts map[axes]int32
	known   map[strided]int32 // layouts by shape and strides
	plain   map[[2]int]int32  // layouts of a whole list, by its length and how often each element comes
	fewer   map[[2]int]int32  // layouts without repetitions, by layout and how many
	axes    []axes            // by layout
	made    []instruction     // by number: how it is computed, if element by element
	copies  map[int32]tensor  // what a copy is one of
	scratch fuse.Program
	values  []tensor // of the instructions of a loop
}

// tensor is a list of elements: those of a computed list (value) that a layout names, from element
// off on.
type tensor struct {
	value, layout int32
	off           int
}

// axes is a layout: which elements the list has, with axes of neighbours that could be one taken
// together, and none of length 1. Two layouts name the same elements only if they are equal.
type axes struct {
	n    int
	at   [ir.MaxDims]struct{ size, stride int }
	many bool // more axes than there is room for
}

// strided is a layout as operands give it.
type strided struct{ shape, strides ir.Dims }

// instruction is a value that is computed element by element.
type instruction struct {
	op    fuse.Op
	dtype backend.DType
	bits  uint64
	args  [4]tensor
}

// term is a value that is computed in another way: by an operation, from a list of operands.
type term struct {
	op     ir.Op
	dtype  backend.DType
	shape  int32
	args   int32
	effect int // how many effects there were before it, if it has one
}

// list is operands: those before, and one more.
type list struct {
	before int32
	arg    tensor
	shape  int32
	dtype  backend.DType
}

// before is what lies in memory that is not the arena's when a run begins: a vector of a solver, a
// sum of runs.
type before struct {
	kind          Kind
	index, vector int
}

// String implements [ir.Op].
func (b before) String() string { return fmt.Sprintf("kind %d of variable %d", b.kind, b.index) }

// newMeaning has room for about n values.
func newMeaning(n int) *meaning {
	return &meaning{
		instrs: make(map[instruction]int32, n), terms: make(map[term]int32, n/2), lists: make(map[list]int32, n/2), shapes: map[ir.Dims]int32{},
		layouts: map[axes]int32{}, known: map[strided]int32{}, plain: map[[2]int]int32{}, fewer: map[[2]int]int32{}, copies: map[int32]tensor{},
		made: make([]instruction, 0, 2*n),
	}
}

// add puts an axis inside of the others.
func (a *axes) add(size, stride int) {
	last := a.n - 1
	switch {
	case size == 1:
	case last >= 0 && a.at[last].stride == size*stride:
		a.at[last].size *= size
		a.at[last].stride = stride
	case a.n == len(a.at):
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

// layout returns the number of a layout.
func (m *meaning) layout(a axes) int32 {
	id, ok := m.layouts[a]
	if !ok {
		id = int32(len(m.axes))
		m.layouts[a], m.axes = id, append(m.axes, a)
	}
	return id
}

// strided returns the layout of a shape whose axes have strides.
func (m *meaning) strided(shape, strides ir.Dims) int32 {
	id, ok := m.known[strided{shape, strides}]
	if !ok {
		var a axes
		for i := range shape.Len() {
			a.add(shape.At(i), strides.At(i))
		}
		id = m.layout(a)
		m.known[strided{shape, strides}] = id
	}
	return id
}

// list returns the layout of n elements, each repeated.
func (m *meaning) list(n, repeated int) int32 {
	id, ok := m.plain[[2]int{n, repeated}]
	if !ok {
		var a axes
		a.add(n, 1)
		a.add(repeated, 0)
		id = m.layout(a)
		m.plain[[2]int{n, repeated}] = id
	}
	return id
}

// once returns the layout without n repetitions of each element.
func (m *meaning) once(layout int32, n int) int32 {
	if n == 1 {
		return layout
	}
	id, ok := m.fewer[[2]int{int(layout), n}]
	if !ok {
		a := m.axes[layout]
		if a.n--; a.at[a.n].size > n {
			a.at[a.n].size /= n
			a.n++
		} else {
			a.at[a.n].size, a.at[a.n].stride = 0, 0
		}
		id = m.layout(a)
		m.fewer[[2]int{int(layout), n}] = id
	}
	return id
}

// size returns the number of elements of a tensor.
func (m *meaning) size(t tensor) int { return m.axes[t.layout].size() }

// read returns the elements of t at the places that a layout names, from place off on.
func (m *meaning) read(t tensor, off int, layout int32) tensor {
	y, ok := m.through(t, off, layout)
	if !ok {
		y = tensor{m.copy(t), layout, off}
	}
	for of, copied := m.copies[y.value]; copied; of, copied = m.copies[y.value] {
		inner, ok := m.through(of, y.off, y.layout)
		if !ok {
			break
		}
		y = inner
	}
	return y
}

// copy returns the number of the list of a tensor's elements.
func (m *meaning) copy(t tensor) int32 {
	n := m.term(term{op: ir.Copy{}, args: m.operand(0, t, ir.Dims{}, 0)})
	m.copies[n] = t
	return n
}

// through returns read(t, off, layout) as elements of the list that t has its elements of; false if
// no layout names them. Places of t have one digit for each of its axes, and reading along an axis
// must change digits without a carry.
func (m *meaning) through(t tensor, off int, layout int32) (tensor, bool) {
	of := &m.axes[t.layout]
	if of.n == 0 || of.n == 1 && of.at[0].stride == 1 {
		return tensor{t.value, layout, t.off + off}, true
	}
	var place [ir.MaxDims]int // the size of what is inside of each axis
	inside := 1
	for j := of.n - 1; j >= 0; j-- {
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
	from := follow(off, 1)
	var y axes
	for _, x := range m.axes[layout].at[:m.axes[layout].n] {
		outer := x
		var parts []struct{ size, stride int } // of what is read along one axis, one for each axis of t
		for j := of.n - 1; j > 0; j-- {
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
	return tensor{t.value, m.layout(y), t.off + from}, !y.many
}

// number returns a new number, or that of an equal instruction.
func (m *meaning) number(i instruction) int32 {
	n, ok := m.instrs[i]
	if !ok {
		n = int32(len(m.made))
		m.instrs[i], m.made = n, append(m.made, i)
	}
	return n
}

// term returns a new number, or that of an equal term.
func (m *meaning) term(t term) int32 {
	n, ok := m.terms[t]
	if !ok {
		n = int32(len(m.made))
		m.terms[t], m.made = n, append(m.made, instruction{})
	}
	return n
}

// operand returns a list with one operand more.
func (m *meaning) operand(before int32, t tensor, shape ir.Dims, dtype backend.DType) int32 {
	l := list{before, t, m.shape(shape), dtype}
	n, ok := m.lists[l]
	if !ok {
		n = int32(len(m.lists) + 1)
		m.lists[l] = n
	}
	return n
}

func (m *meaning) shape(s ir.Dims) int32 {
	n, ok := m.shapes[s]
	if !ok {
		n = int32(len(m.shapes))
		m.shapes[s] = n
	}
	return n
}

// outside returns n elements that come from outside.
func (m *meaning) outside(op ir.Op, d backend.DType, n int) tensor {
	return tensor{m.term(term{op: op, dtype: d}), m.list(n, 1), 0}
}

// constant is a number, n times.
func (m *meaning) constant(d backend.DType, bits uint64, n int) tensor {
	return tensor{m.number(instruction{op: fuse.Const, dtype: d, bits: bits}), m.list(1, n), 0}
}

// fold returns the reduction of t, whose elements are those of a shape, along axes. What it
// computes does not depend on how axes that are reduced, or kept, together are divided.
func (m *meaning) fold(op backend.ReduceOp, d backend.DType, t tensor, shape []int, reduced func(axis int) bool) (y int32, n int) {
	var sizes ir.Dims // of kept axes, and of reduced ones less than 0
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
		if last := sizes.Len() - 1; last >= 0 && sizes.At(last)*sign > 0 {
			sizes = sizes.With(last, sizes.At(last)*size)
		} else {
			sizes = sizes.Insert(sizes.Len(), sign*size)
		}
	}
	return m.term(term{op: ir.Reduce{Op: op, Axes: sizes}, dtype: d, args: m.operand(0, t, ir.Dims{}, 0)}), n
}

// run returns what each instruction of a loop computes, until the next call. loads are what the
// loop's operands are.
func (m *meaning) run(p *fuse.Program, loads []tensor) []tensor {
	n := 1
	for _, size := range p.Shape {
		n *= size
	}
	values := m.values[:0]
	for _, c := range p.Code {
		switch {
		case c.Op == fuse.Load:
			values = append(values, loads[c.Args[0]])
		case c.Op == fuse.Const:
			values = append(values, m.constant(c.Type, c.Bits, n))
		case c.Op == fuse.Index:
			places := tensor{layout: m.strided(ir.Of(p.Shape...), ir.Of(p.Indices[c.Args[0]]...))}
			values = append(values, m.elementwise(instruction{op: c.Op, dtype: c.Type}, n, places))
		case c.Op.FoldsRows():
			last := len(p.Shape) - 1
			sum, rows := m.fold(rowFold(c.Op), c.Type, values[c.Args[0]], p.Shape, func(axis int) bool { return axis == last })
			values = append(values, tensor{sum, m.list(rows, p.Shape[last]), 0})
		default:
			var args [4]tensor
			for i, a := range c.Args[:c.Op.Operands()] {
				args[i] = values[a]
			}
			values = append(values, m.elementwise(instruction{op: c.Op, dtype: c.Type, bits: c.Bits}, n, args[:c.Op.Operands()]...))
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
func (m *meaning) elementwise(i instruction, n int, args ...tensor) tensor {
	repeated := n
	for _, a := range args {
		repeated = gcd(repeated, m.axes[a.layout].repeats())
	}
	for k, a := range args {
		a.layout = m.once(a.layout, repeated)
		i.args[k] = a
	}
	return tensor{m.number(i), m.list(n/repeated, repeated), 0}
}

func gcd(a, b int) int {
	for b > 0 {
		a, b = b, a%b
	}
	return a
}

// do returns op(args...), element by element, in the dtype of the last operand.
func (m *meaning) do(op fuse.Op, d backend.DType, args ...tensor) tensor {
	return m.elementwise(instruction{op: op, dtype: fuse.Type(d)}, m.size(args[0]), args...)
}

// program returns what each value of a program is, and its effects.
func (m *meaning) program(p *ir.Program) (values []tensor, done effects) {
	values = make([]tensor, len(p.Values))
	for i, v := range p.Values {
		switch {
		case ir.Leaf(v.Op):
			values[i] = m.leaf(v.Op, v.DType, v.Shape.Size())
		case ir.View(v.Op):
			values[i] = m.view(p, v, values)
		case ir.Elementwise(v.Op):
			values[i] = m.element(p, v, values)
		default:
			values[i] = m.operation(p, v, values, &done)
		}
	}
	return values, done
}

// leaf returns a value from outside.
func (m *meaning) leaf(op ir.Op, d backend.DType, n int) tensor {
	if s, ok := op.(ir.Scalar); ok {
		m.reset(nil)
		c := m.scratch.Code[m.scratch.Const(fuse.Type(d), s.Float())]
		return m.constant(c.Type, c.Bits, n)
	}
	return m.outside(op, d, n)
}

// reset makes the scratch program an empty one over a shape.
func (m *meaning) reset(shape []int) {
	m.scratch = fuse.Program{Shape: shape, Code: m.scratch.Code[:0], Indices: m.scratch.Indices[:0]}
}

// element returns a value that is computed element by element.
func (m *meaning) element(p *ir.Program, v ir.Value, values []tensor) tensor {
	m.reset(v.Shape.Slice())
	loads, args := make([]tensor, 0, 3), make([]fuse.Value, 0, 3)
	for k, a := range v.Args {
		loads = append(loads, values[a])
		args = append(args, k)
		m.scratch.Code = append(m.scratch.Code, fuse.Instr{Op: fuse.Load, Type: fuse.Type(p.Values[a].DType), Args: [4]fuse.Value{k}})
	}
	y := compute(&m.scratch, v, args)
	return m.run(&m.scratch, loads)[y]
}

// view returns a value that shares the memory of its operand.
func (m *meaning) view(p *ir.Program, v ir.Value, values []tensor) tensor {
	x, shape := values[v.Args[0]], p.Values[v.Args[0]].Shape
	off, strides := 0, shape.Strides()
	switch op := v.Op.(type) {
	case ir.Reshape:
		return x
	case ir.Result:
		return tensor{m.term(term{op: op, args: m.operand(0, x, ir.Dims{}, 0)}), m.list(v.Shape.Size(), 1), 0}
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
	return m.read(x, off, m.strided(v.Shape, strides))
}

// operation returns a value of any other kind.
func (m *meaning) operation(p *ir.Program, v ir.Value, values []tensor, done *effects) tensor {
	if r, ok := v.Op.(ir.Reduce); ok {
		y, n := m.fold(r.Op, fuse.Type(v.DType), values[v.Args[0]], p.Values[v.Args[0]].Shape.Slice(), r.Axes.Has)
		return tensor{y, m.list(n, 1), 0}
	}
	args := int32(0)
	for _, a := range v.Args {
		args = m.operand(args, values[a], p.Values[a].Shape, p.Values[a].DType)
	}
	y := done.term(m, term{op: v.Op, dtype: v.DType, shape: m.shape(v.Shape), args: args})
	return tensor{y, m.list(v.Shape.Size(), 1), 0}
}

// effects are the terms of operations with an effect, in the order in which they run.
type effects []int32

// term is [meaning.term]. Operations with an effect are not equal: they differ in how many were
// before.
func (e *effects) term(m *meaning, t term) int32 {
	if !ir.Effect(t.op) || t.op.(ir.Opaque).Index == Squares {
		return m.term(t)
	}
	t.effect = len(*e) + 1
	*e = append(*e, m.term(t))
	return (*e)[t.effect-1]
}

// leaves returns what a sum is one of, however its additions are nested.
func (m *meaning) leaves(sum tensor) (all []tensor) {
	if i := m.made[sum.value]; i.op == fuse.Add && m.size(sum) == 1 {
		return slices.Concat(m.leaves(i.args[0]), m.leaves(i.args[1]))
	}
	return []tensor{sum}
}
