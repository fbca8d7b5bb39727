package exec

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/plan"
)

// rowsOf returns an axis of x as rows of tables.
func rowsOf(x ir.Dims, axis int) kernels.Rows {
	r := kernels.Rows{Before: 1, Count: x.At(axis), Width: 1}
	for i := range x.Len() {
		if i < axis {
			r.Before *= x.At(i)
		} else if i > axis {
			r.Width *= x.At(i)
		}
	}
	return r
}

// rows returns the function of a step on rows that its second operand names.
func (e *Executor) rows(s *step, r kernels.Rows) func() error {
	e.check(s, s.Args[1], r.Count, 0)
	return func() error {
		switch s.Op.(type) {
		case ir.Gather:
			return e.device.TakeRows(s.dsts[0], s.args[0], s.args[1], r)
		case ir.GatherGrad:
			return e.device.AddRows(s.dsts[0], s.args[0], s.args[1], r)
		}
		return e.device.PutRows(s.dsts[0], s.args[2], s.args[1], r) // over the first operand
	}
}

// check makes every run look at an operand of indices of a step before it starts: a device that
// finds a wrong one later could say so only where the host waits for it.
// Indices that the plan computes are not known then. What they name wrongly is NaN. Rows of some
// indices must not descend, unless there are 0 in a row.
func (e *Executor) check(s *step, indices plan.Ref, count, row int) {
	b := e.plan.Buffers[indices.Buffer]
	if b.Kind != plan.Input && b.Kind != plan.Constant || b.Computed() && !e.device.Host() {
		return
	}
	e.checks = append(e.checks, func() error {
		var err error
		if on := e.outsideElements(indices); on.DType() == backend.I32 {
			err = inRange(backend.View[int32](on), count, row)
		} else {
			err = inRange(backend.View[int64](on), count, row)
		}
		if err != nil {
			return fmt.Errorf("vm: %s: %v of %s: %w", b.Name, s.Op, s.Name, err)
		}
		return nil
	})
}

// inRange checks indices of count elements, in rows that do not descend unless row is 0.
func inRange[T int32 | int64](indices []T, count, row int) error {
	for k, i := range indices {
		if i < 0 || int64(i) >= int64(count) {
			return fmt.Errorf("%w: index %d is %d, out of range 0 to %d", backend.ErrArgument, k, i,
				count-1)
		}
		if row > 0 && k%row > 0 && i < indices[k-1] {
			return fmt.Errorf("%w: index %d of row %d is %d, less than %d before it",
				backend.ErrArgument, k%row, k/row, i, indices[k-1])
		}
	}
	return nil
}
