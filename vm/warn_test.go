package vm_test

import (
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// Two slices with one defect are reported once, with what to use instead; a graph without
// defects is silent.
func TestWrongOperationsAreReportedOnce(t *testing.T) {
	for _, start := range []int{0, 255} {
		m := &model{g: gorgonia.NewGraph()}
		x := m.variable("x", tensor.Float64, 300)
		must(gorgonia.Slice(x, gorgonia.S(start, start+4)))
		must(gorgonia.Slice(x, gorgonia.S(start, start+5)))
		var said []string
		machine := machine(t, m.g, vm.Notice(func(text string) { said = append(said, text) }))
		machine.Close()
		switch {
		case start == 0 && len(said) > 0:
			t.Errorf("slices that are right: %q", said)
		case start > 0 &&
			(len(said) != 1 || !strings.Contains(said[0], "T[255:259:1...]: it is merged") ||
				!strings.Contains(said[0], "use nn.Slice or nn.Split")):
			t.Errorf("slices beyond 255: %q, want one report that names nn.Slice", said)
		}
	}
}

// A training in a process of a larger job, without WithDataParallel, is reported.
func TestTrainingAloneIsReported(t *testing.T) {
	for name, value := range map[string]string{"RANK": "1", "WORLD_SIZE": "4",
		"EURYALE_JOB": "test"} {
		t.Setenv(name, value)
	}
	var said []string
	m := mlp(t, tensor.Float32)
	machine(t, m.g, vm.Notice(func(text string) { said = append(said, text) }))
	require.Check(t, len(said) <= 0, "a machine that does not train said %q", said)
	machine(t, m.g, vm.WithSolver(&solver.SGD{Rate: 0.1}, m.params...),
		vm.Notice(func(text string) { said = append(said, text) }))
	require.Check(t, len(said) == 1 && strings.Contains(said[0], "rank 1 of 4 trains on its own"),
		"said %q", said)
}

// A variable with a gradient that no solver has is reported by name, unless something reads the
// gradient.
func TestAForgottenLearnableIsReported(t *testing.T) {
	for name, test := range map[string]struct {
		options func(m *model) []vm.Option
		said    bool
	}{
		"forgotten": {func(m *model) []vm.Option { return nil }, true},
		"kept": {func(m *model) []vm.Option {
			return []vm.Option{vm.Keep(m.params[1].Deriv())}
		}, false},
		"has another": {func(m *model) []vm.Option {
			return []vm.Option{vm.WithSolver(&solver.Adam{Rate: 1}, m.params[1])}
		}, false},
		"is read": {func(m *model) []vm.Option {
			var g gorgonia.Value
			gorgonia.Read(m.params[1].Deriv(), &g)
			return nil
		}, false},
	} {
		var said []string
		m := product(t, vector(1, 2), vector(3, 4))
		options := append(test.options(m), vm.WithSolver(&solver.SGD{Rate: 1}, m.params[0]),
			vm.Notice(func(text string) { said = append(said, text) }))
		run(t, machine(t, m.g, options...))
		require.Check(t, (len(said) > 0) == test.said && (!test.said || len(said) <= 1 &&
			strings.Contains(said[0], "gradients of w, which no WithSolver has")), "%s: said %q",
			name, said)
	}
}

// Nodes that the graph gets after New are an error of RunAll, which names the last one: they would
// have no value.
func TestNodesAddedAfterNewAreAnError(t *testing.T) {
	for where, device := range devices {
		g, x, _, z := doubled()
		m, err := vm.New(g, device(t))
		require.NoError(t, gorgonia.Let(x, vector(1, 2, 3)))
		require.NoError(t, err)
		run(t, m)
		late := square(z)
		for range 3 {
			err := m.RunAll()
			require.Fails(t, where, err, backend.ErrArgument, late.String(),
				"before the first machine")
		}
		require.Report(t, m.Close())
		run(t, machine(t, g))
		require.Check(t, late.Value() != nil, "%s: a machine made later has no value", where)
	}
}

// A machine for evaluation may be made before the gradients, which it does not compute.
func TestEvalMayBeMadeBeforeGrad(t *testing.T) {
	g := gorgonia.NewGraph()
	x := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(2), gorgonia.WithName("x"),
		gorgonia.WithValue(vector(1, 2)))
	loss := sum(square(x))
	evaluation := machine(t, g, vm.Eval())
	run(t, evaluation)
	require.NoError(t, require.Err(gorgonia.Grad(loss, x)))
	training := machine(t, g, vm.WithSolver(&solver.SGD{Rate: 0.25}, x))
	for range 3 {
		run(t, evaluation)
		run(t, training)
	}
	square(loss)
	require.Fails(t, "a node that is no gradient", evaluation.RunAll(), backend.ErrArgument)
}

// noticesOf returns what New says of a graph.
func noticesOf(t *testing.T, g *gorgonia.ExprGraph) (said []string) {
	t.Helper()
	m := machine(t, g, vm.Notice(func(text string) { said = append(said, text) }))
	m.Close()
	return said
}

// Graphs in which nothing is wrong are silent: models and Gorgonia's own examples, except charRNN.
// That one takes Log2 of a softmax of which it takes Log, too, which makes logarithms of both.
func TestRightGraphsAreSilent(t *testing.T) {
	for _, all := range []map[string]func(testing.TB, tensor.Dtype) *model{models, stockExamples} {
		for name, build := range all {
			for _, said := range noticesOf(t, build(t, tensor.Float64).g) {
				require.Check(t, name == "charRNN" && (strings.Contains(said, "log2") ||
					strings.Contains(said, "Softmax{-1, true}")), "%s: %q", name, said)
			}
		}
	}
}

// wrongGraph is a graph that New reports, with what the notice says.
type wrongGraph struct {
	build func(m *model)
	want  []string
}

const (
	everywhere = "wrong on every machine"
	onTape     = "package vm is right, but Gorgonia's own machines"
)

// A graph whose gradients or nodes Gorgonia gets wrong is reported by name, with the engine that is
// wrong and what to do instead.
func TestWrongGraphsAreReported(t *testing.T) {
	vector := func(m *model) node { return m.variable("x", tensor.Float64, 4) }
	grad := func(loss node, by ...node) node {
		found := require.Value(gorgonia.Grad(loss, by...))(t)
		return found[0]
	}
	sum := func(x node) node { return must(gorgonia.Sum(x)) }
	norm := func(m *model, x node, name string, epsilon float64) {
		gain, bias := m.variable("gain"+name, tensor.Float64, 1, 4),
			m.variable("bias"+name, tensor.Float64, 1, 4)
		y, _, _, _, err := gorgonia.BatchNorm(x, gain, bias, 0.1, epsilon)
		must(y, err)
	}
	reported(t, map[string]wrongGraph{
		"a gradient penalty": {func(m *model) {
			x := vector(m)
			grad(sum(square(grad(sum(must(gorgonia.Exp(x))), x))), x)
		}, []string{everywhere, "exp", "a second gorgonia.Grad", "nn.Grad"}},
		"two losses of a hidden layer": {func(m *model) {
			x := vector(m)
			h := must(gorgonia.Exp(x))
			grad(sum(h), x)
			grad(sum(square(h)), x)
		}, []string{everywhere, "a second gorgonia.Grad",
			"one gorgonia.Grad of the sum of the losses"}},
		"a loss of a loss": {func(m *model) {
			x := vector(m)
			loss := sum(must(gorgonia.Exp(x)))
			grad(loss, x)
			grad(square(loss), x)
		}, []string{everywhere, "a second gorgonia.Grad"}},
		"a softmax and its logarithm": {func(m *model) {
			x := m.variable("x", tensor.Float64, 3, 4)
			gorgonia.Read(must(gorgonia.SoftMax(x)), new(gorgonia.Value))
			neg(must(gorgonia.LogSoftMax(x)))
		}, []string{everywhere, "Softmax{-1, false}()", "read 2 times",
			"nn.SoftMax and nn.LogSoftMax"}},
		"two batch norms": {func(m *model) {
			x := m.variable("x", tensor.Float64, 6, 4)
			norm(m, x, "1", 1e-5)
			norm(m, x, "2", 0.04)
		}, []string{everywhere, "batchnorm", "2 norms of one operand", "momentum or epsilon"}},
		"LogSumExp": {func(m *model) { must(gorgonia.LogSumExp(vector(m), 0)) },
			[]string{everywhere, "gorgonia.LogSumExp",
				"gorgonia.Log of gorgonia.Sum of gorgonia.Exp"}},
	})
}

// A graph that Gorgonia's machines alone compute wrongly is reported as such.
func TestFaultsOfTheTapeMachineAreReported(t *testing.T) {
	reported(t, map[string]wrongGraph{
		"a mean of images": {func(m *model) {
			mean(m.variable("x", tensor.Float64, 2, 3, 4, 5), 2, 3)
		}, []string{onTape, "axis 2 of shape (2, 3, 4, 5)"}},
		"a group of 264 elements": {func(m *model) {
			one := m.variable("gain", tensor.Float64, 1, 2, 1, 1)
			must(gorgonia.GroupNorm(m.variable("x", tensor.Float64, 1, 2, 11, 12), one, one, 1, 2,
				1e-5))
		}, []string{onTape, "GroupNorm", "264 and more elements"}},
		"a product with a reshaped variable": {func(m *model) {
			y := times(must(gorgonia.Ravel(m.variable("x", tensor.Float64, 3, 4))),
				gorgonia.NewConstant(2.0))
			gorgonia.Read(y, new(gorgonia.Value))
		}, []string{onTape, "⊙", "shares the memory of x"}},
		"a pool with uneven padding": {func(m *model) {
			must(gorgonia.MaxPool2D(m.variable("x", tensor.Float64, 1, 1, 4, 4), tensor.Shape{2, 2},
				[]int{0, 1, 0, 1}, []int{2, 2}))
		}, []string{onTape, "MaxPool", "padding of the other side"}},
	})
}

func reported(t *testing.T, graphs map[string]wrongGraph) {
	for name, test := range graphs {
		t.Run(name, func(t *testing.T) {
			m := &model{g: gorgonia.NewGraph()}
			test.build(m)
			said := noticesOf(t, m.g)
			require.That(t, len(said) == 1, "%d notices, want 1: %q", len(said), said)
			for _, part := range test.want {
				require.Check(t, strings.Contains(said[0], part), "the notice does not say %q: %s",
					part, said[0])
			}
		})
	}
}

// Where a second call of Grad is right, and where nn.Grad takes its place, New is silent.
func TestRightGradientsOfSeveralLossesAreSilent(t *testing.T) {
	sum := func(x node) node { return must(gorgonia.Sum(x)) }
	for name, grad := range map[string]func(node, ...node) (nodes, error){
		"gorgonia.Grad": gorgonia.Grad, "nn.Grad": nn.Grad,
	} {
		m := &model{g: gorgonia.NewGraph()}
		x := m.variable("x", tensor.Float64, 4)
		var first, second gorgonia.Value
		for loss, into := range map[node]*gorgonia.Value{
			sum(square(x)): &first, sum(must(gorgonia.Cube(x))): &second,
		} {
			by := require.Value(grad(loss, x))(t)
			gorgonia.Read(by[0], into)
		}
		said := noticesOf(t, m.g)
		require.Check(t, len(said) <= 0, "%s of two losses: %q", name, said)
	}
	m := &model{g: gorgonia.NewGraph()}
	x := m.variable("x", tensor.Float64, 4)
	h := must(gorgonia.Exp(x))
	for _, loss := range []node{sum(h), sum(square(h))} {
		require.NoError(t, require.Err(nn.Grad(loss, x)))
	}
	said := noticesOf(t, m.g)
	require.Check(t, len(said) <= 0, "nn.Grad of two losses of a hidden layer: %q", said)
}

// TestComparingMuchIsReportedOnce: of variables that stay on a device, and that nothing changes.
func TestComparingMuchIsReportedOnce(t *testing.T) {
	m := mlp(t, tensor.Float32)
	frozen := vm.WithFrozen(m.g.Inputs()...)
	for name, test := range map[string]struct {
		options []vm.Option
		want    int
	}{"compared": {nil, 1}, "frozen": {[]vm.Option{frozen}, 0}} {
		var said []string
		machine := machineOn(t, fake(t), m.g, append(test.options, vm.WithMuch(1),
			vm.Notice(func(text string) { said = append(said, text) }))...)
		for range 5 {
			run(t, machine)
		}
		require.Check(t, len(said) == test.want && (test.want <= 0 || strings.Contains(said[0],
			"pass the weights that stay as they are to vm.WithFrozen")), "%s: said %q", name, said)
		require.Report(t, machine.Close())
	}
}
