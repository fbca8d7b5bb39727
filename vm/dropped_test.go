package vm_test

import (
	"runtime"
	"slices"
	"testing"
	"time"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// drop makes machines, runs them and closes none. They and their solvers are garbage when it
// returns.
func drop(t *testing.T, n int, device backend.Device) {
	t.Helper()
	for range n {
		g, w, _ := layer(t, costs["mean and a penalty"])
		m := require.Value(vm.New(g, device, vm.WithSolver(&solver.Adam{Rate: 0.5}, w)))(t)
		for range 3 {
			run(t, m)
		}
		large, x := cubed(t)
		eval := require.Value(vm.New(large, device, vm.Eval()))(t)
		for range 3 {
			double(x)
			run(t, eval)
		}
	}
}

// cubed is a graph whose values take 256 KiB.
func cubed(t *testing.T) (*gorgonia.ExprGraph, node) {
	t.Helper()
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, gorgonia.Float64, gorgonia.WithShape(128, 128),
		gorgonia.WithName("x"), gorgonia.WithInit(gorgonia.Ones()))
	y := must(gorgonia.Mul(must(gorgonia.Mul(x, x)), x))
	must(gorgonia.Sum(y))
	return g, x
}

// collected waits until the garbage collector has done what garbage leads to.
func collected(done func() bool) bool {
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(
		deadline); runtime.Gosched() {
		runtime.GC()
		if done() {
			return true
		}
	}
	return false
}

func heap() int {
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return int(s.HeapAlloc)
}

func TestAMachineThatIsDroppedWithoutCloseIsCollectedRaced(t *testing.T) {
	drop(t, 1, nil)
	runtime.GC()
	goroutines, before := runtime.NumGoroutine(), heap()
	drop(t, 100, nil)
	if !collected(func() bool {
		return runtime.NumGoroutine() <= goroutines && heap() < before+4<<20
	}) {
		t.Errorf("after 200 machines there are %d goroutines and %d MB, %d and %d before",
			runtime.NumGoroutine(), heap()>>20, goroutines, before>>20)
	}
}

// another makes and closes a machine, which closes those that are garbage.
func another(t *testing.T, d backend.Device) {
	t.Helper()
	g, _, _ := layer(t, costs["sum"])
	m, err := vm.New(g, d)
	if err == nil {
		err = m.Close()
	}
	require.NoError(t, err)
}

func TestAMachineThatIsDroppedFreesItsDeviceWhenTheNextIsMadeRaced(t *testing.T) {
	d := fake(t).(*fakedevice.Device)
	another(t, d)
	goroutines := runtime.NumGoroutine()
	drop(t, 20, d)
	if !collected(func() bool {
		another(t, d)
		_, held := d.Live()
		return held == 0 && runtime.NumGoroutine() <= goroutines
	}) {
		_, held := d.Live()
		t.Errorf(
			"after 40 machines the device has %d bytes, and there are %d goroutines, %d before",
			held, runtime.NumGoroutine(), goroutines)
	}
}

func TestADroppedMachineGivesItsLearnablesBackToTheHost(t *testing.T) {
	d := fake(t).(*fakedevice.Device)
	g, w, _ := layer(t, costs["sum"])
	got, want := w.Value().Data().([]float64), closed(t, d)
	func() {
		m := require.Value(vm.New(g, d, vm.WithSolver(&solver.SGD{Rate: 0.0009765625}, w)))(t)
		for range 3 {
			run(t, m)
		}
	}()
	require.Check(t, collected(func() bool { another(t, d); return slices.Equal(got, want) }),
		"the learnable is %v, want %v", got, want)
}

// closed returns the learnable of a training whose machine is closed.
func closed(t *testing.T, d backend.Device) []float64 {
	t.Helper()
	g, w, _ := layer(t, costs["sum"])
	m := require.Value(vm.New(g, d, vm.WithSolver(&solver.SGD{Rate: 0.0009765625}, w)))(t)
	for range 3 {
		run(t, m)
	}
	require.NoError(t, m.Close())
	return w.Value().Data().([]float64)
}
