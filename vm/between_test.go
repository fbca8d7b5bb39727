package vm_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/vm"
)

// TestAStepInProgressIsNotDisturbed: in the middle of a step nothing is saved or loaded, and no
// rate is set. The error says how far the step is, nothing has changed, and the training goes on
// with the bits of one that nobody has disturbed. Close gives the same error.
func TestAStepInProgressIsNotDisturbed(t *testing.T) {
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices}, stepsInProgress)
}

func stepsInProgress(t *testing.T, k testenv.Kind) {
	for P := 1; P <= 2; P++ {
		ways := map[string]vm.Option{"accumulate": vm.Accumulate(4), "tree": vm.WithTree(4 * P)}
		for name, option := range ways {
			dir := filepath.Join(t.TempDir(), "checkpoint")
			err := testranks.Join(together(t, k, P, func(r ranked) error {
				want, err := r.between(dir, option, false)
				got, err2 := r.between(dir, option, true)
				if !slices.EqualFunc(got, want, slices.Equal) {
					err = errors.Join(err, fmt.Errorf("%v, undisturbed %v", got, want))
				}
				return errors.Join(err, err2)
			}))
			require.Check(t, err == nil, "%s of %d ranks: %v", name, P, err)
		}
	}
}

// between trains for three steps of 4 runs, saves, and begins another one.
func (r ranked) between(dir string, option vm.Option, disturbed bool) ([][]float64, error) {
	m, adam := r.build(mlp), &solver.Adam{Rate: 0.05}
	machine, err := vm.New(m.g, r.device, vm.WithSolver(adam, m.params...),
		vm.WithDataParallel(r.Comm), option)
	testranks.NoError(err)
	dp := machine.DataParallel()
	err = dp.Save(dir, adam, nil)
	for i := range 12 {
		m.shift(i)
		err = errors.Join(err, machine.RunAll())
		if !disturbed || i%4 == 3 {
			continue
		}
		adam.SetRate(0.5)
		rate := machine.RunAll()
		adam.SetRate(0.05)
		want := fmt.Sprintf("a step is in progress, with %d of 4 micro-batches accumulated: "+
			"run the other %d first", 1+i%4, 3-i%4)
		saved, loaded := dp.Save(dir+"2", adam, nil), dp.Load(dir, adam, nil)
		for what, is := range []error{rate, saved, loaded} {
			if !errors.Is(is, backend.ErrArgument) || !strings.Contains(is.Error(), want) {
				err = errors.Join(err, fmt.Errorf("%d in the middle: %w, want %q", what, is, want))
			}
		}
	}
	if _, there := os.Stat(dir + "2"); there == nil {
		err = errors.Join(err, errors.New("a refused Save has written something"))
	}
	err = errors.Join(err, dp.Save(dir, adam, nil))
	if _, missing := os.Stat(filepath.Join(dir, "step-00000003")); missing != nil {
		err = errors.Join(err, missing)
	}
	err = errors.Join(err, machine.Pull(m.params...))
	weights := m.weights(r.t)
	err = errors.Join(err, machine.RunAll())
	closed := machine.Close()
	if !errors.Is(closed, backend.ErrArgument) ||
		strings.Count(closed.Error(), "with 1 of 4 micro-batches accumulated") != 1 {
		err = errors.Join(err, fmt.Errorf("close in the middle: %w", closed))
	}
	return weights, errors.Join(err, machine.Close())
}

// TestCloseInTheMiddleOfAStepIsAnErrorRaced: also of a machine that trains alone.
func TestCloseInTheMiddleOfAStepIsAnErrorRaced(t *testing.T) {
	for where, device := range devices {
		m := product(t, vector(1, 2), vector(3, 4))
		machine := solving(t, m, device(t), &solver.SGD{Rate: 1}, vm.Accumulate(2))
		for range 3 {
			run(t, machine)
		}
		require.Fails(t, where, machine.Close(), backend.ErrArgument,
			"with 1 of 2 micro-batches accumulated")
		err := machine.Close()
		require.Check(t, err == nil, "%s: again: %v", where, err)
	}
}
