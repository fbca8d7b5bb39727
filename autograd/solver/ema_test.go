package solver

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestEMAAveragesWhatItsSolverDoes: parameters have the bits of the solver alone, averages those of
// the formula, and both go on from a state.
func TestEMAAveragesWhatItsSolverDoes(t *testing.T) {
	step := func(s Solver, w []float64, grad float64) []gorgonia.ValueGrad {
		p := &averaged{tensor.New(tensor.WithBacking(w)),
			tensor.New(tensor.WithBacking([]float64{grad, -grad}))}
		require.NoError(t, s.Step([]gorgonia.ValueGrad{p}))
		return nil
	}
	for _, solvers := range [][2]Solver{
		{&SGD{Rate: 0.5}, &SGD{Rate: 0.5}},
		{&Momentum{Rate: 0.5, Momentum: 0.5}, &Momentum{Rate: 0.5, Momentum: 0.5}},
		{&Adam{Rate: 0.5}, &Adam{Rate: 0.5}},
	} {
		s := &EMA{Solver: solvers[0], Decay: 0.75}
		w, alone := []float64{1, 2}, []float64{1, 2}
		sum, part := []float64{0, 0}, 0.0
		for i := range 6 {
			if i == 3 { // another one goes on
				state := require.Value(s.State())(t)
				for _, other := range []float64{0, 0.5} {
					s := &EMA{Solver: solvers[0], Decay: other}
					require.Fails(t, fmt.Sprintf("%T: averages of another decay", solvers[0]),
						s.SetState(state), backend.ErrArgument)
				}
				s = &EMA{Solver: solvers[0], Decay: 0.75}
				require.NoError(t, errors.Join(s.CheckState(state, []backend.Buffer{backend.Of(w)}),
					s.SetState(state)))
			}
			step(s, w, float64(i))
			step(solvers[1], alone, float64(i))
			part = 0.75*part + 0.25
			want := []float64{0, 0}
			for k := range sum {
				sum[k] = 0.75*sum[k] + 0.25*w[k]
				want[k] = sum[k] / part
			}
			got, err := s.Averages()
			require.Check(t, err == nil && slices.Equal(w, alone) && len(got) == 1 &&
				close2(backend.View[float64](got[0]), want), "%T, step %d: %v, averages %v, %v; "+
				"want %v and %v", solvers[0], i, w, got, err, alone, want)
		}
	}
}

func close2(a, b []float64) bool {
	return slices.EqualFunc(a, b, func(x, y float64) bool { return x-y < 1e-12 && y-x < 1e-12 })
}

type averaged struct{ w, dw *tensor.Dense }

func (p *averaged) Value() gorgonia.Value         { return p.w }
func (p *averaged) Grad() (gorgonia.Value, error) { return p.dw, nil }

func TestEMARefusesWhatItCannotAverage(t *testing.T) {
	for name, s := range map[string]*EMA{
		"nil":       {Decay: 0.5},
		"Groups":    {Solver: &Groups{}, Decay: 0.5},
		"an EMA":    {Solver: &EMA{Solver: &SGD{Rate: 1}}, Decay: 0.5},
		"a decay":   {Solver: &SGD{Rate: 1}, Decay: 1},
		"a setting": {Solver: &SGD{}, Decay: 0.5},
	} {
		p := &averaged{tensor.New(tensor.WithBacking([]float64{1})), tensor.New(
			tensor.WithBacking([]float64{1}))}
		err := s.Step([]gorgonia.ValueGrad{p})
		require.Check(t, err != nil, "%s is taken", name)
		if all, err := s.Averages(); len(all) != 0 || err != nil {
			t.Errorf("%s: averages %v, %v before a step", name, all, err)
		}
	}
}
