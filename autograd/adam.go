package autograd

import (
	"cmp"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
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

	rated bool // by SetRate
	kept  kept
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

	rated bool // by SetRate
	kept  kept
}

var (
	_ Solver = (*Adam)(nil)
	_ Solver = (*AdamW)(nil)
)

// Step updates the parameters in place. Errors are those of [Solver].
func (s *Adam) Step(params []gorgonia.ValueGrad) error {
	if err := s.check(); err != nil {
		return err
	}
	return s.kept.step(s.rule(), params)
}

// Step updates the parameters in place. Errors are those of [Solver].
func (s *AdamW) Step(params []gorgonia.ValueGrad) error {
	if err := s.check(); err != nil {
		return err
	}
	return s.kept.step(s.rule(), params)
}

func (s *Adam) check() error {
	return cmp.Or(checkRate("Adam", s.Rate, s.rated), s.settings().check())
}

func (s *AdamW) check() error {
	return cmp.Or(checkRate("AdamW", s.Rate, s.rated), s.settings().check())
}

func (s *Adam) memory() *kept  { return &s.kept }
func (s *AdamW) memory() *kept { return &s.kept }
func (s *Adam) rule() rule     { return adamRule("Adam", s) }
func (s *AdamW) rule() rule    { return adamRule("AdamW", s) }

func (s *Adam) settings() adam {
	return adam{"Adam", s.Rate, cmp.Or(s.Beta1, 0.9), cmp.Or(s.Beta2, 0.999), cmp.Or(s.Epsilon, 1e-8), 0}
}

func (s *AdamW) settings() adam {
	return adam{"AdamW", s.Rate, cmp.Or(s.Beta1, 0.9), cmp.Or(s.Beta2, 0.999), cmp.Or(s.Epsilon, 1e-8), s.WeightDecay}
}

// adam is what Adam and AdamW have in common.
type adam struct {
	solver                                   string
	rate, beta1, beta2, epsilon, weightDecay float64
}

func (a adam) check() error {
	return checkNumbers(a.solver, number{"Rate", a.rate, math.Inf(1)}, number{"Beta1", a.beta1, 1}, number{"Beta2", a.beta2, 1},
		number{"Epsilon", a.epsilon, math.Inf(1)}, number{"WeightDecay", a.weightDecay, math.Inf(1)})
}

func adamRule(name string, s updater) rule {
	return rule{name: name, keep: []string{"adam.m.", "adam.v."}, counter: "adam.steps", updater: s}
}

func (s *Adam) update(k backend.Arithmetic, w, dw backend.Buffer, kept []backend.Buffer) error {
	return s.settings().update(k, w, dw, kept[0], kept[1], float64(s.kept.steps))
}

func (s *AdamW) update(k backend.Arithmetic, w, dw backend.Buffer, kept []backend.Buffer) error {
	return s.settings().update(k, w, dw, kept[0], kept[1], float64(s.kept.steps))
}

// update needs no memory beside its operands: dw becomes (1-Beta1)*dw, which is added to m,
// and then its square, which is added to v.
func (a adam) update(k backend.Arithmetic, w, dw, m, v backend.Buffer, t float64) error {
	part1, part2 := 1-a.beta1, 1-a.beta2
	unbias1, unbias2 := 1-math.Pow(a.beta1, t), 1-math.Pow(a.beta2, t)
	return inOrder(
		func() error { return decay(k, w, a.rate, a.weightDecay) },
		func() error { return k.Scale(m, m, a.beta1) },
		func() error { return k.Scale(dw, dw, part1) },
		func() error { return k.Binary(backend.Add, m, m, dw) },
		func() error { return k.Scale(v, v, a.beta2) },
		func() error { return k.Binary(backend.Mul, dw, dw, dw) },
		func() error { return k.Scale(dw, dw, part2/(part1*part1)) },
		func() error { return k.Binary(backend.Add, v, v, dw) },
		func() error { return k.Unary(backend.Sqrt, dw, v) },
		func() error { return k.Scale(dw, dw, 1/math.Sqrt(unbias2)) },
		func() error { return k.BinaryScalar(backend.Add, dw, dw, a.epsilon, false) },
		func() error { return k.Binary(backend.Div, dw, m, dw) },
		func() error { return k.Scale(dw, dw, a.rate/unbias1) },
		func() error { return k.Binary(backend.Sub, w, w, dw) },
	)
}

// SetRate implements [Solver].
func (s *Adam) SetRate(rate float64) { s.Rate, s.rated = rate, true }

// SetRate implements [Solver].
func (s *AdamW) SetRate(rate float64) { s.Rate, s.rated = rate, true }

// State implements [Stateful].
func (s *Adam) State() (map[string]backend.Buffer, error) {
	return s.kept.state(s.rule())
}

// State implements [Stateful].
func (s *AdamW) State() (map[string]backend.Buffer, error) {
	return s.kept.state(s.rule())
}

// SetState implements [Stateful].
func (s *Adam) SetState(state map[string]backend.Buffer) error {
	return s.kept.set(s.rule(), state)
}

// SetState implements [Stateful].
func (s *AdamW) SetState(state map[string]backend.Buffer) error {
	return s.kept.set(s.rule(), state)
}

// CheckState implements [Checker].
func (s *Adam) CheckState(state map[string]backend.Buffer, params []backend.Buffer) error {
	return s.kept.check(s.rule(), state, params)
}

// CheckState implements [Checker].
func (s *AdamW) CheckState(state map[string]backend.Buffer, params []backend.Buffer) error {
	return s.kept.check(s.rule(), state, params)
}

// Close implements [Solver].
func (s *Adam) Close() error { return s.kept.close() }

// Close implements [Solver].
func (s *AdamW) Close() error { return s.kept.close() }
