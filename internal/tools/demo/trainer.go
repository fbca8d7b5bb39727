package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/hierarchy"
	"github.com/euryale-ml/euryale/examples/handwritten"
	"github.com/euryale-ml/euryale/vm"
)

// trainer is a model that is trained on all ranks.
type trainer struct {
	comm       backend.Communicator
	training   handwritten.Samples // all ranks have all images
	heldOut    handwritten.Samples
	net, eval  *network // they share their weights
	vm, evalVM gorgonia.VM
	parallel   *autograd.DataParallel
	sampler    *autograd.Sampler
	solver     solver.Solver
	inPlan     bool // the exchange of gradients and the solver's step are part of each run
	rate       solver.Schedule
	batch      int       // of all ranks together
	sums       []float64 // of the losses in an epoch, by this rank's micro-batches
	limit      int       // steps of the training, 0 if it is epochs that count

	// takes a line for each epoch on rank 0; nil for none, and then on no rank
	out        io.Writer
	began      time.Time     // of the training in this process
	waited     time.Duration // for the other ranks, in this epoch
	steps      int           // of this process
	averaged   *counted      // what weights are averaged through; nil if gradients are
	past       past
	resumed    past   // what was in the checkpoint
	checkpoint string // its directory, if there is to be one
	saveEvery  int
	history    []moment
}

// evalBatch is how many held-out images a rank classifies at a time.
const evalBatch = 60

func newTrainer(comm backend.Communicator, build sync.Locker, cfg config) (*trainer, error) {
	t := &trainer{
		comm: comm, solver: cfg.newSolver(), batch: cfg.batch, limit: cfg.steps,
		checkpoint: cfg.checkpoint, saveEvery: cfg.saveEvery, past: past{Flags: cfg.flags()},
	}
	arch, err := architectureOf(cfg.model)
	if err != nil {
		return nil, usageError{Err: err}
	}
	exchange, err := cfg.exchange()
	if err != nil {
		return nil, usageError{Err: err}
	}
	if t.training, t.heldOut, err = handwritten.Load(cfg.seed, arch.input); err != nil {
		return nil, err
	}
	share, all := 1, comm.Size() // micro-batches of a step, of this rank and of all
	if cfg.inTree() {
		all = cfg.microBatches
		if _, share, err = autograd.TreeShare(all, comm.Rank(), comm.Size()); err != nil {
			return nil, usage("--micro-batches: %w", err)
		}
	}
	t.sums = make([]float64, share)
	if t.sampler, err = autograd.NewTreeSampler(comm, t.training.Count(), cfg.batch, all,
		cfg.seed); err != nil {
		return nil, usage("--batch: %w", err)
	}
	t.inPlan = cfg.machine == "plan" && !cfg.partial
	t.rate = cfg.rateAt(cmp.Or(cfg.steps, cfg.epochs*t.sampler.Steps()))
	build.Lock()
	values := arch.weights(cfg.seed)
	t.net, t.eval = newNetwork(arch, values, t.sampler.Local()/share),
		newNetwork(arch, values, evalBatch)
	build.Unlock()
	if cfg.partial {
		t.averaged = &counted{Base: backend.Wrap(comm)}
		comm = t.averaged
	}
	if !t.inPlan {
		// Not under the lock: New waits for the other ranks.
		if t.parallel, err = autograd.New(comm, t.net.params, exchange...); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(t.build(arch, build), t.compile(cfg, build, exchange)); err != nil {
		return nil, errors.Join(err, t.close())
	}
	return t, nil
}

// build builds the graphs.
func (t *trainer) build(arch architecture, build sync.Locker) error {
	build.Lock()
	defer build.Unlock()
	use := unhooked
	if !t.inPlan {
		use = t.parallel.Hook
	}
	if err := t.net.build(arch, use); err != nil {
		return err
	}
	if _, err := gorgonia.Grad(t.net.loss, t.net.params...); err != nil {
		return fmt.Errorf("differentiate the model: %w", err)
	}
	return t.eval.build(arch, unhooked)
}

// compile makes the machines of the graphs.
func (t *trainer) compile(cfg config, build sync.Locker, exchange []autograd.Option) error {
	on, err := cfg.deviceOf(t.comm)
	if err != nil {
		return err
	}
	if t.inPlan { // not under the lock, either
		options := []vm.Option{vm.Keep(t.net.logits), vm.WithSolver(t.solver, t.net.params...),
			vm.WithDataParallel(t.comm, exchange...)}
		if cfg.inTree() {
			options = append(options, vm.WithTree(cfg.microBatches))
		}
		m, err := vm.New(t.net.g, on, options...)
		if err != nil {
			return err
		}
		t.vm, t.parallel = m, m.DataParallel()
	}
	build.Lock()
	defer build.Unlock()
	if !t.inPlan {
		if t.vm, err = machines[cfg.machine](t.net, on); err != nil {
			return err
		}
	}
	t.evalVM, err = machines[cfg.machine](t.eval, on, vm.Eval())
	return err
}

func (t *trainer) close() error {
	var all error
	for _, machine := range []gorgonia.VM{t.vm, t.evalVM} {
		if machine != nil {
			all = errors.Join(all, machine.Close())
		}
	}
	if t.parallel != nil {
		all = errors.Join(all, t.parallel.Close())
	}
	return errors.Join(all, t.solver.Close())
}

// train trains up to a number of epochs, or of steps if there is a limit, or until ctx ends and the
// training is saved.
func (t *trainer) train(ctx context.Context, epochs int) error {
	steps := t.sampler.Steps()
	if t.limit > 0 {
		epochs = (t.limit + steps - 1) / steps
	}
	if err := errors.Join(t.resume(epochs), t.origin()); err != nil {
		return err
	}
	t.began = time.Now()
	left := cmp.Or(t.limit, epochs*steps) - t.past.Epochs*steps - t.past.Step
	if left <= 0 {
		return nil
	}
	bar := t.progress(left)
	for ; left > 0; left = cmp.Or(t.limit, epochs*steps) - t.past.Epochs*steps - t.past.Step {
		if err := t.epoch(ctx, left, epochs, bar); err != nil {
			return errors.Join(err, bar.Clear())
		}
	}
	return bar.Finish()
}

// epoch trains on every image once, or on those that are left, or for so many steps if they are
// fewer.
func (t *trainer) epoch(ctx context.Context, steps, epochs int,
	bar *progressbar.ProgressBar) error {
	batches := t.sampler.Epoch(t.past.Epochs)[t.past.Step:]
	batches = batches[:min(len(batches), steps)]
	var took time.Duration
	for i, batch := range batches {
		began := time.Now()
		if err := t.step(batch); err != nil {
			return fmt.Errorf("epoch %d, step %d: %w", t.past.Epochs+1, t.past.Step+1, err)
		}
		took += time.Since(began)
		bar.Add(1) // an error of drawing is no reason to stop
		if i == len(batches)-1 {
			break // the epoch has finished, and saved as a whole
		}
		if err := t.keep(ctx, false); err != nil {
			return err
		}
	}
	if err := t.finish(); err != nil {
		return err
	}
	if err := t.line(epochs, float64(len(batches)*t.batch), took, bar); err != nil {
		return err
	}
	return t.keep(ctx, true)
}

// step trains on this rank's share of one batch.
func (t *trainer) step(which []int) error {
	t.solver.SetRate(t.rate(t.past.Epochs*t.sampler.Steps() + t.past.Step))
	share := len(which) / len(t.sums)
	run := func(i int) error { return t.run(i, which[i*share:(i+1)*share]) }
	for i := range t.sums {
		if err := run(i); err != nil {
			return err
		}
	}
	if !t.inPlan {
		if err := t.update(); err != nil {
			return err
		}
	}
	t.steps++
	t.past.Step++
	return nil
}

// run computes loss and gradients of a micro-batch, number i of this rank.
func (t *trainer) run(i int, which []int) error {
	if err := t.net.feed(t.training, which); err != nil {
		return err
	}
	if err := t.vm.RunAll(); err != nil {
		if cause := t.parallel.Err(); !errors.Is(err, cause) { // Gorgonia's machines hide it
			err = errors.Join(cause, err)
		}
		return err
	}
	t.sums[i] += float64(t.net.loss.Value().Data().(float32))
	t.vm.Reset()
	return nil
}

// update exchanges the gradients and applies them.
func (t *trainer) update() error {
	began := time.Now()
	grads, err := t.parallel.Sync()
	t.waited += time.Since(began)
	if err != nil {
		return err
	}
	if err := t.solver.Step(grads); err != nil {
		return fmt.Errorf("solver: %w", err)
	}
	began = time.Now()
	err = t.parallel.Average()
	t.waited += time.Since(began)
	return err
}

// pull brings the weights to the host, where checkpoints and the evaluation find them.
func (t *trainer) pull() error {
	if m, ok := t.vm.(*vm.Machine); ok {
		return m.Pull(t.net.params...)
	}
	return nil
}

// finish ends an epoch, or what there is of the last one: the loss is the mean over all ranks.
func (t *trainer) finish() error {
	sum, err := autograd.TreeMean(t.comm, t.sums)
	if err != nil {
		return err
	}
	t.past.Loss = (t.past.Sum + sum) / float64(t.past.Step)
	if math.IsNaN(t.past.Loss) || math.IsInf(t.past.Loss, 0) {
		return fmt.Errorf("the loss of all ranks is %v, the training has diverged: use a smaller "+
			"--lr", t.past.Loss)
	}
	if t.past.Step == t.sampler.Steps() {
		t.past.Epochs, t.past.Step, t.past.Sum = t.past.Epochs+1, 0, 0
		clear(t.sums)
	}
	t.note()
	return nil
}

// line prints how an epoch was: so many images were seen in that time.
func (t *trainer) line(epochs int, images float64, took time.Duration,
	bar *progressbar.ProgressBar) error {
	waited := t.waited
	t.waited = 0
	if t.out == nil {
		return nil
	}
	accuracy, err := t.accuracy()
	if err != nil || t.comm.Rank() != 0 {
		return err
	}
	bar.Clear()
	share := ""
	if !t.inPlan { // whose runs do not tell it
		share = fmt.Sprintf(" communication=%.0f%%", 100*waited.Seconds()/took.Seconds())
	}
	epoch := fmt.Sprintf("epoch %d/%d", t.past.Epochs, epochs)
	if t.past.Step > 0 { // --steps has ended within it
		epoch = fmt.Sprintf("epoch %d/%d, step %d of %d",
			t.past.Epochs+1, epochs, t.past.Step, t.sampler.Steps())
	}
	_, err = fmt.Fprintf(t.out, "%s: loss=%.4f accuracy=%.4f images/s=%.0f%s\n",
		epoch, t.past.Loss, accuracy, images/took.Seconds(), share)
	return err
}

// progress returns a bar, which is drawn by rank 0 and on a terminal only.
func (t *trainer) progress(steps int) *progressbar.ProgressBar {
	if t.out == nil || t.comm.Rank() != 0 {
		return progressbar.DefaultSilent(int64(steps))
	}
	return progressBar(steps)
}

// report verifies that all ranks ended with the same model, and prints its accuracy.
func (t *trainer) report() error {
	if err := errors.Join(t.pull(), t.parallel.AverageAll(), t.parallel.Check()); err != nil {
		return err
	}
	accuracy, err := t.accuracy()
	if err != nil {
		return err
	}
	params, err := t.parallel.Hash()
	if err != nil || t.comm.Rank() != 0 {
		return err
	}
	if err := errors.Join(t.levels(), t.traffic()); err != nil {
		return err
	}
	_, err = fmt.Fprintf(t.out, "accuracy=%.4f loss=%.4f epochs=%d ranks=%d backend=%s params=%s "+
		"seconds=%.1f\n",
		accuracy, t.past.Loss, t.past.Epochs, t.comm.Size(), t.comm.Capabilities().Backend, params,
		time.Since(t.began).Seconds())
	return err
}

// levels prints how many collectives went through machines, where ranks are on several.
func (t *trainer) levels() (err error) {
	if h, ok := backend.As[*hierarchy.Communicator](t.comm); ok {
		s := h.Stats()
		_, err = fmt.Fprintf(t.out, "%d collectives inside and between machines, %d among all "+
			"ranks at once\n", s.Calls, s.Flat)
	}
	return err
}

// accuracy classifies the held-out images, each rank a part of them.
func (t *trainer) accuracy() (float64, error) {
	shares, err := autograd.Evaluation(t.comm, t.heldOut.Count(), evalBatch)
	if err = errors.Join(err, t.pull()); err != nil {
		return 0, err
	}
	var correct, seen float64
	for _, share := range shares {
		if err := t.eval.feed(t.heldOut, share); err != nil {
			return 0, err
		}
		if err := t.evalVM.RunAll(); err != nil {
			return 0, fmt.Errorf("evaluate: %w", err)
		}
		correct += float64(t.eval.correct(t.heldOut, share))
		seen += float64(len(share))
		t.evalVM.Reset()
	}
	err = autograd.Sum(t.comm, &correct, &seen)
	return correct / seen, err
}
