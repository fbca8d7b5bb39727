package vm_test

import (
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// batchLevel is a layer, the mean of a batch, and a penalty that reads both the layer's input and
// the mean.
func batchLevel(t testing.TB, dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	x, b := m.variable("x", dt, 6, 5), m.variable("b", dt, 6, 5)
	w, v := m.variable("w", dt, 5, 4), m.variable("v", dt, 6, 5)
	m.params = nodes{w, v}
	less := sub(x, square(b))
	h := tanh(mul(less, w))
	level := mean(x)
	penalty := sum(times(times(less, level), v))
	m.grad(t, add(add(level, sum(h)), penalty))
	return m
}

// TestProvenPlansTrainAsTheTapeMachine: also where an early value is read by a product, and again
// by a value that depends on a reduction.
func TestProvenPlansTrainAsTheTapeMachine(t *testing.T) {
	for dt, tolerance := range map[tensor.Dtype]float64{tensor.Float64: 1e-12,
		tensor.Float32: 1e-4} {
		ours, theirs := batchLevel(t, dt), batchLevel(t, dt)
		machine := machine(t, ours.g, vm.WithSolver(&solver.SGD{Rate: 0.1}, ours.params...))
		tape, sgd := gorgonia.NewTapeMachine(theirs.g), &solver.SGD{Rate: 0.1}
		for range 4 {
			run(t, machine)
			run(t, tape)
			require.NoError(t, sgd.Step(gorgonia.NodesToValueGrads(theirs.params)))
			tape.Reset()
		}
		require.Report(t, machine.Close())
		for i, p := range ours.params {
			compare(t, p.Name(), p.Value(), theirs.params[i].Value(), tolerance)
		}
	}
}
