package vm_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/vm"
)

// TestAveragedEvaluatesWithAverages: another machine sees them, and the training goes on with the
// bits of one that was never interrupted, on every device.
func TestAveragedEvaluatesWithAverages(t *testing.T) {
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices}, func(t *testing.T,
		k testenv.Kind) {
		onRanks(t, k, 1, func(on ranked) error {
			averagedOn(t, on)
			return nil
		})
	})
}

func averagedOn(t *testing.T, on ranked) {
	train := func(look bool) []float64 {
		w := tensor.New(tensor.WithBacking([]float64{0, 0}))
		x, y, weights, loss := graphOf(1, w)
		ema := &solver.EMA{Solver: &solver.SGD{Rate: 0.5}, Decay: 0.5}
		m, err := vm.New(x.Graph(), on.device, vm.WithSolver(ema, weights))
		require.Report(t, err)
		defer m.Close()
		eval, err := vm.New(x.Graph(), on.device, vm.Eval())
		require.Report(t, err)
		defer eval.Close()
		gorgonia.Let(x, tensor.New(tensor.WithShape(1, 2), tensor.WithBacking([]float64{1, 0})))
		gorgonia.Let(y, tensor.New(tensor.WithShape(1), tensor.WithBacking([]float64{4})))
		for step, average := range []float64{2, 8. / 3, 22. / 7} {
			if err := m.RunAll(); err != nil { // w is 2, 3, 3.5
				t.Error(err)
			}
			if !look {
				continue
			}
			err := m.Averaged(eval.RunAll)
			want := (average - 4) * (average - 4) / 2
			if got := (*loss).Data().(float64); err != nil || got-want > 1e-12 || want-got > 1e-12 {
				t.Errorf("step %d: the loss with averages is %v, %v; want %v", step, got, err, want)
			}
			dir := filepath.Join(t.TempDir(), "run")
			inside := func() (all []error) {
				return []error{m.RunAll(), m.DataParallel().Save(dir, ema, nil),
					m.DataParallel().Load(dir, ema, nil), m.Averaged(eval.RunAll)}
			}
			require.Report(t, m.Averaged(func() error {
				for i, err := range inside() {
					require.Fails(t, fmt.Sprintf("call %d inside Averaged", i), err,
						backend.ErrArgument)
				}
				return nil
			}))
			file := filepath.Join(t.TempDir(), "weights.safetensors")
			require.Report(t, m.Averaged(func() error {
				return errors.Join(autograd.SaveWeights(file, nodes{weights}), eval.RunAll())
			}))
			m.Averaged(func() error { w.Data().([]float64)[1]++; return nil })
			err = m.Averaged(func() error {
				w.Data().([]float64)[1] = 7
				return autograd.SaveWeights(file, nodes{weights})
			})
			require.Fails(t, "a change inside Averaged is undone", err, backend.ErrArgument)
			err = m.Averaged(func() error {
				return errors.Join(eval.RunAll(), autograd.LoadWeights(file, nodes{weights}))
			})
			require.Fails(t, "LoadWeights inside Averaged is undone", err, backend.ErrArgument,
				"w was changed")
			broken := errors.New("broken")
			require.Fails(t, "m.Averaged", m.Averaged(func() error { return broken }), broken)
		}
		require.Report(t, m.Pull(weights))
		return slices.Clone(w.Data().([]float64))
	}
	got, want := train(true), train(false)
	require.Check(t, slices.Equal(got, want), "the weights are %v, want %v", got, want)
}
