package vm_test

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// byDo runs a graph node by node, by the Do of every operation, and returns the values.
func byDo(g *gorgonia.ExprGraph) (map[node]gorgonia.Value, error) {
	sorted, err := gorgonia.Sort(g)
	if err != nil {
		return nil, err
	}
	values := map[node]gorgonia.Value{}
	for _, n := range slices.Backward(sorted) {
		var args []gorgonia.Value
		for it := g.From(n.ID()); it.Next(); {
			args = append(args, values[it.Node().(node)])
		}
		switch name := reflect.TypeOf(n.Op()); {
		case n.Op() == nil || strings.HasPrefix(name.Name(), "constant"):
			values[n] = n.Value()
		case name.Name() != "readOp":
			if values[n], err = n.Op().Do(args...); err != nil {
				return nil, fmt.Errorf("%v: %w", n, err)
			}
			if signOfZero(n.Op(), args) { // in a tensor, Gorgonia's is 0, too
				values[n] = args[0]
			}
		}
	}
	return values, nil
}

// signOfZero reports whether an operation is the sign of the number 0, which Gorgonia says is 1, or
// -1 for -0: gorgonia.Sign, and the gradient of Abs.
func signOfZero(op gorgonia.Op, args []gorgonia.Value) bool {
	if fmt.Sprint(op) != "sign" || len(args[0].Shape()) > 0 {
		return false
	}
	switch x := args[0].Data().(type) {
	case float64:
		return x == 0
	case float32:
		return x == 0
	}
	return false
}

// valuesByDo is byDo for a test.
func valuesByDo(t *testing.T, g *gorgonia.ExprGraph) map[node]gorgonia.Value {
	t.Helper()
	return require.Value(byDo(g))(t)
}

// agree compares every node of a graph with the interpreter.
func agree(t *testing.T, g *gorgonia.ExprGraph, tolerance float64, hostOps int,
	devices map[string]func(testing.TB) backend.Device) {
	t.Helper()
	want := valuesByDo(t, g)
	var computed []node
	for n := range want {
		if n.Op() != nil && n.Value() == nil {
			computed = append(computed, n)
		}
	}
	for where, device := range devices {
		agreeOn(t, g, where, device(t), computed, want, tolerance, hostOps)
	}
}

func agreeOn(t *testing.T, g *gorgonia.ExprGraph, where string, device backend.Device,
	computed []node, want map[node]gorgonia.Value, tolerance float64, hostOps int) {
	t.Helper()
	m := machineOn(t, device, g, vm.Keep(computed...))
	if text := m.Plan().String(); !strings.Contains(text, fmt.Sprintf("host_ops=%d", hostOps)) {
		t.Errorf("not %d host_ops in\n%s", hostOps, text)
	}
	for range 2 {
		run(t, m)
	}
	for _, n := range computed {
		compare(t, fmt.Sprint(where, ": ", n), n.Value(), rowMajor(want[n]), tolerance)
		if !n.Value().Shape().Eq(n.Shape()) {
			t.Errorf("%v has the shape %v, its value %v", n, n.Shape(), n.Value().Shape())
		}
	}
}

// rowMajor returns a value whose Data is in row-major order.
func rowMajor(v gorgonia.Value) gorgonia.Value {
	if d, ok := v.(*tensor.Dense); ok && d.RequiresIterator() {
		return d.Materialize().(gorgonia.Value)
	}
	return v
}

// operation is an operation of a graph.
type operation struct {
	name   string
	shapes [][]int // of its variables
	build  func(x ...node) (node, error)
	host   int  // operations that run by Do, gradients among them
	plain  bool // without a gradient, or with one that is wrong or crashes by Do
}

// eachOperation checks models of operations, whose loss is the sum of the squares of a result.
func eachOperation(t *testing.T, all []operation, check func(t *testing.T, o operation, m *model,
	tolerance float64)) {
	for _, o := range all {
		for dt, tolerance := range tolerances {
			t.Run(fmt.Sprint(o.name, " ", dt), func(t *testing.T) {
				m := &model{g: gorgonia.NewGraph()}
				for i, shape := range o.shapes {
					m.params = append(m.params, m.variable(fmt.Sprint("x", i), dt, shape...))
				}
				y := must(o.build(m.params...))
				if !o.plain {
					if !y.IsScalar() {
						y = sum(square(y))
					}
					m.grad(t, y)
				}
				check(t, o, m, tolerance)
			})
		}
	}
}

// stock are graphs for operations of Gorgonia: build returns the result from operands of
// the shapes.
var stock = []operation{
	{name: "unary", shapes: [][]int{{3, 4}}, build: chain(gorgonia.Abs, gorgonia.Exp, gorgonia.Log,
		gorgonia.Sin, gorgonia.Cos, gorgonia.Neg,
		gorgonia.Square, gorgonia.Sqrt, gorgonia.Tanh, gorgonia.Sigmoid, gorgonia.Softplus,
		gorgonia.Log1p, gorgonia.Expm1, gorgonia.Cube, gorgonia.Inverse)},
	{name: "steps", shapes: [][]int{{3, 4}}, build: chain(gorgonia.Sign, gorgonia.Ceil,
		gorgonia.Floor), plain: true},
	{name: "roots", shapes: [][]int{{3, 4}}, build: chain(gorgonia.Exp, gorgonia.InverseSqrt,
		gorgonia.Log2), plain: true},
	{name: "add sub", shapes: [][]int{{3, 4}, {3, 4}}, build: pair(gorgonia.Add, gorgonia.Sub)},
	{name: "mul div", shapes: [][]int{{3, 4}, {3, 4}}, build: pair(gorgonia.HadamardProd,
		gorgonia.HadamardDiv)},
	{name: "scalar left", shapes: [][]int{nil, {3, 4}},
		build: pair(gorgonia.Sub, gorgonia.HadamardProd)},
	{name: "scalar right", shapes: [][]int{{3, 4}, nil},
		build: pair(gorgonia.Add, gorgonia.HadamardDiv)},
	{name: "scalars", shapes: [][]int{nil, nil}, build: pair(gorgonia.Add, gorgonia.HadamardProd)},
	{name: "broadcast", shapes: [][]int{{3, 4}, {1, 4}}, build: func(x ...node) (node, error) {
		return gorgonia.BroadcastHadamardProd(x[0], x[1], nil, []byte{0})
	}},
	{name: "broadcast left", shapes: [][]int{{3, 1, 2}, {3, 4, 2}},
		build: func(x ...node) (node, error) {
			return gorgonia.BroadcastSub(x[0], x[1], []byte{1}, nil)
		}},
	{name: "rectify", shapes: [][]int{{3, 4}}, build: chain(gorgonia.Rectify)},
	{name: "leaky relu", shapes: [][]int{{3, 4}}, build: func(x ...node) (node, error) {
		return gorgonia.LeakyRelu(x[0], 0.1)
	}},
	{name: "matmul", shapes: [][]int{{3, 4}, {4, 5}}, build: pair(gorgonia.Mul, nil)},
	{name: "matvec", shapes: [][]int{{3, 4}, {4}}, build: pair(gorgonia.Mul, nil)},
	{name: "dot", shapes: [][]int{{4}, {4}}, build: pair(gorgonia.Mul, nil)},
	{name: "outer", shapes: [][]int{{3}, {4}}, build: pair(gorgonia.OuterProd, nil), plain: true},
	{name: "batched", shapes: [][]int{{2, 3, 4}, {2, 4, 5}}, build: func(x ...node) (node, error) {
		return gorgonia.BatchedMatMul(x[0], x[1])
	}},
	{name: "batched transposed", shapes: [][]int{{2, 3, 4}, {2, 5, 4}},
		build: func(x ...node) (node, error) {
			return gorgonia.BatchedMatMul(x[0], x[1], false, true)
		}},
	{name: "tensordot", shapes: [][]int{{2, 3, 4}, {4, 3, 5}}, build: func(x ...node) (
		node, error) {
		return gorgonia.Tensordot([]int{1, 2}, []int{1, 0}, x[0], x[1])
	}},
	{name: "sum", shapes: [][]int{{2, 3, 4}}, build: func(x ...node) (node, error) {
		return gorgonia.Sum(x[0], 0, 2)
	}},
	{name: "sum all", shapes: [][]int{{2, 3}}, build: func(x ...node) (node, error) {
		return gorgonia.Sum(x[0])
	}},
	{name: "mean", shapes: [][]int{{2, 3}}, build: func(x ...node) (node, error) {
		return gorgonia.Mean(x[0], 1)
	}},
	{name: "max", shapes: [][]int{{2, 3}}, build: func(x ...node) (node, error) {
		return gorgonia.Max(x[0], 1)
	}},
	{name: "norm", shapes: [][]int{{5}}, build: func(x ...node) (node, error) {
		return gorgonia.Norm(x[0], 0, 2)
	}},
	{name: "reshape", shapes: [][]int{{2, 6}}, build: func(x ...node) (node, error) {
		return gorgonia.Reshape(x[0], tensor.Shape{3, 4})
	}},
	{name: "transpose", shapes: [][]int{{2, 3, 4}}, build: func(x ...node) (node, error) {
		return gorgonia.Transpose(x[0], 2, 0, 1)
	}},
	{name: "slice", shapes: [][]int{{4, 6}}, build: func(x ...node) (node, error) {
		return gorgonia.Slice(x[0], gorgonia.S(1, 3), gorgonia.S(2, 5))
	}},
	{name: "slice of one", shapes: [][]int{{4, 6}}, build: func(x ...node) (node, error) {
		return gorgonia.Slice(x[0], nil, gorgonia.S(2))
	}},
	{name: "concat", shapes: [][]int{{2, 3}, {4, 3}}, build: func(x ...node) (node, error) {
		return gorgonia.Concat(0, x...)
	}},
	{name: "concat columns", shapes: [][]int{{2, 3}, {2, 1}}, build: func(x ...node) (node, error) {
		return gorgonia.Concat(1, x...)
	}},
	{name: "softmax", shapes: [][]int{{3, 4}}, build: func(x ...node) (node, error) {
		return gorgonia.SoftMax(x[0])
	}},
	{name: "softmax axis", shapes: [][]int{{3, 4}}, build: func(x ...node) (node, error) {
		return gorgonia.SoftMax(x[0], 0)
	}},
	{name: "log softmax", shapes: [][]int{{3, 4}}, build: func(x ...node) (node, error) {
		return gorgonia.LogSoftMax(x[0])
	}},
	{name: "between", shapes: [][]int{{3, 4}, {3, 4}}, build: pair(gorgonia.MaxBetween,
		gorgonia.MinBetween), plain: true},
	{name: "conv2d", shapes: [][]int{{2, 2, 5, 6}, {3, 2, 3, 2}}, build: func(x ...node) (
		node, error) {
		return gorgonia.Conv2d(x[0], x[1], tensor.Shape{3, 2}, []int{1, 0}, []int{2, 1},
			[]int{1, 2})
	}},
	{name: "max pool", shapes: [][]int{{2, 2, 6, 6}}, build: func(x ...node) (node, error) {
		return gorgonia.MaxPool2D(x[0], tensor.Shape{3, 2}, []int{1, 0}, []int{2, 2})
	}},
	{name: "global average", shapes: [][]int{{2, 3, 4, 5}},
		build: chain(gorgonia.GlobalAveragePool2D), plain: true},
	{name: "at", plain: true, shapes: [][]int{{3, 4}}, build: func(x ...node) (node, error) {
		return gorgonia.At(x[0], 1, 2)
	}},
	{name: "diagonal", plain: true, shapes: [][]int{{5}}, build: func(x ...node) (node, error) {
		return gorgonia.DiagFlat(x[0])
	}},
	{name: "upsample", shapes: [][]int{{2, 2, 2, 3}}, build: func(x ...node) (node, error) {
		return gorgonia.Upsample2D(x[0], 2)
	}},
	{name: "batch norm", shapes: [][]int{{3, 2, 2, 3}, {1, 2, 1, 1}, {1, 2, 1, 1}},
		build: batchNorm},
	{name: "batch norm of rows", shapes: [][]int{{6, 4}, {1, 4}, {1, 4}}, build: batchNorm},
	{name: "group norm", shapes: [][]int{{2, 4, 2, 2}, {2, 4, 2, 2}, {2, 4, 2, 2}},
		build: func(x ...node) (node, error) {
			return gorgonia.GroupNorm(x[0], x[1], x[2], 2, 4, 1e-5)
		}},
	{name: "by indices", shapes: [][]int{{5, 3}}, build: func(x ...node) (node, error) {
		return gorgonia.ByIndices(x[0], labels(x[0], 4, 0, 4, 2), 0)
	}},
	{name: "sparsemax", shapes: [][]int{{3, 4}}, host: 2, build: func(x ...node) (node, error) {
		return gorgonia.Sparsemax(x[0])
	}},
}

func batchNorm(x ...node) (node, error) {
	y, _, _, _, err := gorgonia.BatchNorm(x[0], x[1], x[2], 0.1, 1e-5)
	return y, err
}

type function = func(node) (node, error)

// chain applies functions one after the other.
func chain(functions ...function) func(x ...node) (node, error) {
	return func(x ...node) (node, error) {
		y := x[0]
		for _, f := range functions {
			y = must(f(y))
		}
		return y, nil
	}
}

// pair applies f to two operands, and then f2, if there is one, to the first and the result.
func pair(f, f2 func(a, b node) (node, error)) func(x ...node) (node, error) {
	return func(x ...node) (node, error) {
		y, err := f(x[0], x[1])
		if err == nil && f2 != nil {
			return f2(x[0], y)
		}
		return y, err
	}
}

// TestStockOperations compares values and gradients of every operation with its Do.
func TestStockOperations(t *testing.T) { stockOperations(t, devices) }

func stockOperations(t *testing.T, devices map[string]func(testing.TB) backend.Device) {
	eachOperation(t, stock, func(t *testing.T, o operation, m *model, tolerance float64) {
		agree(t, m.g, tolerance*10, o.host, devices)
	})
}
