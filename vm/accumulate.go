package vm

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Accumulate makes one step of the solver of n runs, for batches whose activations do not fit into
// memory. Each RunAll adds the gradients of a micro-batch to those before; each n-th one exchanges the
// sum ([WithDataParallel]) and applies it. For the mean over all samples, divide the loss by n in the
// graph. The bits are those of autograd's Accumulate.
//
// Cost: a pass over the gradients in each run, and memory for the sums, which is that of the buckets
// with [WithDataParallel]. An error of a run discards what was added up.
//
// New returns ErrArgument if n is not positive, and without [WithSolver].
func Accumulate(n int) Option { return func(m *Machine) { m.micro = &micro{n: n} } }

// micro is where a machine is among the micro-batches of a step.
type micro struct{ n, done int }

// last reports whether a run ends a step.
func (b *micro) last() bool { return b == nil || b.done == b.n-1 }

// more is 1 if gradients are added to those of the run before.
func (b *micro) more() float64 { return float64(min(b.done, 1)) }

// end counts a run, or begins again after an error.
func (b *micro) end(err error) {
	switch {
	case b == nil:
	case err != nil:
		b.done = 0
	default:
		b.done = (b.done + 1) % b.n
	}
}

// accumulates reports whether gradients of several runs are added up.
func (m *Machine) accumulates() (bool, error) {
	switch b := m.micro; {
	case b == nil:
		return false, nil
	case b.n < 1:
		return false, fmt.Errorf("vm: Accumulate: %w: %d micro-batches: there must be at least 1", backend.ErrArgument, b.n)
	case m.solver == nil:
		return false, fmt.Errorf("vm: Accumulate: %w: no solver applies the gradients: use WithSolver, too", backend.ErrArgument)
	}
	return m.micro.n > 1, nil
}
