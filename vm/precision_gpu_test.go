//go:build gpu

package vm_test

import (
	"testing"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// TestPrecisionsOnGPU: gradients in TF32 and BF16 are near those in f32 on the host, and are
// bitwise identical when steps run as a graph.
func TestPrecisionsOnGPU(t *testing.T) {
	d := gpu(t)
	for name, build := range withAttention() {
		exact := build(t, tensor.Float32)
		once(t, exact, nil)
		for _, p := range []vm.Precision{vm.TF32, vm.BF16} {
			m := build(t, tensor.Float32)
			machine := machineOn(t, d, m.g, vm.WithPrecision(p))
			var first [][]float64
			for range 3 { // the second run records the graph, the third one launches it
				run(t, machine)
				var all [][]float64
				for _, n := range m.params {
					all = append(all, append([]float64{}, floats(t, gradient(t, n))...))
				}
				if first == nil {
					first = all
				}
				for i, n := range m.params {
					near(t, name+" "+n.Name(), all[i], first[i], 0)
				}
			}
			for i, n := range exact.params {
				near(t, name+" in "+p.String()+" "+n.Name(), first[i], floats(t, gradient(t, n)),
					roundings)
			}
			require.Report(t, machine.Close())
		}
	}
}
