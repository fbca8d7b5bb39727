package vm

import (
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/exec"
)

// ClipNorm scales the gradients of [WithSolver] by one factor so that their global norm is at most
// limit, as solver.ClipNorm does, in the plan and after the exchange of [WithDataParallel]. The
// norm is computed in float64; [Machine.Norm] returns it. Updates wait for all gradients.
//
// With autograd.WithParts it is the norm of the whole gradients, bitwise identical on all ranks
// that have the parts. Each rank adds up the squares of its parts, and the first rank also those of
// gradients that all ranks have. An exchange of 8 bytes adds up these sums: an all-gather on the
// host, an all-reduce on a device.
//
// RunAll returns an ErrArgument if the norm is NaN or infinite. The learnables and the solver's
// state are then unchanged on all ranks, and the next RunAll is the same step of the solver.
//
// New returns ErrArgument if limit is not positive, and without WithSolver.
func ClipNorm(limit float64) Option {
	return func(m *Machine) {
		m.once("ClipNorm")
		m.clipping = &clipping{limit: limit}
	}
}

// clipping is the clipping of gradients in a machine.
type clipping struct{ limit, norm float64 }

// Norm returns the global norm of the gradients in the last run, before they were clipped: 0 before
// the first run and without [ClipNorm].
func (m *Machine) Norm() float64 {
	if m.clipping == nil {
		return 0
	}
	return m.clipping.norm
}

// check returns the limit of the norm, 0 for none.
func (c *clipping) check(trains bool) (float64, error) {
	switch {
	case c == nil:
		return 0, nil
	case !(c.limit > 0):
		return 0, fmt.Errorf("vm: ClipNorm: %w: a limit of %v: it must be positive",
			backend.ErrArgument, c.limit)
	case !trains:
		return 0, fmt.Errorf("vm: ClipNorm: %w: no solver applies the gradients: use WithSolver, "+
			"too", backend.ErrArgument)
	}
	return c.limit, nil
}

// squares adds up the squares of gradients that ranks have parts of: first over the ranks of one
// communicator, then over the ranks of the next.
type squares []backend.Communicator

var _ exec.Placed = squares{}

// Scratch implements [exec.Placed].
func (squares) Scratch() int { return 0 }

// StartOn implements [exec.Placed]. On the host the ranks' sums are added in rank order.
func (s squares) StartOn(q backend.Queue, y, _ backend.Buffer, x ...backend.Buffer) (w backend.Work,
	err error) {
	if q == nil {
		all := backend.View[float64](y)
		copy(all, backend.View[float64](x[0]))
		for _, comm := range s {
			if err := autograd.Sum(comm, &all[0]); err != nil {
				return nil, fmt.Errorf("ClipNorm: %w", err)
			}
		}
		return nil, nil
	}
	from := x[0]
	for _, comm := range s {
		w, err = comm.Start(q, backend.Collective{Kind: backend.AllReduce, Op: backend.Sum,
			Exact: true, Origin: &backend.Origin{Purpose: backend.ForSum}}, y, from)
		if err == nil {
			err = w.Wait(q)
		}
		if err != nil {
			return w, fmt.Errorf("ClipNorm: %w", err)
		}
		from = y
	}
	return w, nil
}

// squares returns the communicators whose ranks have parts of gradients: shards, and parts of
// autograd.WithParts.
func (p *parallel) squares(sharded bool) (over squares) {
	if sharded {
		over = append(over, p.comm)
	}
	if comm, _ := p.parts(); comm != nil {
		over = append(over, comm)
	}
	return over
}

// measure reads the norm of a run. A norm that is not finite is an error: no update took place.
func (c *clipping) measure(e *exec.Executor, result int) error {
	if c == nil {
		return nil
	}
	norm := make([]float64, 1)
	if err := e.Result(result, backend.Of(norm)); err != nil {
		return err
	}
	c.norm = norm[0]
	if math.IsNaN(c.norm) || math.IsInf(c.norm, 0) {
		return fmt.Errorf("vm: ClipNorm: %w: the norm of the gradients is %v: the step is left "+
			"out: use a lower rate, or another batch", backend.ErrArgument, c.norm)
	}
	return nil
}
