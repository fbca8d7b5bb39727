package vm_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
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

// syncBatch is how many samples all ranks have together.
const (
	syncBatch = 8
	syncSteps = 6
)

// syncModel has two batch norms, of images and of vectors, whose inputs have gradients.
type syncModel struct {
	model
	x, y  node
	norms []*gorgonia.BatchNormOp
}

func newSyncModel(t testing.TB, dt tensor.Dtype, samples int) *syncModel {
	m := &syncModel{model: model{g: gorgonia.NewGraph()}}
	norm := func(x node, name string, shape ...int) node {
		gain, bias := m.variable("gain"+name, dt, shape...), m.variable("bias"+name, dt, shape...)
		m.params = append(m.params, gain, bias)
		y, _, _, op, err := gorgonia.BatchNorm(x, gain, bias, 0.25, 1e-3)
		m.norms = append(m.norms, op)
		return must(y, err)
	}
	m.x, m.y = m.variable("x", dt, samples, 2, 3, 3), m.variable("y", dt, samples, 4)
	filter, w := m.variable("filter", dt, 3, 2, 2, 2), m.variable("w", dt, 12, 4)
	m.params = nodes{filter, w}
	h := must(gorgonia.Conv2d(m.x, filter, tensor.Shape{2, 2}, []int{0, 0}, []int{1, 1},
		[]int{1, 1}))
	h = tanh(norm(h, "0", 1, 3, 1, 1))
	h = mul(reshape(h, tensor.Shape{samples, 12}), w)
	h = norm(h, "1", 1, 4)
	trained := m.params
	m.params = append(slices.Clone(trained), m.x) // whose gradient a layer before would get
	m.grad(t, mean(square(sub(h, m.y))))
	m.params = trained
	return m
}

// feed gives the model samples of a step, from number first on. Their mean is far from zero.
func (m *syncModel) feed(step, first int) {
	for _, n := range []node{m.x, m.y} {
		v := n.Value().(*tensor.Dense)
		size := v.Len() / v.Shape()[0]
		for i := range v.Len() {
			k := first*size + i + 31*step
			set(v, i, 100+float64(k*k%17)/4+float64(first+i/size))
		}
	}
}

// averages returns the running statistics of all norms.
func (m *syncModel) averages(t testing.TB) (all []float64) {
	for _, op := range m.norms {
		mean, variance := op.Stats()
		all = slices.Concat(all, floats(t, mean), floats(t, variance))
	}
	return all
}

// history is what a training leaves.
type history struct {
	losses            []float64 // of all ranks, by step
	gradients         []float64 // of x on this rank, by step
	weights, averages []float64
}

// of returns the part that a rank of P has of the gradients of one rank, whose loss is the mean of
// theirs.
func (h history) of(rank, P int) (all []float64) {
	size := len(h.gradients) / syncSteps
	for step := range slices.Chunk(h.gradients, size) {
		for _, g := range step[rank*size/P : (rank+1)*size/P] {
			all = append(all, g*float64(P))
		}
	}
	return all
}

// trainNormed trains with batch norms over all ranks, and returns what is left of it.
func (r ranked) trainNormed(dt tensor.Dtype, options ...vm.Option) (h history, err error) {
	P, rank := r.Comm.Size(), r.Comm.Rank()
	share := syncBatch / P
	r.lock.Lock()
	m := newSyncModel(r.t, dt, share)
	r.lock.Unlock()
	momentum := &solver.Momentum{Rate: 0.05, Momentum: 0.5}
	options = append(options, vm.WithSolver(momentum, m.params...),
		vm.WithDataParallel(r.Comm), vm.SyncBatchNorm())
	machine := testranks.Must(vm.New(m.g, r.device, options...))
	if text := machine.Plan().String(); r.device != nil && !strings.Contains(text, "host_ops=0") {
		return h, errors.Join(fmt.Errorf("a collective goes through the host: %s", text),
			machine.Close())
	}
	for step := range syncSteps {
		m.feed(step, rank*share)
		if err := machine.RunAll(); err != nil {
			return h, errors.Join(err, machine.Close())
		}
		loss := floats(r.t, m.loss)[0]
		testranks.NoError(autograd.Mean(r.Comm, &loss))
		h.losses = append(h.losses, loss)
		h.gradients = append(h.gradients, floats(r.t, gradient(r.t, m.x))...)
	}
	err = errors.Join(machine.Pull(m.params...), machine.Close())
	for _, w := range m.weights(r.t) {
		h.weights = append(h.weights, w...)
	}
	h.averages = m.averages(r.t)
	return h, err
}

// TestBatchNormOverAllRanks: with SyncBatchNorm, losses, gradients, weights and running statistics
// of a training on any number of ranks equal one rank's with the whole batch.
func TestBatchNormOverAllRanks(t *testing.T) {
	kinds := []testenv.Kind{testenv.Hosts, testenv.Devices, testenv.Staged}
	testenv.Each(t, kinds, func(t *testing.T, k testenv.Kind) { normsOverAllRanks(t, k, 1, 2, 4) })
}

func normsOverAllRanks(t *testing.T, k testenv.Kind, ranks ...int) {
	t.Helper()
	tolerances := map[tensor.Dtype]float64{tensor.Float64: 1e-12, tensor.Float32: 2e-4}
	for dt, tolerance := range tolerances {
		for _, micro := range []int{1, 2} { // runs of a step
			var want []history
			for _, P := range ranks {
				t.Run(fmt.Sprint(P, " ", dt, " ", micro), func(t *testing.T) {
					histories := make([]history, P)
					onRanks(t, k, P, func(r ranked) (err error) {
						histories[r.Comm.Rank()], err = r.trainNormed(dt, vm.Accumulate(micro))
						return err
					})
					if P == 1 {
						want = histories
					}
					asOneRank(t, histories, want[0], tolerance)
				})
			}
		}
	}
}

// asOneRank checks that ranks have trained as one rank has.
func asOneRank(t *testing.T, histories []history, want history, tolerance float64) {
	t.Helper()
	for rank, h := range histories {
		agreeing(t, "losses", h.losses, want.losses, tolerance)
		agreeing(t, "gradients", h.gradients, want.of(rank, len(histories)), tolerance)
		agreeing(t, "weights", h.weights, want.weights, tolerance)
		agreeing(t, "averages", h.averages, want.averages, tolerance)
		require.Check(t, slices.Equal(h.averages, histories[0].averages),
			"rank %d has the averages %v, rank 0 %v", rank, h.averages, histories[0].averages)
	}
}

// TestBatchNormOverAllRanksOfMachines is TestBatchNormOverAllRanks where collectives have phases
// inside and between machines.
func TestBatchNormOverAllRanksOfMachines(t *testing.T) {
	var lock sync.Mutex
	var want history
	err := testranks.Join(together(t, testenv.Hosts, 1, func(r ranked) (err error) {
		want, err = r.trainNormed(tensor.Float64)
		return err
	}))
	require.NoError(t, err)
	histories := make([]history, 4)
	err = testranks.Join(testranks.Run(4, connectMachines, func(r machineRank) (err error) {
		of := ranked{Rank: r.Rank, t: t, lock: &lock}
		histories[r.Comm.Rank()], err = of.trainNormed(tensor.Float64)
		return err
	}))
	require.NoError(t, err)
	asOneRank(t, histories, want, 1e-12)
}

// agreeing checks numbers up to a relative difference.
func agreeing(t *testing.T, what string, got, want []float64, tolerance float64) {
	t.Helper()
	require.That(t, len(got) == len(want) && len(got) != 0, "%s: %d numbers, want %d", what,
		len(got), len(want))
	for i := range got {
		if d := max(got[i]-want[i], want[i]-got[i]); !(d <= tolerance*max(1, want[i], -want[i])) {
			t.Fatalf("%s: number %d is %v, want %v", what, i, got[i], want[i])
		}
	}
}

// TestSyncBatchNormIsChecked: New refuses a batch norm over all ranks where it means nothing, or
// where ranks differ.
func TestSyncBatchNormIsChecked(t *testing.T) {
	option := func(m *model) vm.Option { return vm.WithSolver(&solver.SGD{Rate: 1}, m.params...) }
	onRanks(t, testenv.Hosts, 2, func(r ranked) error {
		build := func(samples int) *syncModel {
			r.lock.Lock()
			defer r.lock.Unlock()
			return newSyncModel(t, tensor.Float64, samples)
		}
		m, other := build(4), r.build(mlp)
		together := vm.WithDataParallel(r.Comm)
		for _, test := range []struct { // in one order on all ranks
			want    string
			g       *gorgonia.ExprGraph
			options []vm.Option
		}{
			{"use WithDataParallel", m.g, []vm.Option{option(&m.model)}},
			{"WithTree", m.g, []vm.Option{option(&m.model), together, vm.WithTree(2)}},
			{"in evaluation", m.g, []vm.Option{vm.Eval()}},
			{"has no gorgonia.BatchNorm", other.g, []vm.Option{option(other), together}},
		} {
			_, err := vm.New(test.g, nil, append(test.options, vm.SyncBatchNorm())...)
			if !errors.Is(err, backend.ErrArgument) || !strings.Contains(err.Error(), test.want) {
				return fmt.Errorf("%v, want %q", err, test.want)
			}
		}
		uneven := build(3 + r.Comm.Rank())
		_, err := vm.New(uneven.g, nil, option(&uneven.model), together, vm.SyncBatchNorm())
		if !errors.Is(err, backend.ErrMismatch) ||
			!strings.Contains(err.Error(), "samples on rank 0") {
			return fmt.Errorf("ranks with 3 and 4 samples: %v", err)
		}
		return nil
	})
}
