package vm_test

import (
	"errors"
	"fmt"
	"testing"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// TestWhatIsSavedBeforeTheFirstStepLoads, with every solver; but not by a solver that is not the
// machine's, and not into a progress that lacks a field of the one that was saved.
func TestWhatIsSavedBeforeTheFirstStepLoads(t *testing.T) {
	all := map[string]func() solver.Solver{"ema": func() solver.Solver {
		return &solver.EMA{Solver: &solver.Adam{Rate: 0.1}}
	}}
	for name, newSolver := range solvers {
		all[name] = newSolver
	}
	for name, newSolver := range all {
		start := func() *vm.Machine {
			m := mlp(t, tensor.Float32)
			machine := require.Value(vm.New(m.g, nil, vm.WithSolver(newSolver(), m.params...)))(t)
			t.Cleanup(func() { machine.Close() })
			return machine
		}
		first, second, dir := start(), start(), t.TempDir()
		saved := struct{ Epoch, Best int }{3, 2}
		if err := first.DataParallel().Save(dir, first.Solver(), saved); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		require.Fails(t, fmt.Sprintf("%s: another solver is saved", name),
			first.DataParallel().Save(dir, newSolver(), saved), backend.ErrArgument)
		var renamed struct{ Epoch, BestEpoch int }
		if err := second.DataParallel().Load(dir, second.Solver(), &renamed); !errors.Is(err,
			backend.ErrArgument) || renamed.Epoch != 0 {
			t.Errorf("%s: a renamed field: %v, and %v is loaded", name, err, renamed)
		}
		require.Fails(t, fmt.Sprintf("%s: another solver is loaded", name),
			second.DataParallel().Load(dir, newSolver(), nil), backend.ErrArgument)
		now := saved
		now.Epoch = 0
		err := second.DataParallel().Load(dir, second.Solver(), &now)
		require.Check(t, err == nil && now == saved, "%s: %v, and the progress is %v", name, err,
			now)
		if err := second.RunAll(); err != nil {
			t.Errorf("%s: the first step: %v", name, err)
		}
	}
}
