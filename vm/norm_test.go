package vm_test

import (
	"fmt"
	"testing"

	"gorgonia.org/gorgonia"

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
