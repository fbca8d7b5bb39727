package vm

import (
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/backend"
)

// ClipNorm scales the gradients of [WithSolver] by one factor so that their global norm is at most
// limit, as autograd.ClipNorm does, in the plan and after the exchange of [WithDataParallel]. The
// norm is computed in float64; [Machine.Norm] returns it. Updates wait for all gradients.
//
// RunAll returns an ErrArgument if the norm is NaN or infinite. The learnables and the solver's
// state are unchanged then, on all ranks, and the next RunAll is the same step of the solver.
//
// New returns ErrArgument if limit is not positive, and without WithSolver.
func ClipNorm(limit float64) Option {
	return func(m *Machine) { m.clipping = &clipping{limit: limit} }
}

// clipping is the clipping of gradients in a machine.
type clipping struct{ limit, norm float64 }

// Norm returns the global norm of the gradients in the last run, before they were clipped: 0 before the
// first run and without [ClipNorm].
func (m *Machine) Norm() float64 {
	if m.clipping == nil {
		return 0
	}
	return m.clipping.norm
}

// limit returns the limit of the norm, 0 for none.
func (m *Machine) limit() (float64, error) {
	switch c := m.clipping; {
	case c == nil:
		return 0, nil
	case !(c.limit > 0):
		return 0, fmt.Errorf("vm: ClipNorm: %w: a limit of %v: it must be positive", backend.ErrArgument, c.limit)
	case m.solver == nil:
		return 0, fmt.Errorf("vm: ClipNorm: %w: no solver applies the gradients: use WithSolver, too", backend.ErrArgument)
	}
	return m.clipping.limit, nil
}

// measure reads the norm of a run, which is an error if it is not finite: no update took place.
func (m *Machine) measure() error {
	c := m.clipping
	if c == nil {
		return nil
	}
	norm := make([]float64, 1)
	if err := m.exec.Result(m.plan.Norm, backend.Of(norm)); err != nil {
		return err
	}
	c.norm = norm[0]
	if math.IsNaN(c.norm) || math.IsInf(c.norm, 0) {
		return fmt.Errorf("vm: ClipNorm: %w: the norm of the gradients is %v: the step is left out: use a lower rate, or another batch", backend.ErrArgument, c.norm)
	}
	return nil
}
