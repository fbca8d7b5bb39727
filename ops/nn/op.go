package nn

import (
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
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/ops"
)

// spec says what an operation computes. It is a comparable struct, whose fields are all that the
// result depends on besides the operands: equal specs compute the same from the same operands.
type spec interface {
	// String names the operation and its parameters: "Slice{axis 1, 256:512}".
	fmt.Stringer
	// shape returns the shape of the result, or what is wrong with the operands' shapes.
	shape(in []tensor.Shape) (tensor.Shape, error)
	// program adds the result to what a builder makes, given the operands.
	program(b *program.Builder, x ...program.Value) program.Value
	// gradients returns the gradient of each operand, nothing if they cannot be differentiated.
	// Entries behind these are intermediate values of the gradients, computed once and first.
	gradients(in []tensor.Shape) []gradient
}

// gradient is a spec that computes the gradient of one operand, and what it is applied to: numbers
// of operands, or of the values behind them, result, or dy. An operand without a gradient has no
// spec.
type gradient struct {
	spec spec
	of   []int
}

// What a gradient can be applied to besides operands: the result and its gradient.
const (
	result = -1 - iota
	dy
)

// Op is an operation of a graph: what it computes, and the operands that it was built for.
type Op struct {
	spec  spec
	in    []tensor.Shape // of the operands
	out   tensor.Shape   // of the result
	types []tensor.Dtype // of the operands
	dtype tensor.Dtype   // of the result

	hosts sync.Pool // of the plan, *program.Host
	mu    sync.Mutex
	plan  *program.Plan // of the last number of operands
	back  []*Op         // see backward
}

var (
	_ gorgonia.SDOp        = (*Op)(nil)
	_ gorgonia.ADOp        = (*Op)(nil)
	_ gorgonia.TrainModeOp = (*Op)(nil)
)

// build applies a spec to nodes. name is the name of the constructor. operands names each node, or
// all of them with one word.
func build(name, operands string, s spec, x ...*gorgonia.Node) (*gorgonia.Node, error) {
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

func apply(s spec, x ...*gorgonia.Node) (*gorgonia.Node, error) {
	o := &Op{spec: s}
	for i, n := range x {
		if err := o.checkOperand(n, i); err != nil {
			return nil, err
		}
	}
	if err := o.infer(); err != nil {
		return nil, err
	}
	return gorgonia.ApplyOp(o, x...)
}

// infer finds dtype and shape of the result.
func (o *Op) infer() (err error) {
	if o.dtype, err = dtypeOf(o.spec, o.types); err == nil {
		o.out, err = o.spec.shape(o.in)
	}
	return err
}

// checkOperand checks operand i of the op.
func (o *Op) checkOperand(n *gorgonia.Node, i int) error {
	if n == nil {
		return fmt.Errorf("%w: operand %d is nil", backend.ErrArgument, i)
	}
	shape := n.Shape()
	if t, ok := n.Type().(gorgonia.TensorType); ok && t.Dims != len(shape) {
		return fmt.Errorf("%w: operand %d is a %v, but its shape is %v: give it one with "+
			"gorgonia.WithShape", ops.ErrShape, i, t, shape)
	}
	if slices.ContainsFunc(shape, func(d int) bool { return d < 1 }) {
		return fmt.Errorf("%w: operand %d has shape %v, without elements", ops.ErrShape, i, shape)
	}
	if len(shape) > backend.MaxAxes {
		return fmt.Errorf("%w: operand %d has shape %v: there may be %d axes",
			ops.ErrShape, i, shape, backend.MaxAxes)
	}
	o.in, o.types = append(o.in, shape.Clone()), append(o.types, n.Dtype())
	return nil
}

// Arity returns the number of operands.
func (o *Op) Arity() int { return len(o.in) }

// Type returns the function from the types of the operands to that of the result.
func (o *Op) Type() hm.Type {
	types := make([]hm.Type, 0, len(o.in)+1)
	for i, shape := range o.in {
		types = append(types, typeOf(shape, o.types[i]))
	}
	return hm.NewFnType(append(types, typeOf(o.out, o.dtype))...)
}

func typeOf(shape tensor.Shape, dt tensor.Dtype) hm.Type {
	if len(shape) == 0 {
		return dt
	}
	return gorgonia.TensorType{Dims: len(shape), Of: dt}
}

// InferShape returns the shape of the result.
func (o *Op) InferShape(inputs ...gorgonia.DimSizer) (tensor.Shape, error) {
	for i, input := range inputs {
		if shape, ok := input.(tensor.Shape); !ok || i >= len(o.in) ||
			!slices.Equal(shape, o.in[i]) {
			return nil, o.fail(fmt.Errorf("%w: operand %d has shape %v, the graph was built for %v",
				ops.ErrShape, i, input, o.in))
		}
	}
	return o.out.Clone(), nil
}

// Program adds the result to what a builder makes, given the operands. A Dropout in training takes
// one more: its step and its first sample, a vector of integers.
func (o *Op) Program(b *program.Builder, x ...program.Value) program.Value {
	return o.spec.program(b, x...)
}

// Do computes the result on the host, in new memory.
func (o *Op) Do(inputs ...gorgonia.Value) (gorgonia.Value, error) {
	y, err := o.compute(inputs)
	if err != nil {
		return nil, o.fail(err)
	}
	return y, nil
}

func (o *Op) compute(inputs []gorgonia.Value) (gorgonia.Value, error) {
	src, err := o.operands(inputs)
	if err != nil {
		return nil, err
	}
	if mask, forward := o.Mask(); mask != nil && mask.Training() {
		if forward {
			err = mask.Draw()
		}
		step, first, _ := mask.Random.at()
		src = append(src, backend.Of([]int64{int64(step), int64(first)}))
	}
	if err != nil {
		return nil, err
	}
	y, dst, err := fresh(o.out, o.dtype)
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

// operands returns the elements of values, which are what the graph was built for.
func (o *Op) operands(inputs []gorgonia.Value) (src []backend.Buffer, err error) {
	if len(inputs) != len(o.in) {
		return nil, fmt.Errorf("%w: %d operands, want %d", backend.ErrArgument, len(inputs),
			len(o.in))
	}
	for i, v := range inputs {
		if err := check(v, o.in[i], o.types[i]); err != nil {
			return nil, fmt.Errorf("operand %d: %w", i, err)
		}
		memory, err := elements(v)
		if err != nil {
			return nil, fmt.Errorf("operand %d: %w", i, err)
		}
		src = append(src, memory)
	}
	if s, ok := o.spec.(indexed); ok && s.indices() >= 0 {
		return src, s.check(integers(src[s.indices()]), o.in)
	}
	return src, nil
}

// compiled returns the plan of these operands, ready to run, which no other goroutine runs.
func (o *Op) compiled(src []backend.Buffer, d backend.DType) (*program.Host, error) {
	if host, ok := o.hosts.Get().(*program.Host); ok && host.Operands() == len(src) {
		return host, nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.plan == nil || o.plan.Operands() != len(src) {
		var in []program.Tensor
		for i, x := range src {
			shape := tensor.Shape{x.Len()} // of the state of a Dropout
			if i < len(o.in) {
				shape = o.in[i]
			}
			in = append(in, program.Tensor{Shape: shape, DType: x.DType()})
		}
		var err error
		o.plan, err = program.New(o.String(), in, program.Tensor{Shape: o.out, DType: d},
			o.spec.program)
		if err != nil {
			return nil, err
		}
	}
	return o.plan.Host()
}

func (o *Op) fail(err error) error { return &Error{o.spec.String(), err} }

// ReturnsPtr returns true: the result is its own value.
func (o *Op) ReturnsPtr() bool { return true }

// CallsExtern returns false.
func (o *Op) CallsExtern() bool { return false }

// OverwritesInput returns -1: operands are never written to.
func (o *Op) OverwritesInput() int { return -1 }

// WriteHash writes every field of the spec, and shapes and dtypes.
func (o *Op) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "euryale %T %+v %v %v %v", o.spec, o.spec, o.in, o.types, o.out)
}

// Hashcode returns the hash of what WriteHash writes.
func (o *Op) Hashcode() uint32 {
	h := fnv.New32a()
	o.WriteHash(h)
	return h.Sum32()
}

// String returns the operation and its parameters: "Slice{axis 1, 256:512}".
func (o *Op) String() string { return o.spec.String() }

// SetTraining switches a [Dropout] on or off. Gorgonia's machines call it when they are made:
// gorgonia.EvalMode switches to evaluation. Other operations do the same in both modes.
func (o *Op) SetTraining(on bool) error {
	if s, ok := o.spec.(gorgonia.TrainModeOp); ok {
		return s.SetTraining(on)
	}
	return nil
}

// Mask returns the mask of a Dropout or of its gradient, nil for other operations, and whether it
// is the forward pass, which draws.
func (o *Op) Mask() (m *Mask, forward bool) {
	if s, ok := o.spec.(dropoutSpec); ok {
		return s.Mask, !s.Gradient
	}
	return nil, false
}

// Labels returns the number of an operand of labels or indices whose program makes NaN of those
// that are out of range, -1 for none.
func (o *Op) Labels() int {
	switch s := o.spec.(type) {
	case crossEntropySpec:
		return s.indices()
	case gatherElementsSpec:
		return s.indices()
	}
	return -1
}

// Casts reports whether the operation is [Cast] to numbers: to Bool, all but 0 become true.
func (o *Op) Casts() bool {
	s, ok := o.spec.(castSpec)
	return ok && s.To != tensor.Bool
}

// CheckIndices reports labels, indices or lengths that are out of range. The integers are values of
// operand i, all or some of them; which operand has labels is what [Op.Labels] says. It needs no
// run. Other operands have nothing to check.
//
// Errors: [backend.ErrArgument] if one is out of range.
func (o *Op) CheckIndices(i int, integers []int) error {
	s, ok := o.spec.(indexed)
	if !ok || s.indices() != i {
		return nil
	}
	if err := s.check(integers, o.in); err != nil {
		return o.fail(err)
	}
	return nil
}

// Draws returns the [*Random] that the operation draws from, nil for none. Package autograd keeps
// it in checkpoints.
func (o *Op) Draws() any {
	if m, _ := o.Mask(); m != nil {
		return m.Random
	}
	return nil
}

// DiffWRT says which operands have a gradient. An operation that cannot be differentiated says that
// all floats have one: asking for it gives an error that says why.
func (o *Op) DiffWRT(int) []bool {
	which, back := make([]bool, len(o.in)), o.spec.gradients(o.in)
	for i := range which {
		which[i] = isFloat(o.types[i]) && (len(back) == 0 || back[i].spec != nil)
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
	known := append(slices.Clone(inputs), nodes[len(inputs):]...)
	for _, i := range o.order(gradients) {
		of := choose(gradients[i].of, known, output, grad)
		if nodes[i], err = apply(gradients[i].spec, of...); err != nil {
			return nil, o.fail(err)
		}
		if i >= len(inputs) {
			known[i] = nodes[i]
		}
	}
	return nodes[:len(inputs)], nil
}

// DoDiff adds the gradients to those of the operands.
func (o *Op) DoDiff(_ gorgonia.ExecutionContext, inputs gorgonia.Nodes,
	output *gorgonia.Node) error {
	back, gradients, err := o.backward()
	if err != nil || !slices.Contains(o.DiffWRT(len(inputs)), true) {
		return err // or none, of an operation without gradients
	}
	grad, err := output.Grad()
	if err != nil {
		return o.fail(err)
	}
	values := make([]gorgonia.Value, len(gradients))
	for i, n := range inputs {
		values[i] = n.Value()
	}
	for _, i := range o.order(gradients) {
		if i < len(inputs) && strings.HasPrefix(stock.Name(inputs[i].Op()), "constant") {
			continue
		}
		dx, err := back[i].Do(choose(gradients[i].of, values, output.Value(), grad)...)
		switch {
		case err == nil && i < len(inputs):
			err = accumulate(inputs[i], dx)
		case err == nil:
			values[i] = dx
		}
		if err != nil {
			return o.fail(err)
		}
	}
	return nil
}

// backward returns the operations of the gradients, nil where there is none. They are made once.
func (o *Op) backward() ([]*Op, []gradient, error) {
	gradients, err := o.gradients()
	if err != nil {
		return nil, nil, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.back != nil {
		return o.back, gradients, nil
	}
	back := make([]*Op, len(gradients))
	n := len(gradients) - len(o.in)
	shapes := append(slices.Clone(o.in), make([]tensor.Shape, n)...)
	types := append(slices.Clone(o.types), make([]tensor.Dtype, n)...)
	for _, i := range o.order(gradients) {
		g := gradients[i]
		back[i] = &Op{spec: g.spec, in: choose(g.of, shapes, o.out, o.out),
			types: choose(g.of, types, o.dtype, o.dtype)}
		if err := back[i].infer(); err != nil {
			return nil, nil, o.fail(err)
		}
		if i >= len(o.in) {
			shapes[i], types[i] = back[i].out, back[i].dtype
		}
	}
	o.back = back
	return back, gradients, nil
}

func (o *Op) gradients() ([]gradient, error) {
	g := o.spec.gradients(o.in)
	if len(g) == 0 {
		return nil,
			o.fail(fmt.Errorf("%w: gradients of this operation cannot be differentiated again",
				ops.ErrGradient))
	}
	return g, nil
}

// order returns the numbers of the gradients that exist, first those that others need.
func (o *Op) order(gradients []gradient) (order []int) {
	for i := range gradients {
		if i = (i + len(o.in)) % len(gradients); gradients[i].spec != nil {
			order = append(order, i)
		}
	}
	return order
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
