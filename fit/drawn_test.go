package fit_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/tensorboard"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// drawn is a training by Run whose parts are drawn together.
type drawn struct {
	// what it computes
	samples, batch, epochs int
	solver                 string
	weighted, clipped      bool
	dropout, validated     bool
	augmented, scheduled   bool
	early                  int // patience, 0 for none
	reduced, restored      bool

	// how it is run, on which the result does not depend
	P, micros int  // of all ranks in a step
	tree      bool // and not Accumulate
	shards    vm.Shards
	readers   int
	shown     bool // by TensorBoard
}

func draw(r *rand.Rand) drawn {
	yes := func() bool { return r.IntN(2) == 0 }
	d := drawn{samples: 24 + r.IntN(60), batch: 24, epochs: 1 + r.IntN(5), weighted: yes(),
		clipped: yes(), dropout: yes(), augmented: yes(), scheduled: yes(), validated: yes(),
		solver: []string{"sgd", "momentum", "nesterov", "rmsprop", "adam", "adamw", "ema",
			"groups"}[r.IntN(8)]}
	d.reduced, d.restored, d.shown = d.scheduled && yes(), yes(), yes()
	d.early = []int{0, 2}[r.IntN(2)]
	if d.tree = r.IntN(3) == 0; d.tree {
		d.micros = []int{4, 6, 8, 12}[r.IntN(4)]
	}
	d.run(r)
	return d
}

// run draws how the training is run, except for a tree: a checkpoint goes on with its own.
func (d *drawn) run(r *rand.Rand) {
	d.P, d.readers, d.shards = 1+r.IntN(4), 1+r.IntN(3), 0
	if d.tree {
		return
	}
	d.micros = d.P * (1 + r.IntN(2))
	if d.P > 1 && r.IntN(2) == 0 {
		d.shards = []vm.Shards{vm.SolverState, vm.SolverState | vm.Gradients,
			vm.SolverState | vm.Gradients | vm.Parameters}[r.IntN(3)]
	}
}

const drawnFeatures, drawnHidden, drawnClasses = 4, 6, 3

// net is a graph of the training.
type net struct {
	data       fit.Data
	learnables G.Nodes
	random     *nn.Random
	scores     *G.Node
}

func (d drawn) net(local int, by float64) (n net, err error) {
	g := G.NewGraph()
	start := rand.New(rand.NewPCG(1, 2))
	variable := func(name string, shape ...int) *G.Node {
		v := make([]float64, tensor.Shape(shape).TotalSize())
		for i := range v {
			v[i] = start.NormFloat64()
		}
		w := G.NewTensor(g, G.Float64, len(shape), G.WithShape(shape...), G.WithName(name),
			G.WithValue(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(v))))
		n.learnables = append(n.learnables, w)
		return w
	}
	x := G.NewMatrix(g, G.Float64, G.WithShape(local, drawnFeatures), G.WithName("x"),
		G.WithInit(G.Zeroes()))
	y := G.NewVector(g, tensor.Int, G.WithShape(local), G.WithName("y"), G.WithInit(G.Zeroes()))
	h := G.Must(G.Tanh(G.Must(G.Mul(x, variable("w1", drawnFeatures, drawnHidden)))))
	if d.dropout {
		n.random = nn.NewRandom(7)
		if h, err = nn.Dropout(0.3, n.random, h); err != nil {
			return n, err
		}
	}
	scores := G.Must(G.Mul(h, variable("w2", drawnHidden, drawnClasses)))
	n.scores = scores
	loss, err := nn.CrossEntropy(nn.NoLabel, scores, y)
	if err != nil {
		return n, err
	}
	if d.weighted {
		n.data.Weights = G.NewScalar(g, G.Float64, G.WithName("weight"), G.WithValue(0.0))
		n.data.Pad = func(row []any) { row[1].([]int)[0] = nn.NoLabel }
		loss = G.Must(G.Mul(loss, n.data.Weights))
	} else if by != 1 {
		loss = G.Must(G.Div(loss, G.NewConstant(by)))
	}
	if d.augmented {
		n.data.Augment = func(r *rand.Rand, row []any) { row[0].([]float64)[1] += r.NormFloat64() }
	}
	n.data.Loss, n.data.Inputs = loss, G.Nodes{x, y}
	n.data.Set = drawnSamples(d.samples, 3)
	_, err = G.Grad(loss, n.learnables...)
	return n, err
}

// drawnSamples are n samples of the task.
func drawnSamples(n int, seed uint64) fit.Set {
	return data.Of(n, func(i int, row []any) error {
		r := rand.New(rand.NewPCG(uint64(i), seed))
		x, label := row[0].([]float64), 0
		for k := range x {
			if x[k] = r.NormFloat64(); x[k] > 0 {
				label++
			}
		}
		row[1].([]int)[0] = label % drawnClasses
		return nil
	})
}

func (d drawn) newSolver(w G.Nodes) (solver.Solver, error) {
	switch d.solver {
	case "momentum":
		return &solver.Momentum{Rate: 0.1, Momentum: 0.5, WeightDecay: 0.1}, nil
	case "nesterov":
		return &solver.Nesterov{Rate: 0.1, Momentum: 0.5}, nil
	case "rmsprop":
		return &solver.RMSProp{Rate: 0.1}, nil
	case "adam":
		return &solver.Adam{Rate: 0.1}, nil
	case "adamw":
		return &solver.AdamW{Rate: 0.1, WeightDecay: 0.1}, nil
	case "ema":
		return &solver.EMA{Solver: &solver.Adam{Rate: 0.1}, Decay: 0.75}, nil
	case "groups":
		return solver.NewGroups(w, solver.Group{Solver: &solver.SGD{Rate: 0.25},
			Params: w[1:]}, solver.Group{Solver: &solver.Adam{Rate: 0.1}, Params: w[:1]})
	}
	return &solver.SGD{Rate: 0.25}, nil
}

// measures are the losses and metrics of epochs, and which were the best so far.
func measures(r *fit.Result) (all []float64) {
	for _, e := range r.Epochs {
		all = append(all, e.Loss)
		for _, name := range slices.Sorted(maps.Keys(e.Metrics)) {
			all = append(all, e.Metrics[name])
		}
		if e.Best {
			all = append(all, float64(e.Epoch))
		}
	}
	return all
}

// train runs it on a rank, until it has done so many steps, if any.
func (d drawn) train(ctx context.Context, comm backend.Communicator, build sync.Locker, dir string,
	until int) (r *fit.Result, params []float64, err error) {
	by := 1.0
	if !d.tree {
		by = float64(d.micros / d.P)
	}
	build.Lock()
	n, err := d.net(d.batch/d.micros, by)
	build.Unlock()
	if err != nil {
		return nil, nil, err
	}
	with, err := d.newSolver(n.learnables)
	if err != nil {
		return nil, nil, err
	}
	var dp []autograd.Option
	if n.random != nil {
		dp = append(dp, autograd.WithRandom(n.random))
	}
	options := []vm.Option{vm.WithSolver(with, n.learnables...), vm.WithDataParallel(comm, dp...)}
	if d.tree {
		options = append(options, vm.WithTree(d.micros))
	} else if d.micros > d.P {
		options = append(options, vm.Accumulate(d.micros/d.P))
	}
	if d.shards != 0 {
		options = append(options, vm.WithShards(d.shards))
	}
	if d.clipped {
		options = append(options, vm.ClipNorm(0.25))
	}
	m, err := vm.New(n.data.Loss.Graph(), nil, options...)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	how := []fit.Option{fit.Epochs(d.epochs), fit.Prefetch(d.readers), fit.Checkpoint(dir, 0),
		fit.OnStep(func(s fit.StepLoss) error {
			if s.Step == until {
				cancel()
			}
			return nil
		})}
	if n.random != nil {
		how = append(how, fit.Random(n.random))
	}
	if d.scheduled {
		how = append(how, fit.Schedule(solver.Cosine(0.2, 0.05, 5)))
	}
	if d.reduced {
		how = append(how, fit.ReduceOnPlateau(0.25, 1))
	}
	if d.restored {
		how = append(how, fit.RestoreBest())
	}
	if d.early > 0 {
		how = append(how, fit.EarlyStop(d.early))
	}
	if d.shown {
		how = append(how, fit.TensorBoard(filepath.Join(dir, "shown")))
	}
	if d.validated {
		eval, err := vm.New(n.data.Loss.Graph(), nil, vm.Eval(), vm.Keep(n.scores, n.data.Loss))
		if err != nil {
			return nil, nil, errors.Join(err, m.Close())
		}
		defer eval.Close()
		held := n.data
		held.Augment, held.Set = nil, drawnSamples(30, 4)
		if n.data.Weights == nil {
			held.Loss = nil
		}
		how = append(how, fit.Validate(eval, held, fit.Accuracy(n.scores, n.data.Inputs[1])),
			fit.Watch("accuracy"))
	}
	r, err = fit.Run(ctx, m, n.data, how...)
	if errors.Is(err, fit.ErrStopped) && until > 0 {
		err = nil
	}
	err = errors.Join(err, m.Pull(), m.Close())
	for _, w := range n.learnables {
		params = append(params, w.Value().Data().([]float64)...)
	}
	return r, params, err
}

// outcome trains, and returns the losses and metrics of epochs, and the parameters. With random
// numbers, the training is stopped after some of its steps, and other ranks continue it.
func (d drawn) outcome(t *testing.T, r *rand.Rand) []float64 {
	dir, steps, stop := t.TempDir(), d.epochs*(d.samples/d.batch), 0
	for {
		last := r == nil || r.IntN(2) == 0
		if !last {
			stop += 1 + r.IntN(3)
		}
		if last = last || stop >= steps; last {
			stop = 0
		}
		params := make([][]float64, d.P)
		results := ranks(t, d.P, func(comm backend.Communicator, build sync.Locker) (
			result *fit.Result, err error) {
			result, params[comm.Rank()], err = d.train(t.Context(), comm, build, dir, stop)
			return result, err
		})
		for p := range params {
			if !slices.Equal(params[p], params[0]) {
				t.Fatalf("rank %d has the parameters %v, rank 0 %v", p, params[p], params[0])
			}
		}
		if last && d.shown {
			steps, epochs := tensorboard.Shown(t, filepath.Join(dir, "shown")), results[0].Epochs
			for _, e := range epochs {
				require.Equal(t, "the loss shown", steps["epoch/loss"][e.Steps], float32(e.Loss))
			}
			require.Equal(t, "steps and epochs shown", fmt.Sprint(len(steps["step/loss"]),
				len(steps["epoch/loss"])), fmt.Sprint(epochs[len(epochs)-1].Steps, len(epochs)))
		}
		if last {
			return append(measures(results[0]), params[0]...)
		}
		d.run(r)
	}
}

// TestAnyTrainingIsTheOneOfOneRank: whatever divides its steps, among however many ranks, also if
// others continue it. EURYALE_FULL=1 draws many.
func TestAnyTrainingIsTheOneOfOneRank(t *testing.T) {
	n := uint64(24)
	if os.Getenv("EURYALE_FULL") == "1" {
		n = 1000
	}
	for seed := range n {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 5))
			d := draw(r)
			one := d
			one.P, one.micros, one.tree, one.shards, one.readers = 1, 1, false, 0, 1
			want, got := one.outcome(t, nil), d.outcome(t, r)
			same := func(x, y float64) bool { return math.Abs(x-y) < 1e-9 }
			require.Check(t, slices.EqualFunc(got, want, same),
				"%+v: losses and parameters are\n%v, want\n%v", d, got, want)
		})
	}
}
