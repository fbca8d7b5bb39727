package solver

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
)

// Custom is a solver that you define by the [Update] of one element. Otherwise it works like the
// solvers of this package: the bits are the same on the host and in plans of package vm,
// checkpoints hold the vectors and the number of steps, and it may be one of [Groups].
//
// Cost: one pass over the parameters, their gradients, and the vectors of Keep.
type Custom struct {
	// Name names the solver in errors and checkpoints: letters, digits, "-" and "_". A checkpoint
	// of a solver with another name is refused.
	Name string
	Rate float64
	// Keep names the vectors that the solver keeps for each parameter, with the characters of Name.
	// They have the parameter's dtype and length, and are zeros at first.
	Keep []string
	// Update writes the update of one element. It is called at least once in each step, and must do
	// nothing else.
	Update func(u *Update) `json:"-"`

	solverState
}

var _ Solver = (*Custom)(nil)

func (s *Custom) check() error {
	for i, name := range append([]string{s.Name}, s.Keep...) {
		if name == "" || strings.ContainsFunc(name, notInName) {
			return fmt.Errorf("solver: Custom: %w: the name %q: it must be letters, digits, - "+
				"and _",
				backend.ErrArgument, name)
		}
		if i > 0 && slices.Index(s.Keep, name) != i-1 {
			return fmt.Errorf("solver: %s: %w: Keep has %q twice", s.Name, backend.ErrArgument,
				name)
		}
	}
	if s.Update == nil {
		return fmt.Errorf("solver: %s: %w: Update is nil", s.Name, backend.ErrArgument)
	}
	return cmp.Or(checkRate(s.Name, s.Rate, s.rated),
		checkNumbers(s.Name, number{"Rate", s.Rate, math.Inf(1)}))
}

// notInName reports whether a name must not contain this character.
func notInName(c rune) bool {
	letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
	return !letter && !(c >= '0' && c <= '9') && c != '-' && c != '_'
}

func (s *Custom) rule() rule {
	r := rule{name: s.Name, rate: &s.Rate, counter: s.Name + ".steps", update: s.Update}
	for _, name := range s.Keep {
		r.keep = append(r.keep, s.Name+"."+name+".")
	}
	return r
}

// Step updates the parameters in place. Errors: see [Solver]; ErrArgument for an invalid name, or
// an Update that is nil or writes no valid program.
func (s *Custom) Step(params []gorgonia.ValueGrad) error { return applyStep(s, params) }

// SetRate implements [Solver].
func (s *Custom) SetRate(rate float64) { setRate(s, rate) }

// State implements [Stateful].
func (s *Custom) State() (map[string]backend.Buffer, error) { return savedState(s) }

// SetState implements [Stateful].
func (s *Custom) SetState(state map[string]backend.Buffer) error { return setState(s, state) }

// CheckState implements [Checker].
func (s *Custom) CheckState(state map[string]backend.Buffer, params []backend.Buffer) error {
	return checkState(s, state, params)
}
