package autograd

import (
	"cmp"
	"fmt"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
)

// RMSProp is the solver of Hinton's lecture 6e of "Neural Networks for Machine Learning" (2012),
// with Epsilon, weight decay and momentum where PyTorch's torch.optim.RMSprop has them:
//
//	g = dw + WeightDecay*w
//	s = Alpha*s + (1-Alpha)*g*g
//	q = g / (sqrt(s) + Epsilon)
//	w -= Rate*q                 without Momentum; with it
//	b = Momentum*b + q
//	w -= Rate*b
//
// with a mean square s, and with Momentum a buffer b, for each parameter, which begin as zeros. An
// Alpha or Epsilon of 0 means PyTorch's default. There is no centered variant.
type RMSProp struct {
	Rate        float64
	Alpha       float64 // 0 for 0.99
	Epsilon     float64 // 0 for 1e-8
	WeightDecay float64 // 0 for none
	Momentum    float64 // 0 for none, from the first step on

	rated bool // by SetRate
	kept  kept
}

var _ Solver = (*RMSProp)(nil)

// Step updates the parameters in place. Errors are those of [Solver].
func (s *RMSProp) Step(params []gorgonia.ValueGrad) error {
	if err := s.check(); err != nil {
		return err
	}
	return s.kept.step(s.rule(), params)
}

func (s *RMSProp) check() error {
	if len(s.kept.vectors) > 0 && (len(s.kept.vectors[0]) > 1) != (s.Momentum != 0) {
		return fmt.Errorf("autograd: RMSProp: %w: Momentum is %v: it is on or off from the "+
			"first step on", backend.ErrArgument, s.Momentum)
	}
	infinite := math.Inf(1)
	return cmp.Or(checkRate("RMSProp", s.Rate, s.rated),
		checkNumbers("RMSProp", number{"Rate", s.Rate, infinite}, number{"Alpha", s.Alpha, 1},
			number{"Epsilon", s.Epsilon, infinite}, number{"Momentum", s.Momentum, infinite},
			number{"WeightDecay", s.WeightDecay, infinite}))
}

func (s *RMSProp) memory() *kept { return &s.kept }

func (s *RMSProp) rule() rule {
	const square, momentum = "rmsprop.square.", "rmsprop.momentum."
	if s.Momentum == 0 {
		return rule{name: "RMSProp", keep: []string{square}, without: []string{momentum},
			scratch: 1, updater: s}
	}
	return rule{name: "RMSProp", keep: []string{square, momentum}, scratch: 1, updater: s}
}

func (s *RMSProp) update(k backend.Arithmetic, w, dw backend.Buffer, v []backend.Buffer) error {
	alpha, square, t := cmp.Or(s.Alpha, 0.99), v[0], v[len(v)-1]
	return inOrder(
		func() error { return decayGradient(k, dw, w, t, s.WeightDecay) },
		func() error { return k.Scale(square, square, alpha) },
		func() error { return k.Binary(backend.Mul, t, dw, dw) },
		func() error { return k.Scale(t, t, 1-alpha) },
		func() error { return k.Binary(backend.Add, square, square, t) },
		func() error { return k.Unary(backend.Sqrt, t, square) },
		func() error { return k.BinaryScalar(backend.Add, t, t, cmp.Or(s.Epsilon, 1e-8), false) },
		func() error { return k.Binary(backend.Div, dw, dw, t) },
		func() error {
			if len(v) == 2 {
				return k.Scale(dw, dw, s.Rate)
			}
			b := v[1]
			return inOrder(
				func() error { return k.Scale(b, b, s.Momentum) },
				func() error { return k.Binary(backend.Add, b, b, dw) },
				func() error { return k.Scale(dw, b, s.Rate) },
			)
		},
		func() error { return k.Binary(backend.Sub, w, w, dw) },
	)
}

// SetRate implements [Solver].
func (s *RMSProp) SetRate(rate float64) { s.Rate, s.rated = rate, true }

// State implements [Stateful].
func (s *RMSProp) State() (map[string]backend.Buffer, error) { return s.kept.state(s.rule()) }

// SetState implements [Stateful].
func (s *RMSProp) SetState(state map[string]backend.Buffer) error {
	return s.kept.set(s.rule(), state)
}

// CheckState implements [Checker].
func (s *RMSProp) CheckState(state map[string]backend.Buffer, params []backend.Buffer) error {
	return s.kept.check(s.rule(), state, params)
}

// Close implements [Solver].
func (s *RMSProp) Close() error { return s.kept.close() }
