package cuda

import (
	"errors"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// Room allocates device memory for intermediate results. It is used in the order of the
// launcher, so memory may be freed while kernels still use it.
type Room interface {
	Take(d backend.DType, n int) (backend.Buffer, error)
	Give(b backend.Buffer) error
}

// Arithmetic is [backend.Arithmetic], except for Move, out of [Kernels] and their
// own names of functions. Some functions are computed in several launches:
//
//   - 16-bit floats are widened first, in memory: three launches;
//   - Minimum and Maximum with a scalar take two.
//
// Tensors with more than 6 axes that cannot be joined are
// [backend.ErrUnsupported].
type Arithmetic struct {
	Kernels
	room Room
}

// NewArithmetic returns the arithmetic of l with room for what is on the way.
func NewArithmetic(l Launcher, room Room) Arithmetic { return Arithmetic{New(l), room} }

// extrema are the functions of two elements that are computed as reductions of two operands.
var extrema = map[backend.BinaryOp]backend.ReduceOp{backend.Minimum: backend.Min,
	backend.Maximum: backend.Max}

func half(d backend.DType) bool { return d == backend.F16 || d == backend.BF16 }

// scalarOf converts a value to an element as the host does.
func scalarOf(d backend.DType, value float64) (Scalar, error) {
	var word [1]int64
	err := kernels.Host{}.Fill(backend.Of(word[:]).As(d).Slice(0, 1), value)
	return Scalar{uint64(word[0]), d}, err
}

// with runs f with n elements of scratch memory.
func (a Arithmetic) with(d backend.DType, n int, f func(backend.Buffer) error) error {
	b, err := a.room.Take(d, n)
	if err != nil {
		return err
	}
	return errors.Join(f(b), a.room.Give(b))
}

// Fill implements [backend.Arithmetic].
func (a Arithmetic) Fill(dst backend.Buffer, value float64) error {
	if err := check.Fill(dst, value); err != nil {
		return err
	}
	s, err := scalarOf(dst.DType(), value)
	if err != nil {
		return err
	}
	return a.fill(dst, s.bits)
}

// firstError runs steps up to the first that fails.
func firstError(steps ...func() error) error {
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// Binary implements [backend.Arithmetic].
func (a Arithmetic) Binary(op backend.BinaryOp, dst, x, y backend.Buffer) error {
	if err := check.Binary(op, dst, x, y); err != nil {
		return err
	}
	d, n := dst.DType(), dst.Len()
	if n == 0 {
		return nil
	}
	if extremum, ok := extrema[op]; ok {
		return a.Reduce(extremum, dst, x, y)
	}
	if !half(d) {
		return a.Kernels.Binary(op, dst, x, y)
	}
	return a.with(backend.F32, 2*n, func(wide backend.Buffer) error {
		u, v := wide.Slice(0, n), wide.Slice(n, 2*n)
		return firstError(
			func() error { return a.Cast(u, x) },
			func() error { return a.Cast(v, y) },
			func() error { return a.Kernels.Binary(op, u, u, v) },
			func() error { return a.Cast(dst, u) })
	})
}

// BinaryScalar implements [backend.Arithmetic].
func (a Arithmetic) BinaryScalar(op backend.BinaryOp, dst, x backend.Buffer, s float64,
	reverse bool) error {
	if err := check.BinaryScalar(op, dst, x, s, reverse); err != nil {
		return err
	}
	d, n := dst.DType(), dst.Len()
	scalar, err := scalarOf(d, s)
	switch extremum, ok := extrema[op]; {
	case err != nil || n == 0:
		return err
	case ok:
		return a.with(d, n, func(all backend.Buffer) error {
			return firstError(
				func() error { return a.fill(all, scalar.bits) },
				func() error { return a.Reduce(extremum, dst, x, all) })
		})
	case half(d):
		// The scalar becomes an element of 16 bits first.
		return a.with(d, n, func(all backend.Buffer) error {
			u, v := x, all
			if reverse {
				u, v = all, x
			}
			return firstError(
				func() error { return a.fill(all, scalar.bits) },
				func() error { return a.Binary(op, dst, u, v) })
		})
	case reverse:
		return a.ScalarBinary(op, dst, scalar, x)
	}
	return a.Kernels.BinaryScalar(op, dst, x, scalar)
}

// CopyStrided implements [backend.Arithmetic].
func (a Arithmetic) CopyStrided(dst, src backend.Buffer, shape, strides []int) error {
	if err := check.CopyStrided(dst, src, shape, strides); err != nil {
		return err
	}
	return a.Gather(dst, src, shape, strides)
}
