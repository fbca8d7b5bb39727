package vm_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/vm"
)

// TestAMachineAloneSavesAndLoads: without WithDataParallel, and with it on autograd.Solo, on the
// host and on a device, a machine resumes bitwise identically, and nobody needs to pull.
func TestAMachineAloneSavesAndLoads(t *testing.T) {
	for place, device := range map[string]backend.Device{"host": nil, "device": fake(t)} {
		for with, options := range map[string][]vm.Option{
			"alone": nil, "Solo": {vm.WithDataParallel(autograd.Solo())},
		} {
			t.Run(place+" "+with, func(t *testing.T) { saveAlone(t, device, options) })
		}
	}
}

func saveAlone(t *testing.T, device backend.Device, options []vm.Option) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	start := func() (*model, *vm.Machine) {
		m := mlp(t, tensor.Float64)
		option := vm.WithSolver(&solver.AdamW{Rate: 0.125, WeightDecay: 0.25}, m.params...)
		machine := require.Value(vm.New(m.g, device, append(slices.Clone(options), option)...))(t)
		return m, machine
	}
	runs := func(machine *vm.Machine, n int) (err error) {
		for range n {
			err = errors.Join(err, machine.RunAll())
		}
		return err
	}
	m, machine := start()
	dp := machine.DataParallel()
	err := errors.Join(runs(machine, 3), dp.Save(dir, machine.Solver(), "after 3"), dp.Check())
	saved, err2 := dp.Hash()
	err = errors.Join(err, err2, runs(machine, 3), machine.Close())
	again, resumed := start()
	var progress string
	err = errors.Join(err, runs(resumed, 4), // of which nothing is left
		resumed.DataParallel().Load(dir, resumed.Solver(), &progress))
	loaded, err2 := resumed.DataParallel().Hash()
	if err = errors.Join(err, err2, runs(resumed, 3), resumed.Close()); err != nil {
		t.Fatal(err)
	}
	if got, want := again.weights(t), m.weights(t); !slices.EqualFunc(got, want, slices.Equal) {
		t.Errorf("it ends with %v, without a stop %v", got, want)
	}
	require.Report(t, require.Err(os.Stat(filepath.Join(dir, "step-00000003"))))
	require.Check(t, progress == "after 3" && loaded == saved,
		"progress is %q, the hash %s, when it was saved %s", progress, loaded, saved)
	require.Fails(t, "Save after Close", dp.Save(dir, machine.Solver(), nil), backend.ErrClosed)
}

// TestSaveBetweenMicroBatchesIsRefused: also by a machine without other ranks.
func TestSaveBetweenMicroBatchesIsRefused(t *testing.T) {
	m := mlp(t, tensor.Float64)
	machine := machine(t, m.g, vm.Accumulate(2), vm.WithSolver(&solver.SGD{Rate: 1}, m.params...))
	dir := filepath.Join(t.TempDir(), "checkpoint")
	for run := range 4 {
		err := errors.Join(machine.RunAll(), machine.DataParallel().Save(dir, machine.Solver(),
			nil))
		if middle := run%2 == 0; errors.Is(err, backend.ErrArgument) != middle || !middle &&
			err != nil {
			t.Errorf("after run %d: %v", run, err)
		}
	}
	require.NoError(t, machine.Close())
}

// TestATreeAloneAndOfRanksHaveTheSameCheckpoints: a machine without WithDataParallel writes what
// two ranks load, and loads what they write.
func TestATreeAloneAndOfRanksHaveTheSameCheckpoints(t *testing.T) {
	one := &setting{has: map[string]bool{"WithTree": true, "batch norm": true}, dp: 1, sp: 1, tp: 1,
		kind: testenv.Hosts, dtype: tensor.Float32, samples: 2, runs: 4, solver: "Adam",
		blocks: []string{"twice"}, bucket: 200, share: 1, alone: true}
	two := *one
	two.dp, two.alone = 2, false
	dir := t.TempDir()
	for from, to := range map[*setting]*setting{one: &two, &two: one} {
		at := filepath.Join(dir, fmt.Sprint(from.dp))
		want := from.must(t, leg{n: 2, save: at})
		d := differ(to.must(t, leg{from: at, first: 1, n: 1}), want, 0, nil)
		require.Check(t, d == "", "from %v to %v: %s", from, to, d)
	}
}
