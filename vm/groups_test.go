package vm_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/vm"
)

// halves returns two groups of learnables, which are interleaved, with solvers of their own.
func halves(params nodes) []solver.Group {
	groups := []solver.Group{{Solver: &solver.AdamW{Rate: 0.05, WeightDecay: 0.1}},
		{Solver: &solver.RMSProp{Rate: 0.01, Momentum: 0.5}}}
	for i, n := range params {
		groups[i%2].Params = append(groups[i%2].Params, n)
	}
	return groups
}

// TestSeveralWithSolverAreGroups: machines with several solvers, one rank or several, train to the
// bits of autograd's Groups after runs.
func TestSeveralWithSolverAreGroups(t *testing.T) {
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices}, severalSolvers)
}

func severalSolvers(t *testing.T, k testenv.Kind) {
	for P := 1; P <= 2; P++ {
		if err := testranks.Join(together(t, k, P, ranked.group)); err != nil {
			t.Errorf("%d ranks: %v", P, err)
		}
	}
}

func (r ranked) group() error {
	apart, within := r.build(mlp), r.build(mlp)
	after := testranks.Must(solver.NewGroups(apart.params, halves(apart.params)...))
	options := []vm.Option{vm.WithDataParallel(r.Comm, autograd.WithBuckets(1, 60))}
	for _, g := range halves(within.params) {
		options = append(options, vm.WithSolver(g.Solver, g.Params...))
	}
	m := testranks.Must(vm.New(within.g, r.device, options...))
	dp := testranks.Must(autograd.New(r.Comm, apart.params, autograd.WithBuckets(1, 60)))
	machine, err := vm.New(apart.g, r.device)
	testranks.NoError(err)
	for range 4 {
		testranks.NoError(errors.Join(machine.RunAll(), dp.Step(after), m.RunAll()))
	}
	err = m.Pull(within.params...)
	if got, want := within.weights(r.t), apart.weights(r.t); !slices.EqualFunc(got, want,
		slices.Equal) {
		err = errors.Join(err, fmt.Errorf("%v, by autograd %v", got, want))
	}
	sameState(r.t, m.Solver(), after)
	return errors.Join(err, m.Close(), machine.Close(), dp.Close())
}

// TestGroupsOfAutogradInAPlan: one WithSolver takes solver.Groups, which a checkpoint has whole.
func TestGroupsOfAutogradInAPlan(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	onRanks(t, testenv.Hosts, 2, func(r ranked) error {
		train := func(before, steps int, load bool) ([][]float64, error) {
			m := r.build(mlp)
			groups, err := solver.NewGroups(m.params, halves(m.params)...)
			if err != nil {
				return nil, err
			}
			machine, err := vm.New(m.g, r.device, vm.WithSolver(groups, m.params...),
				vm.WithDataParallel(r.Comm))
			if err != nil {
				return nil, err
			}
			if load {
				err = machine.DataParallel().Load(dir, machine.Solver(), nil)
			}
			for range before {
				err = errors.Join(err, machine.RunAll())
			}
			if !load {
				err = errors.Join(err, machine.Pull(m.params...), machine.DataParallel().Save(dir,
					groups, nil))
			}
			for range steps {
				err = errors.Join(err, machine.RunAll())
			}
			err = errors.Join(err, machine.Close())
			return m.weights(r.t), err
		}
		want, err := train(3, 3, false)
		got, err2 := train(0, 3, true)
		if !slices.EqualFunc(got, want, slices.Equal) {
			err = errors.Join(err, fmt.Errorf("%v, without a stop %v", got, want))
		}
		return errors.Join(err, err2)
	})
}

// TestLearnablesAreUpdatedOnce: a learnable in two groups, twice in one, or as two nodes of one
// tensor is refused.
func TestLearnablesAreUpdatedOnce(t *testing.T) {
	m := product(t, vector(1, 2), vector(3, 4))
	v, w := m.params[0], m.params[1]
	tied := product(t, vector(1, 2), vector(3, 4))
	require.NoError(t, gorgonia.Let(tied.params[1], tied.params[0].Value()))
	sgd := func() solver.Solver { return &solver.SGD{Rate: 1} }
	one := sgd()
	for want, options := range map[string][]vm.Option{
		"the learnable v is given twice": {vm.WithSolver(sgd(), v, v)},
		"the learnable w is given twice: each step": {vm.WithSolver(sgd(), v, w),
			vm.WithSolver(&solver.Adam{Rate: 1}, w)},
		"its solver has another group, too": {vm.WithSolver(one, v), vm.WithSolver(one, w)},
		"solver: group 1: Groups: bad argument: it has no": {vm.WithSolver(sgd(), v),
			vm.WithSolver(sgd())},
		"learnables 1 is nil": {vm.WithSolver(sgd(), v, nil)},
	} {
		require.Fails(t, "vm.New", require.Err(vm.New(m.g, nil, options...)), backend.ErrArgument,
			want)
	}
	const one2 = "v and w are one tensor"
	require.Fails(t, "tied learnables", require.Err(vm.New(tied.g, nil, vm.WithSolver(sgd(),
		tied.params...))), backend.ErrArgument, one2)
	machine := solving(t, m, nil, sgd())
	defer machine.Close()
	run(t, machine)
	require.NoError(t, gorgonia.Let(w, v.Value()))
	for range 3 {
		require.Fails(t, "learnables that are tied later", machine.RunAll(), backend.ErrArgument,
			one2)
	}
}

// TestGroupsOfOneKindAreOneStep: learnables of two groups whose updates differ are joined by group,
// in one step each, wherever they are in the graph.
func TestGroupsOfOneKindAreOneStep(t *testing.T) {
	m := mlp(t, tensor.Float32)
	var options []vm.Option
	for _, g := range halves(m.params) {
		options = append(options, vm.WithSolver(g.Solver, g.Params...))
	}
	machine := machine(t, m.g, options...)
	updates := 0
	for line := range strings.Lines(machine.Plan().String()) {
		if strings.Contains(line, "update") {
			updates++
		}
	}
	if updates != 2 {
		t.Errorf("%d updates, want 2 in\n%v", updates, machine.Plan())
	}
}
