package vm_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// treeSamples is how many samples a micro-batch of these tests has.
const treeSamples = 4

// treeModel has what depends on a batch beside its gradients: a batch norm, a dropout and a loss.
type treeModel struct {
	model
	x, y   node
	norm   *gorgonia.BatchNormOp
	random *nn.Random
}

func newTreeModel(t testing.TB, dt tensor.Dtype) *treeModel {
	m := &treeModel{model: model{g: gorgonia.NewGraph()}, random: nn.NewRandom(5)}
	m.x, m.y = m.variable("x", dt, treeSamples, 6), m.variable("y", dt, treeSamples, 3)
	w0, gain, bias, w1 := m.variable("w0", dt, 6, 5), m.variable("gain", dt, 1, 5),
		m.variable("bias", dt, 1, 5), m.variable("w1", dt, 5, 3)
	m.params = nodes{w0, gain, bias, w1}
	h, _, _, norm, err := gorgonia.BatchNorm(mul(m.x, w0), gain, bias, 0.25, 1e-3)
	m.norm = norm
	h = must(nn.Dropout(0.25, m.random, tanh(must(h, err))))
	m.grad(t, mean(square(sub(mul(h, w1), m.y))))
	return m
}

// feed gives the model micro-batch i of a step: numbers whose sums depend on the order.
func (m *treeModel) feed(step, i int) {
	m.random.Seek(uint64(step), i*treeSamples)
	for _, n := range []node{m.x, m.y} {
		x, _ := n.Value().(*tensor.Dense)
		for k := range x.Len() {
			set(x, k, math.Sin(float64(1+k+37*i+101*step))*math.Exp2(float64((k+i)%7-3)))
		}
	}
}

// trained is what is left of a training: bits.
type trained struct {
	weights, averages [][]float64
	norm, loss        float64
}

func (a trained) equal(b trained) bool {
	same := func(x, y [][]float64) bool { return slices.EqualFunc(x, y, slices.Equal) }
	return same(a.weights, b.weights) && same(a.averages, b.averages) && a.norm == b.norm &&
		a.loss == b.loss
}

// train trains for some steps of n micro-batches of all ranks, of which this one runs a share.
func (m *treeModel) train(r ranked, steps, n int, options ...vm.Option) (trained, error) {
	first, share, err := autograd.TreeShare(n, r.Comm.Rank(), r.Comm.Size())
	if err != nil {
		return trained{}, err
	}
	machine, err := vm.New(m.g, r.device, append(options, vm.WithSolver(&solver.Adam{Rate: 0.05},
		m.params...), vm.ClipNorm(0.5))...)
	if err != nil {
		return trained{}, err
	}
	var result trained
	for step := range steps {
		var losses []float64
		for i := range share {
			m.feed(step, first+i)
			if err := machine.RunAll(); err != nil {
				return trained{}, errors.Join(err, machine.Close())
			}
			losses = append(losses, floats(r.t, m.loss)[0])
		}
		if result.loss, err = autograd.TreeMean(r.Comm, losses); err != nil {
			return trained{}, errors.Join(err, machine.Close())
		}
	}
	result.norm = machine.Norm()
	err = errors.Join(machine.Pull(m.params...), machine.Close())
	mean, variance := m.norm.Stats()
	result.weights, result.averages = m.weights(r.t), [][]float64{floats(r.t, mean),
		floats(r.t, variance)}
	return result, err
}

// treeModel makes the model of a rank.
func (r ranked) treeModel(dt tensor.Dtype) *treeModel {
	r.lock.Lock()
	defer r.lock.Unlock()
	return newTreeModel(r.t, dt)
}

// trainTree trains on so many ranks, which are to end alike, with options.
func trainTree(t *testing.T, k testenv.Kind, P int, dt tensor.Dtype, steps, n int,
	options func(r ranked) []vm.Option) trained {
	t.Helper()
	results := make([]trained, P)
	onRanks(t, k, P, func(r ranked) (err error) {
		results[r.Comm.Rank()], err = r.treeModel(dt).train(r, steps, n, options(r)...)
		return err
	})
	for r := range results {
		require.Check(t, results[r].equal(results[0]), "%v: rank %d of %d has %v, rank 0 %v", dt, r,
			P, results[r], results[0])
	}
	return results[0]
}

// treeAlone returns the options of a tree of n without WithDataParallel.
func treeAlone(n int) func(ranked) []vm.Option {
	return func(ranked) []vm.Option { return []vm.Option{vm.WithTree(n)} }
}

// treeOfRanks returns those of ranks.
func treeOfRanks(n int) func(ranked) []vm.Option {
	return func(r ranked) []vm.Option {
		return []vm.Option{vm.WithDataParallel(r.Comm, autograd.WithBuckets(60, 100)),
			vm.WithTree(n)}
	}
}

// TestTree: weights, norm, loss and the averages of a batch norm are bitwise identical on any
// number of ranks, and with and without a communicator, and those of sums in rank order are others.
func TestTree(t *testing.T) {
	const n, steps = 8, 3
	ranks := []int{1, 2, 3, 4, 5}
	if full() {
		ranks = append(ranks, 6, 7, 8)
	}
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		alone := trainTree(t, testenv.Hosts, 1, dt, steps, n, treeAlone(n))
		require.Check(t, alone.norm != 0 && alone.loss != 0, "%v: the norm is %v, the loss %v", dt,
			alone.norm, alone.loss)
		for _, P := range ranks {
			got := trainTree(t, testenv.Hosts, P, dt, steps, n, treeOfRanks(n))
			require.Check(t, got.equal(alone),
				"%v: %d ranks have\n%v, one without a communicator\n%v", dt, P, got, alone)
		}
		inOrder := trainTree(t, testenv.Hosts, 1, dt, steps, n, func(ranked) []vm.Option {
			return []vm.Option{vm.Accumulate(n)}
		})
		require.Check(t, !slices.EqualFunc(inOrder.weights, alone.weights, slices.Equal),
			"%v: sums in order give the same weights: this test shows nothing", dt)
	}
}

// TestTreeIsThatOfItsDefinition: steps in the plan have the bits of a solver's Step with gradients
// that the test adds pair by pair, with as many sums as there are levels.
func TestTreeIsThatOfItsDefinition(t *testing.T) {
	for _, test := range []struct{ P, n int }{{1, 1}, {1, 6}, {1, 8}, {2, 8}, {2, 2}, {3, 6},
		{3, 8}, {4, 4}, {4, 13}} {
		t.Run(fmt.Sprint(test.P, " ranks ", test.n), func(t *testing.T) {
			onRanks(t, testenv.Hosts, test.P, func(r ranked) error {
				return r.treeBothWays(test.n)
			})
		})
	}
}

func (r ranked) treeBothWays(n int) error {
	const steps = 3
	apart, within := r.treeModel(tensor.Float32), r.treeModel(tensor.Float32)
	got := testranks.Must(within.train(r, steps, n, vm.WithDataParallel(r.Comm,
		autograd.WithBuckets(1, 60)), vm.WithTree(n)))
	machine, err := vm.New(apart.g, r.device)
	testranks.NoError(err)
	adam, norm := &solver.Adam{Rate: 0.05}, 0.0
	for step := range steps {
		of := make([][][]float32, len(apart.params)) // gradients of micro-batches
		for i := range n {
			apart.feed(step, i)
			err = errors.Join(err, machine.RunAll())
			for p, g := range apart.grads() {
				of[p] = append(of[p], slices.Clone(g))
			}
		}
		for p, g := range apart.grads() {
			for k, sum := range pairwise(of[p]) {
				g[k] = sum * float32(1/float64(n))
			}
		}
		grads, clipped := gorgonia.NodesToValueGrads(apart.params), error(nil)
		norm, clipped = solver.ClipNorm(grads, 0.5)
		testranks.NoError(errors.Join(err, clipped, adam.Step(grads)))
	}
	if want := apart.weights(r.t); !slices.EqualFunc(got.weights, want, slices.Equal) {
		return fmt.Errorf("%v, want %v", got.weights, want)
	}
	if math.Abs(got.norm-norm) > 1e-12*norm { // one adds the squares in another order
		return fmt.Errorf("a norm of %v, want %v", got.norm, norm)
	}
	return machine.Close()
}

// pairwise adds vectors level by level.
func pairwise(all [][]float32) []float32 {
	for len(all) > 1 {
		var sums [][]float32
		for pair := range slices.Chunk(all, 2) {
			for _, right := range pair[1:] {
				for k, x := range right {
					pair[0][k] += x
				}
			}
			sums = append(sums, pair[0])
		}
		all = sums
	}
	return all[0]
}

// TestTreeOfRanksOnGPU: ranks on devices, whose graphs hold each kind of run and the exchange of
// several branches, have the bits of one rank; and those of the host, if its functions round alike.
func TestTreeOfRanksOnGPU(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		const n, steps = 7, 4
		want := trainTree(t, k, 1, tensor.Float32, steps, n, treeAlone(n))
		for P := 1; P <= 3; P++ {
			got := trainTree(t, k, P, tensor.Float32, steps, n, treeOfRanks(n))
			require.Check(t, got.equal(want), "%d ranks have\n%v, one without a communicator\n%v",
				P, got, want)
		}
		if k.OnGPU() {
			return // functions round differently there
		}
		host := trainTree(t, testenv.Hosts, 1, tensor.Float32, steps, n, treeAlone(n))
		require.Check(t, host.equal(want), "the host has\n%v, a device\n%v", host, want)
	})
}

func TestTreeRefused(t *testing.T) {
	onRanks(t, testenv.Hosts, 3, func(r ranked) error {
		data := vm.WithDataParallel(r.Comm)
		for _, test := range []struct {
			want    string
			is      error
			options []vm.Option
		}{
			{"2 micro-batches for rank", backend.ErrArgument, []vm.Option{data, vm.WithTree(2)}},
			{"0 micro-batches", backend.ErrArgument, []vm.Option{data, vm.WithTree(0)}},
			{"Accumulate", backend.ErrArgument, []vm.Option{data, vm.WithTree(3),
				vm.Accumulate(1)}},
			{"WithCompression", backend.ErrArgument, []vm.Option{vm.WithTree(3),
				vm.WithDataParallel(r.Comm, autograd.WithCompression(half.Wrap(backend.BF16)))}},
			{"use WithTree of this package", backend.ErrArgument,
				[]vm.Option{vm.WithDataParallel(r.Comm, autograd.WithTree(3))}},
			{"cannot add these operands in a tree", backend.ErrUnsupported,
				[]vm.Option{vm.WithTree(3), vm.WithDataParallel(noTree{r.Comm})}},
		} {
			m := r.build(mlp)
			options := append([]vm.Option{vm.WithSolver(&solver.SGD{Rate: 1}, m.params...)},
				test.options...)
			machine, err := vm.New(m.g, nil, options...)
			if err == nil {
				return errors.Join(fmt.Errorf("no error, want %q", test.want), machine.Close())
			}
			if !errors.Is(err, test.is) || !strings.Contains(err.Error(), test.want) {
				return fmt.Errorf("%w, want %q", err, test.want)
			}
		}
		return nil
	})
}

// noTree is a communicator that does not add in a tree.
type noTree struct{ backend.Communicator }

func (c noTree) Capabilities() backend.Capabilities {
	caps := c.Communicator.Capabilities()
	caps.Tree = []backend.DType{backend.F64}
	return caps
}
