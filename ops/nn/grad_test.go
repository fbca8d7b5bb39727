package nn

import (
	"math"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func ok(t *testing.T, n *gorgonia.Node, err error) *gorgonia.Node {
	t.Helper()
	require.NoError(t, err)
	return n
}

// total is the sum of f of x.
func total(t *testing.T, f func(x *gorgonia.Node) (*gorgonia.Node, error),
	x *gorgonia.Node) *gorgonia.Node {
	t.Helper()
	y, err := f(x)
	y, err = gorgonia.Sum(ok(t, y, err))
	return ok(t, y, err)
}

func cubes(x *gorgonia.Node) *gorgonia.Node { return gorgonia.Must(gorgonia.Cube(x)) }

// Gradients of several losses, of a shared hidden layer, and of a gradient are right, in each of
// three runs of the tape machine; variables keep the gradient of the first loss, and others get
// that of theirs.
func TestGradOfSeveralLosses(t *testing.T) {
	g := gorgonia.NewGraph()
	vector := func(name string, data ...float64) *gorgonia.Node {
		value := tensor.New(tensor.WithShape(len(data)), tensor.WithBacking(data))
		return gorgonia.NewVector(g, tensor.Float64, gorgonia.WithShape(len(data)),
			gorgonia.WithName(name), gorgonia.WithValue(value))
	}
	x, w := vector("x", 1, -2), vector("w", 3, 5)
	h := cubes(x)
	first := require.Value(Grad(total(t, gorgonia.Square, h), x))(t)
	product := gorgonia.Must(gorgonia.HadamardProd(h, w))
	second := require.Value(Grad(total(t, gorgonia.Square, product), x, w))(t)
	penalty := require.Value(Grad(total(t, gorgonia.Square, first[0]), x))(t)
	if x.Deriv() != first[0] || w.Deriv() != second[1] || h.Deriv() != nil {
		t.Errorf("Deriv of x, w and h: %v %v %v", x.Deriv(), w.Deriv(), h.Deriv())
	}
	found := Defects(g)
	require.Check(t, len(found) <= 0, "the graph has the defects %v", found)
	want := map[*gorgonia.Node][]float64{
		first[0]:   {6, -6 * 32},                        // of x^6
		second[0]:  {6 * 9, -6 * 32 * 25},               // of w^2 x^6
		second[1]:  {2 * 3, 2 * 5 * 64},                 // w x^6, twice
		penalty[0]: {2 * 6 * 30, -2 * 6 * 32 * 30 * 16}, // of (6 x^5)^2
	}
	expectInThreeRuns(t, g, want)
}

// expectInThreeRuns runs a graph in the tape machine and compares nodes.
func expectInThreeRuns(t *testing.T, g *gorgonia.ExprGraph, want map[*gorgonia.Node][]float64) {
	t.Helper()
	got := map[*gorgonia.Node]*gorgonia.Value{}
	for n := range want {
		got[n] = new(gorgonia.Value)
		gorgonia.Read(n, got[n])
	}
	m := gorgonia.NewTapeMachine(g)
	defer m.Close()
	for run := range 3 {
		require.NoError(t, m.RunAll())
		for n, value := range got {
			data := (*value).Data().([]float64)
			for i, w := range want[n] {
				if math.Abs(data[i]-w) > 1e-9*math.Abs(w) {
					t.Errorf("run %d: %v is %v, want %v", run, n, data, want[n])
				}
			}
		}
		m.Reset()
	}
}

// Grad passes the errors of gorgonia.Grad on, and leaves the graph's gradients as they were.
func TestGradThatFails(t *testing.T) {
	require.Fails(t, "Grad of nil", require.Err(Grad(nil)), backend.ErrArgument)
	g := gorgonia.NewGraph()
	x := gorgonia.NewVector(g, tensor.Float64, gorgonia.WithShape(2), gorgonia.WithName("x"))
	other := gorgonia.NewVector(g, tensor.Float64, gorgonia.WithShape(2),
		gorgonia.WithName("other"))
	loss := total(t, gorgonia.Square, x)
	first := require.Value(gorgonia.Grad(loss, x))(t)
	if _, err := Grad(loss, other); err == nil || !strings.HasPrefix(err.Error(), "nn: Grad: ") {
		t.Errorf("Grad by what the loss does not read: %v", err)
	}
	if x.Deriv() != first[0] || loss.Deriv() == nil || len(x.Deriv().DerivOf()) != 1 {
		t.Errorf("the failed call has changed Deriv: %v %v", x.Deriv(), loss.Deriv())
	}
}
