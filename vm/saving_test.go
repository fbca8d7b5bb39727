package vm_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/vm"
)

// TestASolverThatIsNotTheMachinesSavesNothing: it has no moments of the training, which nobody
// would miss before the training went on without them.
func TestASolverThatIsNotTheMachinesSavesNothing(t *testing.T) {
	m, dir := mlp(t, tensor.Float64), filepath.Join(t.TempDir(), "saved")
	own, other := &solver.Adam{Rate: 0.125}, &solver.Adam{Rate: 0.125}
	machine := solving(t, m, nil, own)
	run(t, machine)
	dp := machine.DataParallel()
	saved := func(s solver.Solver) error { return dp.Save(dir, s, nil) }
	require.Fails(t, "another solver is saved", saved(other), backend.ErrArgument)
	require.Report(t, saved(own))
	require.Fails(t, "another solver is loaded", dp.Load(dir, other, nil), backend.ErrArgument)
	require.NoError(t, machine.Close())
}

// contentsOf returns the data of the model in a directory's only checkpoint, behind its header.
func contentsOf(dir string) (string, error) {
	all, err := filepath.Glob(filepath.Join(dir, "step-*", "model.safetensors"))
	if err != nil || len(all) != 1 {
		return "", fmt.Errorf("%s has %v: %w", dir, all, err)
	}
	text, err := os.ReadFile(all[0])
	if err != nil || len(text) < 8 {
		return "", fmt.Errorf("%d bytes: %w", len(text), err)
	}
	header := int(text[0]) | int(text[1])<<8 | int(text[2])<<16
	return string(text[8+header:]), nil
}

// scarce is a device that has no more memory at times.
type scarce struct {
	*fakedevice.Device
	full bool
}

// Alloc implements [backend.Device].
func (d *scarce) Alloc(nbytes int) (backend.Buffer, error) {
	if d.full {
		return backend.Buffer{}, errors.New("out of memory")
	}
	return d.Device.Alloc(nbytes)
}

// TestSaveAsyncNeedsNoDeviceMemory: where the device has none left, copies are made on the host,
// and steps go on.
func TestSaveAsyncNeedsNoDeviceMemory(t *testing.T) {
	dir := t.TempDir()
	for _, where := range []string{"save", "async"} {
		d := &scarce{Device: fake(t).(*fakedevice.Device)}
		m := mlp(t, tensor.Float64)
		machine, err := vm.New(m.g, d, vm.WithSolver(&solver.AdamW{Rate: 0.125}, m.params...))
		require.NoError(t, err)
		err = errors.Join(machine.RunAll(), machine.RunAll(), machine.RunAll())
		dp, at := machine.DataParallel(), filepath.Join(dir, where+"0")
		if d.full = true; where == "async" {
			err = errors.Join(err, dp.SaveAsync(at, machine.Solver(), nil), machine.RunAll())
		} else {
			err = errors.Join(err, dp.Save(at, machine.Solver(), nil))
		}
		if err = errors.Join(err, machine.Close()); err != nil {
			t.Fatal(err)
		}
	}
	want, err := contentsOf(filepath.Join(dir, "save0"))
	got, err2 := contentsOf(filepath.Join(dir, "async0"))
	if err = errors.Join(err, err2); err != nil || got != want {
		t.Errorf("%v, the files differ: %v", err, got != want)
	}
}

// counting is a device that counts what is allocated.
type counting struct {
	*fakedevice.Device
	nbytes int
}

// Alloc implements [backend.Device].
func (d *counting) Alloc(nbytes int) (backend.Buffer, error) {
	d.nbytes += nbytes
	return d.Device.Alloc(nbytes)
}

// TestSaveAsyncOfShardsCopiesWhatARankWrites: of parameters and what Adam keeps each rank copies
// its shards, on any stage.
func TestSaveAsyncOfShardsCopiesWhatARankWrites(t *testing.T) {
	const P, width = 4, 40
	as := training{solver: solvers["adam"], build: layers(2, width, width, width)}
	for _, stage := range stages {
		at := t.TempDir()
		if err := testranks.Join(together(t, testenv.Devices, P, func(r ranked) error {
			d := &counting{Device: r.device.(*fakedevice.Device)}
			r.device = d
			_, machine, err := r.start(as, vm.WithShards(stage))
			if err == nil {
				err = machine.RunAll()
			}
			testranks.NoError(err)
			dp := machine.DataParallel()
			d.nbytes = 0
			err = dp.SaveAsync(at, machine.Solver(), nil)
			const all = 3 * 4 * (2*width*width + 2*2*width) // of F32
			require.Check(t, d.nbytes <= all/P*5/4, "stage %b: rank %d copies %d bytes of %d",
				stage, r.Comm.Rank(), d.nbytes, all)
			return errors.Join(err, machine.Close())
		})); err != nil {
			t.Error(err)
		}
	}
}
