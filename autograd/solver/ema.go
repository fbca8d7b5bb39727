package solver

import (
	"cmp"
	"fmt"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// EMA extends a solver of this package, except [Groups], with an exponential moving average of each
// parameter, which often generalises better than the parameter:
//
//	a = Decay*a + (1-Decay)*w      after each step
//
// Averages begin as zeros, and [EMA.Averages] divides by 1-Decay^t after t steps, as [Adam] does
// with its moments. vm.Machine's Averaged evaluates with them. EMA uses the settings of Solver, but
// not its state.
type EMA struct {
	Solver Solver
	Decay  float64 // 0 for 0.999

	solverState
}

var _ Solver = (*EMA)(nil)

// decay returns Decay, or PyTorch's default.
func (s *EMA) decay() float64 { return cmp.Or(s.Decay, 0.999) }

// averageOf names the average of a parameter in the state.
const averageOf = "ema.average."

func (s *EMA) inner() (ruled, error) {
	r, ok := s.Solver.(ruled)
	if _, twice := r.(*EMA); !ok || twice {
		return nil, fmt.Errorf("solver: EMA: %w: a %T is not a single solver of package solver",
			backend.ErrUnsupported, s.Solver)
	}
	return r, backend.Given("solver.EMA", "Solver", s.Solver)
}

func (s *EMA) check() error {
	r, err := s.inner()
	if err != nil {
		return err
	}
	return cmp.Or(r.check(), checkNumbers("EMA", number{"Decay", s.Decay, 1}))
}

func (s *EMA) rule() rule {
	r, err := s.inner()
	if err != nil { // which check reports
		return rule{name: "EMA", rate: new(float64), update: func(*Update) {}}
	}
	all := r.rule()
	kept, update := len(all.keep), all.update
	all.keep = append(all.keep[:kept:kept], averageOf)
	all.counter = cmp.Or(all.counter, "ema.steps")
	all.constant, all.value = "ema.decay", s.decay()
	all.update = func(u *Update) {
		update(u)
		a := u.With(fuse.Mul, u.Kept(kept), s.decay())
		u.SetKept(kept, u.Do(fuse.Add, a, u.With(fuse.Mul, u.next[0], 1-s.decay())))
	}
	return all
}

// Averages returns the averages of all parameters, in the order of Step, as host memory of their
// dtypes: none before the first step.
//
// Errors: those of the device that has the averages.
func (s *EMA) Averages() ([]backend.Buffer, error) {
	if err := s.present(); err != nil {
		return nil, wrapped("EMA: %w", err)
	}
	var all []backend.Buffer
	part := 1 - math.Pow(s.decay(), float64(s.steps))
	for _, vectors := range s.vectors {
		a := residence.Clone(vectors[len(vectors)-1])
		if s.steps == 0 {
			break
		}
		switch a.DType() {
		case backend.F32:
			for i, x := range backend.View[float32](a) {
				backend.View[float32](a)[i] = float32(float64(x) / part)
			}
		case backend.F64:
			for i, x := range backend.View[float64](a) {
				backend.View[float64](a)[i] = x / part
			}
		}
		all = append(all, a)
	}
	return all, nil
}

// Step updates the parameters in place. Errors: see [Solver]; ErrUnsupported if Solver is not of
// this package, or is Groups or another EMA.
func (s *EMA) Step(params []gorgonia.ValueGrad) error { return applyStep(s, params) }

// SetRate implements [Solver].
func (s *EMA) SetRate(rate float64) {
	if s.Solver != nil {
		s.Solver.SetRate(rate)
	}
}

// State implements [Stateful].
func (s *EMA) State() (map[string]backend.Buffer, error) { return savedState(s) }

// SetState implements [Stateful].
func (s *EMA) SetState(state map[string]backend.Buffer) error { return setState(s, state) }

// CheckState implements [Checker].
func (s *EMA) CheckState(state map[string]backend.Buffer, params []backend.Buffer) error {
	return checkState(s, state, params)
}
