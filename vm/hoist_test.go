package vm_test

import (
	"fmt"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// frozenModel is a graph of x w and of the frozen matrix 2w, of n rows and columns.
type frozenModel struct {
	model
	w, y, twice node
}

func newFrozenModel(w *tensor.Dense) *frozenModel {
	m := &frozenModel{model: model{g: gorgonia.NewGraph()}}
	n := w.Shape()[0]
	m.w = gorgonia.NewMatrix(m.g, tensor.Float32, gorgonia.WithShape(n, n),
		gorgonia.WithName("w"), gorgonia.WithValue(w))
	m.twice = add(m.w, m.w)
	m.y = mul(m.variable("x", tensor.Float32, n, n), m.twice)
	return m
}

// filledWith returns a matrix of one number.
func filledWith(n int, x float32) *tensor.Dense {
	all := make([]float32, n*n)
	for i := range all {
		all[i] = x
	}
	return tensor.New(tensor.WithShape(n, n), tensor.WithBacking(all))
}

// on returns a machine of the model, on whose plan nothing but the product of x is left.
func (m *frozenModel) on(t *testing.T, d backend.Device, options ...vm.Option) *vm.Machine {
	t.Helper()
	machine := machineOn(t, d, m.g, append(options, vm.Keep(m.y), vm.WithFrozen(m.w),
		vm.WithPrecision(vm.BF16))...)
	text := fmt.Sprint(machine.Plan())
	require.Check(t, strings.Contains(text, "once") && !strings.Contains(text, "of w f32") &&
		!strings.Contains(text, "add"), "runs compute what none changes:\n%s", text)
	return machine
}

// A value of frozen variables is computed when they are set, and again when they are set to other
// tensors. All machines that have them share it, and a device has nothing else of them.
func TestWhatNoRunChangesIsComputedWhenItIsSet(t *testing.T) {
	const n = 64
	for name, d := range map[string]backend.Device{"host": nil, "fake": fake(t)} {
		first, second := filledWith(n, 3), filledWith(n, 5)
		m, other := newFrozenModel(first), newFrozenModel(first)
		a, b := m.on(t, d), other.on(t, d, vm.Eval())
		if d, ok := d.(*fakedevice.Device); ok {
			_, held := d.Live()
			values := a.Summary().Memory.Values + b.Summary().Memory.Values
			left := held - int(values) - 2*4*n*n - 2*n*n // x of each, and the value in BF16
			require.Check(t, left < 4*n*n, "%d bytes besides", left)
		}
		x := floats(t, m.g.Inputs()[1].Value())
		row := 0.0
		for _, f := range x[:n] {
			row += f
		}
		want := func(what string, machine *vm.Machine, y node, w float64) {
			t.Helper()
			run(t, machine)
			got := floats(t, y.Value())[0]
			require.Check(t, got > 2*w*row-1 && got < 2*w*row+1, "%s, %s: %v, want %v", name,
				what, got, 2*w*row)
		}
		want("the first tensor", a, m.y, 3)
		want("another machine", b, other.y, 3)
		require.NoError(t, gorgonia.Let(m.w, second))
		want("the second tensor", a, m.y, 5)
		want("the other machine still has the first", b, other.y, 3)
		require.NoError(t, gorgonia.Let(other.w, second))
		want("now it has the second", b, other.y, 5)
		require.NoError(t, a.Pull())
	}
}

// A result that no run changes is there after each run.
func TestAResultThatNoRunChangesIsThere(t *testing.T) {
	for name, d := range map[string]backend.Device{"host": nil, "fake": fake(t)} {
		m := newFrozenModel(filledWith(2, 3))
		machine := m.on(t, d, vm.Keep(m.twice))
		for _, w := range []float32{3, 7} {
			require.NoError(t, gorgonia.Let(m.w, filledWith(2, w)))
			run(t, machine)
			twice := float64(2 * w)
			require.Slices(t, name, floats(t, m.twice.Value()),
				[]float64{twice, twice, twice, twice})
		}
	}
}

// What another machine trains is frozen for one that evaluates, as for a Generator that has the
// Learnables of a training: its next run computes anew what it has computed of it, also after the
// host has written what was pulled.
func TestWhatAnotherMachineTrainsIsComputedAnew(t *testing.T) {
	for name, d := range map[string]backend.Device{"host": nil, "fake": fake(t)} {
		w := filledWith(2, 3)
		m, other := newFrozenModel(w), newFrozenModel(w)
		loss := gorgonia.Must(gorgonia.Sum(other.twice)) // whose gradient is 2
		require.NoError(t, require.Err(gorgonia.Grad(loss, other.w)))
		reads := m.on(t, d, vm.Keep(m.twice))
		trains := machineOn(t, d, other.g, vm.WithSolver(&solver.SGD{Rate: 0.5}, other.w))
		want := func(what string, twice float64) {
			t.Helper()
			run(t, reads)
			require.Check(t, floats(t, m.twice.Value())[0] == twice, "%s, %s: %v, want %v", name,
				what, m.twice.Value(), twice)
		}
		want("before the training", 6)
		for _, twice := range []float64{4, 2} {
			run(t, trains)
			want("after a step", twice)
		}
		require.NoError(t, trains.Pull())
		copy(w.Data().([]float32), []float32{9, 9, 9, 9})
		want("after the host has written it", 18)
	}
}

// What cannot be computed is an error of each run until it can: nobody has the memory that was for
// it, which is freed once.
func TestWhatCannotBeComputedOnceIsAnErrorOfEachRun(t *testing.T) {
	for name, d := range map[string]backend.Device{"host": nil, "fake": fake(t)} {
		m := &model{g: gorgonia.NewGraph()}
		ids := gorgonia.NewVector(m.g, tensor.Int, gorgonia.WithShape(2), gorgonia.WithName("ids"),
			gorgonia.WithValue(tensor.New(tensor.WithBacking([]int{0, 9}))))
		table := m.variable("table", tensor.Float32, 2, 2)
		y := add(m.variable("x", tensor.Float32, 2, 2),
			require.Value(nn.ByIndices(0, table, ids))(t))
		machine := machineOn(t, d, m.g, vm.Keep(y), vm.WithFrozen(table, ids))
		for range 2 {
			err := machine.RunAll()
			require.Fails(t, name, err, "index 1 is 9, out of range")
			require.Check(t, !strings.Contains(err.Error(), "freed"), "%s: %v", name, err)
		}
		require.NoError(t, gorgonia.Let(ids, tensor.New(tensor.WithBacking([]int{0, 1}))))
		run(t, machine)
	}
}
