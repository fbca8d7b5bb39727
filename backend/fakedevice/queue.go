package fakedevice

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// queue is a queue of the host whose kernels take addresses of the device.
type queue struct {
	device *Device
	backend.Queue
}

// Kernels returns the host's, on the memory behind the addresses; they are an
// Arithmetic if the host's are.
func (q *queue) Kernels() backend.Kernels {
	k := basic{q.device, q.Queue.Kernels()}
	if a, ok := k.host.(backend.Arithmetic); ok {
		return full{k, a}
	}
	return k
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

// basic are the kernels around collectives.
type basic struct {
	device *Device
	host   backend.Kernels
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

func (k basic) Zero(dst backend.Buffer) error {
	return k.device.on(check.Zero(dst), func(b []backend.Buffer) error { return k.host.Zero(b[0]) }, dst)
}

func (k basic) Copy(dst, src backend.Buffer) error {
	return k.device.on(check.Copy(dst, src), func(b []backend.Buffer) error { return k.host.Copy(b[0], b[1]) }, dst, src)
}

func (k basic) Copy2D(dst backend.Buffer, dstPitch int, src backend.Buffer, srcPitch, width, rows int) error {
	return k.device.on(check.Copy2D(dst, dstPitch, src, srcPitch, width, rows), func(b []backend.Buffer) error {
		return k.host.Copy2D(b[0], dstPitch, b[1], srcPitch, width, rows)
	}, dst, src)
}

func (k basic) Cast(dst, src backend.Buffer) error {
	return k.device.on(check.Cast(dst, src), func(b []backend.Buffer) error { return k.host.Cast(b[0], b[1]) }, dst, src)
}

func (k basic) Scale(dst, src backend.Buffer, factor float64) error {
	return k.device.on(check.Scale(dst, src, factor), func(b []backend.Buffer) error { return k.host.Scale(b[0], b[1], factor) }, dst, src)
}

func (k basic) Reduce(op backend.ReduceOp, dst backend.Buffer, srcs ...backend.Buffer) error {
	all := append([]backend.Buffer{dst}, srcs...)
	return k.device.on(check.Reduce(op, dst, srcs...), func(b []backend.Buffer) error { return k.host.Reduce(op, b[0], b[1:]...) }, all...)
}

// full are the kernels of an engine.
type full struct {
	basic
	host backend.Arithmetic
}

var _ backend.Arithmetic = full{}

// Move takes host memory as it is.
func (k full) Move(dst, src backend.Buffer) error {
	if err := check.Move(dst, src); err != nil {
		return err
	}
	for _, b := range []*backend.Buffer{&dst, &src} {
		if b.Len() > 0 && !b.Device() {
			continue
		}
		memory, err := k.device.behind(*b)
		if err != nil {
			return err
		}
		*b = memory
	}
	return k.host.Move(dst, src)
}

func (k full) Fill(dst backend.Buffer, value float64) error {
	return k.device.on(check.Fill(dst, value), func(b []backend.Buffer) error { return k.host.Fill(b[0], value) }, dst)
}

func (k full) Unary(op backend.UnaryOp, dst, x backend.Buffer) error {
	return k.device.on(check.Unary(op, dst, x), func(b []backend.Buffer) error { return k.host.Unary(op, b[0], b[1]) }, dst, x)
}

func (k full) Binary(op backend.BinaryOp, dst, x, y backend.Buffer) error {
	return k.device.on(check.Binary(op, dst, x, y), func(b []backend.Buffer) error { return k.host.Binary(op, b[0], b[1], b[2]) }, dst, x, y)
}

func (k full) BinaryScalar(op backend.BinaryOp, dst, x backend.Buffer, s float64, reverse bool) error {
	return k.device.on(check.BinaryScalar(op, dst, x, s, reverse), func(b []backend.Buffer) error {
		return k.host.BinaryScalar(op, b[0], b[1], s, reverse)
	}, dst, x)
}

func (k full) FoldScratch(outer, n, inner int) int { return k.host.FoldScratch(outer, n, inner) }

func (k full) Fold(op backend.ReduceOp, dst, src, scratch backend.Buffer, outer, n, inner int) error {
	return k.device.on(check.Fold(op, dst, src, scratch, outer, n, inner), func(b []backend.Buffer) error {
		return k.host.Fold(op, b[0], b[1], b[2], outer, n, inner)
	}, dst, src, scratch)
}

func (k full) CopyStrided(dst, src backend.Buffer, shape, strides []int) error {
	return k.device.on(check.CopyStrided(dst, src, shape, strides), func(b []backend.Buffer) error {
		return k.host.CopyStrided(b[0], b[1], shape, strides)
	}, dst, src)
}

func (k full) CopyMany(dsts, srcs []backend.Buffer) error {
	all := append(slices.Clone(dsts), srcs...)
	return k.device.on(check.CopyMany(dsts, srcs), func(b []backend.Buffer) error {
		return k.host.CopyMany(b[:len(dsts)], b[len(dsts):])
	}, all...)
}
