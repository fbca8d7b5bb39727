package host

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/serial"
)

// queued is the arithmetic of a Queue, kernels.Host. Arguments are checked when a kernel
// is started, so that it cannot fail when it runs.
type queued struct{ tasks *serial.Executor }

func (q queued) submit(task func()) error {
	if !q.tasks.Submit(task) {
		return fmt.Errorf("%w: %w", backend.ErrArgument, errQueueClosed)
	}
	return nil
}

// kernel submits run, unless wrong says that the arguments are.
func (q queued) kernel(wrong error, run func(kernels.Host) error) error {
	if wrong != nil {
		return wrong
	}
	return q.submit(func() { run(kernels.Host{}) })
}

func (q queued) Zero(dst backend.Buffer) error {
	return q.kernel(kernels.Check{}.Zero(dst), func(h kernels.Host) error { return h.Zero(dst) })
}

func (q queued) Copy(dst, src backend.Buffer) error {
	return q.kernel(kernels.Check{}.Copy(dst, src), func(h kernels.Host) error {
		return h.Copy(dst, src)
	})
}

func (q queued) Copy2D(dst backend.Buffer, dstPitch int, src backend.Buffer, srcPitch, width,
	rows int) error {
	return q.kernel(kernels.Check{}.Copy2D(dst, dstPitch, src, srcPitch, width, rows),
		func(h kernels.Host) error { return h.Copy2D(dst, dstPitch, src, srcPitch, width, rows) })
}

func (q queued) Cast(dst, src backend.Buffer) error {
	return q.kernel(kernels.Check{}.Cast(dst, src), func(h kernels.Host) error {
		return h.Cast(dst, src)
	})
}

func (q queued) CastScale(dst, src backend.Buffer, factor float64) error {
	return q.kernel(kernels.Check{}.CastScale(dst, src, factor), func(h kernels.Host) error {
		return h.CastScale(dst, src, factor)
	})
}

func (q queued) Divide(dst, src backend.Buffer, n int) error {
	return q.kernel(kernels.Check{}.Divide(dst, src, n), func(h kernels.Host) error {
		return h.Divide(dst, src, n)
	})
}

func (q queued) Reduce(op backend.ReduceOp, dst backend.Buffer, srcs ...backend.Buffer) error {
	srcs = slices.Clone(srcs)
	return q.kernel(kernels.Check{}.Reduce(op, dst, srcs...), func(h kernels.Host) error {
		return h.Reduce(op, dst, srcs...)
	})
}

func (q queued) Move(dst, src backend.Buffer) error { return q.Copy(dst, src) }

func (q queued) CopyStrided(dst, src backend.Buffer, shape, strides []int) error {
	shape, strides = slices.Clone(shape), slices.Clone(strides)
	return q.kernel(kernels.Check{}.CopyStrided(dst, src, shape, strides),
		func(h kernels.Host) error { return h.CopyStrided(dst, src, shape, strides) })
}
