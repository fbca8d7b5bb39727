package vm_test

import (
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// refused is a graph that New refuses, with what its error says.
type refused struct {
	name  string
	build func(g *gorgonia.ExprGraph)
	want  []string
}

// What Gorgonia implements for floats only, and what has no elements, is an error of New that says
// what to do, not one of RunAll, and no panic.
func TestOperationsThatNobodyComputesAreErrorsOfNew(t *testing.T) {
	const convert = "gorgonia.ConvType"
	images := func(g *gorgonia.ExprGraph, dt tensor.Dtype, shape ...int) node {
		return gorgonia.NewTensor(g, dt, len(shape), gorgonia.WithShape(shape...),
			gorgonia.WithName("x"), gorgonia.WithInit(gorgonia.RangedFrom(1)))
	}
	for _, test := range []refused{
		{"max pool of Uint8", func(g *gorgonia.ExprGraph) {
			x := images(g, tensor.Uint8, 1, 1, 4, 4)
			must(gorgonia.MaxPool2D(x, tensor.Shape{2, 2}, []int{0, 0}, []int{2, 2}))
		}, []string{"MaxPool", "uint8", "Float32 and Float64 only", "gorgonia.ConvType"}},
		{"average pool of Int", func(g *gorgonia.ExprGraph) {
			x := images(g, tensor.Int, 1, 1, 4, 4)
			must(gorgonia.AveragePool2D(x, tensor.Shape{2, 2}, []int{0, 0}, []int{1, 1}))
		}, []string{"AvgPool", "int", "Float32 and Float64 only", "gorgonia.ConvType"}},
		{"patches of Int", func(g *gorgonia.ExprGraph) {
			both := tensor.Shape{2, 2}
			x := images(g, tensor.Int, 1, 1, 4, 4)
			must(gorgonia.Im2Col(x, both, tensor.Shape{0, 0}, both, tensor.Shape{1, 1}))
		}, []string{"im2col", "int", "Float32 and Float64 only"}},
		{"an Int tensor times a number", func(g *gorgonia.ExprGraph) {
			times(images(g, tensor.Int, 2, 3), gorgonia.NewConstant(2))
		}, []string{"⊙", "one operand is a tensor and one a number",
			"x int(2, 3)", "make both tensors of one shape", "gorgonia.ConvType"}},
		{"a product of Int", func(g *gorgonia.ExprGraph) {
			mul(images(g, tensor.Int, 2, 3), images(g, tensor.Int, 3, 2))
		}, []string{"A × B of x int(2, 3), x int(3, 2): ", "Float32 and Float64 only", convert}},
		{"a sum over axes of products of Int", func(g *gorgonia.ExprGraph) {
			x := images(g, tensor.Int, 2, 3)
			must(gorgonia.Tensordot([]int{0}, []int{0}, x, x))
		}, []string{"Tensordot", "x int(2, 3)", "Float32 and Float64 only", convert}},
		{"a softmax of Uint8", func(g *gorgonia.ExprGraph) {
			must(gorgonia.SoftMax(images(g, tensor.Uint8, 2, 3)))
		}, []string{"Softmax", "x uint8(2, 3)", "Float32 and Float64 only", convert}},
		{"a power of Int", func(g *gorgonia.ExprGraph) {
			x := images(g, tensor.Int, 2, 3)
			must(gorgonia.Pow(x, x))
		}, []string{"^", "x int(2, 3), x int(2, 3)", "Float32 and Float64 only", convert}},
		{"a sum of Bools", func(g *gorgonia.ExprGraph) {
			x := gorgonia.NewVector(g, tensor.Bool, gorgonia.WithShape(3),
				gorgonia.WithName("mask"))
			add(x, x)
		}, []string{"+", "mask bool(3)", "numbers only", convert}},
		{"a variable without elements", func(g *gorgonia.ExprGraph) {
			x := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithShape(0, 3),
				gorgonia.WithName("empty"))
			square(x)
		}, []string{"empty of shape (0, 3) has no elements: only collectives of package ops"}},
		{"a product without elements", func(g *gorgonia.ExprGraph) {
			x := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithShape(2, 0),
				gorgonia.WithName("left"))
			y := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithShape(0, 3),
				gorgonia.WithName("right"))
			mul(x, y)
		}, []string{"of shape (2, 0) has no elements: only collectives of package ops"}},
	} {
		t.Run(test.name, test.check)
	}
}

func (r refused) check(t *testing.T) {
	g := gorgonia.NewGraph()
	r.build(g)
	m, err := vm.New(g, nil, vm.Notice(func(string) {}))
	if err == nil {
		m.Close()
		t.Fatal("New gave no error")
	}
	for _, part := range r.want {
		require.Fails(t, "vm.New", err, part)
	}
}

// An error of one of Gorgonia's operations in a run says which one, of which operands, and what to
// do.
func TestErrorsOfGorgoniaSayWhatToDo(t *testing.T) {
	g := gorgonia.NewGraph()
	mask := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(2, 3), tensor.Of(tensor.Bool)),
		gorgonia.WithName("mask"))
	m := machine(t, g, vm.Keep(sum(mask, 1)))
	for range 3 {
		err := m.RunAll()
		for _, part := range []string{
			"Σ[1] of mask bool(2, 3), by Gorgonia: ", "No methods found for Sum for bool",
			"gorgonia.ConvType",
		} {
			require.Fails(t, "m.RunAll", err, part)
		}
	}
}

// Integers of one shape are added by Gorgonia's Do, and images of them are scaled up.
func TestIntegersOfOneShapeStillRun(t *testing.T) {
	g := gorgonia.NewGraph()
	x := gorgonia.NewTensor(g, tensor.Int, 4, gorgonia.WithShape(1, 1, 1, 2),
		gorgonia.WithName("x"), gorgonia.WithInit(gorgonia.RangedFrom(1)))
	large := must(gorgonia.Upsample2D(x, 2))
	sum := add(large, large)
	m := machine(t, g, vm.Keep(sum))
	for range 3 {
		run(t, m)
		got := sum.Value().Data().([]int)
		require.That(t, len(got) == 8 && got[0] == 2 && got[2] == 4, "got %v", got)
	}
}

// Options that contradict each other are refused, with both names.
func TestASolverInEvaluationIsRefused(t *testing.T) {
	m := mlp(t, tensor.Float32)
	_, err := vm.New(m.g, nil, vm.Eval(), vm.WithSolver(&solver.SGD{Rate: 0.1}, m.params...))
	require.Fails(t, "vm.New", err, backend.ErrArgument, "WithSolver", "Eval")
}
