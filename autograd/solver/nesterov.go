package solver

import (
	"cmp"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Nesterov is stochastic gradient descent with Nesterov's momentum, in the form of Sutskever,
// Martens, Dahl and Hinton, "On the importance of initialization and momentum in deep learning"
// (ICML 2013), as PyTorch's torch.optim.SGD(nesterov=True) has it:
//
//	g = dw + WeightDecay*w
//	b = Momentum*b + g
//	w -= Rate * (g + Momentum*b)
//
// with a buffer b for each parameter, which begins as zeros. Unlike the velocity of [Momentum], b
// does not contain the rate: a new rate applies to all of it.
type Nesterov struct {
	Rate, Momentum float64
	WeightDecay    float64 // 0 for none

	solverState
}

var _ Solver = (*Nesterov)(nil)

func (s *Nesterov) check() error {
	infinite := math.Inf(1)
	return cmp.Or(checkRate("Nesterov", s.Rate, s.rated),
		checkNumbers("Nesterov", number{"Rate", s.Rate, infinite},
			number{"Momentum", s.Momentum, infinite},
			number{"WeightDecay", s.WeightDecay, infinite}),
		checkPositive("Nesterov", "Momentum", s.Momentum, "use SGD"))
}

func (s *Nesterov) rule() rule {
	return rule{name: "Nesterov", rate: &s.Rate, keep: []string{"nesterov.buffer."},
		update: s.update}
}

func (s *Nesterov) update(u *Update) {
	g := withDecay(u, s.WeightDecay)
	b := u.Do(fuse.Add, u.With(fuse.Mul, u.Kept(0), s.Momentum), g)
	u.SetKept(0, b)
	g = u.Do(fuse.Add, g, u.With(fuse.Mul, b, s.Momentum))
	u.SetParam(u.Do(fuse.Sub, u.Param(), u.With(fuse.Mul, g, s.Rate)))
}

// withDecay returns the gradient plus part*w.
func withDecay(u *Update, part float64) fuse.Value {
	if part == 0 {
		return u.Gradient()
	}
	return u.Do(fuse.Add, u.Gradient(), u.With(fuse.Mul, u.Param(), part))
}

// Step updates the parameters in place. Errors: see [Solver]; and ErrArgument for a
// Momentum of 0, for which Nesterov's method is plain descent: use [SGD].
func (s *Nesterov) Step(params []gorgonia.ValueGrad) error { return applyStep(s, params) }

// SetRate implements [Solver].
func (s *Nesterov) SetRate(rate float64) { setRate(s, rate) }

// State implements [Stateful].
func (s *Nesterov) State() (map[string]backend.Buffer, error) { return savedState(s) }

// SetState implements [Stateful].
func (s *Nesterov) SetState(state map[string]backend.Buffer) error { return setState(s, state) }

// CheckState implements [Checker].
func (s *Nesterov) CheckState(state map[string]backend.Buffer, params []backend.Buffer) error {
	return checkState(s, state, params)
}
