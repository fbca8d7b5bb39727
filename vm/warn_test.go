package vm_test

import (
	"errors"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
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
		machine, err := vm.New(m.g, nil, vm.Notice(func(text string) { said = append(said, text) }))
		if err != nil {
			t.Fatal(err)
		}
		machine.Close()
		switch {
		case start == 0 && len(said) > 0:
			t.Errorf("slices that are right: %q", said)
		case start > 0 && (len(said) != 1 || !strings.Contains(said[0], "T[255:259:1...]: it is merged") || !strings.Contains(said[0], "use nn.Slice or nn.Split")):
			t.Errorf("slices beyond 255: %q, want one report that names nn.Slice", said)
		}
	}
}

// A training in a process of a larger job, without WithDataParallel, is reported.
func TestTrainingAloneIsReported(t *testing.T) {
	for name, value := range map[string]string{"RANK": "1", "WORLD_SIZE": "4", "EURYALE_JOB": "test"} {
		t.Setenv(name, value)
	}
	var said []string
	m := mlp(t, tensor.Float32)
	machine(t, m.g, vm.Notice(func(text string) { said = append(said, text) }))
	if len(said) > 0 {
		t.Errorf("a machine that does not train said %q", said)
	}
	machine(t, m.g, vm.WithSolver(&autograd.SGD{Rate: 0.1}, m.params...), vm.Notice(func(text string) { said = append(said, text) }))
	if len(said) != 1 || !strings.Contains(said[0], "rank 1 of 4 trains on its own") {
		t.Errorf("said %q", said)
	}
}

// A variable with a gradient that no solver has is reported by name, unless something reads the
// gradient.
func TestAForgottenLearnableIsReported(t *testing.T) {
	for name, test := range map[string]struct {
		options func(m *model) []vm.Option
		said    bool
	}{
		"forgotten":   {func(m *model) []vm.Option { return nil }, true},
		"kept":        {func(m *model) []vm.Option { return []vm.Option{vm.Keep(m.params[1].Deriv())} }, false},
		"has another": {func(m *model) []vm.Option { return []vm.Option{vm.WithSolver(&autograd.Adam{Rate: 1}, m.params[1])} }, false},
		"is read": {func(m *model) []vm.Option {
			var g gorgonia.Value
			gorgonia.Read(m.params[1].Deriv(), &g)
			return nil
		}, false},
	} {
		var said []string
		m := product(t, vector(1, 2), vector(3, 4))
		options := append(test.options(m), vm.WithSolver(&autograd.SGD{Rate: 1}, m.params[0]),
			vm.Notice(func(text string) { said = append(said, text) }))
		run(t, machine(t, m.g, options...))
		if (len(said) > 0) != test.said || test.said && (len(said) > 1 ||
			!strings.Contains(said[0], "gradients of w, which no WithSolver has")) {
			t.Errorf("%s: said %q", name, said)
		}
	}
}

// Nodes that the graph gets after New are an error of RunAll, which names the last one: they would
// have no value.
func TestNodesAddedAfterNewAreAnError(t *testing.T) {
	for where, device := range devices {
		g, x, _, z := doubled()
		m, err := vm.New(g, device(t))
		if err := gorgonia.Let(x, vector(1, 2, 3)); err != nil {
			t.Fatal(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		run(t, m)
		late := must(gorgonia.Square(z))
		for range 3 {
			err := m.RunAll()
			if !errors.Is(err, backend.ErrArgument) ||
				!strings.Contains(err.Error(), late.String()) ||
				!strings.Contains(err.Error(), "before the first machine") {
				t.Errorf("%s: %v", where, err)
			}
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		run(t, machine(t, g))
		if late.Value() == nil {
			t.Errorf("%s: a machine made later has no value", where)
		}
	}
}

// A machine for evaluation may be made before the gradients, which it does not compute.
func TestEvalMayBeMadeBeforeGrad(t *testing.T) {
	g := gorgonia.NewGraph()
	x := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(2), gorgonia.WithName("x"),
		gorgonia.WithValue(vector(1, 2)))
	loss := must(gorgonia.Sum(must(gorgonia.Square(x))))
	evaluation := machine(t, g, vm.Eval())
	run(t, evaluation)
	if _, err := gorgonia.Grad(loss, x); err != nil {
		t.Fatal(err)
	}
	training := machine(t, g, vm.WithSolver(&autograd.SGD{Rate: 0.25}, x))
	for range 3 {
		run(t, evaluation)
		run(t, training)
	}
	must(gorgonia.Square(loss))
	if err := evaluation.RunAll(); !errors.Is(err, backend.ErrArgument) {
		t.Errorf("a node that is no gradient: %v", err)
	}
}
