package fit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"syscall"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm"
)

// ErrStopped is the error of a training that was told to stop and has not trained all epochs. With
// [Checkpoint] it was saved, and goes on when it is started again.
var ErrStopped = errors.New("stopped")

// Set is samples, numbered from 0. Package fit/data has some.
type Set interface {
	// Len returns the number of samples.
	Len() int
	// Read writes a sample to row, which has for each input its elements of one sample: a
	// []float32, []float64 or []int, and so on by the input's dtype. Several goroutines call it at
	// once, with rows of their own. What it does not write is 0.
	Read(sample int, row []any) error
}

// Data is samples, and where they go in the graph of a machine.
type Data struct {
	Set    Set
	Inputs gorgonia.Nodes // variables [b, d...] of the graph, which have no other use
	// Loss is the mean over the samples of a batch, []: the cost of gorgonia.Grad, or a node that
	// the machine keeps. In an evaluation it may be nil, which has no loss then.
	Loss *gorgonia.Node
	// Weights is a variable, [b] or [], of the dtype of Loss, which makes the loss of an incomplete
	// batch exact: see the package. nil drops what does not fill the last batch of an epoch.
	Weights *gorgonia.Node
	// Pad writes what is read in place of a missing sample; nil leaves zeros.
	Pad func(row []any)
	// Augment changes a sample that was read. Its random numbers are other ones in each epoch, and
	// the same in each training with the seed. Several goroutines call it at once.
	Augment func(r *rand.Rand, row []any)
}

// Option changes what Run does. Options are the same on all ranks.
type Option func(*trainer)

// Epochs is how often Run goes through the samples. The default is once.
func Epochs(n int) Option { return func(t *trainer) { t.epochs = n } }

// Seed is the seed of the order of samples and of augmentation. The default is 1.
func Seed(seed uint64) Option { return func(t *trainer) { t.seed = seed } }

// Schedule sets the rate of the machine's solver in each step. The default is the rate that it has.
func Schedule(rate autograd.Schedule) Option {
	return func(t *trainer) {
		t.rate = rate
		t.refuseNil("Schedule", "rate", rate)
	}
}

// Random seeks random numbers, such as the nn.Random of dropouts, to each run: with the number of
// the run in the training as step, and of this rank's first sample in it.
func Random(r autograd.Random) Option {
	return func(t *trainer) {
		t.random = r
		t.refuseNil("Random", "r", r)
	}
}

// Prefetch is how many goroutines read samples, a batch each, ahead of the machine. The default
// is 2. Cost: memory for that many batches and two more. 0 reads when the machine waits.
func Prefetch(goroutines int) Option { return func(t *trainer) { t.readers = goroutines } }

// Checkpoint saves in a directory, by autograd's SaveAsync, after each epoch and after each every
// steps, 0 for none, and goes on with the newest checkpoint that is there. The last two are kept,
// or as autograd.KeepLast says, and the one of the best epoch besides ([Result.Best]). All ranks
// reach the directory.
func Checkpoint(dir string, every int, options ...autograd.SaveOption) Option {
	return func(t *trainer) { t.dir, t.every, t.saveOptions = dir, every, options }
}

// Validate evaluates data after each epoch, on a machine made with vm.Eval, and adds the metrics to
// the [Epoch]. If the machine's solver is an [autograd.EMA] the averages of the parameters are
// evaluated.
func Validate(m *vm.Machine, d Data, metrics ...Metric) Option {
	return func(t *trainer) {
		t.validation = &evaluation{machine: m, data: d, metrics: metrics}
		t.refuseNil("Validate", "m", m)
	}
}

// Watch says by which metric of Validate an epoch is the best one. The default is its loss, and
// without Validate the loss of the training.
func Watch(metric string) Option { return func(t *trainer) { t.watched = metric } }

// EarlyStop ends the training after so many epochs in a row that were not better than the best one.
func EarlyStop(patience int) Option { return func(t *trainer) { t.patience = patience } }

// OnStep calls a function after each step. An error ends the training on all ranks before the next
// step.
func OnStep(f func(s Step) error) Option {
	return func(t *trainer) {
		t.onStep = append(t.onStep, f)
		t.refuseNil("OnStep", "f", f)
	}
}

// OnEpoch calls a function after each epoch, on all ranks, before the checkpoint is saved. An error
// ends the training on all ranks.
func OnEpoch(f func(e Epoch) error) Option {
	return func(t *trainer) {
		t.onEpoch = append(t.onEpoch, f)
		t.refuseNil("OnEpoch", "f", f)
	}
}

// Progress writes a line for each epoch, on rank 0: "epoch 3/20: loss=0.0312 accuracy=0.9841". A
// bar is the hook of package fit/progress.
func Progress(w io.Writer) Option {
	return func(t *trainer) {
		t.out = w
		t.refuseNil("Progress", "w", w)
	}
}

// Log writes all epochs to a file, on rank 0 and after each of them: by [JSONLines], [CSV], or the
// SVG of package fit/curves. A training that resumes writes the epochs of before, too.
func Log(file string, write func(w io.Writer, epochs []Epoch) error) Option {
	return func(t *trainer) {
		t.logs = append(t.logs, log{file, write})
		t.refuseNil("Log", "write", write)
	}
}

// Result is what a training has come to, the same on all ranks.
type Result struct {
	Epochs []Epoch // all, those before the checkpoint that it went on with, too
	// Best is the checkpoint of the best epoch, for autograd.LoadWeights: empty without Checkpoint.
	Best   string
	Params string // the SHA-256 of the model: autograd's Hash
}

// Step is what a training knows of a step, the same on all ranks.
type Step struct {
	Step     int     // of the training, from 1
	InEpoch  int     // the number of the step in its epoch, from 1
	PerEpoch int     // steps of an epoch
	Loss     float64 // the mean over the step's samples
}

// Epoch is what a training knows of an epoch, the same on all ranks.
type Epoch struct {
	Epoch   int                // from 1
	Steps   int                // of the training, until its end
	Rate    float64            // of the last step; 0 without a schedule
	Loss    float64            // of the training, the mean over all samples of the epoch
	Metrics map[string]float64 // of Validate; those that are NaN or infinite are left out
	Best    bool               // so far
	Seconds float64            // that it took
}

// Run trains the model of a machine, which has a solver. It is collective: the ranks of the
// machine's vm.WithDataParallel call it together, with the same options and samples. m and the
// machine of [Validate] stay open.
//
// Cost, beside that of the machine's runs: an all-gather of 24 bytes after each step, and one of
// the sums of the metrics after each epoch.
//
// Errors, on all ranks: ErrStopped; ErrArgument for options and data that do not fit the machine,
// and for a checkpoint of other samples, batches or seeds; a loss that is not finite; the errors of
// samples, hooks, machine and checkpoints, with the rank.
func Run(ctx context.Context, m *vm.Machine, d Data, options ...Option) (*Result, error) {
	if err := backend.Given("fit.Run", "m", m, "options", options); err != nil {
		return nil, err
	}
	t := &trainer{machine: m, data: d, epochs: 1, seed: 1, readers: 2}
	for _, o := range options {
		o(t)
	}
	if m.Solver() == nil || m.DataParallel() == nil {
		return nil, fmt.Errorf("fit: %w: the machine has no solver, or a learnable has no value: "+
			"use vm.WithSolver", backend.ErrArgument)
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer context.AfterFunc(ctx, stop)() // so that a second signal ends the program
	defer stop()
	result, err := t.train(ctx)
	if err != nil {
		return result, fmt.Errorf("fit: %w", err)
	}
	return result, nil
}

// Evaluate runs a machine on all samples once, each rank a part of them, and returns the metrics,
// with "loss" if the data have one. It is collective.
//
// Errors, on all ranks: ErrArgument if the data do not fit the machine, or have a loss and no
// weights, and the ranks do not divide the samples into whole batches; those of samples and
// machine, with the rank.
func Evaluate(comm backend.Communicator, m *vm.Machine, d Data, metrics ...Metric) (
	map[string]float64, error) {
	if err := backend.Given("fit.Evaluate", "comm", comm, "m", m); err != nil {
		return nil, err
	}
	e := &evaluation{machine: m, data: d, metrics: metrics}
	found, err := e.run(comm, 2, 1)
	if err != nil {
		return nil, fmt.Errorf("fit: %w", err)
	}
	return found, nil
}
