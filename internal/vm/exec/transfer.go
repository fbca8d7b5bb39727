package exec

import (
	"errors"
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// alignment of inputs on a device, that of the arena.
const alignment = 256

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
			if l, err = fuse.Host(copying(r, r.Shape.Strides()), nil); err != nil {
				return err
			}
		}
		e.results.loops = append(e.results.loops, l)
	}
	return e.device.Join()
}

// Fetch waits for the run, also for one that has failed, and copies all results to the host, in one
// piece.
func (e *Executor) Fetch() error {
	var err error
	if !e.device.Host() && e.results.device.Len() > 0 {
		err = e.device.Move(e.results.host, e.results.device)
	}
	return errors.Join(e.exchanges.finish(), err, e.device.Join())
}

// Result copies result i of the run before the last Fetch, in row-major order.
func (e *Executor) Result(i int, dst backend.Buffer) error {
	r := e.plan.Results[i]
	src, err := e.hostOf(r)
	if err != nil {
		return err
	}
	if l := e.results.loops[i]; l != nil {
		return l.Run([]backend.Buffer{dst}, []backend.Buffer{src}, backend.Buffer{})
	}
	copy(dst.Bytes(), src.Bytes())
	return nil
}

// hostOf returns where a result is on the host.
func (e *Executor) hostOf(r plan.Ref) (backend.Buffer, error) {
	b, c := e.plan.Buffers[r.Buffer], e.resident[r.Buffer]
	switch {
	case b.Kind == plan.Arena && !e.device.Host():
		first := b.Offset + r.Offset*r.DType.Size()
		return e.results.host.Slice(first, first+r.Span()*r.DType.Size()).As(r.DType), nil
	case b.Computed() && !e.device.Host(): // it is there alone
	case b.Kind == plan.Arena, c == nil, !e.device.Copies().Written(c):
		return e.outsideElements(r), nil
	}
	to, err := Host{}.Alloc(r.Span() * r.DType.Size()) // the host's elements are older
	if err == nil {
		err = errors.Join(e.device.Move(to.As(r.DType), e.at(r)), e.device.Join())
	}
	return to.As(r.DType), err
}

// outsideElements returns the elements of a value that comes from outside, as the host has them,
// or of any value on the host.
func (e *Executor) outsideElements(r plan.Ref) backend.Buffer {
	if e.device.Host() {
		return e.at(r)
	}
	return e.bound[r.Buffer].Slice(r.Offset, r.Offset+r.Span())
}
