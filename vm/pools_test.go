package vm_test

import (
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// TestPoolsOfUnevenPaddingAreReadAsMeant: pools of Gorgonia with other padding behind the image
// than before it, and their gradients, equal pools of package nn.
func TestPoolsOfUnevenPaddingAreReadAsMeant(t *testing.T) {
	kernel, stride := [2]int{3, 2}, [2]int{2, 1}
	type both struct {
		stock func(node, tensor.Shape, []int, []int) (node, error)
		ours  func(_, _, _ [2]int, _ node, _ ...nn.PoolOptions) (node, error)
	}
	for name, pool := range map[string]both{"largest": {gorgonia.MaxPool2D, nn.MaxPool2D},
		"mean": {gorgonia.AveragePool2D, nn.AvgPool2D}} {
		var found [2][][]float64 // value and gradient, of three runs
		for i := range found {
			m := &model{g: gorgonia.NewGraph()}
			x := m.variable("x", tensor.Float64, 2, 3, 5, 6)
			fillLike(x)
			y, err := pool.stock(x, kernel[:], []int{0, 2, 1, 0}, stride[:]) // N, S, W, E
			if i == 1 {
				y, err = pool.ours(kernel, [2]int{0, 1}, stride, x,
					nn.PoolOptions{After: &[2]int{2, 0}})
			}
			dx, err := gorgonia.Grad(sum(square(must(y, err))), x)
			require.NoError(t, err)
			machine := machine(t, m.g, vm.Keep(y))
			for range 3 {
				require.NoError(t, machine.RunAll())
				found[i] = append(found[i], floats(t, y.Value()), floats(t, dx[0].Value()))
				machine.Reset()
			}
			require.Report(t, machine.Close())
		}
		for i, want := range found[1] {
			if !slices.Equal(found[0][i], want) {
				t.Errorf("%s: %v, want %v", name, found[0][i], want)
			}
		}
	}
}

// fillLike gives a variable numbers that follow from their place.
func fillLike(x node) {
	for i := range x.Value().Data().([]float64) {
		x.Value().Data().([]float64)[i] = float64(i*i%23) - 11
	}
}
