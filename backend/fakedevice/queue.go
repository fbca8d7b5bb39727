package fakedevice

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// queue is a queue of the host whose arithmetic takes addresses of the device, and
// runs on the memory behind them.
type queue struct {
	device *Device
	backend.Queue
}

// inner returns the host's queue behind a queue of the device.
func (d *Device) inner(q backend.Queue) (backend.Queue, error) {
	if q == nil {
		return nil, nil
	}
	own, ok := q.(*queue)
	if !ok || own.device != d {
		return nil, fmt.Errorf("fakedevice: %w: a %T that is not a queue of this device", backend.ErrArgument, q)
	}
	return own.Queue, nil
}

// check is what a device refuses.
var check = kernels.Check{Device: true}

// on calls kernel with the memory behind the buffers, unless the arguments were
// found to be wrong.
func (d *Device) on(wrong error, kernel func([]backend.Buffer) error, buffers ...backend.Buffer) error {
	if wrong != nil {
		return wrong
	}
	for i, b := range buffers {
		memory, err := d.behind(b)
		if err != nil {
			return err
		}
		buffers[i] = memory
	}
	return kernel(buffers)
}

func (q *queue) Zero(dst backend.Buffer) error {
	return q.device.on(check.Zero(dst), func(b []backend.Buffer) error { return q.Queue.Zero(b[0]) }, dst)
}

func (q *queue) Copy(dst, src backend.Buffer) error {
	return q.device.on(check.Copy(dst, src), func(b []backend.Buffer) error { return q.Queue.Copy(b[0], b[1]) }, dst, src)
}

func (q *queue) Copy2D(dst backend.Buffer, dstPitch int, src backend.Buffer, srcPitch, width, rows int) error {
	return q.device.on(check.Copy2D(dst, dstPitch, src, srcPitch, width, rows), func(b []backend.Buffer) error {
		return q.Queue.Copy2D(b[0], dstPitch, b[1], srcPitch, width, rows)
	}, dst, src)
}

func (q *queue) Cast(dst, src backend.Buffer) error {
	return q.device.on(check.Cast(dst, src), func(b []backend.Buffer) error { return q.Queue.Cast(b[0], b[1]) }, dst, src)
}

func (q *queue) CastScale(dst, src backend.Buffer, factor float64) error {
	return q.device.on(check.CastScale(dst, src, factor), func(b []backend.Buffer) error { return q.Queue.CastScale(b[0], b[1], factor) }, dst, src)
}

func (q *queue) Scale(dst, src backend.Buffer, factor float64) error {
	return q.device.on(check.Scale(dst, src, factor), func(b []backend.Buffer) error { return q.Queue.Scale(b[0], b[1], factor) }, dst, src)
}

func (q *queue) Reduce(op backend.ReduceOp, dst backend.Buffer, srcs ...backend.Buffer) error {
	all := append([]backend.Buffer{dst}, srcs...)
	return q.device.on(check.Reduce(op, dst, srcs...), func(b []backend.Buffer) error { return q.Queue.Reduce(op, b[0], b[1:]...) }, all...)
}

// Move takes host memory as it is.
func (q *queue) Move(dst, src backend.Buffer) error {
	if err := check.Move(dst, src); err != nil {
		return err
	}
	for _, b := range []*backend.Buffer{&dst, &src} {
		if b.Len() > 0 && !b.Device() {
			continue
		}
		memory, err := q.device.behind(*b)
		if err != nil {
			return err
		}
		*b = memory
	}
	return q.Queue.Move(dst, src)
}

func (q *queue) Fill(dst backend.Buffer, value float64) error {
	return q.device.on(check.Fill(dst, value), func(b []backend.Buffer) error { return q.Queue.Fill(b[0], value) }, dst)
}

func (q *queue) Unary(op backend.UnaryOp, dst, x backend.Buffer) error {
	return q.device.on(check.Unary(op, dst, x), func(b []backend.Buffer) error { return q.Queue.Unary(op, b[0], b[1]) }, dst, x)
}

func (q *queue) Binary(op backend.BinaryOp, dst, x, y backend.Buffer) error {
	return q.device.on(check.Binary(op, dst, x, y), func(b []backend.Buffer) error { return q.Queue.Binary(op, b[0], b[1], b[2]) }, dst, x, y)
}

func (q *queue) BinaryScalar(op backend.BinaryOp, dst, x backend.Buffer, s float64, reverse bool) error {
	return q.device.on(check.BinaryScalar(op, dst, x, s, reverse), func(b []backend.Buffer) error {
		return q.Queue.BinaryScalar(op, b[0], b[1], s, reverse)
	}, dst, x)
}

func (q *queue) ReduceAxisScratch(outer, n, inner int) int {
	return q.Queue.ReduceAxisScratch(outer, n, inner)
}

func (q *queue) ReduceAxis(op backend.ReduceOp, dst, src, scratch backend.Buffer, outer, n, inner int) error {
	return q.device.on(check.ReduceAxis(op, dst, src, scratch, outer, n, inner), func(b []backend.Buffer) error {
		return q.Queue.ReduceAxis(op, b[0], b[1], b[2], outer, n, inner)
	}, dst, src, scratch)
}

func (q *queue) CopyStrided(dst, src backend.Buffer, shape, strides []int) error {
	return q.device.on(check.CopyStrided(dst, src, shape, strides), func(b []backend.Buffer) error {
		return q.Queue.CopyStrided(b[0], b[1], shape, strides)
	}, dst, src)
}

func (q *queue) MultiTensorCopy(dsts, srcs []backend.Buffer) error {
	all := append(slices.Clone(dsts), srcs...)
	return q.device.on(check.MultiTensorCopy(dsts, srcs), func(b []backend.Buffer) error {
		return q.Queue.MultiTensorCopy(b[:len(dsts)], b[len(dsts):])
	}, all...)
}
