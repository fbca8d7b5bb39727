package exec

import (
	"errors"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/vm/plan"
)

// Compute gives a buffer the value that a plan computes from leaves, which no run changes. It
// computes it unless it has, or another machine on the device has. What a device needs for that
// besides is freed before the next value is computed.
func (e *Executor) Compute(buffer int, o *plan.Once, leaves []residence.Source) error {
	copies := e.device.Copies()
	if has := e.once[buffer]; has != nil && has.Of(leaves) {
		return nil
	}
	if err := e.releaseOnce(buffer); err != nil {
		return err
	}
	e.once[buffer] = copies.Compute(o.Text, leaves)
	err := e.once[buffer].Fill(func() (backend.Buffer, error) {
		return e.compute(e.plan.Buffers[buffer], o.Plan, leaves)
	})
	if err != nil {
		return errors.Join(err, e.releaseOnce(buffer))
	}
	e.buffers[buffer], e.moved = e.once[buffer].Memory, true
	return nil
}

// compute returns new memory with the result of a plan, which is like b.
func (e *Executor) compute(b plan.Buffer, p *plan.Plan, leaves []residence.Source) (backend.Buffer,
	error) {
	to, err := e.device.Alloc(b.Bytes)
	if err != nil {
		return to, e.lacking(err, b.Bytes, b.Name)
	}
	p, result := p.Given()
	for i := range p.Buffers { // nothing of this stays on the device
		in := &p.Buffers[i]
		in.Frozen = in.Kind == plan.Input
	}
	if result < 0 {
		return to, errors.Join(errors.New("vm: a value that is computed once has gaps"),
			e.device.Free(to))
	}
	p.Buffers[result].Kind, p.Buffers[result].Frozen = plan.Constant, true
	run, err := New(p, e.device, nil, nil)
	if err != nil {
		return to, errors.Join(err, e.device.Free(to))
	}
	for i, in := range p.Buffers {
		if in.Kind == plan.Input {
			run.Bind(i, leaves[in.Index].Memory)
		}
	}
	run.buffers[result] = to.As(b.DType)
	if err = errors.Join(run.Run(0), run.Fetch(), run.free()); err != nil {
		return to, errors.Join(err, e.device.Free(to))
	}
	return to.As(b.DType), nil
}

// releaseOnce ends the use of what was computed once.
func (e *Executor) releaseOnce(buffer int) error {
	o := e.once[buffer]
	if e.once[buffer] = nil; o == nil {
		return nil
	}
	if unused := e.device.Copies().LeaveOnce(o); unused.Len() > 0 {
		return e.device.Free(unused)
	}
	return nil
}

// written returns the host memory of what updates of the plan write.
func (e *Executor) written() []backend.Buffer {
	e.changes = e.changes[:0]
	for i, b := range e.plan.Buffers {
		if b.Written {
			e.changes = append(e.changes, e.given(i))
		}
	}
	return e.changes
}

// given returns the host memory that a buffer was given.
func (e *Executor) given(buffer int) backend.Buffer {
	if e.device.Host() {
		return e.buffers[buffer]
	}
	return e.bound[buffer]
}
