package vm_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/backend/tcp"
	"github.com/euryale-ml/euryale/internal/hierarchy"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/rendezvous"
	"github.com/euryale-ml/euryale/vm"
)

// stages are ZeRO's, of what ranks shard.
var stages = []vm.Shards{vm.SolverState, vm.SolverState | vm.Gradients,
	vm.SolverState | vm.Gradients | vm.Parameters}

// training is a way to train a model, on several ranks.
type training struct {
	solver  func() solver.Solver
	build   func(testing.TB, tensor.Dtype) *model
	data    func(m *model) []autograd.Option
	options func(m *model) []vm.Option // instead of the solver, nil for it
	micros  int                        // runs of a step, 0 for 1
}

// start makes a machine.
func (r ranked) start(as training, more ...vm.Option) (*model, *vm.Machine, error) {
	m := r.build(as.build)
	data := []autograd.Option{autograd.WithBuckets(1, 400)}
	if as.data != nil {
		data = append(data, as.data(m)...)
	}
	options := append(more, vm.WithDataParallel(r.Comm, data...))
	if as.options != nil {
		options = append(options, as.options(m)...)
	}
	if as.solver != nil {
		options = append(options, vm.WithSolver(as.solver(), m.params...))
	}
	if as.micros > 0 {
		options = append(options, vm.Accumulate(as.micros))
	}
	machine, err := vm.New(m.g, r.device, options...)
	return m, machine, err
}

// steps trains for some steps, from number first on.
func (as training) steps(m *model, machine *vm.Machine, first, n int) error {
	for step := range n {
		for micro := range max(1, as.micros) {
			m.shift(first + step + micro)
			if err := machine.RunAll(); err != nil {
				return err
			}
		}
	}
	return machine.Pull(m.params...)
}

// shardsLikeReplicas trains on replicas and on shards, and compares all bits of the learnables.
func (r ranked) shardsLikeReplicas(stage vm.Shards, as training, more ...vm.Option) error {
	const steps = 20
	want, replica, err := r.start(as)
	testranks.NoError(err)
	testranks.NoError(as.steps(want, replica, 0, steps))
	got, machine, err := r.start(as, append(more, vm.WithShards(stage))...)
	testranks.NoError(err)
	testranks.NoError(as.steps(got, machine, 0, steps))
	err = errors.Join(machine.DataParallel().Check(), replica.Close(), machine.Close())
	if got, want := got.weights(r.t), want.weights(r.t); !slices.EqualFunc(got, want,
		slices.Equal) {
		err = errors.Join(err, fmt.Errorf("%v, by replicas %v", got, want))
	}
	return err
}

// trainsInShards is shardsLikeReplicas on all of P ranks.
func trainsInShards(t *testing.T, k testenv.Kind, P int, as training) {
	t.Helper()
	for i, stage := range stages {
		if !full() && i != P%len(stages) {
			continue
		}
		if k == testenv.Staged && stage != vm.SolverState {
			continue // see TestShardsRefused
		}
		if err := testranks.Join(together(t, k, P, func(r ranked) error {
			return r.shardsLikeReplicas(stage, as)
		})); err != nil {
			t.Errorf("stage %b: %v", stage, err)
		}
	}
}

// TestShardsWithLittleMemory: values are recomputed, and bits stay.
func TestShardsWithLittleMemory(t *testing.T) {
	as := training{solver: solvers["adam"], build: func(t testing.TB, _ tensor.Dtype) *model {
		return bounded["mlp"](t, nil)
	}}
	for _, stage := range stages {
		if err := testranks.Join(together(t, testenv.Hosts, 2, func(r ranked) error {
			var all vm.Memory
			for _, bound := range []vm.Option{vm.Keep(), vm.WithLeastMemory()} {
				_, machine, err := r.start(as, vm.WithShards(stage), bound,
					vm.WithPrecision(vm.BF16))
				testranks.NoError(err)
				got := machine.Summary().Memory
				// with Parameters what reads a learnable is not recomputed
				require.Check(t, all.Values <= 0 || stage&vm.Parameters != 0 ||
					got.Rematerialized != 0 && got.Total() <= all.Total()*96/100,
					"stage %b: %v, without a bound %v", stage, got, all)
				testranks.NoError(machine.Close())
				all = got
			}
			return r.shardsLikeReplicas(stage, as, vm.WithLeastMemory())
		})); err != nil {
			t.Errorf("stage %b: %v", stage, err)
		}
	}
}

// full asks for all cases.
func full() bool { return os.Getenv("EURYALE_FULL") == "1" }

// TestShards: after 20 steps learnables that ranks update in shards have the bits of those that all
// ranks update, for any number of ranks and any solver, on any memory.
func TestShards(t *testing.T) {
	var pairs []training
	for _, solver := range slices.Sorted(maps.Keys(solvers)) {
		pairs = append(pairs, training{solver: solvers[solver], build: mlp})
	}
	for _, name := range slices.Sorted(maps.Keys(parallelModels)) {
		pairs = append(pairs, training{solver: solvers["adam"], build: parallelModels[name]})
	}
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices, testenv.Staged},
		func(t *testing.T, k testenv.Kind) {
			for P := 1; P <= 8; P++ {
				for i, as := range pairs {
					if full() || P > 1 && i%12 == P%12 && (P < 5 || k == testenv.Hosts) {
						t.Run(fmt.Sprint(P, " ", i), func(t *testing.T) {
							trainsInShards(t, k, P, as)
						})
					}
				}
			}
		})
}

// tied has a matrix in two places, and a variable that nothing trains.
func tied(t testing.TB, dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	x, frozen := m.variable("x", dt, 5, 9), m.variable("frozen", dt, 9, 9)
	w, b := m.variable("w", dt, 9, 9), m.variable("b", dt)
	m.params = nodes{w, b}
	h := tanh(mul(mul(x, w), frozen))
	y := add(mul(tanh(h), w), b)
	m.grad(t, mean(square(y)))
	return m
}

// settings are ways to train that shards change nothing about.
var settings = map[string]training{
	"tied and frozen": {solver: solvers["adam"], build: tied,
		data: func(m *model) []autograd.Option {
			at := slices.IndexFunc(m.g.Inputs(), func(n node) bool {
				return n.Name() == "frozen"
			})
			return []autograd.Option{autograd.WithFrozen(m.g.Inputs()[at])}
		}},
	"groups": {build: mlp, options: func(m *model) []vm.Option {
		return []vm.Option{vm.WithSolver(&solver.AdamW{Rate: 0.1, WeightDecay: 0.1}, m.params[1]),
			vm.WithSolver(&solver.Momentum{Rate: 0.1, Momentum: 0.5}, m.params[2], m.params[0])}
	}},
	"clipped": {solver: solvers["adam"], build: mlp, options: func(*model) []vm.Option {
		return []vm.Option{vm.ClipNorm(1e-3)}
	}},
	"micro-batches": {solver: solvers["adam"], build: mlp, micros: 3},
	"micro-batches, clipped": {solver: solvers["adamw"], build: convnet, micros: 2,
		options: func(*model) []vm.Option { return []vm.Option{vm.ClipNorm(1e-3)} }},
	"averages": {build: mlp, solver: func() solver.Solver {
		return &solver.EMA{Solver: &solver.Adam{Rate: 0.1}, Decay: 0.9}
	}},
	"sums, in one bucket": {solver: solvers["adam"], build: convnet,
		data: func(*model) []autograd.Option {
			return []autograd.Option{autograd.WithSum(), autograd.WithBuckets(1<<20, 1<<20)}
		}},
	"bf16": inBF16,
	"buckets for each": {solver: solvers["momentum"], build: convnet,
		data: func(*model) []autograd.Option {
			return []autograd.Option{autograd.WithBuckets(1, 1)}
		}},
}

// TestShardsWithSettings is TestShards with everything else that a training may have.
func TestShardsWithSettings(t *testing.T) {
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices},
		func(t *testing.T, k testenv.Kind) {
			P := 2 // of another stage on devices
			if k == testenv.Devices {
				P = 3
			}
			for name, as := range settings {
				t.Run(name, func(t *testing.T) { trainsInShards(t, k, P, as) })
			}
		})
}

// TestShardsGatherInBF16: where only products of BF16 read a learnable, the ranks gather it in that
// precision, and have but their parts of it in F32. Learnables are bitwise identical to those
// of replicas.
func TestShardsGatherInBF16(t *testing.T) {
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices}, shardsGatherInBF16)
}

// inBF16 has 4 matrices and as many biases, in BF16.
var inBF16 = training{solver: solvers["adam"], build: layers(4, 12, 20, 12, 20, 12),
	options: func(*model) []vm.Option { return []vm.Option{vm.WithPrecision(vm.BF16)} }}

func shardsGatherInBF16(t *testing.T, k testenv.Kind) {
	with := func(change func(as *training)) training {
		as := inBF16
		change(&as)
		return as
	}
	all, never := [3]bool{true, true, true}, [3]bool{}
	for name, test := range map[string]struct {
		training
		want [3]bool // by stage: whether there are such learnables
	}{
		"adam": {inBF16, all},
		"clipped": {with(func(as *training) {
			as.options = func(*model) []vm.Option {
				return []vm.Option{vm.WithPrecision(vm.BF16), vm.ClipNorm(1e-3)}
			}
		}), all},
		"averages": {with(func(as *training) { as.solver = settings["averages"].solver }), all},
		// which would gather them in each
		"micro-batches": {with(func(as *training) { as.micros = 2 }), [3]bool{2: true}},
		"compressed": {with(func(as *training) {
			as.data = func(*model) []autograd.Option {
				return []autograd.Option{autograd.WithCompression(half.Wrap(backend.BF16))}
			}
		}), all},
		// by a product and a sum of squares
		"read in f32": {with(func(as *training) { as.build = regularized }), never},
		"f32":         {with(func(as *training) { as.options = nil }), never},
	} {
		for i, stage := range stages {
			if !full() && ((k == testenv.Hosts) != (i == 1) || i != len(name)%3 &&
				name != "adam" && name != "micro-batches") {
				continue
			}
			if err := testranks.Join(together(t, k, 2, func(r ranked) error {
				m, machine, err := r.start(test.training, vm.WithShards(stage))
				testranks.NoError(err)
				got, whole := machine.Summary(), int64(0)
				for _, n := range m.params {
					whole += 4 * int64(n.Shape().TotalSize())
				}
				in := strings.Contains(machine.Plan().String(), " in bf16 of ")
				if in != test.want[i] || in && got.ParameterBytes > whole*7/10 {
					t.Errorf("%s, stage %b: in BF16 %v, want %v, in\n%v\n%v", name, stage, in,
						test.want[i], machine.Plan(), got)
				}
				if err := machine.Close(); err != nil || name == "compressed" {
					return err // which rounds other sums
				}
				return r.shardsLikeReplicas(stage, test.training)
			})); err != nil {
				t.Errorf("%s, stage %b: %v", name, stage, err)
			}
		}
	}
}

// regularized adds the squares of its weights to the loss.
func regularized(t testing.TB, dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	x, w := m.variable("x", dt, 5, 9), m.variable("w", dt, 9, 9)
	m.params = nodes{w}
	m.grad(t, add(mean(tanh(mul(x, w))), mean(square(w))))
	return m
}

// TestShardsOfMachines is TestShards over sockets, and over two machines of two ranks, where
// gradients are scattered inside of the machines first. The ranks shard its buckets.
func TestShardsOfMachines(t *testing.T) {
	as := inBF16 // with all-gathers of two precisions
	var lock sync.Mutex
	for i, stage := range stages {
		if !full() && i == 1 {
			continue
		}
		err := testranks.Join(testranks.Run(4, connectMachines, func(r machineRank) error {
			of := ranked{Rank: r.Rank, t: t, lock: &lock}
			err := of.shardsLikeReplicas(stage, as)
			if n := r.Comm.(*hierarchy.Communicator).Stats().Calls; n < 40 && err == nil {
				err = fmt.Errorf("%d calls went machine by machine", n)
			}
			return err
		}))
		require.Check(t, err == nil, "stage %b: %v", stage, err)
		if err := testranks.Join(testranks.Run(3, overSockets, func(r machineRank) error {
			of := ranked{Rank: r.Rank, t: t, lock: &lock}
			return errors.Join(of.shardsLikeReplicas(stage, settings["groups"]),
				of.shardsLikeReplicas(stage, as))
		})); err != nil {
			t.Errorf("over sockets, stage %b: %v", stage, err)
		}
	}
}

func overSockets(w *rendezvous.World) (machineRank, error) {
	comm, err := tcp.Backend{}.Connect(context.Background(), w)
	return machineRank{&testenv.Rank{World: w, Comm: comm}}, err
}

// TestShardsTakeAPartOfTheMemory: of what a solver keeps, each of P ranks has a part, and all
// together have it once. With shards of gradients there is no memory for all gradients, but for the
// buckets that are under way.
func TestShardsTakeAPartOfTheMemory(t *testing.T) {
	as := training{solver: solvers["adam"], build: layers(2, 30, 30, 30, 30, 30, 30, 30, 30)}
	as.data = func(*model) []autograd.Option {
		return []autograd.Option{autograd.WithBuckets(1, 4000)} // a layer has 3720 bytes
	}
	for P := 2; P <= 8; P += 3 {
		of := make([][]vm.Summary, P)
		onRanks(t, testenv.Hosts, P, func(r ranked) error {
			for _, options := range [][]vm.Option{nil, {vm.WithShards(stages[0])},
				{vm.WithShards(stages[1])}, {vm.WithShards(stages[2])}} {
				_, machine, err := r.start(as, options...)
				testranks.NoError(err)
				of[r.Comm.Rank()] = append(of[r.Comm.Rank()], machine.Summary())
				testranks.NoError(machine.Close())
			}
			return nil
		})
		replica, sum, most := of[0][0], int64(0), int64(0)
		for _, rank := range of {
			state, gradients, parameters := rank[1], rank[2], rank[3]
			sum, most = sum+state.SolverBytes, max(most, state.SolverBytes)
			require.Check(t, gradients.SolverBytes == state.SolverBytes &&
				gradients.Memory.Gradients == 0,
				"%d ranks: with shards of gradients\n%v, without\n%v", P, gradients, state)
			if got := parameters.ParameterBytes; parameters.SolverBytes != 2*got ||
				parameters.SolverBytes != state.SolverBytes || parameters.Memory.Gradients != 0 ||
				parameters.Bytes > gradients.Bytes+4*3744 { // two that are read, two that come
				t.Errorf("%d ranks: with shards of parameters\n%v, without\n%v", P, parameters,
					gradients)
			}
			got, all := gradients.Bytes, state.Bytes+state.Memory.Gradients
			require.Check(t, got < all && (P <= 2 || got <= all*2/3),
				"%d ranks: with shards of gradients values and gradients take %d bytes, "+
					"without %d", P, got, all)
		}
		if all := replica.SolverBytes; sum != all || most > all/int64(P)+9*8*4*2 ||
			all != 2*replica.ParameterBytes || replica.Memory.Gradients != replica.ParameterBytes {
			t.Errorf("%d ranks keep %d bytes, at most %d each, a replica has\n%v", P, sum, most,
				replica)
		}
	}
}

// TestShardsCompressed: gradients may travel in 16 bits, and all ranks get the same learnables.
func TestShardsCompressed(t *testing.T) {
	as := training{solver: solvers["adam"], build: mlp, data: func(*model) []autograd.Option {
		return []autograd.Option{autograd.WithCompression(half.Wrap(backend.BF16))}
	}}
	weights := make([][][]float64, 3)
	onRanks(t, testenv.Devices, 3, func(r ranked) error {
		m, machine, err := r.start(as, vm.WithShards(vm.SolverState))
		testranks.NoError(err)
		err = errors.Join(as.steps(m, machine, 0, 20), machine.Close())
		weights[r.Comm.Rank()] = m.weights(t)
		return err
	})
	same(t, weights)
}

// TestShardsRefused: what cannot be sharded is an error of New that says why, on all ranks.
func TestShardsRefused(t *testing.T) {
	sgd := func(m *model) vm.Option { return vm.WithSolver(&solver.SGD{Rate: 1}, m.params...) }
	for name, test := range map[string]struct {
		want    error
		text    string
		options func(r ranked, m *model) []vm.Option
	}{
		"no ranks": {backend.ErrArgument, "use WithDataParallel, too",
			func(_ ranked, m *model) []vm.Option {
				return []vm.Option{sgd(m), vm.WithShards(vm.SolverState)}
			}},
		"a tree": {backend.ErrUnsupported, "WithTree", func(r ranked, m *model) []vm.Option {
			return []vm.Option{sgd(m), vm.WithDataParallel(r.Comm), vm.WithTree(2),
				vm.WithShards(vm.SolverState)}
		}},
		"shares of a tree": {backend.ErrUnsupported, "WithTree", // 2 micro-batches, and 1
			func(r ranked, m *model) []vm.Option {
				return []vm.Option{sgd(m), vm.WithDataParallel(r.Comm), vm.WithTree(3),
					vm.WithShards(vm.SolverState), vm.WithPrecision(vm.BF16)}
			}},
		"residuals": {backend.ErrUnsupported, "residuals", func(r ranked, m *model) []vm.Option {
			return []vm.Option{sgd(m), vm.WithShards(vm.SolverState), vm.WithDataParallel(r.Comm,
				autograd.WithCompression(sparse.Wrap(sparse.TopK(0.5))))}
		}},
		"on one rank": {backend.ErrMismatch, "what the ranks shard is",
			func(r ranked, m *model) []vm.Option {
				options := []vm.Option{sgd(m), vm.WithDataParallel(r.Comm)}
				if r.Comm.Rank() == 1 {
					options = append(options, vm.WithShards(vm.SolverState))
				}
				return options
			}},
		"gradients alone": {backend.ErrArgument, "whose gradients it has",
			func(r ranked, m *model) []vm.Option {
				return []vm.Option{sgd(m), vm.WithDataParallel(r.Comm), vm.WithShards(vm.Gradients)}
			}},
		"gradients of the host": {backend.ErrUnsupported, "compute on that device",
			func(r ranked, m *model) []vm.Option {
				return []vm.Option{sgd(m), vm.WithDataParallel(r.Comm),
					vm.WithShards(vm.SolverState | vm.Gradients)}
			}},
		"micro-batches of the host": {backend.ErrUnsupported, "compute on that device",
			func(r ranked, m *model) []vm.Option {
				return []vm.Option{sgd(m), vm.WithDataParallel(r.Comm), vm.Accumulate(2),
					vm.WithShards(stages[2])}
			}},
	} {
		k := testenv.Hosts
		if strings.HasSuffix(name, "of the host") {
			k = testenv.Staged
		}
		for rank, err := range together(t, k, 2, func(r ranked) error {
			m := r.build(mlp)
			machine, err := vm.New(m.g, r.device, test.options(r, m)...)
			if err == nil {
				err = errors.Join(errors.New("no error"), machine.Close())
			}
			return err
		}) {
			require.Fails(t, fmt.Sprintf("%s: rank %d", name, rank), err, test.want, test.text)
		}
	}
}

// TestCloseOfOneRankSaysWhatToDoRaced: where learnables are gathered in BF16, Close is collective
// on each stage, and does not wait for ranks that go on training.
func TestCloseOfOneRankSaysWhatToDoRaced(t *testing.T) {
	errs := together(t, testenv.Hosts, 2, func(r ranked) error {
		as := training{build: mlp, solver: func() solver.Solver { return &solver.SGD{Rate: 1} }}
		_, machine, err := r.start(as, vm.WithPrecision(vm.BF16), vm.WithShards(vm.SolverState))
		testranks.NoError(err)
		if err := machine.RunAll(); err != nil || r.Comm.Rank() == 0 {
			return errors.Join(err, machine.Close())
		}
		return errors.Join(machine.RunAll(), machine.Close())
	})
	const want = "call vm.Machine.Pull, Averaged or Close on every rank, not on some of them"
	for rank, err := range errs {
		require.Fails(t, fmt.Sprintf("rank %d", rank), err, want)
	}
}

// TestAShardIsNotTakenForTheWhole: after a step nothing reads a learnable that ranks shard before
// it is gathered, and everything does afterwards.
func TestAShardIsNotTakenForTheWhole(t *testing.T) {
	for _, c := range []struct {
		stage vm.Shards
		in    vm.Precision
		whole bool // all ranks have all elements after each step
	}{{stages[0], vm.F32, true}, {stages[0], vm.BF16, false}, {stages[1], vm.F32, true},
		{stages[2], vm.F32, false}, {stages[2], vm.BF16, false}} {
		for _, k := range []testenv.Kind{testenv.Hosts, testenv.Devices} {
			as := training{solver: solvers["adam"],
				build: func(t testing.TB, _ tensor.Dtype) *model { return mlp(t, tensor.Float32) }}
			if err := testranks.Join(together(t, k, 3, func(r ranked) error {
				return r.readsShards(as, c.whole && k == testenv.Hosts, vm.WithShards(c.stage),
					vm.WithPrecision(c.in))
			})); err != nil {
				t.Errorf("stage %b in %v, %s: %v", c.stage, c.in, k, err)
			}
		}
	}
}

// readsShards compares what others read of learnables before a Pull, after it, and after Close.
func (r ranked) readsShards(as training, whole bool, options ...vm.Option) error {
	m, machine, err := r.start(as, options...)
	testranks.NoError(err)
	eval := testranks.Must(vm.New(m.g, r.device, vm.Eval()))
	file := filepath.Join(r.t.TempDir(), "w.safetensors")
	read := func(when string, refused bool) error {
		uses := map[string]func() error{"evaluation": eval.RunAll,
			"SaveWeights": func() error { return autograd.SaveWeights(file, m.params) },
			"another machine": func() error {
				_, err := vm.New(m.g, r.device, vm.WithSolver(&solver.SGD{Rate: 1}, m.params...),
					vm.WithDataParallel(autograd.Solo()))
				return err
			}}
		if !refused {
			delete(uses, "another machine")
		}
		for use, do := range uses {
			if err := do(); refused != (err != nil && strings.Contains(err.Error(), "shard")) {
				return fmt.Errorf("%s %s has the error %v", when, use, err)
			}
		}
		return nil
	}
	testranks.NoError(machine.RunAll())
	if r.device == nil { // there SaveWeights reads what the host has
		err = read("before Pull", !whole)
	}
	err = errors.Join(err, machine.Pull(m.params...), read("after Pull", false), machine.RunAll(),
		machine.Close())
	return errors.Join(err, read("after Close", false), eval.Close())
}
