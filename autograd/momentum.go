package autograd

import (
	"cmp"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
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

	rated bool // by SetRate
	kept  kept
}

var _ Solver = (*Momentum)(nil)

// Step updates the parameters in place. Errors are those of [Solver].
func (s *Momentum) Step(params []gorgonia.ValueGrad) error {
	if err := s.check(); err != nil {
		return err
	}
	return s.kept.step(s.rule(), params)
}

func (s *Momentum) check() error {
	return cmp.Or(checkRate("Momentum", s.Rate, s.rated), checkNumbers("Momentum", number{"Rate", s.Rate, math.Inf(1)}, number{"Momentum", s.Momentum, math.Inf(1)}, number{"WeightDecay", s.WeightDecay, math.Inf(1)}))
}

func (s *Momentum) memory() *kept { return &s.kept }

// velocityOf names the velocity of a parameter in the state.
const velocityOf = "momentum.velocity."

func (s *Momentum) rule() rule {
	return rule{name: "Momentum", keep: []string{velocityOf}, updater: s}
}

func (s *Momentum) update(k backend.Arithmetic, w, dw backend.Buffer, kept []backend.Buffer) error {
	v := kept[0]
	return inOrder(
		func() error { return k.Scale(v, v, s.Momentum) },
		func() error { return k.Scale(dw, dw, s.Rate) },
		func() error { return k.Binary(backend.Sub, v, v, dw) },
		func() error {
			if s.WeightDecay == 0 {
				return nil
			}
			return inOrder(
				func() error { return k.Scale(dw, w, s.Rate*s.WeightDecay) }, // the gradient is used
				func() error { return k.Binary(backend.Sub, v, v, dw) },
			)
		},
		func() error { return k.Binary(backend.Add, w, w, v) },
	)
}

// SetRate implements [Solver]. What a velocity holds keeps the rates that it was added with.
func (s *Momentum) SetRate(rate float64) { s.Rate, s.rated = rate, true }

// State implements [Stateful].
func (s *Momentum) State() (map[string]backend.Buffer, error) { return s.kept.state(s.rule()) }

// SetState implements [Stateful].
func (s *Momentum) SetState(state map[string]backend.Buffer) error {
	return s.kept.set(s.rule(), state)
}

// CheckState implements [Checker].
func (s *Momentum) CheckState(state map[string]backend.Buffer, params []backend.Buffer) error {
	return s.kept.check(s.rule(), state, params)
}

// Close implements [Solver].
func (s *Momentum) Close() error { return s.kept.close() }
