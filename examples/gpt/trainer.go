package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
	"gonum.org/v1/plot/plotter"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/bench/chart"
	"github.com/euryale-ml/euryale/examples/cli"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// What is not worth a flag.
const (
	clipNorm    = 1.0 // of the gradients
	weightDecay = 0.01
	beta2       = 0.99 // few tokens in a step
	finalRate   = 0.1  // of the highest
	evalBatches = 20
	lastLosses  = 20 // of the loss that is printed last
	untimed     = 5  // steps, where there are enough of them
)

// trainer is a model that all ranks train.
type trainer struct {
	config
	comm       backend.Communicator
	layout     *layers.Layout
	build      sync.Locker
	device     backend.Device // nil for the host
	out        io.Writer
	corpus     corpus
	evaluation windows
	bigram     float64

	runs            int            // of a step on this rank, each of a micro-batch
	tokens, targets *layers.Tokens // of a micro-batch
	loss            layers.Node
	learnables      gorgonia.Nodes
	parameters      int // elements, of the whole model
	machine, eval   *vm.Machine
	solver          *autograd.AdamW
	random          *nn.Random // of dropouts
	rate            autograd.Schedule

	past  past
	began time.Time     // of the training in this process
	took  time.Duration // for the steps that are timed
	timed int           // steps, negative until memory is touched and kernels are compiled
}

func newTrainer(comm backend.Communicator, build sync.Locker, cfg config, out io.Writer) (t *trainer, err error) {
	t = &trainer{config: cfg, comm: comm, build: build, out: out, random: nn.NewRandom(uint32(cfg.seed)), solver: &autograd.AdamW{Rate: cfg.lr, Beta2: beta2, WeightDecay: weightDecay}}
	t.rate = autograd.Warmup(cfg.warmUp, autograd.Cosine(cfg.lr, finalRate*cfg.lr, max(1, cfg.steps-cfg.warmUp)))
	if t.corpus, err = loadCorpus(cfg.data, cfg.seed); err == nil {
		err = t.corpus.check(cfg.context)
	}
	// Machines may have different versions of Go.
	if err := autograd.Agree(comm, "the text has the SHA-256 "+t.corpus.hash(), err); err != nil {
		return nil, cli.UsageError{Err: err}
	}
	if t.device, err = cli.Device(cfg.device, comm); err != nil {
		return nil, err
	}
	t.layout, err = layers.NewLayout(comm, cfg.sizes.DP, cfg.sizes.SP, cfg.sizes.TP)
	if errors.Is(err, backend.ErrArgument) {
		return nil, cli.Usage("--dp, --sp, --tp: %w", err)
	}
	if err != nil {
		return nil, err
	}
	if err := t.prepare(); err != nil {
		return nil, errors.Join(err, t.close())
	}
	return t, nil
}

// prepare makes the model and the machines.
func (t *trainer) prepare() error {
	if err := t.divide(); err != nil {
		return cli.UsageError{Err: err}
	}
	exchange, err := cli.Compression(t.compress, true)
	if err != nil {
		return err
	}
	t.past.Flags = t.flags()
	t.evaluation = t.corpus.evaluation(evalBatches*t.batch, t.context)
	t.bigram = t.corpus.bigram(t.evaluation)

	t.build.Lock()
	b := layers.NewBuilder(gorgonia.NewGraph(), t.layout, tensor.Float32, t.seed)
	samples := t.batch / t.microBatches
	if t.reduction == tree {
		b.Batches(1)
	} else {
		b.Batches(t.microBatches)
	}
	t.tokens, t.targets = b.Tokens("tokens", 1, samples, t.context), b.Tokens("targets", 1, samples, t.context)
	t.loss = b.CrossEntropy(t.logits(b, t.tokens, len(t.corpus.characters), t.random), t.targets)
	err = b.Err()
	t.build.Unlock()
	if err != nil {
		return cli.UsageError{Err: err}
	}
	options := []vm.Option{vm.Keep(t.loss.Node), vm.WithPrecision(t.precision)}
	if t.eval, err = vm.New(b.Graph(), t.device, append(options, vm.Eval())...); err != nil {
		return err
	}
	t.build.Lock()
	t.learnables, err = b.Grad(t.loss) // behind the machine for evaluation, which has no gradients
	t.parameters = b.Parameters()
	t.build.Unlock()
	if err != nil {
		return err
	}
	exchange = append(exchange, autograd.WithParts(t.layout.Comm(layers.Tensor), b.Divided()))
	if t.reduction == tree {
		options = append(options, vm.WithTree(t.microBatches))
	} else {
		exchange = append(exchange, autograd.WithSum())
		options = append(options, vm.Accumulate(t.runs))
	}
	options = append(options, vm.WithSolver(t.solver, t.learnables...), vm.WithDataParallel(t.layout.Data, exchange...), vm.ClipNorm(clipNorm))
	t.machine, err = vm.New(b.Graph(), t.device, options...)
	return err
}

// divide divides batches into the micro-batches of all replicas.
func (t *trainer) divide() (err error) {
	replicas := t.layout.DP
	if t.microBatches == 0 {
		t.microBatches = replicas
	}
	switch {
	case t.batch%t.microBatches != 0:
		return fmt.Errorf("--batch is %d: it does not divide into %d micro-batches for %d replicas: use a multiple", t.batch, t.microBatches, replicas)
	case t.reduction == tree:
		t.runs, err = autograd.TreeShare(t.microBatches, replicas)
		return err
	case t.microBatches%replicas != 0:
		return fmt.Errorf("--micro-batches is %d: they do not divide among %d replicas: use a multiple", t.microBatches, replicas)
	}
	t.runs = t.microBatches / replicas
	return nil
}

func (t *trainer) close() error {
	return errors.Join(t.closeMachines(), t.solver.Close(), t.layout.Close())
}

func (t *trainer) closeMachines() error {
	var errs []error
	for _, m := range []*vm.Machine{t.machine, t.eval} {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	t.machine, t.eval = nil, nil
	return errors.Join(errs...)
}

// print prints a line on rank 0.
func (t *trainer) print(format string, args ...any) error {
	if t.comm.Rank() != 0 {
		return nil
	}
	_, err := fmt.Fprintf(t.out, format+"\n", args...)
	return err
}

// train trains until all steps are done, or until ctx ends and the training is saved.
func (t *trainer) train(ctx context.Context) error {
	t.began = time.Now()
	if err := t.introduce(); err != nil {
		return err
	}
	if err := t.resume(); err != nil {
		return err
	}
	left := t.steps - len(t.past.Losses)
	if left == 0 {
		return nil
	}
	t.timed = -min(untimed, left/2)
	bar := progressbar.DefaultSilent(int64(left))
	if t.comm.Rank() == 0 {
		bar = cli.Bar(left)
	}
	for step := len(t.past.Losses); step < t.steps; step++ {
		if err := t.step(step); err != nil {
			return errors.Join(fmt.Errorf("step %d: %w", step+1, err), bar.Clear())
		}
		bar.Add(1) // an error of drawing is no reason to stop
		due := (step+1)%t.evalEvery == 0 || step+1 == t.steps
		if due {
			bar.Clear()
			if err := t.line(); err != nil {
				return err
			}
		}
		if err := t.keep(ctx, step+1); err != nil {
			return errors.Join(err, bar.Clear())
		}
	}
	return bar.Finish()
}

// introduce prints what is trained.
func (t *trainer) introduce() error {
	return errors.Join(
		t.print("%d parameters, %d characters, %d bytes to train on, %d held out: a bigram model of them has a loss of %.4f",
			t.parameters, len(t.corpus.characters), len(t.corpus.training), len(t.corpus.heldOut), t.bigram),
		t.print("6N + 12LHQT = %.4g floating-point operations for each token", t.operations(t.parameters)))
}

// over runs a machine on this rank's micro-batches of a batch, and returns the loss of the whole batch. It is
// collective.
func (t *trainer) over(batch windows, m *vm.Machine) (float64, error) {
	losses := make([]float64, t.runs)
	for i := range losses {
		samples, first := t.batch/t.microBatches, t.layout.Replica*t.runs+i
		tokens, targets := batch.part(first*samples, (first+1)*samples).tokens()
		if err := errors.Join(t.tokens.Set(tokens), t.targets.Set(targets)); err != nil {
			return 0, err
		}
		t.random.Seek(uint64(len(t.past.Losses)), first*samples)
		if err := m.RunAll(); err != nil {
			return 0, err
		}
		losses[i] = float64(t.loss.Value().Data().(float32))
	}
	if t.reduction == tree {
		return autograd.TreeMean(t.layout.Data, losses)
	}
	loss := 0.0
	for _, share := range losses {
		loss += share
	}
	err := autograd.Sum(t.layout.Data, &loss)
	return loss, err
}

// step trains on one batch.
func (t *trainer) step(step int) error {
	batch := t.corpus.random(t.seed, step, t.batch, t.context)
	t.solver.SetRate(t.rate(step))
	began := time.Now()
	loss, err := t.over(batch, t.machine)
	if t.timed++; t.timed > 0 {
		t.took += time.Since(began)
	}
	t.past.Losses = append(t.past.Losses, loss)
	return err
}

// heldOutLoss returns the loss of text that was held out. It is collective.
func (t *trainer) heldOutLoss() (float64, error) {
	sum := 0.0
	for i := range evalBatches {
		loss, err := t.over(t.evaluation.part(i*t.batch, (i+1)*t.batch), t.eval)
		if err != nil {
			return 0, fmt.Errorf("evaluate: %w", err)
		}
		sum += loss
	}
	return sum / evalBatches, nil
}

// line evaluates the model, and prints how the training is.
func (t *trainer) line() error {
	since := 0
	if n := len(t.past.Evals); n > 0 {
		since = t.past.Evals[n-1].Step
	}
	loss, err := t.heldOutLoss()
	if err != nil {
		return err
	}
	done := len(t.past.Losses)
	t.past.Evals = append(t.past.Evals, eval{done, loss})
	return t.print("step %d/%d: loss=%.4f eval=%.4f tokens/s=%.0f %s", done, t.steps, mean(t.past.Losses[since:]), loss, t.speed(), t.utilisation())
}

// speed returns the tokens of all ranks in a second of training.
func (t *trainer) speed() float64 {
	if t.took == 0 {
		return 0 // nothing was left to do
	}
	return float64(t.timed*t.batch*t.context) / t.took.Seconds()
}

// utilisation says how many operations that is, and which part of the peak of all ranks' devices.
func (t *trainer) utilisation() string {
	rate := t.speed() * t.operations(t.parameters)
	text := fmt.Sprintf("GFLOP/s=%.0f", rate/1e9)
	if peak := peakOf(t.device, t.precision); peak > 0 {
		text += fmt.Sprintf(" utilisation=%.1f%%", 100*rate/(peak*float64(t.comm.Size())))
	}
	return text
}

// report verifies that all ranks have the same model, and prints what it has learnt.
func (t *trainer) report() error {
	data := t.machine.DataParallel()
	if err := errors.Join(t.machine.Pull(t.learnables...), data.Check()); err != nil {
		return err
	}
	params, err := data.Hash()
	if err != nil {
		return err
	}
	if err := t.closeMachines(); err != nil { // another one writes, which needs memory
		return err
	}
	text, err := t.write(t.layout, t.build, t.device, t.corpus, t.learnables, t.sample)
	if err != nil {
		return fmt.Errorf("write: %w", err)
	}
	if t.plot != "" && t.comm.Rank() == 0 {
		if err := t.draw(); err != nil {
			return fmt.Errorf("--plot: %w", err)
		}
	}
	if t.sample > 0 {
		if err := t.print("%s", text); err != nil {
			return err
		}
	}
	where := "host"
	if t.device != nil {
		where = t.device.Name()
	}
	n := len(t.past.Losses)
	return t.print("loss=%.4f eval=%.4f tokens_per_second=%.0f ranks=%d layout=%v device=%s params=%s seconds=%.1f",
		mean(t.past.Losses[max(0, n-lastLosses):]), t.past.Evals[len(t.past.Evals)-1].Loss, t.speed(), t.comm.Size(), t.layout, where, params, time.Since(t.began).Seconds())
}

// draw draws the losses.
func (t *trainer) draw() error {
	const points = 100 // of the curve
	n := len(t.past.Losses)
	var training, heldOut, bigram plotter.XYs
	for start, size := 0, max(1, n/points); start < n; start += size {
		end := min(n, start+size)
		training = append(training, plotter.XY{X: float64(end), Y: mean(t.past.Losses[start:end])})
	}
	for _, e := range t.past.Evals {
		heldOut = append(heldOut, plotter.XY{X: float64(e.Step), Y: e.Loss})
	}
	for _, step := range []int{1, n} {
		bigram = append(bigram, plotter.XY{X: float64(step), Y: t.bigram})
	}
	return chart.Save(t.plot, chart.Chart{
		Title: fmt.Sprintf("gpt: %d layers, %d wide, %d parameters, layout %v", t.layers, t.width, t.parameters, t.layout),
		X:     "step", Y: "loss",
		Curves: []chart.Curve{{Name: "training", Points: training}, {Name: "held out", Points: heldOut}, {Name: "bigram model", Points: bigram}},
	})
}

func mean(xs []float64) float64 {
	sum := 0.0
	for _, x := range xs {
		sum += x
	}
	return sum / float64(max(1, len(xs)))
}
