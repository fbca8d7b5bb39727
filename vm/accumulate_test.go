package vm_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/vm"
)

// shift gives the variables that are not learnables other values, those of micro-batch i.
func (m *model) shift(i int) {
	for _, n := range m.g.Inputs() {
		if v, ok := n.Value().(*tensor.Dense); ok && !slices.Contains(m.params, n) {
			data, _ := v.Data().([]float32)
			for k := range data {
				data[k] += 0.125 * float32((i+k)%5)
			}
		}
	}
}

// TestAccumulateRaced: steps of several micro-batches have the bits of a Sync of gradients that the
// test adds up, with and without other ranks.
func TestAccumulateRaced(t *testing.T) {
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices},
		func(t *testing.T, k testenv.Kind) {
			for P := 1; P <= 3; P++ {
				for name, build := range parallelModels {
					t.Run(fmt.Sprint(P, " ", name), func(t *testing.T) {
						accumulates(t, k, P, build)
					})
				}
			}
		})
}

func accumulates(t *testing.T, k testenv.Kind, P int, build func(testing.TB, tensor.Dtype) *model) {
	t.Helper()
	require.Report(t, testranks.Join(together(t, k, P, func(r ranked) error {
		return r.accumulate(build)
	})))
}

func (r ranked) accumulate(build func(testing.TB, tensor.Dtype) *model) error {
	const steps, micro = 4, 3
	apart, within := r.build(build), r.build(build)
	after, inside := solvers["adam"](), solvers["adam"]()
	options := []vm.Option{vm.WithSolver(inside, within.params...), vm.Accumulate(micro)}
	if r.Comm.Size() > 1 {
		options = append(options, vm.WithDataParallel(r.Comm, autograd.WithBuckets(1, 60)))
	}
	m, err := vm.New(within.g, r.device, options...)
	testranks.NoError(err)
	dp := testranks.Must(autograd.New(r.Comm, apart.params, autograd.WithBuckets(1, 60)))
	machine, err := vm.New(apart.g, r.device)
	testranks.NoError(err)
	for range steps {
		sums := make([][]float32, len(apart.params))
		for i := range micro {
			apart.shift(i)
			within.shift(i)
			err = errors.Join(err, machine.RunAll(), m.RunAll())
			for p, g := range apart.grads() {
				sums[p] = append(sums[p], make([]float32, len(g)-len(sums[p]))...)
				for k := range g {
					sums[p][k] += g[k]
				}
			}
		}
		for p, g := range apart.grads() {
			copy(g, sums[p])
		}
		err = errors.Join(err, dp.Step(after))
		testranks.NoError(err)
	}
	err = errors.Join(m.Pull(within.params...), m.Close(), machine.Close(), dp.Close())
	if got, want := within.weights(r.t), apart.weights(r.t); !slices.EqualFunc(got, want,
		slices.Equal) {
		err = errors.Join(err, fmt.Errorf("%v, by Sync %v", got, want))
	}
	sameState(r.t, inside, after)
	return err
}

// grads returns the memory of the gradients that a machine without a solver has left.
func (m *model) grads() (all [][]float32) {
	for _, p := range m.params {
		g, _ := p.Grad()
		memory, _, _ := residence.Floats(g)
		all = append(all, backend.View[float32](memory))
	}
	return all
}

// TestAccumulateClippedRaced: the norm is the norm of the sum, one for each step.
func TestAccumulateClippedRaced(t *testing.T) {
	for where, device := range devices {
		m := product(t, vector(1, 2), vector(3, 4)) // each gradient is the other vector
		still := &solver.SGD{}
		still.SetRate(0)
		machine := solving(t, m, device(t), still, vm.Accumulate(2), vm.ClipNorm(100))
		for i, want := range []float64{0, 2, 2, 2} { // of sqrt(30)
			run(t, machine)
			if got := machine.Norm(); got*got < 30*want*want-1e-3 || got*got > 30*want*want+1e-3 {
				t.Errorf("%s: after run %d the norm is %v, want %v sqrt(30)", where, i, got, want)
			}
		}
		require.Report(t, machine.Close())
	}
}

// TestAccumulateRefusedRaced: settings that cannot be.
func TestAccumulateRefusedRaced(t *testing.T) {
	m := mlp(t, tensor.Float32)
	for want, options := range map[string][]vm.Option{
		"0 micro-batches": {vm.WithSolver(&solver.SGD{Rate: 1}, m.params...), vm.Accumulate(0)},
		"WithSolver":      {vm.Accumulate(2)},
	} {
		require.Fails(t, "vm.New", require.Err(vm.New(m.g, nil, options...)), backend.ErrArgument,
			want)
	}
}

// TestAccumulateAgainAfterAnErrorRaced: what was added up before an error does not count.
func TestAccumulateAgainAfterAnErrorRaced(t *testing.T) {
	op := &counter{}
	m := product(t, vector(1, 2), vector(3, 4))
	must(gorgonia.ApplyOp(op, m.params[0]))
	machine := solving(t, m, nil, &solver.SGD{Rate: 1}, vm.Accumulate(2))
	defer machine.Close()
	run(t, machine)
	op.err = errors.New("no more")
	if err := machine.RunAll(); !errors.Is(err, op.err) {
		t.Fatal(err)
	}
	op.err = nil
	run(t, machine)
	got := m.weights(t)[0]
	require.Check(t, slices.Equal(got, []float64{1, 2}), "after a first micro-batch %v", got)
	run(t, machine)
	if got := m.weights(t)[0]; !slices.Equal(got, []float64{-5, -6}) {
		t.Errorf("after a step %v", got)
	}
}
