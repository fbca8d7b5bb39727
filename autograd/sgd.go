package autograd

import (
	"cmp"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
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

	rated bool // by SetRate
}

var _ Solver = (*SGD)(nil)

// Step updates the parameters in place. Errors are those of [Solver].
func (s SGD) Step(params []gorgonia.ValueGrad) error {
	if err := s.check(); err != nil {
		return err
	}
	return new(kept).step(s.rule(), params)
}

func (s SGD) check() error {
	return cmp.Or(checkRate("SGD", s.Rate, s.rated), checkNumbers("SGD", number{"Rate", s.Rate, math.Inf(1)}, number{"WeightDecay", s.WeightDecay, math.Inf(1)}))
}

func (s SGD) memory() *kept { return new(kept) }

func (s *SGD) rule() rule { return rule{name: "SGD", updater: s} }

func (s *SGD) update(k backend.Arithmetic, w, dw backend.Buffer, _ []backend.Buffer) error {
	return inOrder(
		func() error { return decay(k, w, s.Rate, s.WeightDecay) },
		func() error { return k.Scale(dw, dw, -s.Rate) },
		func() error { return k.Binary(backend.Add, w, w, dw) },
	)
}

// decay makes parameters smaller: w *= 1 - rate*part. Whether there is a pass does not depend on
// the rate, so that the passes of a rule are the same in each step.
func decay(k backend.Arithmetic, w backend.Buffer, rate, part float64) error {
	if part == 0 {
		return nil
	}
	return k.Scale(w, w, 1-rate*part)
}

// SetRate implements [Solver].
func (s *SGD) SetRate(rate float64) { s.Rate, s.rated = rate, true }

// State implements [Stateful]: there is none.
func (SGD) State() (map[string]backend.Buffer, error) { return nil, nil }

// SetState implements [Stateful].
func (SGD) SetState(map[string]backend.Buffer) error { return nil }

// CheckState implements [Checker].
func (SGD) CheckState(map[string]backend.Buffer, []backend.Buffer) error { return nil }

// Close implements [Solver].
func (SGD) Close() error { return nil }
