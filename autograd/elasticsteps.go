package autograd

import (
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
)

// Steps carries out the steps of an [Elastic]. Reduce and Apply are the two halves of a step:
// between them the model has not changed.
type Steps interface {
	// Leave ends the use of the communicator of the last Enter, which closes next. The model stays
	// where it is or, if last is set because no Enter follows, moves to the host.
	Leave(last bool) error
	// Enter makes this process exchange gradients with other ranks, and gives it the model of rank
	// 0, without the solver's state. It discards what Reduce has left. It is collective.
	Enter(comm backend.Communicator) (*DataParallel, error)
	// Reduce runs the n micro-batches of this rank, and combines the gradients of all.
	Reduce(n int, run func(i int) error) error
	// Apply gives the solver the gradients, clipped to a norm of at most clip unless clip is 0. It
	// exchanges nothing.
	Apply(clip float64) error
}

// ownSteps are the Steps of NewElastic, with a DataParallel and a solver's Step.
type ownSteps struct {
	params gorgonia.Nodes
	solver solver.Solver
	opts   []Option
	dp     *DataParallel
	grads  []gorgonia.ValueGrad
}

// Leave implements [Steps]. The model is always on the host.
func (*ownSteps) Leave(bool) error { return nil }

// Enter implements [Steps].
func (s *ownSteps) Enter(comm backend.Communicator) (d *DataParallel, err error) {
	if d, err = New(comm, s.params, s.opts...); err != nil {
		return nil, err
	}
	s.dp = d
	if len(d.model.averages) > 0 {
		return d, fmt.Errorf("autograd: NewElastic: %w: the graph has batch norms, whose moving "+
			"averages a run changes before the step is applied: use vm.WithElastic",
			backend.ErrUnsupported)
	}
	return d, nil
}

// Reduce implements [Steps].
func (s *ownSteps) Reduce(n int, run func(i int) error) (err error) {
	if err = s.dp.Accumulate(n, run); err == nil {
		s.grads, err = s.dp.Sync()
	}
	return err
}

// Apply implements [Steps].
func (s *ownSteps) Apply(clip float64) error {
	if clip != 0 {
		if _, err := solver.ClipNorm(s.grads, clip); err != nil {
			return err
		}
	}
	return s.solver.Step(s.grads)
}
