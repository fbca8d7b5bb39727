package vm_test

import (
	"fmt"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// Messages about a variable without a name say that it has none, and its shape.
func TestMessagesSayThatAVariableHasNoName(t *testing.T) {
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithShape(2, 3))
	cost := sum(square(x))
	other := gorgonia.NewMatrix(gorgonia.NewGraph(), tensor.Float64, gorgonia.WithShape(2, 3))
	m := machine(t, g, vm.Keep(x))
	text := m.Plan().String()
	require.Check(t, !strings.Contains(text, "%!"), "the plan is\n%s", text)
	built := func(options ...vm.Option) error { _, err := vm.New(g, nil, options...); return err }
	solved := func(learnables ...node) error {
		return built(vm.WithSolver(&solver.SGD{Rate: 1}, learnables...))
	}
	errs := map[string]error{
		"no value":          m.RunAll(),
		"no gradient":       solved(x),
		"given twice":       solved(x, x),
		"of another graph":  solved(other),
		"pulled, of others": m.Pull(other),
		"kept, of others":   built(vm.Keep(other)),
	}
	require.NoError(t, require.Err(gorgonia.Grad(cost, x)))
	view := require.Value(tensor.New(tensor.WithShape(2, 6), tensor.Of(tensor.Float64)).Slice(nil,
		gorgonia.S(0, 6, 2)))(t)
	training := machine(t, g, vm.WithSolver(&solver.SGD{Rate: 1}, x))
	require.NoError(t, gorgonia.Let(x, view))
	for run := range 3 {
		errs[fmt.Sprint("a view in run ", run)] = training.RunAll()
	}
	for what, err := range errs {
		require.Check(t, err != nil && !strings.Contains(err.Error(), "%!") &&
			strings.Contains(err.Error(), "unnamed(2, 3)"), "%s: %v", what, err)
	}
}
