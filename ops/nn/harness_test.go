package nn

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// operand is a tensor of float64 that tests make, or of indices.
type operand struct {
	shape []int
	data  []float64
	ints  []int
}

// product returns the number of elements of a shape, 1 for a scalar's.
func product(shape tensor.Shape) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// of makes an operand with the given elements.
func of(shape []int, data ...float64) operand { return operand{shape: shape, data: data} }

// count makes an operand with the elements 1, 2, 3, ...
func count(shape ...int) operand {
	x := operand{shape: shape, data: make([]float64, product(shape))}
	for i := range x.data {
		x.data[i] = float64(i + 1)
	}
	return x
}

// normal makes an operand of random numbers.
func normal(seed uint64, shape ...int) operand {
	rng := rand.New(rand.NewPCG(seed, 1))
	x := operand{shape: shape, data: make([]float64, product(shape))}
	for i := range x.data {
		x.data[i] = rng.NormFloat64()
	}
	return x
}

// indices makes an operand of indices.
func indices(shape []int, ints ...int) operand { return operand{shape: shape, ints: ints} }

func (x operand) node(g *gorgonia.ExprGraph, name string, dt tensor.Dtype) *gorgonia.Node {
	var backing any = slices.Clone(x.data)
	switch {
	case x.ints != nil:
		backing, dt = slices.Clone(x.ints), tensor.Int
	case dt == tensor.Float32:
		small := make([]float32, len(x.data))
		for i, v := range x.data {
			small[i] = float32(v)
		}
		backing = small
	}
	value := tensor.New(tensor.WithShape(x.shape...), tensor.WithBacking(backing))
	return gorgonia.NewTensor(g, dt, len(x.shape), gorgonia.WithShape(x.shape...),
		gorgonia.WithName(name), gorgonia.WithValue(value))
}

// builder makes the results of a test from its operands.
type builder = func(x gorgonia.Nodes) (*gorgonia.Node, error)

// one is a builder of an operation with one operand.
func one(f func(x *gorgonia.Node) (*gorgonia.Node, error)) builder {
	return func(x gorgonia.Nodes) (*gorgonia.Node, error) { return f(x[0]) }
}

// numbers returns the elements of a value, in row-major order.
func numbers(t *testing.T, v gorgonia.Value) []float64 {
	t.Helper()
	require.That(t, v != nil, "there is no value")
	memory := require.Value(elements(v))(t)
	if memory.DType() == backend.F64 {
		return slices.Clone(backend.View[float64](memory))
	}
	wide := make([]float64, memory.Len())
	for i, x := range backend.View[float32](memory) {
		wide[i] = float64(x)
	}
	return wide
}

// graph makes the nodes of the operands and of the result.
func graph(t *testing.T, dt tensor.Dtype, in []operand, build builder) (*gorgonia.ExprGraph,
	gorgonia.Nodes, *gorgonia.Node) {
	t.Helper()
	g := gorgonia.NewGraph()
	var x gorgonia.Nodes
	for i, o := range in {
		x = append(x, o.node(g, fmt.Sprint("x", i), dt))
	}
	y := require.Value(build(x))(t)
	return g, x, y
}

func runAll(t *testing.T, m gorgonia.VM) {
	t.Helper()
	defer func() { _ = m.Close() }()
	require.NoError(t, m.RunAll())
}

// forward returns the result's shape and elements, of the tape machine.
func forward(t *testing.T, dt tensor.Dtype, in []operand, build builder) (tensor.Shape, []float64) {
	t.Helper()
	g, _, y := graph(t, dt, in, build)
	var v gorgonia.Value
	gorgonia.Read(y, &v)
	runAll(t, gorgonia.NewTapeMachine(g))
	return v.Shape().Clone(), numbers(t, v)
}

// checkForward checks the result in both dtypes, exactly if tolerance is 0.
func checkForward(t *testing.T, in []operand, build builder, want operand, tolerance float64) {
	t.Helper()
	for _, dt := range []tensor.Dtype{tensor.Float64, tensor.Float32} {
		shape, got := forward(t, dt, in, build)
		require.That(t, slices.Equal(shape, tensor.Shape(want.shape)) && len(got) == len(want.data),
			"%v: shape %v, want %v", dt, shape, want.shape)
		for i := range got {
			if math.Abs(got[i]-want.data[i]) > tolerance {
				t.Fatalf("%v: %v, want %v", dt, got, want.data)
			}
		}
	}
}

// weights are what the loss of gradient tests multiplies the result with.
func weights(shape tensor.Shape) operand { return normal(99, shape...) }

// lossOf is the sum of the result's elements, weighted.
func lossOf(t *testing.T, y *gorgonia.Node) *gorgonia.Node {
	t.Helper()
	if y.IsScalar() {
		return y
	}
	w := weights(y.Shape()).node(y.Graph(), "w", y.Dtype())
	return gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(y, w))))
}

// loss is the value of lossOf.
func loss(t *testing.T, in []operand, build builder) float64 {
	t.Helper()
	g, _, y := graph(t, tensor.Float64, in, build)
	var v gorgonia.Value
	gorgonia.Read(lossOf(t, y), &v)
	runAll(t, gorgonia.NewTapeMachine(g))
	return numbers(t, v)[0]
}

// checkGradient compares the gradients of both machines with central differences.
func checkGradient(t *testing.T, in []operand, build builder) {
	t.Helper()
	checkGradientOf(t, false, in, build)
	checkGradientOf(t, true, in, build)
}

// checkGradientOf is checkGradient for one machine.
func checkGradientOf(t *testing.T, lisp bool, in []operand, build builder) {
	t.Helper()
	const h, tolerance = 1e-5, 1e-6
	got := gradients(t, in, build, lisp)
	for i, o := range in {
		for k, x := range o.data {
			o.data[k] = x + h
			up := loss(t, in, build)
			o.data[k] = x - h
			want := (up - loss(t, in, build)) / (2 * h)
			o.data[k] = x
			if math.Abs(got[i][k]-want) > tolerance*max(1, math.Abs(want)) {
				t.Fatalf("lisp machine %v: gradient of element %d of operand %d is %v, want %v",
					lisp, k, i, got[i][k], want)
			}
		}
	}
}

// gradients returns those of all operands; indices have none.
func gradients(t *testing.T, in []operand, build builder, lisp bool) [][]float64 {
	t.Helper()
	g, x, y := graph(t, tensor.Float64, in, build)
	cost := lossOf(t, y)
	var by, grads gorgonia.Nodes
	for i, n := range x {
		if in[i].ints == nil {
			by = append(by, n)
		}
	}
	if lisp {
		runAll(t, gorgonia.NewLispMachine(g))
	} else {
		var err error
		if grads, err = gorgonia.Grad(cost, by...); err != nil {
			t.Fatal(err)
		}
		runAll(t, gorgonia.NewTapeMachine(g))
	}
	all := make([][]float64, len(in))
	for i, n := range x {
		if in[i].ints != nil {
			continue
		}
		v, err := n.Grad()
		if !lisp {
			v, err = grads[slices.Index(by, n)].Value(), nil
		}
		require.NoError(t, err)
		if !slices.Equal(v.Shape(), tensor.Shape(in[i].shape)) {
			t.Fatalf("the gradient of operand %d has shape %v, want %v", i, v.Shape(), in[i].shape)
		}
		all[i] = numbers(t, v)
	}
	return all
}

// checkDistinct checks that results of one graph are different nodes, and that each is merged with
// another one like it.
func checkDistinct(t *testing.T, in []operand, builds ...builder) {
	t.Helper()
	g := gorgonia.NewGraph()
	var x, seen gorgonia.Nodes
	for i, o := range in {
		x = append(x, o.node(g, fmt.Sprint("x", i), tensor.Float64))
	}
	for i, build := range builds {
		y := require.Value(build(x))(t)
		again := require.Value(build(x))(t)
		if y != again {
			t.Errorf("%v: two equal ones are two nodes", y.Op())
		}
		if k := slices.Index(seen, y); k >= 0 {
			t.Errorf("operations %d and %d are one node, %v", k, i, y.Op())
		}
		seen = append(seen, y)
	}
}

// checkRefused checks the message of a constructor's error, and what it wraps.
func checkRefused(t *testing.T, err error, wraps error, says string) {
	t.Helper()
	require.Fails(t, "error", err, wraps, says)
}
