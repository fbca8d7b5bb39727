package vm_test

import (
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// TestSummaryCountsWhatThePlanDoes: two layers, of which the first has no gradient of its input,
// and a convolution, whose products of patches count as it does.
func TestSummaryCountsWhatThePlanDoes(t *testing.T) {
	g := gorgonia.NewGraph()
	node := func(name string, shape ...int) *gorgonia.Node {
		return gorgonia.NewTensor(g, tensor.Float32, len(shape), gorgonia.WithShape(shape...),
			gorgonia.WithName(name), gorgonia.WithInit(gorgonia.Ones()))
	}
	x, w, v := node("x", 3, 5), node("w", 5, 7), node("v", 7, 2)
	h := gorgonia.Must(gorgonia.Tanh(gorgonia.Must(gorgonia.Mul(x, w))))
	loss := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Mul(h, v))))
	require.NoError(t, require.Err(gorgonia.Grad(loss, w, v)))
	m := machine(t, g, vm.WithSolver(&solver.Adam{Rate: 1}, w, v))
	s := m.Summary()
	const first, second = 2 * 3 * 5 * 7, 2 * 3 * 7 * 2
	require.Check(t, s.Parameters == 49 && s.ParameterBytes == 196 && s.SolverBytes == 392 &&
		s.Bytes != 0 && s.FLOPs == 2*first+3*second, "%+v", s)
	const table = "w  (5, 7)  35\nv  (7, 2)  14\nparameters=49 "
	text := s.String()
	require.Check(t, strings.HasPrefix(text, table), "it prints\n%s", text)

	g = gorgonia.NewGraph()
	image, filters := node("image", 2, 3, 8, 8), node("filters", 4, 3, 3, 3)
	y := gorgonia.Must(gorgonia.Conv2d(image, filters, tensor.Shape{3, 3}, []int{1, 1}, []int{1, 1},
		[]int{1, 1}))
	loss = gorgonia.Must(gorgonia.Mean(y))
	require.NoError(t, require.Err(gorgonia.Grad(loss, filters)))
	c := machine(t, g, vm.WithSolver(&solver.SGD{Rate: 1}, filters))
	if got, want := c.Summary().FLOPs, int64(2*2*(2*4*8*8)*(3*3*3)); got != want {
		t.Errorf("forward and gradient of a convolution have %d FLOPs, want %d", got, want)
	}
}
