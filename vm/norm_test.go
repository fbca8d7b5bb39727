package vm_test

import (
	"fmt"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/vm"
)

// TestRunningStatistics: a batch normalisation has the moving averages that the tape machine gives
// it, keeps them while machines for training and evaluation take turns, and evaluates with them.
func TestRunningStatistics(t *testing.T) {
	for where, device := range devices {
		for dt, tolerance := range tolerances {
			t.Run(fmt.Sprint(where, " ", dt), func(t *testing.T) {
				var y [2]*gorgonia.Node
				var op [2]*gorgonia.BatchNormOp
				var x [2]*gorgonia.Node
				for i := range y {
					m := &model{g: gorgonia.NewGraph()}
					x[i] = m.variable("x", dt, 3, 2, 2, 2)
					var err error
					y[i], _, _, op[i], err = gorgonia.BatchNorm(x[i], m.variable("gain", dt, 1, 2, 1, 1), m.variable("bias", dt, 1, 2, 1, 1), 0.25, 1e-3)
					must(y[i], err)
				}
				tape := gorgonia.NewTapeMachine(x[0].Graph())
				defer tape.Close()
				d := device(t)
				train, err := vm.New(x[1].Graph(), d)
				if err != nil {
					t.Fatal(err)
				}
				defer train.Close()
				evaluate, err := vm.New(x[1].Graph(), d, vm.Eval())
				if err != nil {
					t.Fatal(err)
				}
				defer evaluate.Close()
				if text := evaluate.Plan().String(); !strings.Contains(text, "host_ops=0") {
					t.Errorf("operations run by Do in\n%s", text)
				}
				for step := range 3 {
					for i := range x {
						batch := ramp(dt, 3+step, 2, 2, 2)
						part, err := batch.Slice(gorgonia.S(step, step+3))
						if err != nil {
							t.Fatal(err)
						}
						if err := gorgonia.Let(x[i], part.Materialize()); err != nil {
							t.Fatal(err)
						}
					}
					run(t, tape)
					run(t, train)
					compare(t, "training", y[1].Value(), y[0].Value(), 10*tolerance)
					mean, variance := op[0].Stats()
					gotMean, gotVariance := op[1].Stats()
					compare(t, fmt.Sprint("mean of step ", step), gotMean, mean, 10*tolerance)
					compare(t, fmt.Sprint("variance of step ", step), gotVariance, variance, 10*tolerance)
					run(t, evaluate)
					tape.Reset()
				}
				last := gorgonia.NewTapeMachine(x[0].Graph(), gorgonia.EvalMode())
				defer last.Close()
				run(t, last)
				compare(t, "evaluation", y[1].Value(), y[0].Value(), 10*tolerance)
			})
		}
	}
}

// TestBatchNormEvaluates: in evaluation, value and gradient are those of the present averages.
func TestBatchNormEvaluates(t *testing.T) {
	m := &model{g: gorgonia.NewGraph()}
	x := gorgonia.NewMatrix(m.g, tensor.Float64, gorgonia.WithName("x"), gorgonia.WithValue(tensor.New(tensor.WithShape(2, 2), tensor.WithBacking([]float64{1, 2, 3, 4}))))
	ones := func(name string) *gorgonia.Node {
		return gorgonia.NewMatrix(m.g, tensor.Float64, gorgonia.WithShape(1, 2), gorgonia.WithName(name), gorgonia.WithInit(gorgonia.Ones()))
	}
	y, _, _, op, err := gorgonia.BatchNorm(x, ones("gain"), ones("bias"), 0.1, 1)
	m.params = gorgonia.Nodes{x}
	m.grad(t, must(gorgonia.Sum(must(y, err))))
	e := machine(t, m.g, vm.Eval(), vm.Keep(y))
	for _, test := range []struct{ mean, variance, y, dx []float64 }{
		{[]float64{1, 0}, []float64{3, 0}, []float64{1, 3, 2, 5}, []float64{0.5, 1, 0.5, 1}},
		{[]float64{0, 2}, []float64{0, 15}, []float64{2, 1, 4, 1.5}, []float64{1, 0.25, 1, 0.25}},
	} {
		if err := op.SetStats(tensor.New(tensor.WithBacking(test.mean)), tensor.New(tensor.WithBacking(test.variance))); err != nil {
			t.Fatal(err)
		}
		run(t, e)
		compare(t, "value", y.Value(), tensor.New(tensor.WithBacking(test.y)), 1e-12)
		compare(t, "gradient", gradient(t, x), tensor.New(tensor.WithBacking(test.dx)), 1e-12)
	}
}
