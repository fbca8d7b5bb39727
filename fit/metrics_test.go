package fit_test

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/internal/testing/nilargs"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

const classes = 4

// scored are samples whose scores a graph passes through: small integers, with ties.
func scored(n int) (s fit.Set, scores [][]float64, labels []int) {
	r := rand.New(rand.NewPCG(1, 2))
	for range n {
		row := make([]float64, classes)
		for c := range row {
			row[c] = float64(r.IntN(6))
		}
		scores, labels = append(scores, row), append(labels, r.IntN(classes))
	}
	return data.Of(n, func(i int, row []any) error {
		copy(row[0].([]float64), scores[i])
		row[1].([]int)[0] = labels[i]
		row[2].([]float64)[0] = map[bool]float64{true: 1}[labels[i] == 0]
		return nil
	}), scores, labels
}

// place is the number of classes with a higher score, or an equal one before it.
func place(row []float64, label int) (n int) {
	for c, x := range row {
		if x > row[label] || x == row[label] && c < label {
			n++
		}
	}
	return n
}

// TestMetricsAreThoseOfAllSamples: on any number of ranks, counted by plain loops over all.
func TestMetricsAreThoseOfAllSamples(t *testing.T) {
	for _, n := range []int{7, 24, 41} {
		s, scores, labels := scored(n)
		want := map[string]float64{}
		table := [classes][classes]int{}
		pairs, won := 0.0, 0.0
		for i, row := range scores {
			at := place(row, labels[i])
			want["accuracy"] += map[bool]float64{true: 1 / float64(n)}[at == 0]
			want["top2"] += map[bool]float64{true: 1 / float64(n)}[at < 2]
			for c := range row {
				if place(row, c) == 0 {
					table[labels[i]][c]++
				}
			}
			for j := range scores {
				if labels[i] == 0 && labels[j] != 0 {
					pairs++
					won += map[int]float64{1: 1, 0: 0.5}[cmpOf(row[0], scores[j][0])]
				}
			}
			want["loss"] += (row[0] + 1) / float64(n) / 8
		}
		want["perplexity"] = math.Exp(want["loss"])
		want["auc"] = won / pairs
		for c, row := range table {
			all := row[0] + row[1] + row[2] + row[3]
			want["recall"] += float64(row[c]) / float64(all) / classes
		}
		for P := 1; P <= 4; P++ {
			require.NoError(t, euryale.Run(t.Context(), P, func(comm backend.Communicator,
				build sync.Locker) error {
				build.Lock()
				g := G.NewGraph()
				node := func(name string, of tensor.Dtype, shape ...int) *G.Node {
					return G.NewTensor(g, of, len(shape), G.WithShape(shape...), G.WithName(name),
						G.WithInit(G.Zeroes()))
				}
				x, y := node("x", tensor.Float64, 3, classes), node("y", tensor.Int, 3)
				zero, weights := node("z", tensor.Float64, 3), node("weights", tensor.Float64, 3)
				first := G.Must(G.Slice(x, nil, G.S(0)))
				eighth := G.Must(G.Mul(G.Must(G.Add(first, G.NewConstant(1.0))),
					G.NewConstant(0.125)))
				loss := G.Must(G.Sum(G.Must(G.HadamardProd(eighth, weights))))
				build.Unlock()
				m, err := vm.New(g, nil, vm.Eval(), vm.Keep(loss, first))
				if err != nil {
					return err
				}
				defer m.Close()
				matrix := [][]int{{9, 9, 9, 9}, {9, 9, 9, 9}, {9, 9, 9, 9}, {9, 9, 9, 9}}
				d := fit.Data{Set: s, Inputs: G.Nodes{x, y, zero}, Loss: loss, Weights: weights}
				for range 3 {
					got, err := fit.Evaluate(comm, m, d, fit.Accuracy(x, y), fit.TopK(2, x, y),
						fit.Confusion(matrix, x, y), fit.AUC(first, zero), fit.Perplexity())
					if err != nil {
						return err
					}
					for name, w := range want {
						require.Check(t, !(math.Abs(got[name]-w) > 1e-12),
							"%d samples, %d ranks: %s is %v, want %v", n, P, name, got[name], w)
					}
					for label, row := range matrix {
						if [classes]int(row) != table[label] {
							t.Errorf("%d samples, %d ranks: row %d is %v, want %v", n, P, label,
								row, table[label])
						}
					}
				}
				broken := d
				broken.Set = data.Of(n, func(i int, row []any) error {
					if comm.Rank() == 0 { // each of its samples
						return errors.New("no such file")
					}
					return s.Read(i, row)
				})
				require.Fails(t, fmt.Sprintf("%d samples, %d ranks: what one cannot read", n, P),
					require.Err(fit.Evaluate(comm, m, broken)), "no such file")
				d.Weights = nil
				if _, err := fit.Evaluate(comm, m, d); n%(3*P) > 0 && (err == nil ||
					!strings.Contains(err.Error(), "count padding")) {
					t.Errorf("%d samples, %d ranks: a padded loss is %v", n, P, err)
				}
				return nil
			}))
		}
	}
}

// TestMetricsThatCannotBeAreNoNumbers: a beginner's mistakes are errors, or metrics that are left
// out.
func TestMetricsThatCannotBeAreNoNumbers(t *testing.T) {
	g := G.NewGraph()
	x := G.NewMatrix(g, G.Float64, G.WithShape(2, 2), G.WithName("x"), G.WithInit(G.Zeroes()))
	y := G.NewVector(g, G.Int, G.WithShape(2), G.WithName("y"), G.WithInit(G.Zeroes()))
	z := G.NewMatrix(g, G.Float64, G.WithShape(2, 1), G.WithName("z"), G.WithInit(G.Zeroes()))
	loss := G.Must(G.Mean(x))
	twice := G.Must(G.Mul(loss, G.NewConstant(2.0)))
	m := require.Value(vm.New(g, nil, vm.Eval(), vm.Keep(twice)))(t)
	defer m.Close()
	label := 1
	s := data.Of(4, func(i int, row []any) error {
		row[1].([]int)[0], row[2].([]float64)[0] = i%2*label, 0.5
		return nil
	})
	d := fit.Data{Set: s, Inputs: G.Nodes{x, y, z}}
	refused := func(what string, metrics ...fit.Metric) {
		t.Helper()
		require.Fails(t, what, require.Err(fit.Evaluate(autograd.Solo(), m, d, metrics...)),
			backend.ErrArgument)
	}
	got, err := fit.Evaluate(autograd.Solo(), m, d, fit.Perplexity())
	require.Check(t, err == nil && len(got) == 0, "perplexity without a loss: %v, %v", got, err)
	refused("two scores for a sample", fit.AUC(x, y))
	refused("a small matrix", fit.Confusion([][]int{{0}}, x, y))
	refused("no square", fit.Confusion([][]int{{0, 0}, {0, 0, 0}}, x, y))
	refused("no whole number", fit.Accuracy(x, z))
	label = 2
	refused("no label of two", fit.AUC(z, y))
	refused("two of one name", fit.Perplexity(), fit.Perplexity())
	refused("the name of the loss", fit.Metric{Name: "loss", Value: fit.Perplexity().Value})
	label, d.Loss = 1, loss
	refused("a loss that is not kept")
}

func cmpOf(a, b float64) int {
	switch {
	case a > b:
		return 1
	case a == b:
		return 0
	}
	return -1
}

// TestAveragesAreValidated: with an EMA validation sees the averages, and the training the weights.
func TestAveragesAreValidated(t *testing.T) {
	type outcome struct {
		params string
		losses []float64
	}
	run := func(averaged bool) (o outcome) {
		m := newLinear(4, true, 1)
		var by solver.Solver = &solver.SGD{Rate: 1. / 64}
		if averaged {
			by = &solver.EMA{Solver: by, Decay: 0.9}
		}
		training := require.Value(vm.New(m.x.Graph(), nil, vm.WithSolver(by, m.w)))(t)
		defer training.Close()
		eval := require.Value(vm.New(m.x.Graph(), nil, vm.Eval()))(t)
		defer eval.Close()
		r := require.Value(fit.Run(t.Context(), training, m.data(points(10)), fit.Epochs(3),
			fit.Validate(eval, m.data(points(10)))))(t)
		for _, e := range r.Epochs {
			o.losses = append(o.losses, e.Metrics["loss"])
		}
		o.params = r.Params
		return o
	}
	plain, averaged := run(false), run(true)
	require.Check(t, plain.params == averaged.params && plain.losses[0] != averaged.losses[0],
		"without averages %+v, with them %+v", plain, averaged)
}

func TestNilArgumentsAreErrors(t *testing.T) {
	m := newLinear(2, false, 1)
	training, err := vm.New(m.x.Graph(), nil, vm.WithSolver(&solver.SGD{Rate: 1. / 64}, m.w))
	require.NoError(t, err)
	defer training.Close()
	eval := require.Value(vm.New(m.x.Graph(), nil, vm.Eval(), vm.Keep(m.guess)))(t)
	defer eval.Close()
	with := func(o fit.Option) error {
		_, err := fit.Run(t.Context(), training, m.data(points(2)), o)
		return err
	}
	measured := func(of fit.Metric) error {
		_, err := fit.Evaluate(autograd.Solo(), eval, m.data(points(2)), of)
		return err
	}
	nodes := func(f func(a, b *G.Node) fit.Metric) func(scores, labels *G.Node) error {
		return func(scores, labels *G.Node) error { return measured(f(scores, labels)) }
	}
	two, buffer := m.data(points(2)), strings.Builder{}
	none := func(string) (fs.FS, error) { return nil, fs.ErrNotExist }
	nilargs.Check(t, map[string]nilargs.Use{
		"Run": {F: fit.Run, Args: []any{t.Context(), training, two, fit.Epochs(1)}},
		"Evaluate": {F: fit.Evaluate,
			Args: []any{autograd.Solo(), eval, two, fit.Perplexity()}},
		"Predict": {F: fit.Predict, Args: []any{autograd.Solo(), eval, two, m.guess}},
		"TensorBoard": {F: func(dir string, histograms ...*G.Node) error {
			return with(fit.TensorBoard(dir, histograms...))
		}, Args: []any{t.TempDir(), m.w}},
		"Checkpoint": {F: func(dir string, every int, options ...autograd.SaveOption) error {
			return with(fit.Checkpoint(dir, every, options...))
		}, Args: []any{"", 0, autograd.KeepLast(1)}},
		"ReadMapping": {F: fit.ReadMapping, Args: []any{"", none}},
		"Progress": {F: func(w io.Writer) error { return with(fit.Progress(w)) },
			Args: []any{&buffer}},
		"Schedule": {F: func(rate solver.Schedule) error { return with(fit.Schedule(rate)) },
			Args: []any{solver.Constant(1)}},
		"Random": {F: func(r autograd.Random) error { return with(fit.Random(r)) },
			Args: []any{random{}}},
		"Validate": {F: func(m *vm.Machine, d fit.Data, metrics ...fit.Metric) error {
			return with(fit.Validate(m, d, metrics...))
		}, Args: []any{eval, m.data(points(2)), fit.Perplexity()}},
		"OnStep": {F: func(f func(fit.StepLoss) error) error { return with(fit.OnStep(f)) },
			Args: []any{func(fit.StepLoss) error { return nil }}},
		"OnEpoch": {F: func(f func(fit.Epoch) error) error { return with(fit.OnEpoch(f)) },
			Args: []any{func(fit.Epoch) error { return nil }}},
		"Accuracy": {F: nodes(fit.Accuracy), Args: []any{m.x, m.y}},
		"AUC":      {F: nodes(fit.AUC), Args: []any{m.guess, m.y}},
		"TopK": {F: func(k int, scores, labels *G.Node) error {
			return measured(fit.TopK(k, scores, labels))
		}, Args: []any{1, m.x, m.y}},
		"Confusion": {F: func(matrix [][]int, scores, labels *G.Node) error {
			return measured(fit.Confusion(matrix, scores, labels))
		}, Args: []any{[][]int{{1}}, m.x, m.y}},
	}, map[string]string{
		"Log": "see below", "CSV": "w is used at once", "MLflow": "nil are no params",
		"JSONLines": "w is used at once",
		"Run.ctx":   "as everywhere, nil is a mistake of the caller",
	})
	require.Fails(t, "a nil writer of a log", with(fit.Log(t.TempDir()+"/log", nil)),
		backend.ErrArgument)
}

type random struct{}

func (random) Seed() uint32     { return 1 }
func (random) Step() uint64     { return 0 }
func (random) First() int       { return 0 }
func (random) Seek(uint64, int) {}
