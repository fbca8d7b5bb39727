package solver

import (
	"cmp"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Momentum is stochastic gradient descent with momentum, and with decay of the weights if
// WeightDecay is not 0:
//
//	v = Momentum*v - Rate*(dw + WeightDecay*w)
//	w += v
//
// with a velocity v for each parameter, which begins as zeros. Products are rounded before
// the sum, on every processor.
type Momentum struct {
	Rate, Momentum float64
	WeightDecay    float64 // 0 for none

	solverState
}

var _ Solver = (*Momentum)(nil)

func (s *Momentum) check() error {
	infinite := math.Inf(1)
	return cmp.Or(checkRate("Momentum", s.Rate, s.rated),
		checkNumbers("Momentum", number{"Rate", s.Rate, infinite},
			number{"Momentum", s.Momentum, infinite},
			number{"WeightDecay", s.WeightDecay, infinite}))
}

// velocityOf names the velocity of a parameter in the state.
const velocityOf = "momentum.velocity."

func (s *Momentum) rule() rule {
	return rule{name: "Momentum", rate: &s.Rate, keep: []string{velocityOf}, update: s.update}
}

func (s *Momentum) update(u *Update) {
	v := u.With(fuse.Mul, u.Kept(0), s.Momentum)
	v = u.Do(fuse.Sub, v, u.With(fuse.Mul, u.Gradient(), s.Rate))
	if s.WeightDecay != 0 {
		v = u.Do(fuse.Sub, v, u.With(fuse.Mul, u.Param(), s.Rate*s.WeightDecay))
	}
	u.SetKept(0, v)
	u.SetParam(u.Do(fuse.Add, u.Param(), v))
}

// Step updates the parameters in place. Errors: see [Solver].
func (s *Momentum) Step(params []gorgonia.ValueGrad) error { return applyStep(s, params) }

// SetRate implements [Solver]. The terms in a velocity keep the rates with which they were added.
func (s *Momentum) SetRate(rate float64) { setRate(s, rate) }

// State implements [Stateful].
func (s *Momentum) State() (map[string]backend.Buffer, error) { return savedState(s) }

// SetState implements [Stateful].
func (s *Momentum) SetState(state map[string]backend.Buffer) error { return setState(s, state) }

// CheckState implements [Checker].
func (s *Momentum) CheckState(state map[string]backend.Buffer, params []backend.Buffer) error {
	return checkState(s, state, params)
}
