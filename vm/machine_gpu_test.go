//go:build gpu

package vm_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/vm"
)

// gpu opens the first GPU.
func gpu(t testing.TB) backend.Device {
	t.Helper()
	d, err := cuda.Open(0)
	if err != nil {
		testenv.Lacking(t, err.Error())
	}
	t.Cleanup(func() {
		require.NoError(t, d.Close())
	})
	return d
}

// TestTrainsOnGPU: losses and gradients equal those of the tape machine.
func TestTrainsOnGPU(t *testing.T) { trainOnGPU(t, models) }

// TestStockExamplesOnGPU is TestStockExamples on a GPU.
func TestStockExamplesOnGPU(t *testing.T) { trainOnGPU(t, stockExamples) }

func trainOnGPU(t *testing.T, models map[string]func(testing.TB, tensor.Dtype) *model) {
	d := gpu(t)
	for name, build := range models {
		for dt, tolerance := range tolerances {
			t.Run(fmt.Sprint(name, " ", dt), func(t *testing.T) {
				trainsAsTheTapeMachine(t, build, d, dt, tolerance)
			})
		}
	}
}

// TestSolverOnGPU: steps in the plan have the bits of steps on the host after it.
func TestSolverOnGPU(t *testing.T) {
	d := gpu(t)
	for name, solver := range solvers {
		t.Run(name, func(t *testing.T) {
			solverInPlan(t, d, solver, func() *model { return mlp(t, tensor.Float32) })
		})
	}
}

// TestTrainingAndEvaluationShareParametersOnGPU is TestTrainingAndEvaluationShareParameters on a
// GPU.
func TestTrainingAndEvaluationShareParametersOnGPU(t *testing.T) {
	trainingAndEvaluation(t, gpu(t), func(int) {}) // cuBLAS has workspaces, too
}

// TestMemoryIsFlatOnGPU: 1,000 steps leave the device's memory as it was, and do not ask the driver
// for any.
func TestMemoryIsFlatOnGPU(t *testing.T) {
	d := gpu(t).(*cuda.Device)
	memoryIsFlat(t, d, func() string { return fmt.Sprintf("%+v", d.MemoryStats()) })
}

// TestNothingIsLoadedInARunOnGPU: a machine has the kernels of its plan when it is made, and no
// others.
func TestNothingIsLoadedInARunOnGPU(t *testing.T) {
	t.Setenv("EURYALE_CUBLAS", "off")
	t.Setenv("EURYALE_CUDNN", "off")
	d := gpu(t).(*cuda.Device)
	want := append(d.Families(), "convolve", "fewrows", "gemm", "images")
	slices.Sort(want)
	m := convnet(t, tensor.Float32)
	machine := machineOn(t, d, m.g)
	for range 3 { // the second run is captured
		got := d.Families()
		require.That(t, slices.Equal(got, want), "%v are loaded, want %v", got, want)
		require.NoError(t, machine.RunAll())
	}
}

// TestStockOperationsOnGPU compares every operation with its Do.
func TestStockOperationsOnGPU(t *testing.T) {
	devices := map[string]func(testing.TB) backend.Device{"gpu": sharing(gpu(t))}
	stockOperations(t, devices)
}

// TestOperationsOfPackageNNOnGPU compares every operation of package nn with its Do.
func TestOperationsOfPackageNNOnGPU(t *testing.T) {
	operationsOfPackageNN(t, map[string]func(testing.TB) backend.Device{"gpu": sharing(gpu(t))})
}

// TestONNXOnGPU is TestONNX on a GPU.
func TestONNXOnGPU(t *testing.T) {
	testONNX(t, map[string]func(testing.TB) backend.Device{"gpu": sharing(gpu(t))})
}

// TestRecurrentLayersAreThoseOfPyTorchOnGPU compares results and gradients of LSTMs and GRUs.
func TestRecurrentLayersAreThoseOfPyTorchOnGPU(t *testing.T) {
	recurrentAsInPyTorch(t, map[string]func(testing.TB) backend.Device{"gpu": sharing(gpu(t))})
}

// TestLabelsOfTimeStepsAreSlicesOnGPU moves integers by the GPU.
func TestLabelsOfTimeStepsAreSlicesOnGPU(t *testing.T) {
	labelsOfTimeStepsAreSlices(t, map[string]func(testing.TB) backend.Device{
		"gpu": sharing(gpu(t))})
}

// TestDropoutOnGPU compares masks with those by Do.
func TestDropoutOnGPU(t *testing.T) {
	dropoutIsThatOfItsDo(t, map[string]func(testing.TB) backend.Device{"gpu": sharing(gpu(t))})
}

// TestRandomGraphsOnGPU compares random graphs with the interpreter: fewer where GPUs are emulated.
func TestRandomGraphsOnGPU(t *testing.T) {
	n := uint64(1000)
	if testenv.GPUs.Sampled() {
		n = 250
	}
	b := bench{layout: layout(t), devices: []backend.Device{gpu(t)}, lock: &sync.Mutex{},
		figures: &figures{}}
	b.checkAll(t, newSeeds(t, n, n))
	b.sharp(t)
}

// sharing makes all machines run on one device.
func sharing(d backend.Device) func(testing.TB) backend.Device {
	return func(testing.TB) backend.Device { return d }
}

// BenchmarkStepOnGPU is BenchmarkStep on a GPU: the run, without the solver.
func BenchmarkStepOnGPU(b *testing.B) {
	d := gpu(b)
	for name, build := range stepModels {
		b.Run(name, func(b *testing.B) { benchmarkStep(b, build(b, tensor.Float32), d) })
	}
}

// BenchmarkTrainOnGPU is BenchmarkTrain on a GPU.
func BenchmarkTrainOnGPU(b *testing.B) {
	d := gpu(b)
	for name, build := range stepModels {
		b.Run(name, func(b *testing.B) { benchmarkTrain(b, build, d) })
	}
}

// BenchmarkConvnetOnGPU measures steps of training Gorgonia's convnet example on batches of 256,
// with momentum in the plan: with NVIDIA's libraries and with kernels of Euryale alone.
func BenchmarkConvnetOnGPU(b *testing.B) {
	d := gpu(b)
	for _, libraries := range []string{"", "off"} {
		b.Run("libraries="+libraries, func(b *testing.B) {
			b.Setenv("EURYALE_CUBLAS", libraries)
			b.Setenv("EURYALE_CUDNN", libraries)
			m := stockConvnet(256)(b, tensor.Float32)
			benchmarkStep(b, m, d, vm.WithSolver(&solver.Momentum{Rate: 1e-3, Momentum: 0.9},
				m.params...))
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N), "us/step")
		})
	}
}

// TestPoolsOnGPU is TestStockPoolsAreThoseOfPackageNN on a GPU.
func TestPoolsOnGPU(t *testing.T) {
	d := gpu(t)
	for _, p := range stockPools {
		t.Run(p.name, func(t *testing.T) { p.check(t, d) })
	}
}

// TestSaveAsyncOnGPU: copies are of the step although the GPU goes on, and a machine that is alone
// saves what it has there.
func TestSaveAsyncOnGPU(t *testing.T) {
	d, dir := gpu(t), t.TempDir()
	for where, save := range map[string]func(*autograd.DataParallel, string, solver.Solver) error{
		"save": func(dp *autograd.DataParallel, dir string, s solver.Solver) error {
			return dp.Save(dir, s, nil)
		},
		"async": func(dp *autograd.DataParallel, dir string, s solver.Solver) error {
			return dp.SaveAsync(dir, s, nil)
		},
	} {
		m := mlp(t, tensor.Float32)
		machine, err := vm.New(m.g, d, vm.WithSolver(&solver.AdamW{Rate: 0.125}, m.params...))
		require.NoError(t, err)
		for step := range 3 {
			for range 4 {
				err = errors.Join(err, machine.RunAll())
			}
			at := filepath.Join(dir, fmt.Sprint(where, step))
			err = errors.Join(err, save(machine.DataParallel(), at, machine.Solver()))
		}
		if err = errors.Join(err, machine.RunAll(), machine.Close()); err != nil {
			t.Fatal(err)
		}
	}
	for step := range 3 {
		want, err := contentsOf(filepath.Join(dir, fmt.Sprint("save", step)))
		got, err2 := contentsOf(filepath.Join(dir, fmt.Sprint("async", step)))
		if err = errors.Join(err, err2); err != nil || got != want {
			t.Errorf("after %d steps: %v, the files differ: %v", 4*(step+1), err, got != want)
		}
	}
}

// TestABoundOfMemoryChangesNoBitOnGPU: of models and of random graphs.
func TestABoundOfMemoryChangesNoBitOnGPU(t *testing.T) {
	d := gpu(t)
	boundOfMemory(t, d, 40)
	boundOfRandomGraphs(t, map[string]backend.Device{"GPU": d}, 6)
}

// TestTilesOfTheLossOnGPU is TestTilesOfTheLoss, where kernels choose their blocks by the rows.
func TestTilesOfTheLossOnGPU(t *testing.T) { tilesOfTheLoss(t, gpu(t), 1e-5) }
