package solver

import (
	"cmp"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// SGD is stochastic gradient descent, with decay of the weights if WeightDecay is not 0:
//
//	w -= Rate*WeightDecay*w
//	w -= Rate*dw
//
// On the host, without decay, it computes the bits of Gorgonia's VanillaSolver. It has no
// state.
type SGD struct {
	Rate        float64
	WeightDecay float64 // 0 for none

	solverState
}

var _ Solver = (*SGD)(nil)

func (s *SGD) check() error {
	infinite := math.Inf(1)
	return cmp.Or(checkRate("SGD", s.Rate, s.rated),
		checkNumbers("SGD", number{"Rate", s.Rate, infinite},
			number{"WeightDecay", s.WeightDecay, infinite}))
}

func (s *SGD) rule() rule { return rule{name: "SGD", rate: &s.Rate, update: s.update} }

func (s *SGD) update(u *Update) {
	w := decayed(u, s.WeightDecay)
	u.SetParam(u.Do(fuse.Add, w, u.With(fuse.Mul, u.Gradient(), -s.Rate)))
}

// decayed returns the parameter after decay: w *= 1 - rate*part. Whether it decays does not depend
// on the rate, so that an update has the same operations in each step.
func decayed(u *Update, part float64) fuse.Value {
	if part == 0 {
		return u.Param()
	}
	return u.With(fuse.Mul, u.Param(), 1-u.Rate()*part)
}

// Step updates the parameters in place. Errors: see [Solver].
func (s *SGD) Step(params []gorgonia.ValueGrad) error { return applyStep(s, params) }

// SetRate implements [Solver].
func (s *SGD) SetRate(rate float64) { setRate(s, rate) }

// State implements [Stateful].
func (s *SGD) State() (map[string]backend.Buffer, error) { return savedState(s) }

// SetState implements [Stateful].
func (s *SGD) SetState(state map[string]backend.Buffer) error { return setState(s, state) }

// CheckState implements [Checker].
func (s *SGD) CheckState(state map[string]backend.Buffer, params []backend.Buffer) error {
	return checkState(s, state, params)
}
