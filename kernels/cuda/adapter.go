package cuda

import (
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// Room allocates device memory for intermediate results. It is used in the order of the
// launcher, so memory may be freed while kernels still use it.
type Room interface {
	Take(d backend.DType, n int) (backend.Buffer, error)
	Give(b backend.Buffer) error
}

// Arithmetic is [backend.Arithmetic], but for Move, out of [Kernels] and their
// own names of functions. Some functions are computed in several launches:
//
//   - 16-bit floats are widened first, in memory: three launches;
//   - Cube and InvSqrt, and Minimum and Maximum with a scalar, take two;
//   - ReduceAxis by Min and Max takes several, of ever shorter lengths.
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
var extrema = map[backend.BinaryOp]backend.ReduceOp{backend.Minimum: backend.Min, backend.Maximum: backend.Max}

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

// Unary implements [backend.Arithmetic].
func (a Arithmetic) Unary(op backend.UnaryOp, dst, x backend.Buffer) error {
	if err := check.Unary(op, dst, x); err != nil {
		return err
	}
	switch {
	case dst.Len() == 0:
		return nil
	case half(dst.DType()):
		return a.with(backend.F32, x.Len(), func(wide backend.Buffer) error {
			return firstError(
				func() error { return a.Cast(wide, x) },
				func() error { return a.Unary(op, wide, wide) },
				func() error { return a.Cast(dst, wide) })
		})
	case op == backend.InvSqrt:
		return firstError(
			func() error { return a.Kernels.Unary(backend.Sqrt, dst, x) },
			func() error { return a.Kernels.Unary(backend.Inv, dst, dst) })
	case op == backend.Cube:
		return a.cube(dst, x)
	}
	return a.Kernels.Unary(op, dst, x)
}

// cube needs room only in place.
func (a Arithmetic) cube(dst, x backend.Buffer) error {
	if dst.Addr() == x.Addr() {
		return a.with(x.DType(), x.Len(), func(square backend.Buffer) error {
			return firstError(
				func() error { return a.Kernels.Unary(backend.Square, square, x) },
				func() error { return a.Kernels.Binary(backend.Mul, dst, square, x) })
		})
	}
	return firstError(
		func() error { return a.Kernels.Unary(backend.Square, dst, x) },
		func() error { return a.Kernels.Binary(backend.Mul, dst, dst, x) })
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
func (a Arithmetic) BinaryScalar(op backend.BinaryOp, dst, x backend.Buffer, s float64, reverse bool) error {
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

// parts is how many parts of an axis ReduceAxis combines at once, by Min and Max.
const parts = 8

// ReduceAxisScratch implements [backend.Arithmetic]. It is what any operation needs.
func (a Arithmetic) ReduceAxisScratch(outer, n, inner int) int {
	return max(sumScratch(outer, n, inner), 2*over(n, parts)*outer*inner)
}

// ReduceAxis implements [backend.Arithmetic].
func (a Arithmetic) ReduceAxis(op backend.ReduceOp, dst, src, scratch backend.Buffer, outer, n, inner int) error {
	if err := check.ReduceAxis(op, dst, src, scratch, outer, n, inner); err != nil {
		return err
	}
	if need := a.ReduceAxisScratch(outer, n, inner); scratch.Len() < need || need > 0 && scratch.DType() != src.DType() {
		return fmt.Errorf("%w: reduceaxis of [%d][%d][%d] needs %d %v of scratch, got %d %v",
			backend.ErrArgument, outer, n, inner, need, src.DType(), scratch.Len(), scratch.DType())
	}
	switch d := dst.DType(); {
	case dst.Len() == 0:
		return nil
	case op != backend.Sum:
		return a.extremum(op, dst, src, scratch, outer, n, inner)
	case half(d):
		return a.wideSum(dst, src, outer, n, inner)
	}
	return a.Sum(dst, src, outer, n, inner, scratch)
}

// wideSum sums 16-bit floats in 32 bits.
func (a Arithmetic) wideSum(dst, src backend.Buffer, outer, n, inner int) error {
	need := sumScratch(outer, n, inner)
	return a.with(backend.F32, src.Len()+dst.Len()+need, func(wide backend.Buffer) error {
		x, y := wide.Slice(0, src.Len()), wide.Slice(src.Len(), src.Len()+dst.Len())
		return firstError(
			func() error { return a.Cast(x, src) },
			func() error { return a.Sum(y, x, outer, n, inner, wide.Slice(src.Len()+dst.Len(), wide.Len())) },
			func() error { return a.Cast(dst, y) })
	})
}

// extremum reduces by Min or Max, for which elements may be counted twice: the last of several
// parts of equal length may overlap the one before. The first step also moves the axis to the
// front.
func (a Arithmetic) extremum(op backend.ReduceOp, dst, src, scratch backend.Buffer, outer, n, inner int) error {
	rows, width := over(n, parts), outer*inner
	folded, next := scratch.Slice(0, rows*width), scratch.Slice(rows*width, 2*rows*width)
	for part := range over(n, rows) {
		from := min(part*rows, n-rows)
		to := folded
		if part > 0 {
			to = next
		}
		err := a.Gather(to, src.Slice(from*inner, src.Len()), []int{rows, outer, inner}, []int{inner, n * inner, 1})
		if err == nil && part > 0 {
			err = a.Reduce(op, folded, folded, next)
		}
		if err != nil {
			return err
		}
	}
	for n = rows; n > 1; n = rows {
		rows = over(n, parts)
		srcs := make([]backend.Buffer, over(n, rows))
		for part := range srcs {
			from := min(part*rows, n-rows)
			srcs[part] = folded.Slice(from*width, (from+rows)*width)
		}
		// What is written is read as the first part alone: n >= 2*rows.
		if err := a.Reduce(op, srcs[0], srcs...); err != nil {
			return err
		}
	}
	return a.Copy(dst, folded.Slice(0, width))
}

// CopyStrided implements [backend.Arithmetic].
func (a Arithmetic) CopyStrided(dst, src backend.Buffer, shape, strides []int) error {
	if err := check.CopyStrided(dst, src, shape, strides); err != nil {
		return err
	}
	return a.Gather(dst, src, shape, strides)
}
