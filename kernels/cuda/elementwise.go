package cuda

import (
	"fmt"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
)

// Scalar is one element, on the host.
type Scalar struct {
	bits  uint64
	dtype backend.DType
}

// ScalarOf returns the scalar of a value.
func ScalarOf[T backend.Element](v T) Scalar {
	s := Scalar{dtype: backend.DTypeOf[T]()}
	*(*T)(unsafe.Pointer(&s.bits)) = v // all CUDA machines are little-endian
	return s
}

// UnaryOp is a function of one element.
type UnaryOp string

// The functions. From Inverse on they are for floats only; exp, log, tanh,
// sigmoid and log2 differ from the exact result by less than 1, 1, 2, 3 and 2
// units of the last place, expm1, log1p and softplus by less than 4.
const (
	Neg     UnaryOp = "neg"
	Abs     UnaryOp = "abs"
	Sign    UnaryOp = "sign"   // 1, -1, or x for zeros and NaN
	Square  UnaryOp = "square" // x * x
	Relu    UnaryOp = "relu"   // 0 where x < 0, else x
	Inverse UnaryOp = "inverse"
	Sqrt    UnaryOp = "sqrt"
	Exp     UnaryOp = "exp"
	Log     UnaryOp = "log"
	Tanh    UnaryOp = "tanh"
	Sigmoid UnaryOp = "sigmoid" // 1 / (1 + e^-x)

	Ceil     UnaryOp = "ceil"
	Floor    UnaryOp = "floor"
	Expm1    UnaryOp = "expm1"    // e^x - 1
	Log1p    UnaryOp = "log1p"    // ln(1 + x)
	Log2     UnaryOp = "log2"     // powers of two are exact
	Softplus UnaryOp = "softplus" // ln(1 + e^x)
)

// BinaryOp is a function of two elements.
type BinaryOp string

// The functions. Integers wrap; their quotients are truncated, and 0 where the
// divisor is 0. Comparisons give 1 or 0 in the operands' type. Pow is for floats
// only.
const (
	Add BinaryOp = "add"
	Sub BinaryOp = "sub"
	Mul BinaryOp = "mul"
	Div BinaryOp = "div"
	Gt  BinaryOp = "gt"
	Gte BinaryOp = "gte"
	Lt  BinaryOp = "lt"
	Lte BinaryOp = "lte"
	Eq  BinaryOp = "eq"
	Ne  BinaryOp = "ne"
	Pow BinaryOp = "pow"
)

// UnaryOps lists every UnaryOp.
func UnaryOps() []UnaryOp {
	return []UnaryOp{Neg, Abs, Sign, Square, Relu, Inverse, Sqrt, Exp, Log, Tanh, Sigmoid, Ceil, Floor, Expm1, Log1p, Log2, Softplus}
}

// BinaryOps lists every BinaryOp.
func BinaryOps() []BinaryOp {
	return []BinaryOp{Add, Sub, Mul, Div, Gt, Gte, Lt, Lte, Eq, Ne, Pow}
}

// Supports reports whether there is a kernel for the type.
func (op UnaryOp) Supports(d backend.DType) bool {
	switch op {
	case Neg, Abs, Sign, Square, Relu:
		return arithmetic(d)
	case Inverse, Sqrt, Exp, Log, Tanh, Sigmoid, Ceil, Floor, Expm1, Log1p, Log2, Softplus:
		return arithmetic(d) && d.Float()
	}
	return false
}

// Supports reports whether there is a kernel for the type.
func (op BinaryOp) Supports(d backend.DType) bool {
	switch op {
	case Add, Sub, Mul, Div, Gt, Gte, Lt, Lte, Eq, Ne:
		return arithmetic(d)
	case Pow:
		return arithmetic(d) && d.Float()
	}
	return false
}

// arithmetic reports whether elements of a type are computed with as they are.
func arithmetic(d backend.DType) bool {
	return d == backend.F32 || d == backend.F64 || d == backend.I32 || d == backend.I64 || d == backend.U8
}

// Fill: for i { dst[i] = value }
func (k Kernels) Fill(dst backend.Buffer, value Scalar) error {
	if err := check.Zero(dst); err != nil {
		return err
	}
	if dst.DType() != value.dtype {
		return fmt.Errorf("%w: fill of %v with a scalar of %v", backend.ErrArgument, dst.DType(), value.dtype)
	}
	return k.fill(dst, value.bits)
}

// Unary: for i { dst[i] = op(x[i]) }. dst may be x.
func (k Kernels) Unary(op UnaryOp, dst, x backend.Buffer) error {
	if err := check.Copy(dst, x); err != nil {
		return err
	}
	if !op.Supports(dst.DType()) {
		return fmt.Errorf("%w: no kernel %s of %v", backend.ErrUnsupported, op, dst.DType())
	}
	if dst.Len() == 0 {
		return nil
	}
	c := Call{Entry: Entry{Verb: string(op), Type: dst.DType().String()}}
	c.linear(dst.NBytes())
	c.pass(word(dst), word(x), uint64(dst.Len()))
	return k.launcher.Launch(c)
}

// Binary: for i { dst[i] = op(x[i], y[i]) }. dst may be x or y.
func (k Kernels) Binary(op BinaryOp, dst, x, y backend.Buffer) error {
	if err := check.Copy(dst, y); err != nil {
		return err
	}
	return k.binary(op, dst, x, word(x), word(y), Scalar{dtype: dst.DType()})
}

// BinaryScalar: for i { dst[i] = op(x[i], y) }. dst may be x.
func (k Kernels) BinaryScalar(op BinaryOp, dst, x backend.Buffer, y Scalar) error {
	return k.binary(op, dst, x, word(x), 0, y)
}

// ScalarBinary: for i { dst[i] = op(x, y[i]) }. dst may be y.
func (k Kernels) ScalarBinary(op BinaryOp, dst backend.Buffer, x Scalar, y backend.Buffer) error {
	return k.binary(op, dst, y, 0, word(y), x)
}

// binary takes the addresses of both operands, 0 for the scalar; like is one
// that is not.
func (k Kernels) binary(op BinaryOp, dst, like backend.Buffer, x, y uint64, s Scalar) error {
	if err := check.Copy(dst, like); err != nil {
		return err
	}
	d := dst.DType()
	switch {
	case !op.Supports(d):
		return fmt.Errorf("%w: no kernel %s of %v", backend.ErrUnsupported, op, d)
	case s.dtype != d:
		return fmt.Errorf("%w: %s of %v with a scalar of %v", backend.ErrArgument, op, d, s.dtype)
	case dst.Len() == 0:
		return nil
	}
	c := Call{Entry: Entry{Verb: string(op), Type: d.String()}}
	c.linear(dst.NBytes())
	c.pass(word(dst), x, y, uint64(dst.Len()), s.bits)
	return k.launcher.Launch(c)
}
