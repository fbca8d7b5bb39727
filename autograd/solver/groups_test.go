package solver

import (
	"errors"
	"fmt"
	"maps"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// vectors returns n parameters of a graph, of different lengths.
func vectors(n int) gorgonia.Nodes {
	g := gorgonia.NewGraph()
	var all gorgonia.Nodes
	for i := range n {
		all = append(all, gorgonia.NewVector(g, tensor.Float64, gorgonia.WithShape(i+1),
			gorgonia.WithName(fmt.Sprint("w", i)), gorgonia.WithInit(gorgonia.Ones())))
	}
	return all
}

// pairsOf returns the parameters with gradients, those of a step.
func pairsOf(t *testing.T, params gorgonia.Nodes, step int) []gorgonia.ValueGrad {
	t.Helper()
	var all []gorgonia.ValueGrad
	for i, n := range params {
		dw := tensor.New(tensor.WithShape(i+1), tensor.Of(tensor.Float64))
		for k := range dw.Float64s() {
			dw.Float64s()[k] = float64((step+i+k)%5 - 2)
		}
		all = append(all, operand{n.Value().(*tensor.Dense), dw})
	}
	return all
}

// threeGroups returns groups of five parameters, which are interleaved.
func threeGroups(t *testing.T, params gorgonia.Nodes) *Groups {
	t.Helper()
	g := require.Value(NewGroups(params,
		Group{&AdamW{Rate: 0.1, WeightDecay: 0.1}, gorgonia.Nodes{params[4], params[0]}},
		Group{&AdamW{Rate: 0.01}, gorgonia.Nodes{params[1], params[3]}},
		Group{&SGD{Rate: 1}, gorgonia.Nodes{params[2]}}))(t)
	return g
}

// Each group is updated as by its solver alone.
func TestGroupsAreUpdatedByTheirSolvers(t *testing.T) {
	params, apart := vectors(5), vectors(5)
	g := threeGroups(t, params)
	defer g.Close()
	a, b, c := &AdamW{Rate: 0.1, WeightDecay: 0.1}, &AdamW{Rate: 0.01}, &SGD{Rate: 1}
	for step := range 4 {
		require.NoError(t, g.Step(pairsOf(t, params, step)))
		of := pairsOf(t, apart, step)
		require.NoError(t, errors.Join(a.Step([]gorgonia.ValueGrad{of[0], of[4]}),
			b.Step([]gorgonia.ValueGrad{of[1], of[3]}), c.Step(of[2:3])))
	}
	for i := range params {
		got, want := params[i].Value().Data().([]float64), apart[i].Value().Data().([]float64)
		require.Slices(t, fmt.Sprint("parameter ", i), got, want)
	}
	if g.SetRate(0.5); a.Rate == 0.5 || g.groups[0].(*AdamW).Rate != 0.5 ||
		g.groups[2].(*SGD).Rate != 0.5 {
		t.Error("SetRate is for all groups")
	}
}

// A parameter has one group, and a solver one, too.
func TestGroupsRefuseWhatIsInNoneOrTwo(t *testing.T) {
	p := vectors(3)
	other := vectors(1)[0]
	s := &SGD{Rate: 1}
	for want, groups := range map[string][]Group{
		"parameter 1, w1, is in no group": {{&SGD{Rate: 1},
			gorgonia.Nodes{p[0], p[2]}}},
		"solver: group 1: Groups: bad argument: w0 is in group 0, too": {{&SGD{Rate: 1}, p},
			{&Adam{Rate: 1}, p[:1]}},
		"w1 is in it twice": {{&SGD{Rate: 1},
			gorgonia.Nodes{p[0], p[1], p[1]}}},
		"w0 is not among the parameters": {{&SGD{Rate: 1},
			gorgonia.Nodes{other}}},
		"its solver has another group, too":                      {{s, p[:1]}, {s, p[1:]}},
		"group 0: bad argument: solver.NewGroups: Solver is nil": {{nil, p}},
		"it has no parameters": {{&SGD{Rate: 1}, p},
			{&SGD{Rate: 1}, nil}},
	} {
		require.Fails(t, "NewGroups", require.Err(NewGroups(p, groups...)), backend.ErrArgument,
			want)
	}
	require.Fails(t, "a parameter twice",
		require.Err(NewGroups(gorgonia.Nodes{p[0], p[0]}, Group{s, p[:1]})), "w0 is twice")
	require.Fails(t, "groups of groups", require.Err(NewGroups(p, Group{&Groups{}, p})),
		backend.ErrUnsupported)
	g := require.Value(NewGroups(p, Group{s, p[:1]}, Group{&Adam{Rate: 1}, p[1:]}))(t)
	require.Fails(t, "a step of two of three parameters", g.Step(pairsOf(t, p, 0)[:2]),
		backend.ErrArgument)
}

// A group that refuses its parameters keeps the others from stepping.
func TestGroupsStepTogetherOrNotAtAll(t *testing.T) {
	p := vectors(2)
	g := require.Value(NewGroups(p, Group{&SGD{Rate: 1}, p[:1]}, Group{&Adam{}, p[1:]}))(t)
	if err := g.Step(pairsOf(t, p, 0)); !errors.Is(err, backend.ErrArgument) ||
		p[0].Value().Data().([]float64)[0] != 1 {
		t.Errorf("%v, and the first group's parameter is %v", err, p[0].Value())
	}
}

// A state that is not that of the groups is refused, and nothing has changed.
func TestGroupsRefuseStatesOfOthers(t *testing.T) {
	params := vectors(5)
	g := threeGroups(t, params)
	require.NoError(t, g.Step(pairsOf(t, params, 0)))
	state := require.Value(g.State())(t)
	for want, damage := range map[string]func(map[string]backend.Buffer){
		"the state has group.3.adam.m.0": func(s map[string]backend.Buffer) {
			s["group.3.adam.m.0"] = s["group.0.adam.m.0"]
		},
		"the state has group.2.adam.m.0": func(s map[string]backend.Buffer) {
			s["group.2.adam.m.0"] = s["group.0.adam.m.0"]
		},
		"solver: group 0: Groups: bad argument: " +
			"its state is of 1 parameters, and it has 2": func(s map[string]backend.Buffer) {
			delete(s, "group.0.adam.m.1")
			delete(s, "group.0.adam.v.1")
		},
	} {
		damaged := maps.Clone(state)
		damage(damaged)
		require.Fails(t, "SetState", g.SetState(damaged), backend.ErrArgument, want)
	}
	require.NoError(t, g.SetState(state))
}

// RMSProp keeps a buffer for momentum or none, from the first step on: the other state is not
// dropped.
func TestRMSPropMomentumIsOnOrOffFromTheBeginning(t *testing.T) {
	params := vectors(2)
	with := &RMSProp{Rate: 0.1, Momentum: 0.9}
	require.NoError(t, with.Step(pairsOf(t, params, 0)))
	state := require.Value(with.State())(t)
	require.Fails(t, "a state with momentum for a solver without", new(RMSProp).SetState(state),
		backend.ErrArgument, "rmsprop.momentum. for 2 parameters")
	f := require.Value(Fuse(with, nil))(t)
	with.Momentum = 0
	require.Fails(t, "momentum that ends", with.Step(pairsOf(t, params, 1)), backend.ErrArgument)
	require.Fails(t, "momentum that ends in a machine", require.Err(f.Next()), backend.ErrArgument)
}

// Parameters that share memory are not updated twice.
func TestSolversRefuseOneParameterTwice(t *testing.T) {
	for name, newSolver := range solvers {
		p := vectors(1)
		err := newSolver().Step(append(pairsOf(t, p, 0), pairsOf(t, p, 0)...))
		require.Fails(t, name, err, backend.ErrArgument, "parameters 0 and 1 are one tensor")
	}
}
