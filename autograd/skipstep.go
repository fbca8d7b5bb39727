package autograd

import (
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// notFinite is the error of a compression that has refused an operand, the same on all
// ranks: the compression has delivered nothing and can still be used. Package sparse has
// such an error.
type notFinite interface {
	error
	// NotFinite returns the state key, the rank and the index of the first element that is
	// NaN or infinite.
	NotFinite() (state, rank, index int)
}

// undoer is a communicator that can undo how the last call with a state key has changed its state.
type undoer interface{ Undo(state int) error }

// skippedStep is the error of a step that all ranks skip.
type skippedStep struct{ error }

// Unwrap returns why.
func (l skippedStep) Unwrap() error { return l.error }

// skipStep undoes a step whose buckets have all arrived. The buckets without a NaN have
// changed the state of the compression, as if their gradients were applied.
func (d *DataParallel) skipStep(why error) error {
	u, ok := backend.As[undoer](d.gradComm)
	if !ok {
		return why
	}
	for _, b := range d.buckets {
		if err := u.Undo(b.slot()); err != nil {
			return errors.Join(why, err)
		}
	}
	return skippedStep{fmt.Errorf("the step is skipped on all ranks: %w", why)}
}

// blame names the parameter of an element that is not finite.
func (b *bucket) blame(n notFinite) error {
	_, rank, index := n.NotFinite()
	for _, p := range b.params {
		if index < p.size {
			return fmt.Errorf("the gradient of %v on rank %d, element %d: %v: %w", p, rank, index,
				b, n)
		}
		index -= p.size
	}
	return fmt.Errorf("%v: %w", b, n)
}
