package solver

import (
	"cmp"
	"fmt"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
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

	solverState
}

var _ Solver = (*RMSProp)(nil)

func (s *RMSProp) check() error {
	if len(s.solverState.vectors) > 0 && (len(s.solverState.vectors[0]) > 1) != (s.Momentum != 0) {
		return fmt.Errorf("solver: RMSProp: %w: Momentum is %v: it is on or off from the "+
			"first step on", backend.ErrArgument, s.Momentum)
	}
	infinite := math.Inf(1)
	return cmp.Or(checkRate("RMSProp", s.Rate, s.rated),
		checkNumbers("RMSProp", number{"Rate", s.Rate, infinite}, number{"Alpha", s.Alpha, 1},
			number{"Epsilon", s.Epsilon, infinite}, number{"Momentum", s.Momentum, infinite},
			number{"WeightDecay", s.WeightDecay, infinite}))
}

func (s *RMSProp) rule() rule {
	const square, momentum = "rmsprop.square.", "rmsprop.momentum."
	r := rule{name: "RMSProp", rate: &s.Rate, keep: []string{square, momentum}, update: s.update}
	if s.Momentum == 0 {
		r.keep, r.without = r.keep[:1], r.keep[1:]
	}
	return r
}

func (s *RMSProp) update(u *Update) {
	alpha := cmp.Or(s.Alpha, 0.99)
	g := withDecay(u, s.WeightDecay)
	square := u.With(fuse.Mul, u.Kept(0), alpha)
	square = u.Do(fuse.Add, square, u.With(fuse.Mul, u.Do(fuse.Mul, g, g), 1-alpha))
	u.SetKept(0, square)
	q := u.Do(fuse.Div, g, u.With(fuse.Add, u.Do(fuse.Sqrt, square), cmp.Or(s.Epsilon, 1e-8)))
	if s.Momentum != 0 {
		q = u.Do(fuse.Add, u.With(fuse.Mul, u.Kept(1), s.Momentum), q)
		u.SetKept(1, q)
	}
	u.SetParam(u.Do(fuse.Sub, u.Param(), u.With(fuse.Mul, q, s.Rate)))
}

// Step updates the parameters in place. Errors: see [Solver].
func (s *RMSProp) Step(params []gorgonia.ValueGrad) error { return applyStep(s, params) }

// SetRate implements [Solver].
func (s *RMSProp) SetRate(rate float64) { setRate(s, rate) }

// State implements [Stateful].
func (s *RMSProp) State() (map[string]backend.Buffer, error) { return savedState(s) }

// SetState implements [Stateful].
func (s *RMSProp) SetState(state map[string]backend.Buffer) error { return setState(s, state) }

// CheckState implements [Checker].
func (s *RMSProp) CheckState(state map[string]backend.Buffer, params []backend.Buffer) error {
	return checkState(s, state, params)
}
