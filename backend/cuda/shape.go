package cuda

import (
	"fmt"
	"slices"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

var (
	_ tensor.Sumer      = (*Engine)(nil)
	_ tensor.Maxer      = (*Engine)(nil)
	_ tensor.Miner      = (*Engine)(nil)
	_ tensor.Repeater   = (*Engine)(nil)
	_ tensor.Transposer = (*Engine)(nil)
)

// Sum adds along axes; none means all. A result of one element is in host
// memory, and costs a wait for the queue.
func (e *Engine) Sum(a tensor.Tensor, along ...int) (tensor.Tensor, error) {
	return e.fold(backend.Sum, a, along)
}

// Max returns the greatest elements along axes, as Sum does.
func (e *Engine) Max(a tensor.Tensor, along ...int) (tensor.Tensor, error) {
	return e.fold(backend.Max, a, along)
}

// Min returns the least elements along axes, as Sum does.
func (e *Engine) Min(a tensor.Tensor, along ...int) (tensor.Tensor, error) {
	return e.fold(backend.Min, a, along)
}

func (e *Engine) fold(op backend.ReduceOp, a tensor.Tensor, along []int) (y tensor.Tensor, err error) {
	err = e.on(op.String(), func() error {
		shape := slices.Clone([]int(a.Shape()))
		axes, err := foldAxes(shape, along)
		if err != nil {
			return err
		}
		s := e.side(elements(shape))
		b, err := e.read(s, a)
		if err != nil {
			return err
		}
		for _, group := range slices.Backward(groups(axes)) {
			if b, err = foldGroup(s, op, b, shape, group); err != nil {
				return err
			}
			shape = slices.Delete(shape, group[0], group[1])
		}
		y, err = e.finish(b, a.Dtype(), shape)
		return err
	})
	if err != nil {
		return nil, err
	}
	return y, nil
}

// foldAxes returns the axes in order.
func foldAxes(shape, along []int) ([]int, error) {
	axes := slices.Compact(slices.Sorted(slices.Values(along)))
	if len(along) == 0 {
		for axis := range shape {
			axes = append(axes, axis)
		}
	}
	for _, axis := range axes {
		if axis < 0 || axis >= len(shape) {
			return nil, fmt.Errorf("%w: along axis %d of a tensor of shape %v", backend.ErrArgument, axis, shape)
		}
	}
	return axes, nil
}

// groups returns the runs of neighbouring axes, as from and to.
func groups(axes []int) (runs [][2]int) {
	for _, axis := range axes {
		if n := len(runs); n > 0 && runs[n-1][1] == axis {
			runs[n-1][1]++
			continue
		}
		runs = append(runs, [2]int{axis, axis + 1})
	}
	return runs
}

// foldGroup folds neighbouring axes into none.
func foldGroup(s side, op backend.ReduceOp, b backend.Buffer, shape []int, group [2]int) (backend.Buffer, error) {
	outer, n, inner := elements(shape[:group[0]]), elements(shape[group[0]:group[1]]), elements(shape[group[1]:])
	y, err := s.take(b.DType(), outer*inner)
	if err != nil {
		return y, err
	}
	var scratch backend.Buffer
	if need := s.ReduceAxisScratch(outer, n, inner); need > 0 {
		if scratch, err = s.take(b.DType(), need); err != nil {
			return y, err
		}
	}
	return y, s.ReduceAxis(op, y, b, scratch, outer, n, inner)
}

// Repeat repeats every element along an axis, all as often.
func (e *Engine) Repeat(t tensor.Tensor, axis int, repeats ...int) (tensor.Tensor, error) {
	return e.repeat(t, nil, axis, repeats)
}

// RepeatReuse is Repeat into a tensor of the right size.
func (e *Engine) RepeatReuse(t, reuse tensor.Tensor, axis int, repeats ...int) (tensor.Tensor, error) {
	return e.repeat(t, reuse, axis, repeats)
}

func (e *Engine) repeat(t, reuse tensor.Tensor, axis int, repeats []int) (y tensor.Tensor, err error) {
	err = e.on("repeat", func() error {
		shape, times, _, err := t.Shape().Repeat(axis, repeats...)
		if err != nil {
			return err
		}
		if len(times) == 0 || slices.Min(times) != slices.Max(times) || times[0] <= 0 {
			return fmt.Errorf("%w: repeats %v: repeat all elements of the axis as often, and at least once", backend.ErrUnsupported, times)
		}
		s := e.side(elements(shape))
		x, err := e.read(s, t)
		if err != nil {
			return err
		}
		dense, dst, err := e.reuseOrNew(s, reuse, t.Dtype(), shape)
		if err != nil {
			return err
		}
		y = dense
		if dst.Len() == 0 {
			return nil
		}
		inner := elements(t.Shape()[min(max(axis, 0)+1, t.Dims()):])
		if axis == tensor.AllAxes {
			inner = 1
		}
		return s.CopyStrided(dst, x, []int{x.Len() / inner, times[0], inner}, []int{inner, 0, 1})
	})
	if err != nil {
		return nil, err
	}
	return y, nil
}

func (e *Engine) reuseOrNew(s side, reuse tensor.Tensor, dt tensor.Dtype, shape tensor.Shape) (*tensor.Dense, backend.Buffer, error) {
	if reuse != nil {
		return e.target(s, reuse, dt, shape)
	}
	return e.result(s, dt, shape)
}

// Transpose moves the elements of a tensor whose axes were permuted, so that
// they are in row-major order. Package tensor sets the strides afterwards.
func (e *Engine) Transpose(t tensor.Tensor, _ []int) error {
	return e.on("transpose", func() error {
		d, err := dense(t)
		if err != nil {
			return err
		}
		b, err := e.memoryOf(d, reading)
		if err != nil {
			return err
		}
		s := e.at(b)
		moved, err := s.take(b.DType(), elements(d.Shape()))
		if err != nil {
			return err
		}
		if err := copyStrided(s, moved, b, d.Shape(), d.Strides()); err != nil {
			return err
		}
		e.watches.change(b.Addr(), b.NBytes())
		return s.Copy(b.Slice(0, moved.Len()), moved)
	})
}
