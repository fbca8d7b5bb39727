package vm_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// twoLosses is a random graph of element-wise operations with two losses, of which the second one
// may read gradients of the first. It returns the gradients of the second loss by two variables,
// nil if grad refuses it.
func twoLosses(seed uint64, grad func(node, ...node) (gorgonia.Nodes, error)) (
	g *gorgonia.ExprGraph, second gorgonia.Nodes) {
	r := rand.New(rand.NewPCG(seed, 7))
	g = gorgonia.NewGraph()
	var x gorgonia.Nodes
	for i, data := range [][]float64{{0.5, -0.25}, {0.75, 0.125}} {
		value := tensor.New(tensor.WithShape(2), tensor.WithBacking(data))
		x = append(x, gorgonia.NewVector(g, tensor.Float64, gorgonia.WithShape(2),
			gorgonia.WithName(fmt.Sprint("x", i)), gorgonia.WithValue(value)))
	}
	loss := func(nodes gorgonia.Nodes) node {
		y := nodes[r.IntN(len(nodes))]
		for range 1 + r.IntN(3) {
			other := nodes[r.IntN(len(nodes))]
			if r.IntN(2) == 0 || other == y {
				y = must([]function{gorgonia.Tanh, gorgonia.Square, gorgonia.Exp,
					gorgonia.Neg}[r.IntN(4)](y))
			} else {
				y = must([]func(a, b node) (node, error){
					gorgonia.Add, gorgonia.Sub, gorgonia.HadamardProd}[r.IntN(3)](y, other))
			}
		}
		return sum(y)
	}
	hidden := gorgonia.Nodes{tanh(x[0]), times(x[0], x[1])}
	first, err := grad(loss(slices.Concat(hidden, x)), x[0])
	if err != nil {
		return g, nil
	}
	from := slices.Clone(x)
	if r.IntN(2) == 0 {
		from = append(from, hidden...)
	}
	if r.IntN(3) == 0 {
		from = append(from, first...)
	}
	last := loss(from)
	x = slices.DeleteFunc(x, func(n node) bool { return !depends(last, n) })
	if second, err = grad(last, x...); err != nil {
		return g, nil
	}
	return g, second
}

// depends reports whether n is computed from x.
func depends(n, x node) bool {
	found := n == x
	for it := n.Graph().From(n.ID()); it.Next(); {
		found = found || depends(it.Node().(node), x)
	}
	return found
}

// secondGradients returns the values of nodes, after three runs that agree.
func secondGradients(t *testing.T, g *gorgonia.ExprGraph, nodes gorgonia.Nodes) (data []float64) {
	t.Helper()
	m := machine(t, g, vm.Keep(nodes...), vm.Notice(func(string) {}))
	for i := range 3 {
		run(t, m)
		var now []float64
		for _, n := range nodes {
			now = append(now, n.Value().Data().([]float64)...)
		}
		require.That(t, i <= 0 || fmt.Sprint(now) == fmt.Sprint(data),
			"run %d gives %v, the run before %v", i, now, data)
		data = now
	}
	return data
}

// A second call of gorgonia.Grad is reported if and only if its gradients differ from those of
// nn.Grad, which are the ones of a graph with this loss alone; what is missing may be zero, though.
// One call alone is never reported.
func TestSecondGradIsReportedIfItIsWrong(t *testing.T) {
	wrong, right, lucky := 0, 0, 0
	for seed := range uint64(600) {
		g, stock := twoLosses(seed, gorgonia.Grad)
		other, ours := twoLosses(seed, nn.Grad)
		if stock == nil || ours == nil {
			continue
		}
		calls := 0
		once, _ := twoLosses(seed, func(loss node, by ...node) (nodes, error) {
			if calls++; calls > 1 {
				return nil, errors.New("one call is enough")
			}
			return gorgonia.Grad(loss, by...)
		})
		for _, d := range nn.Defects(once) {
			require.Check(t, d.Tape, "seed %d: one call of Grad leaves the defect %v", seed, d)
		}
		got, want := secondGradients(t, g, stock), secondGradients(t, other, ours)
		differ := false
		for i, w := range want {
			differ = differ || math.Abs(got[i]-w) > 1e-9*max(1, math.Abs(w))
		}
		reported := false
		for _, d := range nn.Defects(g) {
			reported = reported || strings.HasPrefix(d.What, "a second gorgonia.Grad")
		}
		if found := nn.Defects(other); len(found) > 0 && !found[0].Tape {
			t.Errorf("seed %d: nn.Grad leaves the defect %v", seed, found[0])
		}
		switch {
		case differ && !reported:
			t.Errorf("seed %d: the gradient is %v, want %v, and nothing is reported", seed, got,
				want)
		case !differ && reported:
			lucky++ // what is missing is zero
		case differ:
			wrong++
		default:
			right++
		}
	}
	require.Check(t, wrong >= 50 && right >= 50 && lucky <= 2,
		"%d graphs with a wrong gradient, %d with a right one and %d that are reported, "+
			"but right", wrong, right, lucky)
}
