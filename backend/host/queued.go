package host

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// queued is kernels.Host on a Queue: arguments are checked when a kernel is
// started, so that it cannot fail when it runs.
type queued struct{ q *Queue }

// start submits run, unless the arguments were found to be wrong.
func (k queued) start(wrong error, run func(kernels.Host) error) error {
	if wrong != nil {
		return wrong
	}
	return k.q.submit(func() { run(kernels.Host{}) })
}

func (k queued) Zero(dst backend.Buffer) error {
	return k.start(kernels.Check{}.Zero(dst), func(h kernels.Host) error { return h.Zero(dst) })
}

func (k queued) Copy(dst, src backend.Buffer) error {
	return k.start(kernels.Check{}.Copy(dst, src), func(h kernels.Host) error { return h.Copy(dst, src) })
}

func (k queued) Copy2D(dst backend.Buffer, dstPitch int, src backend.Buffer, srcPitch, width, rows int) error {
	return k.start(kernels.Check{}.Copy2D(dst, dstPitch, src, srcPitch, width, rows),
		func(h kernels.Host) error { return h.Copy2D(dst, dstPitch, src, srcPitch, width, rows) })
}

func (k queued) Cast(dst, src backend.Buffer) error {
	return k.start(kernels.Check{}.Cast(dst, src), func(h kernels.Host) error { return h.Cast(dst, src) })
}

func (k queued) Scale(dst, src backend.Buffer, factor float64) error {
	return k.start(kernels.Check{}.Scale(dst, src, factor), func(h kernels.Host) error { return h.Scale(dst, src, factor) })
}

func (k queued) Reduce(op backend.ReduceOp, dst backend.Buffer, srcs ...backend.Buffer) error {
	srcs = slices.Clone(srcs)
	return k.start(kernels.Check{}.Reduce(op, dst, srcs...), func(h kernels.Host) error { return h.Reduce(op, dst, srcs...) })
}

var _ backend.Arithmetic = queued{}

func (k queued) Move(dst, src backend.Buffer) error { return k.Copy(dst, src) }

func (k queued) Fill(dst backend.Buffer, value float64) error {
	return k.start(kernels.Check{}.Fill(dst, value), func(h kernels.Host) error { return h.Fill(dst, value) })
}

func (k queued) Unary(op backend.UnaryOp, dst, x backend.Buffer) error {
	return k.start(kernels.Check{}.Unary(op, dst, x), func(h kernels.Host) error { return h.Unary(op, dst, x) })
}

func (k queued) Binary(op backend.BinaryOp, dst, x, y backend.Buffer) error {
	return k.start(kernels.Check{}.Binary(op, dst, x, y), func(h kernels.Host) error { return h.Binary(op, dst, x, y) })
}

func (k queued) BinaryScalar(op backend.BinaryOp, dst, x backend.Buffer, s float64, reverse bool) error {
	return k.start(kernels.Check{}.BinaryScalar(op, dst, x, s, reverse),
		func(h kernels.Host) error { return h.BinaryScalar(op, dst, x, s, reverse) })
}

func (k queued) FoldScratch(outer, n, inner int) int {
	return kernels.Host{}.FoldScratch(outer, n, inner)
}

func (k queued) Fold(op backend.ReduceOp, dst, src, scratch backend.Buffer, outer, n, inner int) error {
	return k.start(kernels.Check{}.Fold(op, dst, src, scratch, outer, n, inner),
		func(h kernels.Host) error { return h.Fold(op, dst, src, scratch, outer, n, inner) })
}

func (k queued) CopyStrided(dst, src backend.Buffer, shape, strides []int) error {
	shape, strides = slices.Clone(shape), slices.Clone(strides)
	return k.start(kernels.Check{}.CopyStrided(dst, src, shape, strides),
		func(h kernels.Host) error { return h.CopyStrided(dst, src, shape, strides) })
}

func (k queued) CopyMany(dsts, srcs []backend.Buffer) error {
	dsts, srcs = slices.Clone(dsts), slices.Clone(srcs)
	return k.start(kernels.Check{}.CopyMany(dsts, srcs), func(h kernels.Host) error { return h.CopyMany(dsts, srcs) })
}
