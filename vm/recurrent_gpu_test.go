//go:build gpu

package vm_test

import (
	"fmt"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// stacked is two LSTM layers of as many units, the second one backwards, of whose results all are
// used.
func stacked(steps, batch, units int) func(t testing.TB, dt tensor.Dtype) *model {
	return func(t testing.TB, dt tensor.Dtype) *model {
		m := &model{g: gorgonia.NewGraph()}
		x := m.variable("x", dt, steps, batch, 8)
		var loss node
		for i := range 2 {
			name := func(s string) string { return fmt.Sprint(s, i) }
			p := nodes{m.variable(name("h"), dt, 1, batch, units), m.variable(name("c"), dt, 1,
				batch, units), m.variable(name("w"), dt, 4*units, x.Shape()[2]),
				m.variable(name("u"), dt, 4*units, units), m.variable(name("b"), dt, 4*units),
				m.variable(name("a"), dt, 4*units)}
			y, h, c, err := nn.LSTM(nn.RecurrentOptions{Reverse: i == 1}, x, p[0], p[1], p[2], p[3],
				p[4], p[5])
			require.NoError(t, err)
			m.params, x = append(m.params, p...), y
			for _, n := range []node{h, c, y} {
				term := mean(square(n))
				if loss != nil {
					term = add(loss, term)
				}
				loss = term
			}
		}
		m.grad(t, loss)
		return m
	}
}

// TestAKernelTakesAllStepsOnGPU compares the gradients of LSTMs, all of whose steps are one kernel,
// with those of loops on the host.
func TestAKernelTakesAllStepsOnGPU(t *testing.T) {
	d := gpu(t)
	for _, size := range [][3]int{{1, 1, 16}, {3, 20, 32}} {
		build := stacked(size[0], size[1], size[2])
		exact := build(t, tensor.Float32)
		once(t, exact, nil)
		for p, tolerance := range map[vm.Precision]float64{vm.F32: 1e-5, vm.TF32: roundings,
			vm.BF16: roundings} {
			m := build(t, tensor.Float32)
			machine := machineOn(t, d, m.g, vm.WithPrecision(p))
			if text := fmt.Sprint(machine.Plan()); strings.Count(text, "= lstm") != 4 {
				t.Errorf("%v in %v: not two layers and their gradients:\n%s", size, p, text)
			}
			for range 3 { // the second run records the graph, the third one launches it
				run(t, machine)
				for i, n := range m.params {
					near(t, fmt.Sprint(size, p, n.Name()), floats(t, gradient(t, n)), floats(t,
						gradient(t, exact.params[i])), tolerance)
				}
			}
			require.Report(t, machine.Close())
		}
	}
}
