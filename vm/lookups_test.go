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
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// table is a model in small integers whose gradients are the same in each step: of a table that is
// looked up and multiplies something else, and of one that is only looked up, if alone.
func table(vocabulary, rows, rank int, alone bool) func(testing.TB, tensor.Dtype) *model {
	return func(t testing.TB, dt tensor.Dtype) *model {
		m := &model{g: gorgonia.NewGraph()}
		whole := func(name string, modulus int, shape ...int) node {
			v := tensor.New(tensor.Of(dt), tensor.WithShape(shape...))
			data := v.Data().([]float32)
			for i := range data {
				data[i] = float32(i*7%modulus - modulus/2)
			}
			return gorgonia.NewTensor(m.g, dt, len(shape), gorgonia.WithShape(shape...),
				gorgonia.WithName(name), gorgonia.WithValue(v))
		}
		index := func(name string, step int) node {
			v := tensor.New(tensor.Of(tensor.Int), tensor.WithShape(rows))
			for i := range rows {
				v.Data().([]int)[i] = (i/2*step + rank) % vocabulary // each twice
			}
			return gorgonia.NewVector(m.g, tensor.Int, gorgonia.WithShape(rows),
				gorgonia.WithName(name), gorgonia.WithValue(v))
		}
		const width = 8192
		sum := func(name string, x node) node {
			return must(gorgonia.Sum(times(x, whole(name, 7, x.Shape()...))))
		}
		tied, w := whole("tied", 5, vocabulary, width), whole("w", 3, 1, width)
		m.params = nodes{tied, w}
		x := must(gorgonia.BroadcastAdd(must(nn.Embedding(tied, index("i", 3))), w, nil, []byte{0}))
		if alone {
			other := whole("other", 5, vocabulary, width)
			m.params = append(m.params, other)
			x = add(x, must(nn.Embedding(other, index("k", 5))))
		}
		y := must(nn.BatchedMatMul(false, true, whole("h", 3, rows, width), tied))
		m.grad(t, add(sum("a", x), sum("b", y)))
		return m
	}
}

// TestLookupsAreExchangedAsRows: where sums are exact, parameters have the bits of a training by
// all-reduces of whole gradients, with as many rows as there may be, and with one more.
func TestLookupsAreExchangedAsRows(t *testing.T) {
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices, testenv.Staged}, lookupsAsRows)
}

func lookupsAsRows(t *testing.T, k testenv.Kind) {
	exact := func() solver.Solver { return &solver.SGD{Rate: 0.25} }
	for P := 1; P <= 3; P++ {
		for _, rows := range []int{16, 17} {
			for _, options := range [][]autograd.Option{nil, {autograd.WithSum()}} {
				if P == 3 && (options == nil || k == testenv.GPUs) {
					continue // thirds are rounded
				}
				if !full() && (P == 1 || k != testenv.Hosts && (rows > 16 || options != nil)) {
					continue
				}
				t.Run(fmt.Sprint(P, " ", rows, " ", len(options)), func(t *testing.T) {
					weights := make([][][]float64, P)
					onRanks(t, k, P, func(r ranked) (err error) {
						me := r.Comm.Rank()
						weights[me], err = r.trainBothWays(exact, table(16*P, rows, me, true),
							options)
						return err
					})
					same(t, weights)
				})
			}
		}
	}
}

// looking is a training whose ranks exchange rows, or not, and how many rows more rank 1 looks up.
type looking struct {
	training
	rows  bool
	more  int
	near  float64 // which parameters of whole gradients are, 0 for bitwise identical
	plain bool    // gradients are whole in any case
}

// lookings are what else a training may have.
var lookings = map[string]looking{
	"adam":    {training: training{solver: solvers["adam"]}, rows: true},
	"clipped": {training: training{options: given(vm.ClipNorm(3))}, rows: true},
	"bf16":    {training: training{options: given(vm.WithPrecision(vm.BF16))}, rows: true},
	"averages": {training: training{solver: func() solver.Solver {
		return &solver.EMA{Solver: &solver.Momentum{Rate: 0.5, Momentum: 0.5}, Decay: 0.5}
	}}, rows: true},
	"tiles": {training: training{options: given(vm.WithLossTiles(2)),
		build: func(t testing.TB, _ tensor.Dtype) *model {
			return gpt{vocabulary: 2048, batch: 2, context: 10, width: 128, heads: 2,
				layers: 1}.model(t)
		}}, rows: true, near: 1e-5},
	"16 bits": {training: training{data: func(*model) []autograd.Option {
		return []autograd.Option{autograd.WithCompression(half.Wrap(backend.BF16))}
	}}, rows: true, near: 0.125}, // the whole ones that they are compared with have 32
	"another shape": {training: training{build: reshapedTable}, rows: true},
	"micro-batches": {training: training{micros: 2}},
	"shards": {training: training{options: given(vm.WithShards(vm.SolverState))},
		plain: true},
	"a tree":           {training: training{options: given(vm.WithTree(2))}, plain: true},
	"batches differ":   {more: 1},
	"too many of them": {more: 3},
}

// reshapedTable has the rows of a table along two axes.
func reshapedTable(t testing.TB, dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	w := m.variable("w", dt, 2, 17, 8192)
	m.params = nodes{w}
	i := gorgonia.NewVector(m.g, tensor.Int, gorgonia.WithShape(3), gorgonia.WithName("i"),
		gorgonia.WithValue(tensor.New(tensor.WithBacking([]int{33, 2, 33}))))
	rows := must(nn.Embedding(reshape(w, tensor.Shape{34, 8192}), i))
	m.grad(t, sum(rows))
	return m
}

func given(options ...vm.Option) func(*model) []vm.Option {
	return func(*model) []vm.Option { return options }
}

// TestLookupsWithSettings is TestLookupsAreExchangedAsRows with what else a training may have.
// Gradients are exchanged whole where several runs add to them or a rank has shards, and where
// ranks look up different numbers of rows.
func TestLookupsWithSettings(t *testing.T) {
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices},
		func(t *testing.T, k testenv.Kind) {
			for name, as := range lookings {
				if k == testenv.Devices && (!as.rows || as.near > 0) && !full() {
					continue
				}
				t.Run(name, func(t *testing.T) {
					onRanks(t, k, 2, func(r ranked) error {
						return r.looksLikeWhole(as)
					})
				})
			}
		})
}

// keeper is a compression that changes nothing, and has state: so ranks exchange whole gradients.
type keeper struct{ backend.Base }

func (keeper) State() (map[string]backend.Buffer, error) { return nil, nil }
func (keeper) SetState(map[string]backend.Buffer) error  { return nil }

// looksLikeWhole compares parameters with those of an exchange of whole gradients.
func (r ranked) looksLikeWhole(as looking) error {
	me := r.Comm.Rank()
	if as.build == nil {
		as.build = table(34, 16+as.more*me, me, true)
	}
	if as.solver == nil {
		as.solver = func() solver.Solver { return &solver.SGD{Rate: 0.25} }
	}
	keeping := func(c backend.Communicator) (backend.Communicator, error) {
		return keeper{backend.Wrap(c)}, nil
	}
	var weights [2][][]float64
	for i := range weights {
		if i == 1 && !as.plain {
			as.data = func(*model) []autograd.Option {
				return []autograd.Option{autograd.WithCompression(keeping)}
			}
		}
		m, machine, err := r.start(as.training)
		testranks.NoError(err)
		plan := machine.Plan().String()
		err = errors.Join(as.steps(m, machine, 0, 4), machine.DataParallel().Check(),
			machine.Close())
		if got := strings.Contains(plan, "rows of all ranks"); got != (as.rows && i == 0) {
			err = errors.Join(err, fmt.Errorf("rows are on the way: %v\n%s", got, plan))
		}
		testranks.NoError(err)
		weights[i] = m.weights(r.t)
	}
	if !slices.EqualFunc(weights[0], weights[1], func(x, y []float64) bool {
		return slices.EqualFunc(x, y, func(x, y float64) bool { return math.Abs(x-y) <= as.near })
	}) {
		return fmt.Errorf("parameters differ by %g from those of whole gradients",
			apart(weights[0], weights[1]))
	}
	return nil
}

// summing counts the elements of all-reduces.
type summing struct {
	backend.Base
	elements int
}

func (s *summing) Start(q backend.Queue, c backend.Collective, dst, src backend.Buffer) (
	backend.Work, error) {
	if c.Kind == backend.AllReduce {
		s.elements += dst.Len()
	}
	return s.Base.Start(q, c, dst, src)
}

// TestTablesThatAreOnlyLookedUpAreInNoAllReduce: nor where a bucket had room for all learnables.
func TestTablesThatAreOnlyLookedUpAreInNoAllReduce(t *testing.T) {
	onRanks(t, testenv.Hosts, 2, func(r ranked) error {
		comm := &summing{Base: backend.Wrap(r.Comm)}
		r.Comm = comm
		as := training{build: table(32, 16, r.Comm.Rank(), true), solver: solvers["sgd"],
			data: func(*model) []autograd.Option {
				return []autograd.Option{autograd.WithBuckets(1<<30, 1<<30)}
			}}
		m, machine, err := r.start(as)
		testranks.NoError(err)
		before := comm.elements
		err = errors.Join(as.steps(m, machine, 0, 1), machine.Close())
		if got, want := comm.elements-before, (32+1)*8192; got != want && err == nil {
			err = fmt.Errorf("%d elements are all-reduced in a step, want %d", got, want)
		}
		return err
	})
}
