package fit_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// linear is a graph of the squared errors of x w, of a rank's batch.
type linear struct {
	x, y, w, weights, loss, guess *G.Node
}

// newLinear makes the graph. Each sample's error counts by its weight, or by the mean divided by a
// number.
func newLinear(local int, weighted bool, by float64) *linear {
	g := G.NewGraph()
	m := &linear{
		x: G.NewMatrix(g, G.Float64, G.WithShape(local, 2), G.WithName("x"),
			G.WithInit(G.Zeroes())),
		y: G.NewVector(g, G.Float64, G.WithShape(local), G.WithName("y"), G.WithInit(G.Zeroes())),
		w: G.NewVector(g, G.Float64, G.WithName("w"),
			G.WithShape(2), G.WithValue(tensor.New(tensor.WithBacking([]float64{1, -2})))),
	}
	m.guess = G.Must(G.Mul(m.x, m.w))
	squares := G.Must(G.Square(G.Must(G.Sub(m.guess, m.y))))
	if weighted {
		m.weights = G.NewVector(g, G.Float64, G.WithShape(local), G.WithName("weights"),
			G.WithInit(G.Zeroes()))
		m.loss = G.Must(G.Sum(G.Must(G.HadamardProd(squares, m.weights))))
	} else {
		m.loss = G.Must(G.Div(G.Must(G.Mean(squares)), G.NewConstant(by)))
	}
	if _, err := G.Grad(m.loss, m.w); err != nil {
		panic(err)
	}
	return m
}

func (m *linear) data(s fit.Set) fit.Data {
	return fit.Data{Set: s, Inputs: G.Nodes{m.x, m.y}, Loss: m.loss, Weights: m.weights}
}

// points are n samples of y = 3 a + b + noise, small integers.
func points(n int) fit.Set {
	return data.Of(n, func(i int, row []any) error {
		x, y := row[0].([]float64), row[1].([]float64)
		x[0], x[1] = float64(i%5), float64(i%3)-1
		y[0] = 3*x[0] + x[1] + float64(i%2)
		return nil
	})
}

// ranks runs a training on each of so many ranks, and returns their results.
func ranks(t *testing.T, n int, train func(comm backend.Communicator, build sync.Locker) (
	*fit.Result, error)) []*fit.Result {
	t.Helper()
	results := make([]*fit.Result, n)
	require.NoError(t, euryale.Run(t.Context(), n, func(comm backend.Communicator,
		build sync.Locker) (err error) {
		results[comm.Rank()], err = train(comm, build)
		return err
	}))
	return results
}

// fitLinear trains on a rank, and returns the result and the weights.
func fitLinear(ctx context.Context, comm backend.Communicator, build sync.Locker, batch int,
	s fit.Set, machine []vm.Option, options ...fit.Option) (*fit.Result, []float64, error) {
	return fitLinearBy(ctx, comm, build, batch, s, append(machine, vm.WithDataParallel(comm)),
		options...)
}

// fitLinearBy is fitLinear by a machine with these options.
func fitLinearBy(ctx context.Context, comm backend.Communicator, build sync.Locker, batch int,
	s fit.Set, machine []vm.Option, options ...fit.Option) (*fit.Result, []float64, error) {
	build.Lock()
	m := newLinear(batch/comm.Size(), true, 1)
	build.Unlock()
	training, err := vm.New(m.x.Graph(), nil, append([]vm.Option{
		vm.WithSolver(&solver.Momentum{Rate: 1. / 64, Momentum: 0.5}, m.w)}, machine...)...)
	if err != nil {
		return nil, nil, err
	}
	result, err := fit.Run(ctx, training, m.data(s), options...)
	return result, m.w.Value().Data().([]float64), errors.Join(err, training.Close())
}

// byHand returns the weights and the mean losses of epochs of whole batches.
func byHand(t *testing.T, n, batch, epochs int, s fit.Set) (w []float64, losses []float64) {
	t.Helper()
	sampler := require.Value(autograd.NewSampler(autograd.Solo(), n, batch, 1))(t)
	w = []float64{1, -2}
	velocity := []float64{0, 0}
	for epoch := range epochs {
		loss := 0.0
		for _, which := range sampler.Rest().Epoch(epoch) {
			grad := []float64{0, 0}
			for _, i := range which {
				x, y := make([]float64, 2), make([]float64, 1)
				_ = s.Read(i, []any{x, y})
				wrong := w[0]*x[0] + w[1]*x[1] - y[0]
				loss += wrong * wrong / float64(n)
				for k := range grad {
					grad[k] += 2 * wrong * x[k] / float64(len(which))
				}
			}
			for k := range w {
				velocity[k] = 0.5*velocity[k] - grad[k]/64
				w[k] += velocity[k]
			}
		}
		losses = append(losses, loss)
	}
	return w, losses
}

func near(a, b []float64) bool {
	return slices.EqualFunc(a, b, func(x, y float64) bool { return math.Abs(x-y) < 1e-12 })
}

func losses(r *fit.Result) (all []float64) {
	for _, e := range r.Epochs {
		all = append(all, e.Loss)
	}
	return all
}

// TestLastBatchIsTheMeanOfItsSamplesUnraced: whatever share of it each rank and each run has, and
// some have none.
func TestLastBatchIsTheMeanOfItsSamplesUnraced(t *testing.T) {
	const batch, epochs = 12, 3
	for _, n := range []int{12, 13, 17, 23, 31} {
		s := points(n)
		want, wantLosses := byHand(t, n, batch, epochs, s)
		for _, P := range []int{1, 2, 3, 4} {
			for name, how := range map[string]struct {
				runs  int
				ranks []autograd.Option
				more  []vm.Option
			}{
				"mean":               {1, nil, nil},
				"accumulate":         {3, nil, []vm.Option{vm.Accumulate(3)}},
				"sum":                {1, []autograd.Option{autograd.WithSum()}, nil},
				"tree":               {1, nil, []vm.Option{vm.WithTree(P)}},
				"tree of three runs": {3, nil, []vm.Option{vm.WithTree(3 * P)}},
			} {
				if how.runs > 1 && batch/P%how.runs != 0 {
					continue
				}
				weights := make([][]float64, P)
				results := ranks(t, P, func(comm backend.Communicator, build sync.Locker) (
					r *fit.Result, err error) {
					r, weights[comm.Rank()], err = fitLinearBy(t.Context(), comm, build,
						batch/how.runs, s, append([]vm.Option{vm.WithDataParallel(comm,
							how.ranks...)}, how.more...), fit.Epochs(epochs))
					return r, err
				})
				for r := range P {
					if !near(weights[r], want) || !near(losses(results[r]), wantLosses) {
						t.Errorf("%d samples, %d ranks, %s: weights %v and losses %v, want %v "+
							"and %v", n, P, name, weights[r], losses(results[r]), want, wantLosses)
					}
				}
			}
		}
	}
}

// TestASignalToOneRankStopsAll: after the same step, and the training that goes on has the bits of
// one that never stopped.
func TestASignalToOneRankStopsAll(t *testing.T) {
	for P := 2; P <= 4; P++ {
		s, dir := points(31), t.TempDir()
		options := []fit.Option{fit.Epochs(4), fit.Checkpoint(dir, 2)}
		whole := ranks(t, P, func(comm backend.Communicator, build sync.Locker) (*fit.Result,
			error) {
			r, _, err := fitLinear(t.Context(), comm, build, 12, s, nil, fit.Epochs(4))
			return r, err
		})
		for _, at := range []int{1, 3, 5} {
			stopped := ranks(t, P, func(comm backend.Communicator, build sync.Locker) (*fit.Result,
				error) {
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				r, _, err := fitLinear(ctx, comm, build, 12, s, nil, append(options,
					fit.OnStep(func(s fit.StepLoss) error {
						if s.Step == at && comm.Rank() == P-1 {
							cancel(exit.Stopped(143))
						}
						return nil
					}))...)
				if !errors.Is(err, fit.ErrStopped) || euryale.ExitStatus(err) != 143 ||
					!strings.Contains(err.Error(), fmt.Sprintf("after step %d,", at+1)) {
					return r, fmt.Errorf("stopped in step %d, it ends with %w", at, err)
				}
				return r, nil
			})
			_ = stopped
		}
		resumed := ranks(t, P, func(comm backend.Communicator, build sync.Locker) (*fit.Result,
			error) {
			r, _, err := fitLinear(t.Context(), comm, build, 12, s, nil, options...)
			return r, err
		})
		for r := range P {
			if resumed[r].Params != whole[r].Params || resumed[r].Params != resumed[0].Params ||
				!slices.Equal(losses(resumed[r]), losses(whole[r])) {
				t.Errorf("%d ranks: rank %d has %+v, want %+v", P, r, resumed[r], whole[r])
			}
		}
	}
}

// TestATimeLimitIsNotTheEnd: a training that it stops is not finished, and one that EarlyStop stops
// is.
func TestATimeLimitIsNotTheEnd(t *testing.T) {
	ranks(t, 2, func(comm backend.Communicator, build sync.Locker) (*fit.Result, error) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if comm.Rank() == 1 {
			ctx, cancel = context.WithDeadline(ctx, time.Now())
			defer cancel()
		}
		r, _, err := fitLinear(ctx, comm, build, 12, points(31), nil, fit.Epochs(4))
		if !errors.Is(err, fit.ErrStopped) || euryale.ExitStatus(err) != exit.Unfinished {
			return r, fmt.Errorf("at a time limit it ends with %w", err)
		}
		watch, none := fit.OnEpoch(func(fit.Epoch) error { return nil }), t.Context()
		r, _, err = fitLinear(none, comm, build, 12, points(31), nil, fit.Epochs(1000), watch,
			fit.Schedule(func(int) float64 { return 0 }), fit.EarlyStop(1))
		if err != nil || len(r.Epochs) > 10 {
			return r, fmt.Errorf("after %d epochs it ends with %w", len(r.Epochs), err)
		}
		return r, nil
	})
}

// TestAnErrorOfOneRankIsTheErrorOfAll names the rank.
func TestAnErrorOfOneRankIsTheErrorOfAll(t *testing.T) {
	broken := errors.New("the file is broken")
	for P := 2; P <= 4; P++ {
		for name, fails := range map[string]func(rank int) (fit.Set, fit.Option){
			"a sample": func(rank int) (fit.Set, fit.Option) {
				s := points(24)
				return data.Of(24, func(i int, row []any) error {
					if rank == 1 && i < 12 {
						return broken
					}
					return s.Read(i, row)
				}), fit.Epochs(2)
			},
			"a hook of a step": func(rank int) (fit.Set, fit.Option) {
				return points(24), fit.OnStep(func(s fit.StepLoss) error {
					return map[bool]error{true: broken}[s.Step == 2 && rank == 1]
				})
			},
			"a hook of an epoch": func(rank int) (fit.Set, fit.Option) {
				return points(24), fit.OnEpoch(func(fit.Epoch) error {
					return map[bool]error{true: broken}[rank == 1]
				})
			},
		} {
			require.Report(t, euryale.Run(t.Context(), P, func(comm backend.Communicator,
				build sync.Locker) error {
				s, option := fails(comm.Rank())
				_, _, err := fitLinear(t.Context(), comm, build, 12, s, nil, option)
				if err == nil || !strings.Contains(err.Error(), broken.Error()) ||
					comm.Rank() != 1 && !strings.Contains(err.Error(), "rank 1") {
					return fmt.Errorf("%s, rank %d: %w", name, comm.Rank(), err)
				}
				return nil
			}))
		}
	}
}

// TestAHookThatFailsInTheLastStepIsTheErrorOfAll: a training that was told to stop has that error.
func TestAHookThatFailsInTheLastStepIsTheErrorOfAll(t *testing.T) {
	broken := errors.New("the disk is full")
	for P := 1; P <= 2; P++ {
		ranks(t, P, func(comm backend.Communicator, build sync.Locker) (*fit.Result, error) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			_, _, err := fitLinear(ctx, comm, build, 12, points(48), nil,
				fit.OnStep(func(s fit.StepLoss) error {
					if s.Step == 1 {
						cancel()
					}
					return map[bool]error{true: broken}[s.Step == 2 && comm.Rank() == P-1]
				}))
			require.Fails(t, fmt.Sprintf("%d ranks, rank %d", P, comm.Rank()), err, broken.Error())
			return nil, nil
		})
	}
}

// TestARankWithoutAveragesLeavesNoneWaiting: a hook of one rank begins another step before the
// validation.
func TestARankWithoutAveragesLeavesNoneWaiting(t *testing.T) {
	ranks(t, 3, func(comm backend.Communicator, build sync.Locker) (*fit.Result, error) {
		build.Lock()
		m := newLinear(2, true, 1)
		build.Unlock()
		training, err := vm.New(m.x.Graph(), nil, vm.WithDataParallel(comm), vm.Accumulate(2),
			vm.WithSolver(&solver.EMA{Solver: &solver.SGD{Rate: 1. / 64}, Decay: 0.5}, m.w))
		if err != nil {
			return nil, err
		}
		eval, err := vm.New(m.x.Graph(), nil, vm.Eval())
		if err != nil {
			return nil, err
		}
		_, err = fit.Run(t.Context(), training, m.data(points(24)), fit.Epochs(2),
			fit.Validate(eval, m.data(points(12))), fit.OnStep(func(s fit.StepLoss) error {
				if s.InEpoch == s.PerEpoch && comm.Rank() == 1 {
					return training.RunAll()
				}
				return nil
			}))
		require.Fails(t, fmt.Sprint("rank ", comm.Rank()), err, "a step is in progress",
			"rank 1 cannot go on")
		return nil, nil
	})
}

// classifier is a graph of the cross-entropy of x w, times a weight of all its samples if it has
// one.
func classifier(local int, w *tensor.Dense, weighted bool) (d fit.Data, weights *G.Node) {
	g := G.NewGraph()
	x := G.NewMatrix(g, G.Float64, G.WithShape(local, classes), G.WithName("x"),
		G.WithInit(G.Zeroes()))
	y := G.NewVector(g, tensor.Int, G.WithShape(local), G.WithName("y"), G.WithInit(G.Zeroes()))
	weights = G.NewMatrix(g, G.Float64, G.WithShape(w.Shape()...), G.WithName("w"), G.WithValue(w))
	d = fit.Data{Inputs: G.Nodes{x, y}, Pad: func(row []any) { row[1].([]int)[0] = nn.NoLabel }}
	d.Loss = G.Must(nn.CrossEntropy(nn.NoLabel, G.Must(G.Mul(x, weights)), y))
	if weighted {
		d.Weights = G.NewScalar(g, G.Float64, G.WithName("weight"), G.WithValue(0.0))
		d.Loss = G.Must(G.Mul(d.Loss, d.Weights))
	}
	if _, err := G.Grad(d.Loss, weights); err != nil {
		panic(err)
	}
	return d, weights
}

// TestMissingLabelsMakeTheLastBatchExact: a scalar weight and ignored labels train as machines of
// the size of each batch do, although ranks have other numbers of labels.
func TestMissingLabelsMakeTheLastBatchExact(t *testing.T) {
	const n, batch = 17, 12
	s, _, _ := scored(n)
	zeros := func() *tensor.Dense {
		return tensor.New(tensor.WithShape(classes, 2*classes), tensor.Of(tensor.Float64))
	}
	want, sgd := zeros(), &solver.SGD{Rate: 0.25}
	sampler := require.Value(autograd.NewSampler(autograd.Solo(), n, batch, 1))(t)
	for epoch := range 3 {
		for _, which := range sampler.Rest().Epoch(epoch) {
			d, w := classifier(len(which), want, false)
			m := require.Value(vm.New(w.Graph(), nil, vm.WithSolver(sgd, w)))(t)
			for i, sample := range which {
				x, y := d.Inputs[0].Value().Data().([]float64), d.Inputs[1].Value().Data().([]int)
				require.NoError(t, s.Read(sample, []any{x[classes*i : classes*(i+1)], y[i : i+1],
					make([]float64, 1)}))
			}
			require.NoError(t, errors.Join(m.RunAll(), m.Close()))
		}
	}
	two := data.Of(n, func(i int, row []any) error {
		return s.Read(i, append(slices.Clone(row), make([]float64, 1)))
	})
	for P := 1; P <= 4; P++ {
		ranks(t, P, func(comm backend.Communicator, build sync.Locker) (*fit.Result, error) {
			build.Lock()
			d, w := classifier(batch/P, zeros(), true)
			build.Unlock()
			m, err := vm.New(w.Graph(), nil, vm.WithDataParallel(comm),
				vm.WithSolver(&solver.SGD{Rate: 0.25}, w))
			if err != nil {
				return nil, err
			}
			d.Set = two
			r, err := fit.Run(t.Context(), m, d, fit.Epochs(3))
			if got := w.Value().Data().([]float64); !near(got, want.Data().([]float64)) {
				t.Errorf("%d ranks: the weights are %v, want %v", P, got, want)
			}
			return r, errors.Join(err, m.Close())
		})
	}
}

// TestValidationChangesNothing, although it has the inputs of the training.
func TestValidationChangesNothing(t *testing.T) {
	for P := 1; P <= 3; P++ {
		run := func(validated bool) []*fit.Result {
			return ranks(t, P, func(comm backend.Communicator, build sync.Locker) (*fit.Result,
				error) {
				build.Lock()
				m := newLinear(12/P, true, 1)
				build.Unlock()
				training, err := vm.New(m.x.Graph(), nil, vm.WithDataParallel(comm),
					vm.WithSolver(&solver.SGD{Rate: 1. / 64}, m.w))
				if err != nil {
					return nil, err
				}
				eval, err := vm.New(m.x.Graph(), nil, vm.Eval())
				if err != nil {
					return nil, err
				}
				options := []fit.Option{fit.Epochs(3)}
				if validated {
					options = append(options, fit.Validate(eval, m.data(points(7))))
				}
				r, err := fit.Run(t.Context(), training, m.data(points(31)), options...)
				return r, errors.Join(err, training.Close(), eval.Close())
			})
		}
		with, without := run(true)[0], run(false)[0]
		if with.Params != without.Params || !slices.Equal(losses(with), losses(without)) {
			t.Errorf("%d ranks: %+v with a validation, %+v without", P, with, without)
		}
	}
}
