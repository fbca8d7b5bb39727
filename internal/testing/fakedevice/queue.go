package fakedevice

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// queue is a queue of the host whose arithmetic takes addresses of the device, and
// runs on the memory behind them.
type queue struct {
	device *Device
	backend.Queue
	handle    uintptr
	recording atomic.Pointer[recording] // nil if what is started runs
}

// queueOn returns a queue of the device on one of the host.
func (d *Device) queueOn(host backend.Queue) *queue {
	d.mu.Lock()
	defer d.mu.Unlock()
	q := &queue{device: d, Queue: host, handle: d.handle()}
	d.streams[q.handle] = q
	return q
}

// Close implements [backend.Queue].
func (q *queue) Close() error {
	err := q.Queue.Close()
	q.device.mu.Lock()
	defer q.device.mu.Unlock()
	delete(q.device.streams, q.handle)
	return err
}

// inner returns the host's queue behind a queue of the device.
func (d *Device) inner(q backend.Queue) (backend.Queue, error) {
	if q == nil {
		return nil, nil
	}
	own, ok := q.(*queue)
	if !ok || own.device.Host != d.Host {
		return nil, fmt.Errorf("fakedevice: %w: a %T that is not a queue of this device",
			backend.ErrArgument, q)
	}
	return own.Queue, nil
}

// check is what a device refuses.
var check = kernels.Check{Device: true}

// on starts kernel with the memory behind the buffers, unless the arguments were
// found to be wrong. In a graph, memory is looked up for each replay.
func (q *queue) on(wrong error, kernel func(on backend.Queue, b []backend.Buffer) error,
	buffers ...backend.Buffer) error {
	if wrong != nil {
		return wrong
	}
	memory, err := q.device.allBehind(buffers)
	if err != nil {
		return err
	}
	if q.recording.Load() == nil {
		return kernel(q.Queue, memory)
	}
	buffers = slices.Clone(buffers)
	return q.start(func(on backend.Queue) error {
		memory, err := q.device.allBehind(buffers)
		if err != nil {
			return err
		}
		return kernel(on, memory)
	})
}

// allBehind returns the memory behind buffers.
func (d *Device) allBehind(buffers []backend.Buffer) ([]backend.Buffer, error) {
	memory := make([]backend.Buffer, len(buffers))
	for i, b := range buffers {
		var err error
		if memory[i], err = d.hostMemory(b); err != nil {
			return nil, err
		}
	}
	return memory, nil
}

func (q *queue) Zero(dst backend.Buffer) error {
	return q.on(check.Zero(dst), func(on backend.Queue, b []backend.Buffer) error {
		return on.Zero(b[0])
	}, dst)
}

func (q *queue) Copy(dst, src backend.Buffer) error {
	if q.device.fail("copy", dst.NBytes()) != nil {
		return nil // and nothing arrives
	}
	return q.on(check.Copy(dst, src), func(on backend.Queue, b []backend.Buffer) error {
		return on.Copy(b[0], b[1])
	}, dst, src)
}

func (q *queue) Copy2D(dst backend.Buffer, dstPitch int, src backend.Buffer, srcPitch, width,
	rows int) error {
	return q.on(check.Copy2D(dst, dstPitch, src, srcPitch, width, rows),
		func(on backend.Queue, b []backend.Buffer) error {
			return on.Copy2D(b[0], dstPitch, b[1], srcPitch, width, rows)
		}, dst, src)
}

func (q *queue) Cast(dst, src backend.Buffer) error {
	return q.on(check.Cast(dst, src), func(on backend.Queue, b []backend.Buffer) error {
		return on.Cast(b[0], b[1])
	}, dst, src)
}

func (q *queue) CastScale(dst, src backend.Buffer, factor float64) error {
	return q.on(check.CastScale(dst, src, factor),
		func(on backend.Queue, b []backend.Buffer) error {
			return on.CastScale(b[0], b[1],
				factor)
		}, dst, src)
}

func (q *queue) Divide(dst, src backend.Buffer, n int) error {
	return q.on(check.Divide(dst, src, n), func(on backend.Queue, b []backend.Buffer) error {
		return on.Divide(b[0], b[1], n)
	}, dst, src)
}

func (q *queue) Reduce(op backend.ReduceOp, dst backend.Buffer, srcs ...backend.Buffer) error {
	all := append([]backend.Buffer{dst}, srcs...)
	return q.on(check.Reduce(op, dst, srcs...), func(on backend.Queue, b []backend.Buffer) error {
		return on.Reduce(op, b[0], b[1:]...)
	}, all...)
}

// Move takes host memory as it is.
func (q *queue) Move(dst, src backend.Buffer) error {
	if err := check.Move(dst, src); err != nil {
		return err
	}
	return q.start(func(on backend.Queue) error {
		to, from := dst, src
		for _, b := range []*backend.Buffer{&to, &from} {
			if b.Len() > 0 && !b.Device() {
				continue
			}
			memory, err := q.device.hostMemory(*b)
			if err != nil {
				return err
			}
			*b = memory
		}
		return on.Move(to, from)
	})
}

func (q *queue) CopyStrided(dst, src backend.Buffer, shape, strides []int) error {
	return q.on(check.CopyStrided(dst, src, shape, strides),
		func(on backend.Queue, b []backend.Buffer) error {
			return on.CopyStrided(b[0], b[1], shape, strides)
		}, dst, src)
}
