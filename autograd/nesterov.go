package autograd

import (
	"cmp"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
)

// Nesterov is stochastic gradient descent with Nesterov's momentum, in the form of Sutskever,
// Martens, Dahl and Hinton, "On the importance of initialization and momentum in deep learning"
// (ICML 2013), as PyTorch's torch.optim.SGD(nesterov=True) has it:
//
//	g = dw + WeightDecay*w
//	b = Momentum*b + g
//	w -= Rate * (g + Momentum*b)
//
// with a buffer b for each parameter, which begins as zeros. Other than the velocity of
// [Momentum], b does not contain the rate: a new rate holds for all of it.
type Nesterov struct {
	Rate, Momentum float64
	WeightDecay    float64 // 0 for none

	rated bool // by SetRate
	kept  kept
}

var _ Solver = (*Nesterov)(nil)

// Step updates the parameters in place. Errors are those of [Solver], and ErrArgument for a
// Momentum of 0, with which there is nothing of Nesterov's: use [SGD].
func (s *Nesterov) Step(params []gorgonia.ValueGrad) error {
	if err := s.check(); err != nil {
		return err
	}
	return s.kept.step(s.rule(), params)
}

func (s *Nesterov) check() error {
	infinite := math.Inf(1)
	return cmp.Or(checkRate("Nesterov", s.Rate, s.rated),
		checkNumbers("Nesterov", number{"Rate", s.Rate, infinite},
			number{"Momentum", s.Momentum, infinite},
			number{"WeightDecay", s.WeightDecay, infinite}),
		checkPositive("Nesterov", "Momentum", s.Momentum, "use SGD"))
}

func (s *Nesterov) memory() *kept { return &s.kept }

func (s *Nesterov) rule() rule {
	return rule{name: "Nesterov", keep: []string{"nesterov.buffer."}, scratch: 1, updater: s}
}

func (s *Nesterov) update(k backend.Arithmetic, w, dw backend.Buffer, v []backend.Buffer) error {
	b, t := v[0], v[1]
	return inOrder(
		func() error { return decayGradient(k, dw, w, t, s.WeightDecay) },
		func() error { return k.Scale(b, b, s.Momentum) },
		func() error { return k.Binary(backend.Add, b, b, dw) },
		func() error { return k.Scale(t, b, s.Momentum) },
		func() error { return k.Binary(backend.Add, dw, dw, t) },
		func() error { return k.Scale(dw, dw, s.Rate) },
		func() error { return k.Binary(backend.Sub, w, w, dw) },
	)
}

// decayGradient adds part*w to a gradient, by way of scratch t. Whether there are passes depends on
// part alone, so that the passes of a rule are the same in each step.
func decayGradient(k backend.Arithmetic, dw, w, t backend.Buffer, part float64) error {
	if part == 0 {
		return nil
	}
	return inOrder(
		func() error { return k.Scale(t, w, part) },
		func() error { return k.Binary(backend.Add, dw, dw, t) },
	)
}

// SetRate implements [Solver].
func (s *Nesterov) SetRate(rate float64) { s.Rate, s.rated = rate, true }

// State implements [Stateful].
func (s *Nesterov) State() (map[string]backend.Buffer, error) { return s.kept.state(s.rule()) }

// SetState implements [Stateful].
func (s *Nesterov) SetState(state map[string]backend.Buffer) error {
	return s.kept.set(s.rule(), state)
}

// CheckState implements [Checker].
func (s *Nesterov) CheckState(state map[string]backend.Buffer, params []backend.Buffer) error {
	return s.kept.check(s.rule(), state, params)
}

// Close implements [Solver].
func (s *Nesterov) Close() error { return s.kept.close() }
