package vm_test

import (
	"errors"
	"fmt"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// TestAnOptionOfWhichTheLastWouldCountIsGivenOnce: New says so for each, and names it.
func TestAnOptionOfWhichTheLastWouldCountIsGivenOnce(t *testing.T) {
	with := func(o autograd.Option) vm.Option {
		return vm.WithDataParallel(autograd.Solo(), o, o)
	}
	same := func(c backend.Communicator) (backend.Communicator, error) { return c, nil }
	for name, o := range map[string][]vm.Option{
		"Accumulate":      {vm.Accumulate(2), vm.Accumulate(1)},
		"WithTree":        {vm.WithTree(2), vm.WithTree(4)},
		"ClipNorm":        {vm.ClipNorm(1), vm.ClipNorm(2)},
		"WithMemory":      {vm.WithMemory(1 << 20), vm.WithMemory(1 << 30)},
		"WithLossTiles":   {vm.WithLossTiles(1), vm.WithLossTiles(1)},
		"WithPrecision":   {vm.WithPrecision(vm.BF16), vm.WithPrecision(vm.F32)},
		"WithShards":      {vm.WithShards(vm.SolverState), vm.WithShards(0)},
		"WithCompression": {with(autograd.WithCompression(same))},
		"WithRandom":      {with(autograd.WithRandom(nn.NewRandom(1)))},
		"WithParts":       {with(autograd.WithParts(autograd.Solo(), nil))},
	} {
		x, _, w, _ := graphOf(1, tensor.New(tensor.WithBacking([]float64{0, 0})))
		m, err := vm.New(x.Graph(), nil, append(o, vm.WithSolver(&solver.SGD{Rate: 1}, w))...)
		require.Fails(t, name, err, name, "given twice")
		if err == nil {
			m.Close()
		}
	}
	for name, o := range map[string]func(...node) autograd.Option{
		"WithEarly": autograd.WithEarly, "WithApart": autograd.WithApart,
	} {
		x, _, w, _ := graphOf(1, tensor.New(tensor.WithBacking([]float64{0, 0})))
		_, err := vm.New(x.Graph(), nil, vm.WithSolver(&solver.SGD{Rate: 1}, w),
			vm.WithDataParallel(autograd.Solo(), o(x)))
		require.Fails(t, name, err, "x is no parameter")
	}
}

// TestRanksWithOtherSettingsAreFound: in New, and by Check if a rank sets another rate later.
func TestRanksWithOtherSettingsAreFound(t *testing.T) {
	as := training{solver: solvers["sgd"], build: func(t testing.TB, _ tensor.Dtype) *model {
		return bounded["mlp"](t, nil)
	}}
	rated := func(rate float64) solver.Solver {
		return &solver.Custom{Name: "mine", Rate: rate, Update: func(u *solver.Update) {
			u.SetParam(u.Do(fuse.Sub, u.Param(), u.With(fuse.Mul, u.Gradient(), u.Rate())))
		}}
	}
	onRanks(t, testenv.Hosts, 2, func(r ranked) error {
		_, _, err := r.start(as, vm.WithPrecision([]vm.Precision{vm.BF16, vm.F32}[r.Comm.Rank()]))
		require.Fails(t, "another precision", err, "the precision is")
		own := as
		own.solver = func() solver.Solver { return rated(float64(r.Comm.Rank()) + 1) }
		_, _, err = r.start(own)
		require.Fails(t, "a custom solver", err, `"Rate":1`)
		for _, stage := range append(stages, 0) {
			_, m, err := r.start(as, vm.WithShards(stage))
			testranks.NoError(err)
			testranks.NoError(m.DataParallel().Check())
			if r.Comm.Rank() == 1 {
				m.Solver().SetRate(7)
			}
			err = m.DataParallel().Check()
			require.Fails(t, fmt.Sprintf("stage %b", stage), err, "a setting of the solver")
			testranks.NoError(m.Close())
		}
		return nil
	})
}

// TestASolverWithStateOfOtherLearnablesIsRefused: it knows them by their order alone.
func TestASolverWithStateOfOtherLearnablesIsRefused(t *testing.T) {
	build := func(names ...string) nodes {
		g := gorgonia.NewGraph()
		var all, squares nodes
		for _, name := range names {
			w := gorgonia.NewVector(g, tensor.Float64, gorgonia.WithName(name),
				gorgonia.WithShape(2), gorgonia.WithInit(gorgonia.Ones()))
			all, squares = append(all, w), append(squares, gorgonia.Must(gorgonia.Square(w)))
		}
		loss := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Add(squares[0], squares[1]))))
		require.NoError(t, require.Err(gorgonia.Grad(loss, all...)))
		return all
	}
	s := &solver.Adam{Rate: 1}
	train := func(names ...string) error {
		learnables := build(names...)
		m, err := vm.New(learnables[0].Graph(), nil, vm.WithSolver(s, learnables...))
		if err != nil {
			return err
		}
		return errors.Join(m.RunAll(), m.Close())
	}
	require.Report(t, errors.Join(train("a", "b"), train("a", "b")))
	for _, names := range [][]string{{"b", "a"}, {"a", "c"}} {
		err := train(names...)
		require.Fails(t, fmt.Sprintf("learnables %v", names), err, "the state of a, b")
	}
	require.NoError(t, errors.Join(s.Close(), train("b", "a")))
}
