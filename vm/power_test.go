package vm_test

import (
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestGradientsOfPowersAtZero of numbers, of repeated exponents and of a node to the power of
// itself are PyTorch's; the table of conventions has those of tensors.
func TestGradientsOfPowersAtZero(t *testing.T) {
	of := func(shape []int, values ...float64) *tensor.Dense {
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(values))
	}
	for name, test := range map[string]struct {
		build  func(g *gorgonia.ExprGraph) (z node, x, y node)
		dx, dy []float64
	}{
		"exponent 0": {func(g *gorgonia.ExprGraph) (z, x, y node) {
			x = gorgonia.NodeFromAny(g, of([]int{2}, 0, 1), gorgonia.WithName("x"))
			y = gorgonia.NewScalar(g, tensor.Float64, gorgonia.WithName("y"),
				gorgonia.WithValue(0.0))
			return must(gorgonia.Pow(x, y)), x, y
		}, []float64{0, 0}, []float64{0}},
		"base 0": {func(g *gorgonia.ExprGraph) (z, x, y node) {
			x = gorgonia.NewScalar(g, tensor.Float64, gorgonia.WithName("x"),
				gorgonia.WithValue(0.0))
			y = gorgonia.NodeFromAny(g, of([]int{3}, 0, 1, 2), gorgonia.WithName("y"))
			return must(gorgonia.Pow(x, y)), x, y
		}, []float64{1}, []float64{0, 0, 0}},
		"repeated exponents": {func(g *gorgonia.ExprGraph) (z, x, y node) {
			x = gorgonia.NodeFromAny(g, of([]int{2, 2}, 0, 1, 1, 0), gorgonia.WithName("x"))
			y = gorgonia.NodeFromAny(g, of([]int{2, 1}, 0, 2), gorgonia.WithName("y"))
			return must(gorgonia.BroadcastPow(x, y, nil, []byte{1})), x, y
		}, []float64{0, 0, 2, 0}, []float64{0, 0}},
		"of itself": {func(g *gorgonia.ExprGraph) (z, x, y node) {
			x = gorgonia.NodeFromAny(g, of([]int{2}, 0, 1), gorgonia.WithName("x"))
			return must(gorgonia.Pow(x, x)), x, x
		}, []float64{0, 1}, []float64{0, 1}},
	} {
		m := &model{g: gorgonia.NewGraph()}
		z, x, y := test.build(m.g)
		if m.params = (nodes{x, y}); x == y {
			m.params = m.params[:1]
		}
		m.grad(t, sum(z))
		run(t, machine(t, m.g))
		for i, want := range [][]float64{test.dx, test.dy} {
			n := []node{x, y}[i]
			if got := floats(t, gradient(t, n)); !slices.Equal(got, want) {
				t.Errorf("%s: gradient %d is %v, want %v", name, i, got, want)
			}
		}
	}
}
