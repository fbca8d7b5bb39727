package layers_test

import (
	"errors"
	"math"
	"path/filepath"
	"slices"
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
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// predictor predicts the next token of 6.
type predictor struct {
	b               *layers.Builder
	tokens, targets *layers.Tokens
	extra, loss     layers.Node // extra is added to what is embedded
	learnables      gorgonia.Nodes
}

// newPredictor builds one for so many samples of 4 positions, after prepare.
func newPredictor(l *layers.Layout, samples int, prepare func(m *predictor)) (m *predictor,
	err error) {
	m = &predictor{b: layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)}
	m.tokens, m.targets = m.b.Tokens("tokens", 1, samples, 4), m.b.Tokens("targets", 1, samples, 4)
	if prepare != nil {
		prepare(m)
	}
	embedding := m.b.Learn("words", layers.Normal(1), 0, 6, 4)
	x := m.b.To(m.b.Embedding(embedding, m.tokens), layers.Tensor, layers.Replicated)
	if m.extra.Node != nil {
		x = m.b.Add(x, m.extra)
	}
	m.loss = m.b.CrossEntropy(m.b.Logits(m.b.GELU(x), embedding), m.targets)
	m.learnables, err = m.b.Grad(m.loss)
	return m, err
}

// TestHalfOfWhatTrainingNeedsIsRefused: a graph says how its gradients are right, and New refuses
// to train it in any other way, in words that say what is missing.
func TestHalfOfWhatTrainingNeedsIsRefused(t *testing.T) {
	one := layers.Sizes{DP: 1, SP: 1, TP: 1}
	data := func(options ...autograd.Option) func(*predictor, *layers.Layout) []vm.Option {
		return func(_ *predictor, l *layers.Layout) []vm.Option {
			return []vm.Option{vm.WithDataParallel(l.Data, options...)}
		}
	}
	and := func(more ...vm.Option) func(*predictor, *layers.Layout) []vm.Option {
		return func(m *predictor, _ *layers.Layout) []vm.Option {
			return append(more, m.b.Training())
		}
	}
	batches := func(n int) func(*predictor) { return func(m *predictor) { m.b.Batches(n) } }
	table := func(m *predictor) {
		m.extra = m.b.Table("rows", layers.Normal(1), 6, 4).Lookup(m.tokens)
	}
	padded := func(m *predictor) { m.targets.Padding(5); m.b.Batches(1) }
	for _, c := range []struct {
		name    string
		of      layers.Sizes
		prepare func(*predictor)
		with    func(*predictor, *layers.Layout) []vm.Option
		want    string // "" for no error
	}{
		{"training", layers.Sizes{DP: 2, SP: 1, TP: 2}, nil, and(vm.ClipNorm(1)), ""},
		{"two halves", layers.Sizes{DP: 2, SP: 1, TP: 1}, nil, data(autograd.WithSum()), ""},
		{"a mean", layers.Sizes{DP: 2, SP: 1, TP: 1}, batches(1), data(), ""},
		{"runs", layers.Sizes{DP: 2, SP: 1, TP: 1}, batches(6), and(), ""},
		{"a tree", layers.Sizes{DP: 2, SP: 1, TP: 1}, batches(1), and(vm.WithTree(3)), ""},
		{"a tree over parts", layers.Sizes{DP: 1, SP: 1, TP: 2}, batches(1),
			and(vm.WithTree(3)), ""},
		{"no sum", layers.Sizes{DP: 2, SP: 1, TP: 1}, nil, data(),
			"0.5 times the right ones: give vm.New what Training of the layers.Builder returns"},
		{"no sum of sequences", layers.Sizes{DP: 1, SP: 2, TP: 1}, nil, data(), "0.5 times"},
		{"a sum of means", layers.Sizes{DP: 2, SP: 1, TP: 1}, batches(1),
			data(autograd.WithSum()), "2 times"},
		{"a mean of sequences", layers.Sizes{DP: 2, SP: 2, TP: 1}, batches(1), and(), "2 times"},
		{"other ranks", layers.Sizes{DP: 2, SP: 1, TP: 2}, nil,
			func(_ *predictor, l *layers.Layout) []vm.Option {
				return []vm.Option{vm.WithDataParallel(l.Comm(layers.Tensor), autograd.WithSum())}
			}, "layers.Layout of dp2xsp1xtp2, and the ranks of its Data must add up"},
		{"no ranks", layers.Sizes{DP: 2, SP: 1, TP: 1}, nil,
			func(*predictor, *layers.Layout) []vm.Option { return nil }, "ranks of its Data"},
		{"no parts", layers.Sizes{DP: 1, SP: 1, TP: 2}, nil, data(autograd.WithSum()),
			"without autograd.WithParts ClipNorm, Hash and checkpoints"},
		{"twice", layers.Sizes{DP: 2, SP: 1, TP: 1}, nil,
			func(m *predictor, l *layers.Layout) []vm.Option {
				return append(data()(m, l), m.b.Training())
			}, "WithDataParallel: bad argument: it is given twice"},
		{"no Batches", one, nil, and(vm.Accumulate(2)),
			"2 times the right ones: call Builder.Batches(2) before the loss"},
		{"no Accumulate", layers.Sizes{DP: 2, SP: 1, TP: 1}, batches(4),
			data(autograd.WithSum()), "0.5 times"},
		{"a tree without Batches", layers.Sizes{DP: 2, SP: 1, TP: 1}, nil, and(vm.WithTree(4)),
			"call Builder.Batches(1)"},
		{"a tree over sequences", layers.Sizes{DP: 1, SP: 2, TP: 1}, batches(1),
			and(vm.WithTree(2)), "WithTree: a rank runs whole micro-batches, and the ranks of a " +
				"layers.Layout of dp1xsp2xtp1 shard sequences"},
		{"padding in a tree", layers.Sizes{DP: 2, SP: 1, TP: 1}, padded, and(vm.WithTree(2)),
			"WithTree: several runs are one step, and the loss divides"},
		{"padding in a tree of one rank", one, padded, and(vm.WithTree(2)), "Tokens.Padding"},
		{"padding in runs without Batches", one,
			func(m *predictor) { m.targets.Padding(5) }, and(vm.Accumulate(2)),
			"call Builder.Batches before the loss, and Tokens.Count before each run"},
		{"padding in runs", one, func(m *predictor) { m.targets.Padding(5); m.b.Batches(2) },
			and(), ""},
		{"a table", layers.Sizes{DP: 2, SP: 1, TP: 1}, table, and(), ""},
		{"a table in runs", one, func(m *predictor) { table(m); m.b.Batches(2) }, and(),
			"Accumulate: several runs are one step, and ranks exchange rows of the layers.Table"},
		{"a table in a tree", one, func(m *predictor) { table(m); m.b.Batches(1) },
			and(vm.WithTree(2)), "WithTree: several runs are one step, and ranks exchange rows"},
		{"a table and a mean", layers.Sizes{DP: 2, SP: 1, TP: 1},
			func(m *predictor) { table(m); m.b.Batches(1) }, and(), "2 times"},
	} {
		t.Run(c.name, func(t *testing.T) {
			within(t, testenv.Hosts, c.of, func(l *layers.Layout, _ backend.Device,
				build sync.Locker) error {
				build.Lock()
				m, err := newPredictor(l, 1, c.prepare)
				build.Unlock()
				if err == nil {
					var machine *vm.Machine
					machine, err = vm.New(m.b.Graph(), nil, append(c.with(m, l),
						vm.WithSolver(&solver.SGD{Rate: 1}, m.learnables...))...)
					if err == nil {
						err = machine.Close()
					}
				}
				if c.want == "" {
					return err
				}
				require.Fails(t, "the training", err, backend.ErrArgument, c.want)
				return nil
			})
		})
	}
}

// TestSyncRefusesALossOfSeveralRuns: a step of Sync has one.
func TestSyncRefusesALossOfSeveralRuns(t *testing.T) {
	within(t, testenv.Hosts, layers.Sizes{DP: 2, SP: 1, TP: 1}, func(l *layers.Layout,
		_ backend.Device, build sync.Locker) error {
		build.Lock()
		m, err := newPredictor(l, 1, func(m *predictor) { m.b.Batches(4) })
		build.Unlock()
		testranks.NoError(err)
		dp := testranks.Must(autograd.New(l.Data, m.learnables, autograd.WithSum()))
		defer dp.Close()
		_, err = dp.Sync()
		for _, want := range []string{"Sync: layers' CrossEntropy is a share of the mean over 4 " +
			"batches", "0.5 times the right ones", "give vm.New what Training"} {
			require.Fails(t, "dp.Sync", err, backend.ErrArgument, want)
		}
		return nil
	})
}

// TestTrainingAddsUpRunsAsOneBatch: two runs that Batches announces train as one batch of all of
// their samples, on one rank and on two.
func TestTrainingAddsUpRunsAsOneBatch(t *testing.T) {
	ids := []int{0, 1, 2, 3, 4, 3, 2, 1, 1, 1, 0, 2, 3, 4, 0, 0}
	next := append(slices.Clone(ids[1:]), 0)
	train := func(replicas, runs int) (weights []float64) {
		within(t, testenv.Hosts, layers.Sizes{DP: replicas, SP: 1, TP: 1}, func(l *layers.Layout,
			_ backend.Device, build sync.Locker) error {
			samples := 4 / replicas / runs
			build.Lock()
			m, err := newPredictor(l, samples, func(m *predictor) { m.b.Batches(replicas * runs) })
			build.Unlock()
			testranks.NoError(err)
			machine := testranks.Must(vm.New(m.b.Graph(), nil, m.b.Training(),
				vm.WithSolver(&solver.SGD{Rate: 1}, m.learnables...)))
			first, n, _ := machine.MicroBatches()
			for i := first; i < first+n; i++ {
				own := func(all []int) []int { return all[i*samples*4:][:samples*4] }
				err = errors.Join(err, m.tokens.Set(own(ids)), m.targets.Set(own(next)),
					machine.RunAll())
			}
			err = errors.Join(err, machine.Pull())
			if l.Data.Rank() == 0 {
				weights = slices.Clone(numbers(m.learnables[0].Value()))
			}
			return errors.Join(err, machine.Close())
		})
		return weights
	}
	want := train(1, 1)
	for _, c := range [][2]int{{1, 2}, {2, 1}, {2, 2}} {
		for i, x := range train(c[0], c[1]) {
			if math.Abs(x-want[i]) > 1e-12 {
				t.Errorf("%d replicas, %d runs: weight %d is %v: want %v", c[0], c[1], i, x,
					want[i])
			}
		}
	}
}

// TestAPartOfALearnableIsNotSavedAsTheWhole: SaveWeights has whole learnables, or none.
func TestAPartOfALearnableIsNotSavedAsTheWhole(t *testing.T) {
	for _, of := range []layers.Sizes{{DP: 2, SP: 1, TP: 1}, {DP: 1, SP: 1, TP: 2}} {
		for _, gradient := range []bool{false, true} {
			within(t, testenv.Hosts, of, func(l *layers.Layout, _ backend.Device,
				build sync.Locker) error {
				build.Lock()
				defer build.Unlock()
				b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
				w := b.Learn("w", layers.Normal(1), 0, 4, 2)
				if gradient {
					x := b.Tokens("x", 1, 2, 2)
					rows := b.To(b.Embedding(w, x), layers.Tensor, layers.Replicated)
					if _, err := b.Grad(b.CrossEntropy(b.Logits(rows, w), x)); err != nil {
						return err
					}
				}
				err := autograd.SaveWeights(filepath.Join(t.TempDir(), "w"), gorgonia.Nodes{w.Node})
				require.Check(t, (of.TP > 1) == errors.Is(err, backend.ErrArgument),
					"%v, with a gradient %v: %v", of, gradient, err)
				return nil
			})
		}
	}
}

// TestDropoutIsTheSameForAnyRanksFromTheFirstRunOn, as its page says to use it, and after a
// restart: of a layers.Builder, and of nn.Dropout.
func TestDropoutIsTheSameForAnyRanksFromTheFirstRunOn(t *testing.T) {
	for _, built := range []bool{true, false} {
		train := func(ranks, to int, save, load string) (losses []float64) {
			within(t, testenv.Hosts, layers.Sizes{DP: ranks, SP: 1, TP: 1}, func(l *layers.Layout,
				_ backend.Device, build sync.Locker) error {
				d := dropped{random: nn.NewRandom(1), batch: 4 / ranks}
				build.Lock()
				err := d.build(l, built)
				build.Unlock()
				testranks.NoError(err)
				all, err := d.train(l, to, save, load)
				if l.Replica == 0 {
					losses = all
				}
				return err
			})
			return losses
		}
		near := func(x, y float64) bool { return math.Abs(x-y) < 1e-12 }
		dir, want := t.TempDir(), train(1, 4, "", "")
		if got := train(2, 4, "", ""); !slices.EqualFunc(got, want, near) {
			t.Errorf("by a builder %v: 2 ranks have %v, 1 rank %v", built, got, want)
		}
		got := append(train(2, 2, dir, ""), train(2, 4, "", dir)...)
		require.Check(t, slices.EqualFunc(got, want, near),
			"by a builder %v: restarted ranks have %v, want %v", built, got, want)
	}
}

// dropped is a model with a dropout.
type dropped struct {
	random  *nn.Random
	batch   int // of a rank
	options []vm.Option
	tokens  *layers.Tokens
	loss    layers.Node
}

func (d *dropped) build(l *layers.Layout, built bool) error {
	b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
	d.tokens = b.Tokens("tokens", 1, d.batch, 3)
	embedding := b.Learn("words", layers.Normal(1), 0, 6, 8)
	x := b.To(b.Embedding(embedding, d.tokens), layers.Tensor, layers.Replicated)
	if built {
		x = b.Dropout(0.5, d.random, x)
	} else {
		y, err := nn.Dropout(0.5, d.random, x.Node)
		if err != nil {
			return err
		}
		x = layers.Place(y, x)
	}
	d.loss = b.CrossEntropy(b.Logits(x, embedding), d.tokens)
	learnables, err := b.Grad(d.loss)
	if err != nil {
		return err
	}
	d.options = []vm.Option{vm.WithSolver(&solver.SGD{Rate: 0.1}, learnables...), b.Training(),
		vm.Keep(d.loss.Node)}
	return nil
}

func (d *dropped) train(l *layers.Layout, to int, save, load string) (losses []float64, err error) {
	machine, err := vm.New(d.loss.Node.Graph(), nil, d.options...)
	if err != nil {
		return nil, err
	}
	defer machine.Close()
	step, dp := 0, machine.DataParallel()
	if load != "" {
		if err := dp.Load(load, machine.Solver(), &step); err != nil {
			return nil, err
		}
	}
	for ; step < to; step++ {
		ids := []int{0, 1, 2, 3, 4, 5, 1, 3, 5, 0, 2, 4}[l.Replica*d.batch*3:][:d.batch*3]
		if err := errors.Join(d.tokens.Set(ids), machine.RunAll()); err != nil {
			return nil, err
		}
		d.random.Next(l.Replica * d.batch)
		loss := d.loss.Node.Value().Data().(float64)
		if err := autograd.Sum(l.Data, &loss); err != nil {
			return nil, err
		}
		losses = append(losses, loss)
	}
	if save != "" {
		err = dp.Save(save, machine.Solver(), step)
	}
	return losses, err
}
