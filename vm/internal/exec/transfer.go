package exec

import (
	"bytes"
	"errors"
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/vm/internal/plan"
)

// alignment of inputs on a device, that of the arena.
const alignment = 256

// uploads are the copies of inputs, constants and numbers on a device: one run of memory, with
// a copy of it on the host. A run sends what has changed, in one piece.
type uploads struct {
	host, device backend.Buffer
	first, last  int // the bytes that have changed
}

// prepareUploads makes room on the device for all buffers that come from outside.
func (e *Executor) prepareUploads() (err error) {
	u := &uploads{}
	offsets, end := make([]int, len(e.plan.Buffers)), 0
	for i, b := range e.plan.Buffers {
		if b.Kind != plan.Arena && !b.Written {
			offsets[i] = end
			end += (b.Bytes + alignment - 1) / alignment * alignment
		}
	}
	if u.device, err = e.alloc(backend.U8, end); err != nil {
		return err
	}
	if u.host, err = e.allocHost(backend.U8, end); err != nil {
		return err
	}
	for i, b := range e.plan.Buffers {
		if b.Kind != plan.Arena && !b.Written {
			e.buffers[i] = u.device.Slice(offsets[i], offsets[i]+b.Bytes).As(b.DType)
		}
	}
	u.first, u.last = end, 0
	e.uploads = u
	return nil
}

// put notes the elements of a buffer for the next run.
func (u *uploads) put(at backend.Buffer, memory backend.Buffer) {
	first := int(at.Addr() - u.device.Addr())
	to := u.host.Slice(first, first+at.NBytes()).Bytes()
	if from := memory.Bytes(); !bytes.Equal(to, from) {
		copy(to, from)
		u.first, u.last = min(u.first, first), max(u.last, first+len(to))
	}
}

// send starts to copy what has changed to the device.
func (u *uploads) send(d Device) error {
	if u.first >= u.last {
		return nil
	}
	first, last := u.first, u.last
	u.first, u.last = u.host.Len(), 0
	return d.Move(u.device.Slice(first, last), u.host.Slice(first, last))
}

// Bind gives an input, a constant, a vector or a setting the elements in host memory, which are
// in row-major order. On the host, Run reads that memory, and updates write it.
func (e *Executor) Bind(buffer int, memory backend.Buffer) {
	switch {
	case e.resident[buffer] != nil:
		e.resident[buffer].bind(memory)
	case e.uploads != nil:
		e.uploads.put(e.buffers[buffer], memory)
	case e.buffers[buffer] != memory:
		e.buffers[buffer], e.moved = memory, true
	}
}

// numbers gives the plan's numbers their values.
func (e *Executor) numbers() error {
	for i, b := range e.plan.Buffers {
		if b.Kind != plan.Scalar {
			continue
		}
		switch x := math.Float64frombits(b.Bits); b.DType {
		case backend.F32:
			e.Bind(i, backend.Of([]float32{float32(x)}))
		case backend.F64:
			e.Bind(i, backend.Of([]float64{x}))
		case backend.I32:
			e.Bind(i, backend.Of([]int32{int32(x)}))
		case backend.I64:
			e.Bind(i, backend.Of([]int64{int64(x)}))
		case backend.U8:
			e.Bind(i, backend.Of([]byte{byte(x)}))
		default:
			return fmt.Errorf("vm: a constant of %v", b.DType)
		}
	}
	return nil
}

// results are where the results of a run are on the host.
type results struct {
	device, host backend.Buffer // the part of the arena that holds them, and the copy of it
	loops        []fuse.Loop    // by result: copies it into row-major order, nil if it is
}

// prepareResults makes room for results on the host.
func (e *Executor) prepareResults(arena backend.Buffer) (err error) {
	if n := e.plan.ResultBytes; n > 0 {
		e.results.device = arena.Slice(0, n)
		if e.results.host = e.results.device; !e.device.Host() {
			if e.results.host, err = e.allocHost(backend.U8, n); err != nil {
				return err
			}
		}
	}
	for _, r := range e.plan.Results {
		var l fuse.Loop
		if !r.Dense() {
			if l, err = fuse.Host(copying(r, r.Shape.Strides())); err != nil {
				return err
			}
		}
		e.results.loops = append(e.results.loops, l)
	}
	return e.device.Join()
}

// Fetch waits for the run, and copies all results to the host, in one piece.
func (e *Executor) Fetch() error {
	var err error
	if !e.device.Host() && e.results.device.Len() > 0 {
		err = e.device.Move(e.results.host, e.results.device)
	}
	return errors.Join(err, e.device.Join())
}

// Result copies result i of the run before the last Fetch, in row-major order.
func (e *Executor) Result(i int, dst backend.Buffer) error {
	r := e.plan.Results[i]
	src := e.hostOf(r)
	if l := e.results.loops[i]; l != nil {
		return l.Run([]backend.Buffer{dst}, []backend.Buffer{src}, backend.Buffer{})
	}
	copy(dst.Bytes(), src.Bytes())
	return nil
}

// hostOf returns where a result is on the host.
func (e *Executor) hostOf(r plan.Ref) backend.Buffer {
	at := e.at(r)
	switch b := e.plan.Buffers[r.Buffer]; {
	case e.uploads == nil:
		return at
	case b.Kind == plan.Arena:
		first := b.Offset + r.Offset*r.DType.Size()
		return e.results.host.Slice(first, first+at.NBytes()).As(r.DType)
	default:
		first := int(at.Addr() - e.uploads.device.Addr())
		return e.uploads.host.Slice(first, first+at.NBytes()).As(r.DType)
	}
}
