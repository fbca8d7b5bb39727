package fit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
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
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// machine makes a machine of a graph on the host, closed at the test's end.
func machine(t *testing.T, g *G.ExprGraph, options ...vm.Option) *vm.Machine {
	t.Helper()
	m := require.Value(vm.New(g, nil, options...))(t)
	t.Cleanup(func() { m.Close() })
	return m
}

func sgd(nodes ...*G.Node) vm.Option { return vm.WithSolver(&solver.SGD{Rate: 1. / 64}, nodes...) }

// says reports an error that has not all of the texts.
func says(t *testing.T, what string, err error, texts ...string) {
	t.Helper()
	for _, text := range texts {
		require.Fails(t, what, err, text)
	}
}

// TestWhatReplacesASliceOfARowCounts: Read, Augment and Pad may put slices of their own into the
// row, which train as if they had been written; of another kind or length they are refused.
func TestWhatReplacesASliceOfARowCounts(t *testing.T) {
	run := func(change func(d *fit.Data)) (string, error) {
		m := newLinear(4, true, 1)
		d := m.data(points(10))
		change(&d)
		r, err := fit.Run(t.Context(), machine(t, m.x.Graph(), sgd(m.w)), d, fit.Epochs(3))
		return r.Params, err
	}
	added := func(_ *rand.Rand, row []any) { row[0].([]float64)[0]++ }
	replaced := func(row []any) {
		row[0], row[1] = slices.Clone(row[0].([]float64)), slices.Clone(row[1].([]float64))
	}
	want, err := run(func(d *fit.Data) { d.Augment = added })
	require.NoError(t, err)
	s := points(10)
	for what, change := range map[string]func(d *fit.Data){
		"Read": func(d *fit.Data) {
			d.Augment = added
			d.Set = data.Of(10, func(i int, row []any) error {
				replaced(row)
				return s.Read(i, row)
			})
		},
		"Augment": func(d *fit.Data) {
			d.Augment = func(r *rand.Rand, row []any) { replaced(row); added(r, row) }
		},
		"Pad": func(d *fit.Data) { d.Augment, d.Pad = added, replaced },
	} {
		require.Equal(t, what, require.Got(run(change))(t), want)
	}
	put := func(x any) func(d *fit.Data) {
		return func(d *fit.Data) {
			d.Set = data.Of(10, func(i int, row []any) error {
				if i == 7 {
					row[1] = x
				}
				return nil
			})
		}
	}
	for _, x := range []any{nil, 1.0, []float32{1}, []float64{1, 2}, []float64{}} {
		_, err := run(put(x))
		says(t, fmt.Sprint(x), err, "sample 7", "row[1] was replaced by a", "[]float64 of 1")
	}
	_, err = run(func(d *fit.Data) { d.Pad = func(row []any) { row[0] = nil } })
	says(t, "Pad", err, "Data.Pad: ")
}

// TestAMachineThatTrainsEvaluatesNothing: nor does one of which batch norms and dropouts would
// train. No sample reaches the parameters.
func TestAMachineThatTrainsEvaluatesNothing(t *testing.T) {
	m := newLinear(2, false, 1)
	training := machine(t, m.x.Graph(), sgd(m.w))
	for how, other := range map[string]*vm.Machine{
		"a step of its solver": training, "as in training": machine(t, m.x.Graph())} {
		_, err := fit.Evaluate(autograd.Solo(), other, m.data(points(4)))
		says(t, "Evaluate", err, how, "vm.Eval")
		_, err = fit.Run(t.Context(), training, m.data(points(4)), fit.Validate(other,
			m.data(points(4))))
		says(t, "Validate", err, "fit.Validate", how, "vm.Eval")
	}
	require.Slices(t, "the parameters became", m.w.Value().Data().([]float64), []float64{1, -2})
}

// TestAValidationHasTheTensorsOfTheTraining, in one graph or in two: a graph with weights of its
// own is refused by their names.
func TestAValidationHasTheTensorsOfTheTraining(t *testing.T) {
	m := newLinear(2, false, 1)
	training := machine(t, m.x.Graph(), sgd(m.w))
	validated := func(change func(o *linear)) (float64, error) {
		o := newLinear(2, false, 1)
		change(o)
		r, err := fit.Run(t.Context(), training, m.data(points(8)), fit.Schedule(
			solver.Constant(0)), fit.Validate(machine(t, o.x.Graph(), vm.Eval(),
			vm.Keep(o.loss)), o.data(points(4))))
		if err != nil {
			return 0, err
		}
		return r.Epochs[0].Metrics["loss"], nil
	}
	let := func(of *G.Node, value any) { require.NoError(t, G.Let(of, value)) }
	want := require.Value(fit.Evaluate(autograd.Solo(), machine(t, m.x.Graph(), vm.Eval()),
		m.data(points(4))))(t)
	got, err := validated(func(o *linear) { let(o.w, m.w.Value()) })
	require.Check(t, err == nil && got == want["loss"], "with the same tensor: %v, %v, want %v",
		got, err, want)
	_, err = validated(func(*linear) {})
	says(t, "with its own", err, "fit.Validate", "has none of the learnables")
	// of two learnables one is shared
	b := G.NewVector(m.x.Graph(), G.Float64, G.WithName("b"), G.WithShape(3),
		G.WithInit(G.Zeroes()))
	require.NoError(t, require.Err(nn.Grad(G.Must(G.Sum(b)), b)))
	training = machine(t, m.x.Graph(), sgd(m.w, b))
	for _, name := range []string{"b", "other"} {
		_, err = validated(func(o *linear) {
			let(o.w, m.w.Value())
			own := G.NewVector(o.x.Graph(), G.Float64, G.WithName(name), G.WithShape(3),
				G.WithInit(G.Zeroes()))
			o.loss = G.Must(G.Add(o.loss, G.Must(G.Sum(own))))
		})
		says(t, name, err, name+" of its graph is not the tensor of the learnable b")
	}
}

// weighted is a loss of x [4, 2], which weights of rows or one weight of all reach in some way.
func weighted(t *testing.T, scalar bool, how func(w, each *G.Node) *G.Node) (fit.Data,
	*vm.Machine) {
	t.Helper()
	g, shape := G.NewGraph(), tensor.Shape{4}
	x := G.NewMatrix(g, G.Float64, G.WithShape(4, 2), G.WithName("x"), G.WithInit(G.Zeroes()))
	y := G.NewVector(g, G.Float64, G.WithShape(4), G.WithName("y"), G.WithInit(G.Zeroes()))
	w := G.NewScalar(g, G.Float64, G.WithName("weights"), G.WithValue(0.0))
	if !scalar {
		w = G.NewVector(g, G.Float64, G.WithShape(shape...), G.WithName("weights"),
			G.WithInit(G.Zeroes()))
	}
	guess := G.Must(G.Sum(x, 1))
	loss := how(w, G.Must(G.Square(G.Must(G.Sub(guess, y)))))
	u := G.NewScalar(g, G.Float64, G.WithName("u"), G.WithValue(1.0))
	loss = G.Must(G.Mul(loss, u))
	require.NoError(t, require.Err(G.Grad(loss, u)))
	return fit.Data{Set: points(7), Inputs: G.Nodes{x, y}, Loss: loss, Weights: w},
		machine(t, g, sgd(u))
}

// TestWeightsMultiplyTheLossesOfRowsOnce: whatever else a graph does with Data.Weights is refused,
// before the first step.
func TestWeightsMultiplyTheLossesOfRowsOnce(t *testing.T) {
	mul := func(a, b *G.Node) *G.Node { return G.Must(G.HadamardProd(a, b)) }
	sum, mean := func(a *G.Node) *G.Node { return G.Must(G.Sum(a)) },
		func(a *G.Node) *G.Node { return G.Must(G.Mean(a)) }
	div := func(a, b *G.Node) *G.Node { return G.Must(G.HadamardDiv(a, b)) }
	for _, c := range []struct {
		what   string
		scalar bool
		how    func(w, each *G.Node) *G.Node
		want   string
	}{
		{"a sum", false, func(w, l *G.Node) *G.Node { return sum(mul(w, l)) }, ""},
		{"a product", false, func(w, l *G.Node) *G.Node { return G.Must(G.Mul(l, w)) }, ""},
		{"by column", false, func(w, l *G.Node) *G.Node {
			l = G.Must(G.Reshape(l, tensor.Shape{2, 2}))
			return sum(mul(G.Must(G.Reshape(w, tensor.Shape{2, 2})), mul(l, l)))
		}, ""},
		{"and a penalty", false, func(w, l *G.Node) *G.Node {
			return G.Must(G.Add(sum(mul(w, l)), G.NewConstant(3.0)))
		}, ""},
		{"a mean", false, func(w, l *G.Node) *G.Node { return mean(mul(w, l)) }, "mean over"},
		{"a weighted mean", false, func(w, l *G.Node) *G.Node {
			return div(sum(mul(w, l)), sum(w))
		}, "divided by Weights"},
		{"twice", false, func(w, l *G.Node) *G.Node { return sum(mul(w, mul(w, l))) }, "twice"},
		{"none", false, func(_, l *G.Node) *G.Node { return sum(l) }, "does not read Weights"},
		{"one of all, a mean", true, func(w, l *G.Node) *G.Node {
			return G.Must(G.Mul(w, mean(l)))
		}, "mean over the 4 rows"},
		{"one of all, twice", true, func(w, l *G.Node) *G.Node {
			return G.Must(G.Mul(w, G.Must(G.Mul(w, sum(l)))))
		}, "twice"},
		{"one of all, of all rows", true, func(w, l *G.Node) *G.Node {
			return G.Must(G.Mul(w, sum(l)))
		}, "without their weights"},
	} {
		d, m := weighted(t, c.scalar, c.how)
		d.Pad = func([]any) {}
		if c.scalar && c.want != "without their weights" { // whole batches
			d.Set = points(8)
		}
		steps := 0
		_, err := fit.Run(t.Context(), m, d, fit.OnStep(func(fit.StepLoss) error {
			steps++
			return nil
		}))
		if c.want == "" {
			require.Check(t, err == nil && steps == 2, "%s: %d steps, %v", c.what, steps, err)
			continue
		}
		if says(t, c.what, err, c.want); steps > 0 {
			t.Errorf("%s: %d steps", c.what, steps)
		}
	}
	d, m := weighted(t, true, func(w, l *G.Node) *G.Node { return G.Must(G.Mul(w, sum(l))) })
	_, err := fit.Run(t.Context(), m, d)
	says(t, "no Pad", err, "7 samples do not fill batches of 4", "set Pad")
	d.Set = points(8)
	_, err = fit.Run(t.Context(), m, d)
	require.Check(t, err == nil, "whole batches: %v", err)
}

// rooted is a graph of the roots of (x w z)^2: where z is 0, the loss is finite and the gradient
// is NaN.
func rooted(local int) (d fit.Data, w *G.Node) {
	g := G.NewGraph()
	input := func(name string) *G.Node {
		return G.NewVector(g, G.Float64, G.WithShape(local), G.WithName(name),
			G.WithInit(G.Zeroes()))
	}
	x, z := input("x"), input("z")
	w = G.NewVector(g, G.Float64, G.WithShape(local), G.WithName("w"), G.WithInit(G.Ones()))
	h := G.Must(G.HadamardProd(G.Must(G.HadamardProd(x, w)), z))
	d = fit.Data{Inputs: G.Nodes{x, z}, Loss: G.Must(G.Mean(G.Must(G.Sqrt(G.Must(G.Square(h))))))}
	if _, err := G.Grad(d.Loss, w); err != nil {
		panic(err)
	}
	return d, w
}

// TestAModelThatIsNotFiniteIsNeverTheBest: where the loss is finite and the gradient is not, a
// training ends with an error that names parameter and step on all ranks, whether it is saved or
// not; the checkpoint before stays the newest, although Save keeps the last one only, and the
// training goes on from it.
func TestAModelThatIsNotFiniteIsNeverTheBest(t *testing.T) {
	const parts = vm.SolverState | vm.Gradients | vm.Parameters
	for _, c := range []struct {
		P, every int
		saved    bool
		machine  vm.Option
	}{
		{1, 0, false, nil}, {1, 0, true, nil}, {2, 0, true, nil}, {2, 1, true, nil},
		{3, 2, true, nil}, {2, 0, true, vm.WithShards(parts)},
		{2, 0, false, vm.WithShards(vm.SolverState)},
	} {
		dir, bad, n := t.TempDir(), true, 2*c.P*2
		sampler := require.Value(autograd.NewSampler(autograd.Solo(), n, 2*c.P, 1))(t)
		// by a sample of step 4, the last one of epoch 2: see Data.Augment
		drawn := rand.New(rand.NewPCG(1+1<<32, uint64(sampler.Epoch(1)[1][0]))).Uint64()
		run := func() []error {
			wrongs := make([]error, c.P)
			ranks(t, c.P, func(comm backend.Communicator, build sync.Locker) (*fit.Result, error) {
				build.Lock()
				d, w := rooted(2)
				build.Unlock()
				m, err := vm.New(w.Graph(), nil, append([]vm.Option{sgd(w),
					vm.WithDataParallel(comm)}, slices.DeleteFunc([]vm.Option{c.machine},
					func(o vm.Option) bool { return o == nil })...)...)
				if err != nil {
					return nil, err
				}
				d.Set = data.Of(n, func(i int, row []any) error {
					row[0].([]float64)[0], row[1].([]float64)[0] = float64(i+1), 1
					return nil
				})
				d.Augment = func(r *rand.Rand, row []any) {
					if r.Uint64() == drawn && bad {
						row[1].([]float64)[0] = 0
					}
				}
				o := []fit.Option{fit.Epochs(3)}
				if c.saved {
					o = append(o, fit.Checkpoint(dir, c.every, autograd.KeepLast(1)))
				}
				r, err := fit.Run(t.Context(), m, d, o...)
				wrongs[comm.Rank()] = err
				for _, e := range r.Epochs {
					require.Check(t, !e.Best || e.Epoch <= 1 || !bad,
						"%+v: epoch %d is the best one", c, e.Epoch)
				}
				return r, m.Close()
			})
			return wrongs
		}
		for rank, err := range run() {
			what := fmt.Sprintf("%d ranks, %d, %v, rank %d", c.P, c.every, c.saved, rank)
			says(t, what, err, `of "w" is NaN`, "after step 4")
		}
		if !c.saved {
			continue
		}
		left, err := filepath.Glob(filepath.Join(dir, "step-*"))
		if err != nil || len(left) == 0 || slices.ContainsFunc(left, func(p string) bool {
			return strings.HasSuffix(p, "4")
		}) {
			t.Errorf("%+v: checkpoints %v, %v", c, left, err)
		}
		bad = false
		err = errors.Join(run()...)
		require.Check(t, err == nil, "%+v: it goes on with %v", c, err)
	}
}

// labelled is a graph of the cross-entropy of x [2, 3] w and labels of classes.
func labelled(local int) (d fit.Data, w, scores *G.Node) {
	g := G.NewGraph()
	x := G.NewMatrix(g, G.Float32, G.WithShape(local, 3), G.WithName("x"), G.WithInit(G.Zeroes()))
	y := G.NewVector(g, G.Int, G.WithShape(local), G.WithName("y"), G.WithInit(G.Zeroes()))
	w = G.NewMatrix(g, G.Float32, G.WithShape(3, classes), G.WithName("w"), G.WithInit(G.Zeroes()))
	scores = G.Must(G.Mul(x, w))
	d = fit.Data{Inputs: G.Nodes{x, y}, Loss: G.Must(nn.CrossEntropy(nn.NoLabel, scores, y))}
	if _, err := G.Grad(d.Loss, w); err != nil {
		panic(err)
	}
	return d, w, scores
}

// TestTheBestEpochIsAlwaysChosenByOneNumber, also of a training that resumes.
func TestTheBestEpochIsAlwaysChosenByOneNumber(t *testing.T) {
	dir := t.TempDir()
	train := func(epochs int, validated bool, options ...fit.Option) (*fit.Result, error) {
		d, w, scores := labelled(4)
		d.Set = data.Of(12, func(i int, row []any) error {
			row[0].([]float32)[i%3], row[1].([]int)[0] = 1, i%3
			return nil
		})
		if options = append(options, fit.Epochs(epochs), fit.Checkpoint(dir, 0)); validated {
			options = append(options, fit.Validate(machine(t, w.Graph(), vm.Eval(),
				vm.Keep(scores, d.Loss)), d, fit.Accuracy(scores, d.Inputs[1])))
		}
		m := machine(t, w.Graph(), sgd(w))
		defer m.Close()
		return fit.Run(t.Context(), m, d, options...)
	}
	require.NoError(t, require.Err(train(1, false)))
	_, err := train(2, true)
	says(t, "a validation", err, "by the loss of the training", "by the loss of the validation")
	_, err = train(2, true, fit.Watch("accuracy"))
	says(t, "another metric", err, "by the loss of the training", "by the accuracy of the val")
	require.Equal(t, "the same number",
		len(require.Value(train(2, false, fit.EarlyStop(9)))(t).Epochs), 2)
}

// TestALossThatIsNotFiniteNamesItsSample: a label out of range, and a NaN or an infinity in the
// data, on all ranks, whichever rank has the sample, in a training and in an evaluation.
func TestALossThatIsNotFiniteNamesItsSample(t *testing.T) {
	const n, bad = 24, 13
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for what, c := range map[string]struct {
		spoil   func(x []float32, y []int)
		want    string
		options []vm.Option
	}{
		"a label":     {func(_ []float32, y []int) { y[0] = classes }, "label 0 is 4, out of", nil},
		"a label < 0": {func(_ []float32, y []int) { y[0] = -1 }, "label 0 is -1, out of", nil},
		"a NaN":       {func(x []float32, _ []int) { x[2] = nan }, "[2] of input x", nil},
		"an infinity": {func(x []float32, _ []int) { x[1] = inf }, "is +Inf", nil},
		"clipped": {func(x []float32, _ []int) { x[2] = nan }, "[2] of input x",
			[]vm.Option{vm.ClipNorm(1)}},
		"accumulated": {func(x []float32, _ []int) { x[2] = nan }, "[2] of input x",
			[]vm.Option{vm.Accumulate(2)}},
	} {
		set := data.Of(n, func(i int, row []any) error {
			x, y := row[0].([]float32), row[1].([]int)
			if x[i%3], y[0] = 1, i%3; i == bad {
				c.spoil(x, y)
			}
			return nil
		})
		err := euryale.Run(t.Context(), 2, func(comm backend.Communicator,
			build sync.Locker) error {
			build.Lock()
			d, w, _ := labelled(2)
			build.Unlock()
			d.Set = set
			m, err := vm.New(w.Graph(), nil, append(c.options, vm.WithDataParallel(comm),
				sgd(w))...)
			if err != nil {
				return err
			}
			_, err = fit.Run(t.Context(), m, d)
			says(t, what, err, fmt.Sprintf("of sample %d", bad), c.want)
			return m.Close()
		})
		require.That(t, err == nil || len(c.options) != 0, "%v", err)
		d, w, _ := labelled(2)
		d.Set = set
		_, err = fit.Evaluate(autograd.Solo(), machine(t, w.Graph(), vm.Eval()), d)
		says(t, what+" of an evaluation", err, fmt.Sprintf("of sample %d", bad), c.want)
	}
}

// TestAFinishedTrainingIsValidatedAgain: started once more, it fills the confusion matrix and
// writes the log as it did, and trains nothing.
func TestAFinishedTrainingIsValidatedAgain(t *testing.T) {
	dir := t.TempDir()
	var matrices [2][][]int
	var logs, params [2]string
	for k := range matrices {
		for range classes {
			matrices[k] = append(matrices[k], make([]int, classes))
		}
		d, w, scores := labelled(4)
		d.Set = data.Of(12, func(i int, row []any) error {
			row[0].([]float32)[i%3], row[1].([]int)[0] = 1, i%3
			return nil
		})
		file := filepath.Join(t.TempDir(), "log")
		r, err := fit.Run(t.Context(), machine(t, w.Graph(), sgd(w)), d, fit.Epochs(3),
			fit.Checkpoint(dir, 0), fit.Log(file, fit.CSV), fit.Validate(machine(t, w.Graph(),
				vm.Eval(), vm.Keep(scores)), d, fit.Confusion(matrices[k], scores, d.Inputs[1])),
			fit.OnStep(func(fit.StepLoss) error {
				return map[bool]error{true: errors.New("a step")}[k > 0]
			}))
		text, wrong := os.ReadFile(file)
		if err = errors.Join(err, wrong); err != nil {
			t.Fatal(err)
		}
		logs[k], params[k] = string(text), r.Params
	}
	require.Check(t, fmt.Sprint(matrices[0]) == fmt.Sprint(matrices[1]) && matrices[0][1][1] == 4,
		"the matrices are %v", matrices)
	require.Check(t, logs[0] == logs[1] && params[0] == params[1], "logs %q, parameters %q", logs,
		params)
}

// TestFilesAreTriedBeforeTheFirstStep: checkpoints and logs that cannot be written, on all ranks.
func TestFilesAreTriedBeforeTheFirstStep(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for what, c := range map[string]struct {
		option fit.Option
		want   string
	}{
		"a file for checkpoints": {fit.Checkpoint(file, 0), "not a directory"},
		"in a file":              {fit.Checkpoint(file+"/run", 0), "not a directory"},
		"nothing is kept":        {fit.Checkpoint(dir, 0, autograd.KeepLast(0)), "KeepLast(0)"},
		"a log in no folder":     {fit.Log(dir+"/none/log", fit.CSV), "fit.Log: "},
		"a folder for a log":     {fit.Log(dir, fit.CSV), "fit.Log: "},
	} {
		require.NoError(t, euryale.Run(t.Context(), 2, func(comm backend.Communicator,
			build sync.Locker) error {
			_, _, err := fitLinear(t.Context(), comm, build, 4, points(8), nil, c.option,
				fit.OnStep(func(fit.StepLoss) error { return errors.New("a step") }))
			says(t, what, err, c.want)
			require.Check(t, err == nil || !strings.Contains(err.Error(), "a step"),
				"%s: found after a step", what)
			return nil
		}))
	}
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	require.Check(t, err == nil && len(left) == 1, "it has left %v, %v", left, err)
}

// TestEachOptionHasItsOwnError: it names the option, and all wrong ones are named at once.
func TestEachOptionHasItsOwnError(t *testing.T) {
	m := newLinear(2, false, 1)
	training := machine(t, m.x.Graph(), sgd(m.w))
	eval := machine(t, m.x.Graph(), vm.Eval(), vm.Keep(m.guess))
	value := func([]float64, float64) float64 { return 1 }
	d, unmeasured := m.data(points(4)), m.data(points(4))
	unmeasured.Loss = nil
	validate := func(metrics ...fit.Metric) fit.Option { return fit.Validate(eval, d, metrics...) }
	other, _, scores := labelled(2)
	for want, option := range map[string]fit.Option{
		"fit.Epochs(0): there must be an epoch":      fit.Epochs(0),
		"fit.Prefetch: -1 is below 0":                fit.Prefetch(-1),
		"fit.Checkpoint: every: -2 is below 0":       fit.Checkpoint("", -2),
		"fit.EarlyStop: -3 is below 0":               fit.EarlyStop(-3),
		"fit.Schedule: rate is nil":                  fit.Schedule(nil),
		"fit.Schedule: the rate is NaN":              fit.Schedule(solver.Constant(math.NaN())),
		"fit.Schedule: the rate is -1":               fit.Schedule(solver.Constant(-1)),
		"fit.Validate: m is nil":                     fit.Validate(nil, d),
		"fit.Progress: w is nil":                     fit.Progress(nil),
		"fit.Log: write is nil":                      fit.Log("x", nil),
		`"bleu": there is loss`:                      fit.Watch("bleu"),
		"fit.Watch: val_loss is the Loss of fit.Val": fit.Watch("val_loss"),
		`fit.Metric "x": it needs a Name and a Val`:  validate(fit.Metric{Name: "x"}),
		`fit.Metric "": it needs a Name and a Valu`:  validate(fit.Metric{Value: value}),
		`the name "val_loss"`: validate(fit.Metric{
			Name: "val_loss", Value: value}),
		`fit.Metric "y": Sums is below 0`: validate(fit.Metric{
			Name: "y", Value: value, Sums: func(int) int { return -1 }}),
		"fit.Validate: bad argument: fit.Data: there are no samples": fit.Validate(eval,
			m.data(points(0))),
		`"top9": bad argument: TopK of 9: there are 2`: validate(fit.TopK(9, m.x, m.y)),
		`"top0": bad argument: TopK of 0: there are 2`: validate(fit.TopK(0, m.x, m.y)),
		`"recall": bad argument: a confusion matrix`:   validate(fit.Confusion(nil, m.x, m.y)),
		`"accuracy": bad argument: ` + scores.Name(): validate(
			fit.Accuracy(scores, other.Inputs[1])),
	} {
		r, err := fit.Run(t.Context(), training, d, option)
		if says(t, want, err, want); len(r.Epochs) > 0 || err != nil &&
			strings.Count(err.Error(), "bad argument") > 1 {
			t.Errorf("%s: %d epochs, %v", want, len(r.Epochs), err)
		}
	}
	_, err := fit.Run(t.Context(), training, d, fit.Epochs(-1), fit.Prefetch(-1), fit.Watch("x"))
	says(t, "three", err, "fit.Epochs(-1)", "fit.Prefetch: -1", "fit.Watch")
	_, err = fit.Run(t.Context(), training, d, validate(), validate())
	says(t, "two", err, "fit.Validate is given twice")
	r, err := fit.Run(t.Context(), training, d, validate(), fit.Watch("val_loss"))
	require.Check(t, err == nil && r.Epochs[0].Best, "val_loss: %+v, %v", r, err)
}

// TestDataThatDoNotFitTheGraphAreRefused: what batches would not reach, or would destroy.
func TestDataThatDoNotFitTheGraphAreRefused(t *testing.T) {
	m, o := newLinear(2, false, 1), newLinear(2, false, 1)
	hidden := G.Must(G.Square(G.Must(G.Sum(m.guess)))) // which the machine does not keep
	_ = G.Must(G.Add(hidden, m.loss))
	training := machine(t, m.x.Graph(), sgd(m.w))
	for want, change := range map[string]func(d *fit.Data){
		"w is a learnable":            func(d *fit.Data) { d.Inputs = G.Nodes{m.x, m.w} },
		"x is given twice":            func(d *fit.Data) { d.Inputs = G.Nodes{m.x, m.y, m.x} },
		"x is of another graph":       func(d *fit.Data) { d.Inputs = G.Nodes{o.x, m.y} },
		"is no single number of the ": func(d *fit.Data) { d.Loss = o.loss },
		"of the shape (2), is no":     func(d *fit.Data) { d.Loss = m.guess },
		"does not keep the Loss":      func(d *fit.Data) { d.Loss = hidden },
	} {
		d := m.data(points(4))
		change(&d)
		_, err := fit.Run(t.Context(), training, d)
		says(t, want, err, want)
	}
	c, w, scores := labelled(2)
	y := c.Inputs[1]
	c.Set, c.Inputs = points(4), c.Inputs[:1]
	_, err := fit.Run(t.Context(), machine(t, w.Graph(), sgd(w)), c)
	says(t, "a loss without labels", err, "the labels y are not among the Inputs")
	c.Loss = nil
	_, err = fit.Evaluate(autograd.Solo(), machine(t, w.Graph(), vm.Eval(), vm.Keep(scores)), c,
		fit.Accuracy(scores, y))
	says(t, "a metric without labels", err, "the labels y are not among the Inputs")
	err = euryale.Run(t.Context(), 2, func(comm backend.Communicator, build sync.Locker) error {
		_, _, err := fitLinear(context.Background(), comm, build, 4, points(8+comm.Rank()), nil)
		says(t, "other lengths", err, "rank")
		return nil
	})
	require.NoError(t, err)
}

// growing are samples that become more.
type growing struct {
	fit.Set
	n int
}

func (g *growing) Len() int { return g.n }

// TestTheNumberOfSamplesMustNotChange in a training.
func TestTheNumberOfSamplesMustNotChange(t *testing.T) {
	m := newLinear(2, false, 1)
	s := &growing{points(64), 8}
	_, err := fit.Run(t.Context(), machine(t, m.x.Graph(), sgd(m.w)), m.data(s), fit.Epochs(2),
		fit.OnStep(func(step fit.StepLoss) error {
			s.n = 8 + step.Step
			return nil
		}))
	says(t, "more samples", err, "there were 8 samples, and now there are 12")
}

// TestHooksCannotChangeWhatIsKept: what they are given is theirs.
func TestHooksCannotChangeWhatIsKept(t *testing.T) {
	m := newLinear(2, false, 1)
	d := m.data(points(8))
	one := fit.Metric{Name: "one", Add: func(_ []float64, samples []int) error {
		clear(samples)
		return nil
	}, Value: func([]float64, float64) float64 { return 1 }}
	clears := func(e fit.Epoch) error {
		clear(e.Metrics)
		return nil
	}
	r, err := fit.Run(t.Context(), machine(t, m.x.Graph(), sgd(m.w)), d, fit.Epochs(2),
		fit.Validate(machine(t, m.x.Graph(), vm.Eval()), d, one), fit.OnEpoch(clears),
		fit.Log(filepath.Join(t.TempDir(), "log"), func(_ io.Writer, all []fit.Epoch) error {
			return clears(all[0])
		}))
	require.Check(t, err == nil && len(r.Epochs[0].Metrics) == 2 && len(r.Epochs[1].Metrics) == 2,
		"%+v, %v", r, err)
}
