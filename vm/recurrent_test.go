package vm_test

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// recurrent is a layer that PyTorch has computed: see testdata/recurrent.py.
type recurrent struct {
	Cell                                  string
	BatchFirst, Reverse                   bool
	Operands, Weights, Results, Gradients []array
}

// array is a tensor as text.
type array struct {
	Shape []int
	Data  string
}

// numbers returns the elements.
func (a array) numbers(t *testing.T) (all []float64) {
	t.Helper()
	for _, word := range strings.Fields(a.Data) {
		var x float64
		require.NoError(t, require.Err(fmt.Sscan(word, &x)))
		all = append(all, x)
	}
	return all
}

// node adds a variable with the elements.
func (a array) node(t *testing.T, g *gorgonia.ExprGraph, name string, dt tensor.Dtype) node {
	t.Helper()
	return gorgonia.NewTensor(g, dt, len(a.Shape), gorgonia.WithShape(a.Shape...),
		gorgonia.WithName(name), gorgonia.WithValue(dense(dt, a.numbers(t), a.Shape...)))
}

// dense returns a tensor of numbers.
func dense(dt tensor.Dtype, x []float64, shape ...int) *tensor.Dense {
	d := tensor.New(tensor.Of(dt), tensor.WithShape(shape...))
	for i, v := range x {
		set(d, i, v)
	}
	return d
}

func recurrentCases(t *testing.T) []recurrent {
	t.Helper()
	text := require.Value(os.ReadFile("testdata/recurrent.json"))(t)
	var file struct{ Cases []recurrent }
	err := json.Unmarshal(text, &file)
	require.That(t, err == nil && len(file.Cases) == 10, "%d cases: %v", len(file.Cases), err)
	return file.Cases
}

// build returns the results.
func (c recurrent) build(x nodes) (nodes, error) {
	o := nn.RecurrentOptions{BatchFirst: c.BatchFirst, Reverse: c.Reverse}
	if c.Cell == "LSTM" {
		y, h, last, err := nn.LSTM(o, x[0], x[1], x[2], x[3], x[4], x[5], x[6])
		return nodes{y, h, last}, err
	}
	y, h, err := nn.GRU(o, x[0], x[1], x[2], x[3], x[4], x[5])
	return nodes{y, h}, err
}

// graph returns the graph of the weighted sum of the results, with gradients unless lisp is set.
func (c recurrent) graph(t *testing.T, dt tensor.Dtype, lisp bool) (g *gorgonia.ExprGraph, x,
	y nodes) {
	t.Helper()
	g = gorgonia.NewGraph()
	for i, o := range c.Operands {
		x = append(x, o.node(t, g, fmt.Sprint("x", i), dt))
	}
	y = require.Value(c.build(x))(t)
	var loss node
	for i, w := range c.Weights {
		product := times(y[i], w.node(t, g, fmt.Sprint("w", i), dt))
		if product = sum(product); loss != nil {
			product = add(loss, product)
		}
		loss = product
	}
	if !lisp {
		require.NoError(t, require.Err(gorgonia.Grad(loss, x...)))
	}
	return g, x, y
}

// check runs a machine three times, and a lisp machine once.
func (c recurrent) check(t *testing.T, dt tensor.Dtype, lisp bool,
	machine func(g *gorgonia.ExprGraph) (gorgonia.VM, error)) {
	t.Helper()
	g, x, y := c.graph(t, dt, lisp)
	values := make([]gorgonia.Value, len(y))
	for i, n := range y {
		gorgonia.Read(n, &values[i])
	}
	m := require.Value(machine(g))(t)
	defer func() { _ = m.Close() }()
	for run := range 3 {
		require.NoError(t, m.RunAll())
		for i, want := range c.Results {
			alike(t, fmt.Sprint("result ", i, " of run ", run), dt, values[i], want)
		}
		for i, want := range c.Gradients {
			grad := require.Value(x[i].Grad())(t)
			alike(t, fmt.Sprint("gradient ", i, " of run ", run), dt, grad, want)
		}
		if lisp { // which would add to the gradients
			return
		}
		m.Reset()
	}
}

func alike(t *testing.T, name string, dt tensor.Dtype, got gorgonia.Value, want array) {
	t.Helper()
	if !got.Shape().Eq(tensor.Shape(want.Shape)) {
		t.Fatalf("%s has shape %v, want %v", name, got.Shape(), want.Shape)
	}
	numbers := floats(t, got)
	for i, w := range want.numbers(t) {
		if !(math.Abs(numbers[i]-w) <= tolerances[dt]*max(1, math.Abs(w))) {
			t.Fatalf("element %d of %s is %v, want %v", i, name, numbers[i], w)
		}
	}
}

// TestRecurrentLayersAreThoseOfPyTorch compares results and gradients of LSTMs and GRUs.
func TestRecurrentLayersAreThoseOfPyTorch(t *testing.T) { recurrentAsInPyTorch(t, devices) }

func recurrentAsInPyTorch(t *testing.T, devices map[string]func(testing.TB) backend.Device) {
	for i, c := range recurrentCases(t) {
		for dt := range tolerances {
			name := fmt.Sprint(c.Cell, i, dt)
			for where, device := range devices {
				t.Run(name+" "+where, func(t *testing.T) {
					c.check(t, dt, false, func(g *gorgonia.ExprGraph) (gorgonia.VM, error) {
						m, err := vm.New(g, device(t))
						return m, err
					})
				})
			}
		}
	}
}

// TestRecurrentLayersAreThoseOfPyTorchInGorgoniasMachines is the same of the tape and the lisp
// machine.
func TestRecurrentLayersAreThoseOfPyTorchInGorgoniasMachines(t *testing.T) {
	for i, c := range recurrentCases(t) {
		for dt := range tolerances {
			t.Run(fmt.Sprint("tape ", c.Cell, i, dt), func(t *testing.T) {
				c.check(t, dt, false, func(g *gorgonia.ExprGraph) (gorgonia.VM, error) {
					return gorgonia.NewTapeMachine(g), nil
				})
			})
			t.Run(fmt.Sprint("lisp ", c.Cell, i, dt), func(t *testing.T) {
				c.check(t, dt, true, func(g *gorgonia.ExprGraph) (gorgonia.VM, error) {
					return gorgonia.NewLispMachine(g), nil
				})
			})
		}
	}
}

// TestLoopsStoreTheGradientsOfGates: in the plan of an LSTM's gradient, the loop of each time step
// may store them as the product behind it reads them, side by side.
func TestLoopsStoreTheGradientsOfGates(t *testing.T) {
	all := 0
	for i, c := range recurrentCases(t) {
		if c.Cell != "LSTM" {
			continue
		}
		g, _, _ := c.graph(t, tensor.Float32, false)
		m := machine(t, g)
		text := fmt.Sprint(m.Plan())
		all += strings.Count(text, "= epilogue concat axis 1")
		copies := strings.Count(text, "= concat axis 1")
		require.Check(t, copies <= 1, "case %d: %d concatenations are copies:\n%s", i, copies, text)
		require.Report(t, m.Close())
	}
	require.Check(t, all != 0, "no loop stores a concatenation")
}
