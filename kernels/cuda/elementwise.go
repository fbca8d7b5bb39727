package cuda

import (
	"cmp"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Scalar is one element, on the host.
type Scalar struct {
	bits  uint64
	dtype backend.DType
}

// binaryVerbs are functions whose kernels have other names.
var binaryVerbs = map[backend.BinaryOp]string{
	backend.Less: "lt", backend.LessEqual: "lte", backend.Greater: "gt",
	backend.GreaterEqual: "gte",
	backend.Equal:        "eq", backend.NotEqual: "ne",
}

// hasBinary reports whether one kernel computes a function of elements of a type.
func hasBinary(op backend.BinaryOp, d backend.DType) bool {
	return arithmetic(d) && op.Takes(d) && op != backend.Minimum && op != backend.Maximum
}

// arithmetic reports whether elements of a type are computed with as they are.
func arithmetic(d backend.DType) bool {
	return d == backend.F32 || d == backend.F64 || d == backend.I32 || d == backend.I64 ||
		d == backend.U8
}

// Fill: for i { dst[i] = value }
func (k Kernels) Fill(dst backend.Buffer, value Scalar) error {
	if err := check.Zero(dst); err != nil {
		return err
	}
	if dst.DType() != value.dtype {
		return fmt.Errorf("%w: fill of %v with a scalar of %v", backend.ErrArgument, dst.DType(),
			value.dtype)
	}
	return k.fill(dst, value.bits)
}

// Binary: for i { dst[i] = op(x[i], y[i]) }. dst may be x or y.
func (k Kernels) Binary(op backend.BinaryOp, dst, x, y backend.Buffer) error {
	if err := check.Copy(dst, y); err != nil {
		return err
	}
	return k.binary(op, dst, x, word(x), word(y), Scalar{dtype: dst.DType()})
}

// BinaryScalar: for i { dst[i] = op(x[i], y) }. dst may be x.
func (k Kernels) BinaryScalar(op backend.BinaryOp, dst, x backend.Buffer, y Scalar) error {
	return k.binary(op, dst, x, word(x), 0, y)
}

// ScalarBinary: for i { dst[i] = op(x, y[i]) }. dst may be y.
func (k Kernels) ScalarBinary(op backend.BinaryOp, dst backend.Buffer, x Scalar,
	y backend.Buffer) error {
	return k.binary(op, dst, y, 0, word(y), x)
}

// binary takes the addresses of both operands, 0 for the scalar; like is one
// that is not.
func (k Kernels) binary(op backend.BinaryOp, dst, like backend.Buffer, x, y uint64,
	s Scalar) error {
	if err := check.Copy(dst, like); err != nil {
		return err
	}
	d := dst.DType()
	switch {
	case !hasBinary(op, d):
		return fmt.Errorf("%w: no kernel %s of %v", backend.ErrUnsupported, op, d)
	case s.dtype != d:
		return fmt.Errorf("%w: %s of %v with a scalar of %v", backend.ErrArgument, op, d, s.dtype)
	case dst.Len() == 0:
		return nil
	}
	c := Launch{Entry: Entry{Verb: cmp.Or(binaryVerbs[op], op.String()), Type: d.String()}}
	c.linear(dst.NBytes())
	c.pass(word(dst), x, y, uint64(dst.Len()), s.bits)
	return k.launcher.Launch(c)
}
