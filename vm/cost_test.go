package vm_test

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// costs are losses of a linear layer's outputs and weights, by their last operation.
var costs = map[string]func(d, w, label node) node{
	"mean": func(d, _, _ node) node {
		return mean(square(d))
	},
	"sum": func(d, _, _ node) node {
		return sum(square(d))
	},
	"minus a mean": func(d, _, _ node) node {
		return neg(mean(square(d)))
	},
	"root of a mean": func(d, _, _ node) node {
		return must(gorgonia.Sqrt(mean(square(d))))
	},
	"mean of absolutes": func(d, _, _ node) node {
		return mean(must(gorgonia.Abs(d)))
	},
	"quotient": func(d, _, _ node) node {
		return must(gorgonia.HadamardDiv(sum(square(d)), gorgonia.NewConstant(4.0)))
	},
	"mean and a penalty": func(d, w, _ node) node {
		penalty := mul(gorgonia.NewConstant(0.5), sum(square(w)))
		return add(mean(square(d)), penalty)
	},
	"exponential of a mean": func(d, _, _ node) node {
		small := mul(mean(d), gorgonia.NewConstant(0.125))
		return must(gorgonia.Exp(small))
	},
	"half a cross-entropy": func(d, _, label node) node {
		return must(gorgonia.HadamardDiv(must(nn.CrossEntropy(nn.NoLabel, d, label)),
			gorgonia.NewConstant(2.0)))
	},
}

// layer returns a graph with one of the costs.
func layer(t *testing.T, cost func(d, w, label node) node) (g *gorgonia.ExprGraph, w, loss node) {
	t.Helper()
	g = gorgonia.NewGraph()
	given := func(name string, shape tensor.Shape, backing any) node {
		v := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(backing))
		return gorgonia.NodeFromAny(g, v, gorgonia.WithName(name))
	}
	x := given("x", tensor.Shape{3, 2}, []float64{1, 2, 3, 4, 5, 6})
	w = given("w", tensor.Shape{2, 2}, []float64{1, -2, 3, 4})
	label := given("label", tensor.Shape{3}, []int{0, 1, 0})
	loss = cost(mul(x, w), w, label)
	require.NoError(t, require.Err(gorgonia.Grad(loss, w)))
	return g, w, loss
}

// double doubles the weights, as a step does.
func double(w node) {
	for i, x := range w.Value().Data().([]float64) {
		w.Value().Data().([]float64)[i] = 2 * x
	}
}

func TestTheCostGivenToGradHasItsValueWhateverItEndsIn(t *testing.T) {
	for name, cost := range costs {
		t.Run(name, func(t *testing.T) {
			onTape, wOnTape, want := layer(t, cost)
			tape := gorgonia.NewTapeMachine(onTape, gorgonia.BindDualValues(wOnTape))
			defer tape.Close()
			g, w, loss := layer(t, cost)
			m := machine(t, g)
			for i := range 3 {
				run(t, tape)
				run(t, m)
				require.That(t, loss.Value() != nil, "run %d: the cost has no value", i)
				x, y := want.Value().Data().(float64), loss.Value().Data().(float64)
				require.Check(t, math.Abs(x-y) <= 1e-14*math.Abs(x),
					"run %d: the cost is %v, want %v", i, y, x)
				tape.Reset()
				double(wOnTape)
				double(w)
			}
		})
	}
}

func TestTheCostHasItsValueInTraining(t *testing.T) {
	for name, cost := range costs {
		t.Run(name, func(t *testing.T) {
			g, w, loss := layer(t, cost)
			m := machine(t, g, vm.WithSolver(&solver.SGD{Rate: 0.001}, w))
			var last float64
			for i := range 3 {
				run(t, m)
				require.That(t, loss.Value() != nil, "run %d: the cost has no value", i)
				x := loss.Value().Data().(float64)
				require.Check(t, i <= 0 || x < last, "run %d: the cost is %v after %v", i, x, last)
				last = x
			}
		})
	}
}

func TestAStepLeftInAfterWithSolverIsAnErrorThatSaysSo(t *testing.T) {
	g, w, _ := layer(t, costs["sum"])
	for _, by := range []solver.Solver{&solver.SGD{Rate: 0.5},
		&solver.Momentum{Rate: 0.5}, &solver.Adam{Rate: 0.5}, &solver.AdamW{Rate: 0.5}} {
		m := machine(t, g, vm.WithSolver(by, w))
		for range 3 {
			run(t, m)
			err := by.Step(gorgonia.NodesToValueGrads(nodes{w}))
			require.Fails(t, fmt.Sprintf("a Step of %T after the machine's own", by), err,
				backend.ErrArgument, "(w)", "WithSolver")
		}
		require.NoError(t, errors.Join(m.Close(), by.Close()))
	}
}
