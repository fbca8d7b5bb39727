package nn

import (
	"errors"
	"fmt"
	"hash"
	"hash/fnv"
	"slices"
	"strings"
	"sync"

	"github.com/chewxy/hm"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/ops"
)

// Spec says what an operation computes. It is one of the structs of this package, such as
// [SliceSpec]. Their exported fields are all that the result depends on besides the operands.
// Specs are comparable: equal ones compute the same from the same operands.
type Spec interface {
	// String names the operation and its parameters: "Slice{axis 1, 256:512}".
	fmt.Stringer
	// shape returns the shape of the result, or what is wrong with the operands' shapes.
	shape(in []tensor.Shape) (tensor.Shape, error)
	// gradients returns the gradient of each operand, nothing if there is none.
	gradients(in []tensor.Shape) []gradient
}

// programmed is a Spec with a program, which adds the result to what a builder makes of operands.
type programmed interface {
	program(b program.Builder, x ...program.Value) program.Value
}

// looped is a Spec with loops, which write the result, zero before, to y.
type looped interface {
	f32(y array[float32], x []array[float32]) error
	f64(y array[float64], x []array[float64]) error
}

// indexed is a Spec with an operand of indices, which are of tensor.Int and have no gradient.
type indexed interface {
	// indices returns the number of that operand.
	indices() int
}

// mover is a Spec that only moves elements, whatever they are.
type mover interface{ moves() }

// gradient is a Spec that computes the gradient of one operand, and what it is applied to: numbers
// of operands, result, or dy. An operand without a gradient has no Spec.
type gradient struct {
	spec Spec
	of   []int
}

// What a gradient can be applied to besides operands: the result and its gradient.
const (
	result = -1 - iota
	dy
)

// Op is an operation of a graph: a Spec, and the operands that it was built for.
type Op struct {
	Spec  Spec
	In    []tensor.Shape // of the operands
	Out   tensor.Shape   // of the result
	DType tensor.Dtype   // of all but indices: Float32 or Float64, or integers that are moved

	hosts sync.Pool // of compiled programs, *program.Host
}

var (
	_ gorgonia.SDOp        = (*Op)(nil)
	_ gorgonia.ADOp        = (*Op)(nil)
	_ gorgonia.TrainModeOp = (*Op)(nil)
)

// build applies a Spec to nodes. name is the constructor's, and operands are what it calls them, or
// all of them.
func build(name, operands string, s Spec, x ...*gorgonia.Node) (*gorgonia.Node, error) {
	for i, n := range x {
		if n != nil {
			continue
		}
		of := fmt.Sprintf("%s %d", operands, i)
		if names := strings.Fields(operands); len(names) == len(x) {
			of = names[i]
		}
		return nil, fmt.Errorf("nn: %s: %w: %s is nil", name, backend.ErrArgument, of)
	}
	y, err := apply(s, x...)
	if err != nil {
		return nil, fmt.Errorf("nn: %s: %w", name, err)
	}
	return y, nil
}

func apply(s Spec, x ...*gorgonia.Node) (*gorgonia.Node, error) {
	o := &Op{Spec: s}
	for i, n := range x {
		if err := o.take(n, i); err != nil {
			return nil, err
		}
	}
	var err error
	if o.Out, err = s.shape(o.In); err != nil {
		return nil, err
	}
	return gorgonia.ApplyOp(o, x...)
}

// take checks operand i of the op.
func (o *Op) take(n *gorgonia.Node, i int) error {
	if n == nil {
		return fmt.Errorf("%w: operand %d is nil", backend.ErrArgument, i)
	}
	shape, dt := n.Shape(), n.Dtype()
	if t, ok := n.Type().(gorgonia.TensorType); ok && t.Dims != len(shape) {
		return fmt.Errorf("%w: operand %d is a %v, but its shape is %v: give it one with gorgonia.WithShape", ops.ErrShape, i, t, shape)
	}
	if slices.ContainsFunc(shape, func(d int) bool { return d < 1 }) {
		return fmt.Errorf("%w: operand %d has shape %v, without elements", ops.ErrShape, i, shape)
	}
	o.In = append(o.In, shape.Clone())
	if i == o.indices() {
		if dt != tensor.Int {
			return fmt.Errorf("%w: operand %d is %v: indices are Int", ops.ErrDType, i, dt)
		}
		return nil
	}
	if err := o.computes(dt); err != nil {
		return fmt.Errorf("%w: operand %d is %v: %w", ops.ErrDType, i, dt, err)
	}
	if o.DType.Type != nil && o.DType != dt {
		return fmt.Errorf("%w: operand %d is %v, another one is %v", ops.ErrDType, i, dt, o.DType)
	}
	o.DType = dt
	return nil
}

// computes returns what is wrong with a dtype of operands.
func (o *Op) computes(dt tensor.Dtype) error {
	switch _, moves := o.Spec.(mover); {
	case isFloat(dt), moves && (dt == tensor.Int || dt == tensor.Int64 || dt == tensor.Int32):
		return nil
	case moves:
		return errors.New("it can be Float32, Float64, Int, Int64 or Int32")
	}
	return errors.New("this operation is for Float32 and Float64")
}

func isFloat(dt tensor.Dtype) bool { return dt == tensor.Float32 || dt == tensor.Float64 }

// indices returns the number of the operand that has indices, -1 if none has.
func (o *Op) indices() int {
	if s, ok := o.Spec.(indexed); ok {
		return s.indices()
	}
	return -1
}

// Arity returns the number of operands.
func (o *Op) Arity() int { return len(o.In) }

// Type returns the function from the types of the operands to that of the result.
func (o *Op) Type() hm.Type {
	types := make([]hm.Type, 0, len(o.In)+1)
	for i, shape := range o.In {
		types = append(types, typeOf(shape, o.dtype(i)))
	}
	return hm.NewFnType(append(types, typeOf(o.Out, o.DType))...)
}

func typeOf(shape tensor.Shape, dt tensor.Dtype) hm.Type {
	if len(shape) == 0 {
		return dt
	}
	return gorgonia.TensorType{Dims: len(shape), Of: dt}
}

// dtype returns the dtype of operand i.
func (o *Op) dtype(i int) tensor.Dtype {
	if i == o.indices() {
		return tensor.Int
	}
	return o.DType
}

// InferShape returns the shape of the result.
func (o *Op) InferShape(inputs ...gorgonia.DimSizer) (tensor.Shape, error) {
	for i, input := range inputs {
		if shape, ok := input.(tensor.Shape); !ok || i >= len(o.In) || !slices.Equal(shape, o.In[i]) {
			return nil, o.fail(fmt.Errorf("%w: operand %d has shape %v, the graph was built for %v", ops.ErrShape, i, input, o.In))
		}
	}
	return o.Out.Clone(), nil
}

// Do computes the result on the host, in new memory.
func (o *Op) Do(inputs ...gorgonia.Value) (gorgonia.Value, error) {
	if len(inputs) != len(o.In) {
		return nil, o.fail(fmt.Errorf("%w: %d operands, want %d", backend.ErrArgument, len(inputs), len(o.In)))
	}
	for i, v := range inputs {
		if err := check(v, o.In[i], o.dtype(i)); err != nil {
			return nil, o.fail(fmt.Errorf("operand %d: %w", i, err))
		}
	}
	y, err := o.compute(inputs)
	if err != nil {
		return nil, o.fail(err)
	}
	return y, nil
}

func (o *Op) compute(inputs []gorgonia.Value) (gorgonia.Value, error) {
	s, ok := o.Spec.(looped)
	switch {
	case !ok:
		return o.evaluate(inputs)
	case o.DType.Size() == 4: // integers are moved as floats of their size
		return run(o, inputs, s.f32)
	}
	return run(o, inputs, s.f64)
}

// Program adds the result to what a builder makes, given the operands. It reports false if the
// operation has none.
func (o *Op) Program(b program.Builder, x ...program.Value) (y program.Value, ok bool) {
	s, ok := o.Spec.(programmed)
	if ok {
		y = s.program(b, x...)
	}
	return y, ok
}

// evaluate runs the program. What it compiles is kept for the next run.
func (o *Op) evaluate(inputs []gorgonia.Value) (gorgonia.Value, error) {
	var src []backend.Buffer
	for i, v := range inputs {
		d, _ := residence.DType(v.Dtype()) // which check has compared
		memory, err := residence.Elements(v, d)
		if err != nil {
			return nil, fmt.Errorf("operand %d: %w", i, err)
		}
		src = append(src, memory)
	}
	y, dst, err := o.fresh()
	if err != nil {
		return nil, err
	}
	host, err := o.compiled(src, dst.DType())
	if err != nil {
		return nil, err
	}
	defer o.hosts.Put(host)
	return y, host.Run(dst, src...)
}

// compiled returns the compiled program, which no other goroutine runs.
func (o *Op) compiled(src []backend.Buffer, d backend.DType) (*program.Host, error) {
	if host, ok := o.hosts.Get().(*program.Host); ok {
		return host, nil
	}
	var in []program.Tensor
	for i, x := range src {
		in = append(in, program.Tensor{Shape: o.In[i], DType: x.DType()})
	}
	return program.Compile(in, program.Tensor{Shape: o.Out, DType: d}, func(b program.Builder, x ...program.Value) program.Value {
		y, _ := o.Program(b, x...)
		return y
	})
}

// fresh returns a new value for the result, and its elements.
func (o *Op) fresh() (y gorgonia.Value, memory backend.Buffer, err error) {
	switch {
	case len(o.Out) > 0:
		y = tensor.New(tensor.Of(o.DType), tensor.WithShape(o.Out.Clone()...))
	case o.DType == tensor.Float32:
		y = gorgonia.NewF32(0)
	default:
		y = gorgonia.NewF64(0)
	}
	d, _ := residence.DType(o.DType)
	memory, err = residence.Elements(y, d)
	return y, memory, err
}

func run[T float](o *Op, inputs []gorgonia.Value, compute func(y array[T], x []array[T]) error) (gorgonia.Value, error) {
	x := make([]array[T], len(inputs))
	for i, v := range inputs {
		x[i].shape = o.In[i]
		var err error
		if i == o.indices() {
			x[i].ints, err = elements[int](v)
		} else {
			x[i].data, err = elements[T](v)
		}
		if err != nil {
			return nil, fmt.Errorf("operand %d: %w", i, err)
		}
	}
	v, memory, err := fresh[T](o.Out, o.DType)
	if err != nil {
		return nil, err
	}
	return v, compute(array[T]{shape: o.Out, data: memory}, x)
}

func (o *Op) fail(err error) error { return &Error{o.Spec.String(), err} }

// ReturnsPtr returns true: the result is its own value.
func (o *Op) ReturnsPtr() bool { return true }

// CallsExtern returns false.
func (o *Op) CallsExtern() bool { return false }

// OverwritesInput returns -1: operands are never written to.
func (o *Op) OverwritesInput() int { return -1 }

// WriteHash writes every field of the Spec, the shapes and the dtype.
func (o *Op) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "euryale %T %+v %v %v %v", o.Spec, o.Spec, o.In, o.Out, o.DType)
}

// Hashcode returns the hash of what WriteHash writes.
func (o *Op) Hashcode() uint32 {
	h := fnv.New32a()
	o.WriteHash(h)
	return h.Sum32()
}

// String returns the operation and its parameters: "Slice{axis 1, 256:512}".
func (o *Op) String() string { return o.Spec.String() }

// SetTraining switches a [Dropout] on or off. Gorgonia's machines call it when they are made:
// gorgonia.EvalMode switches to evaluation. Other operations do the same in both modes.
func (o *Op) SetTraining(on bool) error {
	if s, ok := o.Spec.(gorgonia.TrainModeOp); ok {
		return s.SetTraining(on)
	}
	return nil
}

// Draws returns the [*Random] that the operation draws from, nil for none. Package autograd keeps
// it in checkpoints.
func (o *Op) Draws() any {
	if s, ok := o.Spec.(DropoutSpec); ok {
		return s.Mask.Random
	}
	return nil
}

// DiffWRT says that all operands but integers have a gradient. Where there is none, asking for it
// gives an error that says why.
func (o *Op) DiffWRT(int) []bool {
	which := make([]bool, len(o.In))
	for i := range which {
		which[i] = isFloat(o.dtype(i))
	}
	return which
}

// SymDiff returns the nodes of the gradients.
func (o *Op) SymDiff(inputs gorgonia.Nodes, output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	gradients, err := o.gradients()
	if err != nil {
		return nil, err
	}
	nodes := make(gorgonia.Nodes, len(gradients))
	for i, g := range gradients {
		if g.spec == nil {
			continue
		}
		if nodes[i], err = apply(g.spec, choose(g.of, inputs, output, grad)...); err != nil {
			return nil, o.fail(err)
		}
	}
	return nodes, nil
}

// DoDiff adds the gradients to those of the operands.
func (o *Op) DoDiff(_ gorgonia.ExecutionContext, inputs gorgonia.Nodes, output *gorgonia.Node) error {
	gradients, err := o.gradients()
	if err != nil {
		return err
	}
	grad, err := output.Grad()
	if err != nil {
		return o.fail(err)
	}
	values := make([]gorgonia.Value, len(inputs))
	for i, n := range inputs {
		values[i] = n.Value()
	}
	for i, g := range gradients {
		if g.spec == nil {
			continue
		}
		dx, err := o.pullback(g, choose(g.of, values, output.Value(), grad))
		if err == nil {
			err = accumulate(inputs[i], dx)
		}
		if err != nil {
			return o.fail(err)
		}
	}
	return nil
}

// pullback computes one gradient.
func (o *Op) pullback(g gradient, x []gorgonia.Value) (gorgonia.Value, error) {
	back := &Op{Spec: g.spec, DType: o.DType}
	for _, v := range x {
		back.In = append(back.In, v.Shape().Clone())
	}
	var err error
	if back.Out, err = g.spec.shape(back.In); err != nil {
		return nil, err
	}
	return back.Do(x...)
}

func (o *Op) gradients() ([]gradient, error) {
	g := o.Spec.gradients(o.In)
	if len(g) == 0 {
		return nil, o.fail(fmt.Errorf("%w: gradients of this operation cannot be differentiated again", ops.ErrGradient))
	}
	return g, nil
}

// choose returns what a gradient is applied to.
func choose[T any](of []int, inputs []T, output, grad T) []T {
	x := make([]T, len(of))
	for k, i := range of {
		switch i {
		case result:
			x[k] = output
		case dy:
			x[k] = grad
		default:
			x[k] = inputs[i]
		}
	}
	return x
}
