package ops

import (
	"context"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// worker computes a result in existing memory.
type worker interface {
	kernels() backend.Arithmetic
	// scratch returns memory for the operation, with arbitrary content.
	scratch(d backend.DType, n int) (backend.Buffer, error)
	// run runs a collective, in the order of the queue.
	run(c backend.Collective, dst, src backend.Buffer) error
	// apply runs y[i] = f(x[i]...), the given one of the operation's programs. y may be one of x.
	apply(program int, y backend.Buffer, f formula, x ...backend.Buffer) error
	// here returns the elements of a communicator's memory, to be read.
	here(b backend.Buffer) (backend.Buffer, error)
}

// onHost computes with values of the host. If the communicator is on a device, only what a
// collective sends and receives is staged.
type onHost struct{ comm backend.Communicator }

var _ worker = onHost{}

// at runs f for an operation on values of the host.
func at(comm backend.Communicator, f func(onHost) (gorgonia.Value, error)) (gorgonia.Value, error) {
	unbind, err := residence.Bind(comm.Device())
	if err != nil {
		return nil, err
	}
	defer unbind()
	v, err := f(onHost{comm})
	if err != nil {
		return nil, err
	}
	return v, nil
}

func (onHost) kernels() backend.Arithmetic { return kernels.Host{} }

func (onHost) scratch(d backend.DType, n int) (backend.Buffer, error) {
	return residence.Zeros(d, n), nil
}

func (p onHost) run(c backend.Collective, dst, src backend.Buffer) error {
	return group.RunOnHost(p.comm, c, dst, src)
}

func (onHost) apply(_ int, y backend.Buffer, f formula, x ...backend.Buffer) error {
	if y.Len() == 0 {
		return nil
	}
	loop, err := fuse.Host(elementwise(y, f, x), nil)
	if err != nil {
		return err
	}
	return loop.Run([]backend.Buffer{y}, x, backend.Buffer{})
}

// formula computes an element of a result from those of the operands.
type formula func(p *fuse.Program, x []fuse.Value) fuse.Value

// elementwise returns the program of a formula.
func elementwise(y backend.Buffer, f formula, x []backend.Buffer) *fuse.Program {
	p := &fuse.Program{Shape: []int{y.Len()}}
	values := make([]fuse.Value, len(x))
	for i, x := range x {
		values[i] = p.Load(x.DType(), 1)
	}
	p.Store(f(p, values), y.DType(), 1)
	return p
}

func (p onHost) here(b backend.Buffer) (backend.Buffer, error) {
	if !b.Device() {
		return b, nil
	}
	copied, q := residence.Zeros(b.DType(), b.Len()), p.comm.Device().Default()
	if err := q.Move(copied, b); err != nil {
		return copied, err
	}
	done, err := q.Record()
	if err != nil {
		return copied, err
	}
	return copied, done.Join(context.Background())
}
