package cuda

import (
	"fmt"
	"reflect"
	"runtime"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// compute is the part of an element-wise operation that differs: it starts the
// kernel that writes dst, which may be one of the operands.
type compute func(s side, dst backend.Buffer, x []backend.Buffer) error

// elementwise runs an operation on tensors of one shape and dtype. opts say
// where the result goes: a new tensor, one to reuse, the first operand, or added
// to a tensor.
func (e *Engine) elementwise(name string, x []tensor.Tensor, opts []tensor.FuncOpt, f compute) (tensor.Tensor, error) {
	var y tensor.Tensor
	err := e.on(name, func() (err error) {
		y, err = e.apply(x, tensor.ParseFuncOpts(opts...), f)
		return err
	})
	if err != nil {
		return nil, err
	}
	return y, nil
}

func (e *Engine) apply(x []tensor.Tensor, opts *tensor.OpOpt, f compute) (tensor.Tensor, error) {
	dt, shape := x[0].Dtype(), x[0].Shape()
	s := e.side(elements(shape))
	buffers := make([]backend.Buffer, len(x))
	for i, t := range x {
		if t.Dtype() != dt || !t.Shape().Eq(shape) {
			return nil, fmt.Errorf("%w: operands of %v %v and %v %v: shape and dtype must be the same", backend.ErrArgument, dt, shape, t.Dtype(), t.Shape())
		}
		var err error
		if buffers[i], err = e.read(s, t); err != nil {
			return nil, err
		}
	}
	if total := opts.Incr(); total != nil {
		return e.increment(s, total, dt, shape, buffers, f)
	}
	y, dst, err := e.destination(s, x[0], opts, dt, shape)
	if err != nil {
		return nil, err
	}
	return y, f(s, dst, buffers)
}

// destination returns the tensor that the options ask for.
func (e *Engine) destination(s side, first tensor.Tensor, opts *tensor.OpOpt, dt tensor.Dtype, shape tensor.Shape) (*tensor.Dense, backend.Buffer, error) {
	switch reuse := opts.Reuse(); {
	case reuse != nil:
		return e.target(s, reuse, dt, shape)
	case !opts.Safe():
		return e.target(s, first, dt, shape)
	}
	return e.result(s, dt, shape)
}

// increment adds the result to total.
func (e *Engine) increment(s side, total tensor.Tensor, dt tensor.Dtype, shape tensor.Shape, x []backend.Buffer, f compute) (tensor.Tensor, error) {
	before, err := e.read(s, total)
	if err != nil {
		return nil, err
	}
	y, dst, err := e.target(s, total, dt, shape)
	if err != nil {
		return nil, err
	}
	part, err := s.take(dst.DType(), dst.Len())
	if err != nil {
		return nil, err
	}
	if err := f(s, part, x); err != nil {
		return nil, err
	}
	return y, s.Binary(backend.Add, dst, before, part)
}

func (e *Engine) unary(op backend.UnaryOp, a tensor.Tensor, opts []tensor.FuncOpt) (tensor.Tensor, error) {
	return e.elementwise(op.String(), []tensor.Tensor{a}, opts, func(s side, dst backend.Buffer, x []backend.Buffer) error {
		return s.Unary(op, dst, x[0])
	})
}

func (e *Engine) binary(op backend.BinaryOp, a, b tensor.Tensor, opts []tensor.FuncOpt) (tensor.Tensor, error) {
	if err := sameType(op, opts); err != nil {
		return nil, err
	}
	return e.elementwise(op.String(), []tensor.Tensor{a, b}, opts, func(s side, dst backend.Buffer, x []backend.Buffer) error {
		return s.Binary(op, dst, x[0], x[1])
	})
}

// binaryScalar computes with a scalar, which is a Go number or a tensor of one
// element, on the side that left says the tensor is not.
func (e *Engine) binaryScalar(op backend.BinaryOp, a tensor.Tensor, b any, left bool, opts []tensor.FuncOpt) (tensor.Tensor, error) {
	if err := sameType(op, opts); err != nil {
		return nil, err
	}
	value, err := e.scalar(op.String(), a.Dtype(), b)
	if err != nil {
		return nil, err
	}
	return e.elementwise(op.String(), []tensor.Tensor{a}, opts, func(s side, dst backend.Buffer, x []backend.Buffer) error {
		return s.BinaryScalar(op, dst, x[0], value, !left)
	})
}

// sameType refuses comparisons that give booleans.
func sameType(op backend.BinaryOp, opts []tensor.FuncOpt) error {
	if op.Compares() && !tensor.ParseFuncOpts(opts...).Same() {
		return fmt.Errorf("cuda: %v: %w: comparisons give 1 or 0 in the operands' dtype only: pass tensor.AsSameType(), in a graph retSame = true", op, backend.ErrUnsupported)
	}
	return nil
}

// scalar returns a scalar operand of type dt.
func (e *Engine) scalar(operation string, dt tensor.Dtype, b any) (float64, error) {
	if t, ok := b.(tensor.Tensor); ok {
		return e.scalarOf(operation, dt, t)
	}
	if b == nil || reflect.TypeOf(b) != dt.Type {
		return 0, fmt.Errorf("cuda: %s: %w: a scalar of type %T with a tensor of %v: the types must be the same", operation, backend.ErrArgument, b, dt)
	}
	v := reflect.ValueOf(b)
	switch {
	case v.CanFloat():
		return v.Float(), nil
	case v.CanUint():
		return float64(v.Uint()), nil
	case v.CanInt():
		if x, ok := exactly(v.Int()); ok {
			return x, nil
		}
	}
	return 0, fmt.Errorf("cuda: %s: %w: the scalar %v: use floats or integers up to 2^53", operation, backend.ErrUnsupported, b)
}

func (e *Engine) scalarOf(operation string, dt tensor.Dtype, t tensor.Tensor) (value float64, err error) {
	err = e.on(operation, func() error {
		if t.Dtype() != dt || elements(t.Shape()) != 1 {
			return fmt.Errorf("%w: a tensor of %v %v is no scalar of %v", backend.ErrArgument, t.Dtype(), t.Shape(), dt)
		}
		b, err := e.read(e.host, t)
		if err != nil {
			return err
		}
		var ok bool
		if value, ok = number(b); !ok {
			return fmt.Errorf("%w: an integer scalar beyond 2^53", backend.ErrUnsupported)
		}
		return nil
	})
	return value, err
}

// Clamp limits every element to [min, max], both of a's type.
func (e *Engine) Clamp(a tensor.Tensor, min, max any, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	lo, err := e.scalar("clamp", a.Dtype(), min)
	if err != nil {
		return nil, err
	}
	hi, err := e.scalar("clamp", a.Dtype(), max)
	if err != nil {
		return nil, err
	}
	return e.elementwise("clamp", []tensor.Tensor{a}, opts, func(s side, dst backend.Buffer, x []backend.Buffer) error {
		if err := s.BinaryScalar(backend.Maximum, dst, x[0], lo, false); err != nil {
			return err
		}
		return s.BinaryScalar(backend.Minimum, dst, dst, hi, false)
	})
}

// mapped are the functions that Gorgonia passes to Map because package tensor
// has no method for them.
var mapped = map[string]backend.UnaryOp{
	"gorgonia.org/gorgonia._sigmoidf32": backend.Sigmoid, "gorgonia.org/gorgonia._sigmoidf64": backend.Sigmoid,
	"gorgonia.org/gorgonia._softplusf32": backend.Softplus, "gorgonia.org/gorgonia._softplusf64": backend.Softplus,
	"github.com/chewxy/math32.Log1p": backend.Log1p, "math.Log1p": backend.Log1p,
	"github.com/chewxy/math32.Expm1": backend.Expm1, "math.Expm1": backend.Expm1,
	"github.com/chewxy/math32.Ceil": backend.Ceil, "math.Ceil": backend.Ceil,
	"github.com/chewxy/math32.Floor": backend.Floor, "math.Floor": backend.Floor,
}

// Map applies fn, if it is one of the functions that Gorgonia's own operations
// pass: sigmoid, softplus, log1p, expm1, ceil, floor. A device cannot run any
// other Go function.
func (e *Engine) Map(fn any, a tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	name := fmt.Sprintf("%T", fn)
	if v := reflect.ValueOf(fn); v.Kind() == reflect.Func && !v.IsNil() {
		name = runtime.FuncForPC(v.Pointer()).Name()
	}
	op, ok := mapped[name]
	if !ok {
		return nil, fmt.Errorf("cuda: map: %w: the Go function %s cannot run on a device: use operations of the graph, or move the tensor to the host", backend.ErrUnsupported, name)
	}
	return e.unary(op, a, opts)
}
