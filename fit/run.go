package fit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/vm"
)

// ErrStopped is the error of a training that was told to stop before its last epoch, by a signal or
// by its context, such as at a time limit. With [Checkpoint] it was saved, and resumes when it is
// started again. Return it: euryale.ExitStatus then tells whoever started the program that the
// training is not finished. A training that [EarlyStop] ends is.
var ErrStopped = exit.ErrStopped

// sameSignal is how long a signal that comes again is the same: whoever ends a job may tell its
// launcher and its ranks, and launchers tell their ranks.
const sameSignal = time.Second

// Set is a set of samples, numbered from 0. Package fit/data has several.
type Set interface {
	Len() int
	// Read writes a sample to row, which has a slice of zeros for each input: a []float32,
	// []float64, []int, and so on. It may put another slice of that type and length there, which
	// is copied, as Augment and Pad may. Several goroutines call it at once, with separate rows,
	// which later samples get again.
	Read(sample int, row []any) error
}

// Data is a set of samples, and where they go in the graph of a machine.
type Data struct {
	Set    Set
	Inputs gorgonia.Nodes // variables [b, d...] of the graph
	// Loss is the mean over the samples of a batch, []: the cost of gorgonia.Grad, or a node that
	// the machine keeps. In an evaluation it may be nil.
	Loss *gorgonia.Node
	// Weights is a variable of floats, [b] or [], that makes the loss of an incomplete batch exact:
	// see the package. nil drops the samples that do not fill the last batch of an epoch.
	Weights *gorgonia.Node
	Pad     func(row []any) // writes the row of a missing sample; nil leaves zeros, for weights [b]
	// DropLast drops these samples in training although there are Weights, as graphs need whose
	// samples depend on each other, such as those with batch norms.
	DropLast bool
	// Augment changes a sample after Read, in training. Several goroutines call it at once.
	Augment func(r *rand.Rand, row []any)
}

// Option changes what Run does. Options must be the same on all ranks.
type Option func(*trainer)

// given is an option whose argument must not be nil.
func given(option, name string, argument any, set Option) Option {
	return func(t *trainer) {
		if err := backend.Given("fit."+option, name, argument); err != nil {
			t.missing = errors.Join(t.missing, err)
			return
		}
		set(t)
	}
}

// once notes that an option is given, which may be given once.
func (t *trainer) once(option string) {
	if slices.Contains(t.given, option) {
		t.missing = errors.Join(t.missing, refused("fit.%s is given twice", option))
	}
	t.given = append(t.given, option)
}

// Epochs sets how often Run goes through the samples. The default is once.
func Epochs(n int) Option { return func(t *trainer) { t.epochs = n } }

// Seed sets the seed of the order of samples and of augmentation. The default is 1.
func Seed(seed uint64) Option { return func(t *trainer) { t.seed = seed } }

// Prefetch sets how many goroutines read batches, one each, ahead of the machine. The default is 2.
// Cost: memory for that many batches and two more.
func Prefetch(goroutines int) Option { return func(t *trainer) { t.readers = goroutines } }

// Schedule sets the rate of the machine's solver in each step. By default the solver keeps its
// rate.
func Schedule(rate solver.Schedule) Option {
	return given("Schedule", "rate", rate, func(t *trainer) { t.rate = rate })
}

// Random seeks random numbers, such as the nn.Random of dropouts, before each run: to the number of
// the step in the training, and the number of this rank's first sample in the batch. Give it for
// each nn.Random of the graph.
func Random(r autograd.Random) Option {
	return given("Random", "r", r, func(t *trainer) { t.random = append(t.random, r) })
}

// Checkpoint saves to a directory that all ranks can reach, with autograd's SaveAsync, after each
// epoch and, unless every is 0, each time that many steps are done. It keeps the last two
// checkpoints, or as many as autograd.KeepLast says, and the one of the best epoch. Run resumes
// from the newest one. An empty dir saves nothing.
func Checkpoint(dir string, every int, options ...autograd.SaveOption) Option {
	return given("Checkpoint", "options", options, func(t *trainer) {
		t.once("Checkpoint")
		t.dir, t.every, t.saveOptions = dir, every, options
	})
}

// Validate evaluates data after each epoch on a machine of vm.Eval, with the averages of weights if
// the training's solver has them (solver.EMA). Its graph is the one that trains, or has the same
// tensors. Where a training that had ended is started again, it evaluates once, so that
// metrics such as [Confusion] have their results.
func Validate(m *vm.Machine, d Data, metrics ...Metric) Option {
	return given("Validate", "m", m, func(t *trainer) {
		t.once("Validate")
		t.validation = &evaluation{m, d, metrics}
	})
}

// Watch selects the metric of Validate that says which epoch is the best one. The default is the
// loss of Validate, which Progress and Log call "val_loss", or the training's loss if Validate has
// none.
func Watch(metric string) Option { return func(t *trainer) { t.watched = metric } }

// EarlyStop ends the training after patience epochs in a row that were not better than the best
// one, 0 never. It is an error if the metric that decides has a number in no epoch.
func EarlyStop(patience int) Option { return func(t *trainer) { t.patience = patience } }

// RestoreBest makes the model and the solver's state what they were after the best epoch, once the
// training has ended without an error. It needs [Checkpoint], which keeps them; a training that is
// started again with more epochs goes on from the last one.
func RestoreBest() Option { return func(t *trainer) { t.restored = true } }

// ReduceOnPlateau multiplies the rate of [Schedule] by a factor below 1 each time that patience
// epochs in a row were not better than the best one, which [Watch] says how to choose.
func ReduceOnPlateau(factor float64, patience int) Option {
	return func(t *trainer) { t.once("ReduceOnPlateau"); t.plateau = plateau{factor, patience} }
}

// OnStep calls a function after each step. Its error ends the training before the next step.
func OnStep(f func(s StepLoss) error) Option {
	return given("OnStep", "f", f, func(t *trainer) { t.onStep = append(t.onStep, f) })
}

// OnEpoch calls a function after each epoch, before it is saved. Its error ends the training.
func OnEpoch(f func(e Epoch) error) Option {
	return given("OnEpoch", "f", f, func(t *trainer) { t.onEpoch = append(t.onEpoch, f) })
}

// Progress writes a line for each epoch, on rank 0: "epoch 3/20: loss=0.0312 accuracy=0.9841". It
// also says that a training had ended before, and that columns of a table have large numbers. For
// a bar, use the hook of package fit/progress.
func Progress(w io.Writer) Option {
	return given("Progress", "w", w, func(t *trainer) {
		t.onEpoch, t.says = append(t.onEpoch, t.line(w)), append(t.says, w)
	})
}

// Log writes all epochs to a file after each epoch, on rank 0, with [JSONLines], [CSV], or the SVG
// of package fit/curves. A training that resumes also writes the earlier epochs.
func Log(file string, write func(w io.Writer, epochs []Epoch) error) Option {
	return given("Log", "write", write, func(t *trainer) {
		t.logs = append(t.logs, log{file, write})
	})
}

// Result is the outcome of a training, the same on all ranks.
type Result struct {
	Epochs []Epoch // all, including those before the checkpoint that it resumed from
	// Best is the checkpoint of the best epoch, "" for none. autograd.LoadWeights gives learnables
	// its weights. With a solver.EMA epochs are judged by the averages, which only Load restores:
	// load it with the solver, and evaluate in Machine.Averaged.
	Best   string
	Params string // the SHA-256 of the model: autograd's Hash
}

// StepLoss describes a step of a training, the same on all ranks.
type StepLoss struct {
	Step              int // of the training, from 1
	InEpoch, PerEpoch int // the number of the step in its epoch, from 1, and the epoch's steps
	Loss              float64
}

// Epoch describes an epoch of a training, the same on all ranks.
type Epoch struct {
	Epoch   int                // from 1
	Steps   int                // of the training, up to the epoch's end
	Rate    float64            // of the last step, by Schedule and ReduceOnPlateau
	Loss    float64            // of the training, the mean over all samples
	Metrics map[string]float64 // of Validate; those that are NaN or infinite are left out
	Best    bool               // so far
	Seconds float64
}

// Run trains the model of a machine with a solver. It is collective: the ranks of the machine's
// vm.WithDataParallel call it with the same options and samples. Machines stay open.
//
// If the machine is one of vm.WithElastic, ranks may be lost and replaced: a replacement goes on
// with the others' epochs and losses, and parameters end as in a training that loses none. OnEpoch
// may be called for an epoch on one more rank if a rank is lost as it ends. Of ranks that are told
// to stop, those leave whose parameters another process has; they return ErrStopped, and the others
// go on. All are saved and end if all are told to, and no standby is ready. An error of a sample
// ends the rank that reads it, which is replaced. Close the machine in any case.
//
// Cost: an all-gather of 24 bytes after each step, and one of the sums of metrics after each epoch.
//
// In a TrainJob of Kubeflow with the feature TrainJobStatus, rank 0 tells how far the training is.
//
// Before the first step Run finds out whether all options can be, and whether checkpoints and logs
// can be written. At the end of each epoch and of the training it looks for numbers of the model
// that are not finite: no such epoch is the best one, or saved.
//
// Errors, on all ranks: ErrStopped; ErrArgument for options and data that do not fit the machine,
// and for a checkpoint with other samples, batches or seeds; a loss that is not finite, which names
// the sample that is to blame if one is; a model that is not; the errors of samples, hooks, machine
// and checkpoints. The result then has the epochs so far.
func Run(ctx context.Context, m *vm.Machine, d Data, options ...Option) (*Result, error) {
	if err := backend.Given("fit.Run", "m", m, "options", options); err != nil {
		return nil, err
	}
	d.Inputs = slices.Clone(d.Inputs)
	t := &trainer{machine: m, data: d, epochs: 1, seed: 1, readers: 2, dp: m.DataParallel(),
		number: float64(rand.Uint64() >> 11)} // which a float64 holds
	if t.dp == nil {
		return nil, fmt.Errorf("fit: %w: the machine has no solver, or a learnable has no value: "+
			"use vm.WithSolver", backend.ErrArgument)
	}
	t.comm = t.dp.Comm()
	t.watch = observe.WatchOf(t.comm)
	for _, o := range options {
		o(t)
	}
	t.shown, t.trackers = len(t.trackers), append(t.trackers, ofTrainJob()...)
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	again := func() { time.AfterFunc(sameSignal, stop) }
	defer context.AfterFunc(ctx, again)() // so that a second signal ends the program
	defer stop()
	r := &Result{}
	var err error
	switch t.elastic = m.Elastic(); {
	case t.elastic == nil:
		err = t.end(t.train(ctx), r)
	case t.elastic.Size() != t.comm.Size():
		err = fmt.Errorf("%w: ranks of an elastic job that shard weights: write the loop, as "+
			"examples/gpt does", backend.ErrUnsupported)
	default:
		err = t.trainElastic(ctx, r)
	}
	t.closeTrackers(err)
	if r.Epochs = t.past.Epochs; err != nil {
		return r, fmt.Errorf("fit: %w", err)
	}
	return r, nil
}

// end checks what a training has come to, unless it has failed, and says where its best epoch is.
func (t *trainer) end(err error, r *Result) error {
	if err == nil {
		err = t.endBest()
	}
	if err == nil {
		err = t.dp.Check()
	}
	if err == nil {
		err = t.dp.CheckFinite(t.machine.Solver())
	}
	if err == nil {
		r.Params, err = t.dp.Hash()
	}
	if t.dir != "" && t.bestEpoch() >= 0 {
		path, lost := t.dp.Pinned(t.dir)
		r.Best, err = path, errors.Join(err, lost)
	}
	return err
}

// Evaluate runs a machine once on all samples, each rank on a part of them, and returns the
// metrics, and "loss" if the data have one, except those that are not finite. It is collective.
//
// Errors, on all ranks: ErrArgument for a machine that is not of vm.Eval, for data and metrics that
// do not fit it, and if samples with a loss but without weights do not fill whole batches of all
// ranks; a loss that a sample makes NaN; the errors of samples and machine.
func Evaluate(comm backend.Communicator, m *vm.Machine, d Data, metrics ...Metric) (
	map[string]float64, error) {
	if err := backend.Given("fit.Evaluate", "comm", comm, "m", m); err != nil {
		return nil, err
	}
	found, err := (&evaluation{m, d, metrics}).run(comm, evenly(comm), 2, 1, nil)
	if err != nil {
		return nil, fmt.Errorf("fit: %w", err)
	}
	return found, nil
}
