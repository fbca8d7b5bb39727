package solver

import (
	"cmp"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Adam is the solver of Kingma and Ba, "Adam: A Method for Stochastic Optimization"
// (arXiv:1412.6980), Algorithm 1, with Epsilon where PyTorch's torch.optim.Adam has it. In
// step t, which begins at 1:
//
//	m = Beta1*m + (1-Beta1)*dw
//	v = Beta2*v + (1-Beta2)*dw*dw
//	w -= Rate * (m / (1-Beta1^t)) / (sqrt(v / (1-Beta2^t)) + Epsilon)
//
// with two moments m and v for each parameter, which are zero at first. A setting of 0 means
// the published value, except for Rate.
//
// For weight decay use [AdamW].
type Adam struct {
	Rate         float64
	Beta1, Beta2 float64 // 0 for 0.9 and 0.999
	Epsilon      float64 // 0 for 1e-8

	solverState
}

// AdamW is [Adam] with decoupled weight decay, of Loshchilov and Hutter, "Decoupled Weight
// Decay Regularization" (arXiv:1711.05101), Algorithm 2, with the decay multiplied by the rate
// as in PyTorch's torch.optim.AdamW. Before the update of Adam
//
//	w -= Rate*WeightDecay*w
type AdamW struct {
	Rate         float64
	Beta1, Beta2 float64 // 0 for 0.9 and 0.999
	Epsilon      float64 // 0 for 1e-8
	WeightDecay  float64 // 0 for none; PyTorch's default is 0.01

	solverState
}

var (
	_ Solver = (*Adam)(nil)
	_ Solver = (*AdamW)(nil)
)

func (s *Adam) settings() adam {
	return adam{s.Rate, cmp.Or(s.Beta1, 0.9), cmp.Or(s.Beta2, 0.999), cmp.Or(s.Epsilon, 1e-8), 0}
}

func (s *AdamW) settings() adam {
	return adam{s.Rate, cmp.Or(s.Beta1, 0.9), cmp.Or(s.Beta2, 0.999), cmp.Or(s.Epsilon, 1e-8),
		s.WeightDecay}
}

// adam is what Adam and AdamW have in common.
type adam struct{ rate, beta1, beta2, epsilon, weightDecay float64 }

func (a adam) check(name string, rated bool) error {
	infinite := math.Inf(1)
	return cmp.Or(checkRate(name, a.rate, rated),
		checkNumbers(name, number{"Rate", a.rate, infinite},
			number{"Beta1", a.beta1, 1}, number{"Beta2", a.beta2, 1},
			number{"Epsilon", a.epsilon, infinite}, number{"WeightDecay", a.weightDecay, infinite}))
}

func (s *Adam) check() error  { return s.settings().check("Adam", s.rated) }
func (s *AdamW) check() error { return s.settings().check("AdamW", s.rated) }

func (s *Adam) rule() rule  { return adamRule("Adam", &s.Rate, s.update) }
func (s *AdamW) rule() rule { return adamRule("AdamW", &s.Rate, s.update) }

func (s *Adam) update(u *Update)  { s.settings().update(u) }
func (s *AdamW) update(u *Update) { s.settings().update(u) }

func adamRule(name string, rate *float64, update func(u *Update)) rule {
	return rule{name: name, rate: rate, keep: []string{"adam.m.", "adam.v."}, counter: "adam.steps",
		update: update}
}

// update adds (1-Beta1)*dw to m, and its square to v, multiplied by what makes it (1-Beta2)*dw*dw.
func (a adam) update(u *Update) {
	part1, part2, t := 1-a.beta1, 1-a.beta2, float64(u.Step())
	unbias1, unbias2 := 1-math.Pow(a.beta1, t), 1-math.Pow(a.beta2, t)
	w, m := decayed(u, a.weightDecay), u.With(fuse.Mul, u.Kept(0), a.beta1)
	g := u.With(fuse.Mul, u.Gradient(), part1)
	m = u.Do(fuse.Add, m, g)
	v := u.With(fuse.Mul, u.Kept(1), a.beta2)
	v = u.Do(fuse.Add, v, u.With(fuse.Mul, u.Do(fuse.Mul, g, g), part2/(part1*part1)))
	root := u.With(fuse.Mul, u.Do(fuse.Sqrt, v), 1/math.Sqrt(unbias2))
	by := u.Do(fuse.Div, m, u.With(fuse.Add, root, a.epsilon))
	u.SetKept(0, m)
	u.SetKept(1, v)
	u.SetParam(u.Do(fuse.Sub, w, u.With(fuse.Mul, by, a.rate/unbias1)))
}

// Step updates the parameters in place. Errors: see [Solver].
func (s *Adam) Step(params []gorgonia.ValueGrad) error { return applyStep(s, params) }

// SetRate implements [Solver].
func (s *Adam) SetRate(rate float64) { setRate(s, rate) }

// State implements [Stateful].
func (s *Adam) State() (map[string]backend.Buffer, error) { return savedState(s) }

// SetState implements [Stateful].
func (s *Adam) SetState(state map[string]backend.Buffer) error { return setState(s, state) }

// CheckState implements [Checker].
func (s *Adam) CheckState(state map[string]backend.Buffer, params []backend.Buffer) error {
	return checkState(s, state, params)
}

// Step updates the parameters in place. Errors: see [Solver].
func (s *AdamW) Step(params []gorgonia.ValueGrad) error { return applyStep(s, params) }

// SetRate implements [Solver].
func (s *AdamW) SetRate(rate float64) { setRate(s, rate) }

// State implements [Stateful].
func (s *AdamW) State() (map[string]backend.Buffer, error) { return savedState(s) }

// SetState implements [Stateful].
func (s *AdamW) SetState(state map[string]backend.Buffer) error { return setState(s, state) }

// CheckState implements [Checker].
func (s *AdamW) CheckState(state map[string]backend.Buffer, params []backend.Buffer) error {
	return checkState(s, state, params)
}
