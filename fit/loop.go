package fit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"math"
	"path/filepath"
	"slices"
	"time"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm"
)

// trainer is a Run.
type trainer struct {
	epochs, readers, every, patience int
	seed                             uint64
	rate                             autograd.Schedule
	random                           autograd.Random
	dir, watched                     string
	saveOptions                      []autograd.SaveOption
	validation                       *evaluation // nil for none
	onStep                           []func(s Step) error
	onEpoch                          []func(e Epoch) error
	out                              io.Writer // nil prints nothing
	logs                             []log
	missing                          error // nil arguments of options

	machine *vm.Machine
	data    Data
	dp      *autograd.DataParallel
	comm    backend.Communicator
	sampler *autograd.Sampler
	local   int     // samples of a run
	runs    int     // of a step
	weight  float64 // of a run's gradient
	loader  *loader
	past    past
	began   time.Time // of the epoch
	hooked  error     // of OnStep
}

// past is what a checkpoint has besides model and solver.
type past struct {
	Training string // what must be the same on resuming
	Epochs   []Epoch
	Steps    int     // of the training
	Step     int     // of the epoch
	Loss     float64 // the sum over the epoch's samples
	Samples  int     // of the epoch
	Seconds  float64 // that it has taken
}

// refuseNil notes that the argument of an option is nil.
func (t *trainer) refuseNil(option, name string, argument any) {
	t.missing = errors.Join(t.missing, backend.Given("fit."+option, name, argument))
}

// train is Run, once the options are known.
func (t *trainer) train(ctx context.Context) (*Result, error) {
	t.dp = t.machine.DataParallel()
	t.comm = t.dp.Comm()
	if err := t.prepare(); err != nil {
		return nil, err
	}
	if err := t.resume(); err != nil {
		return nil, err
	}
	if !t.done() {
		t.loader = load(t.data, t.readers, t.jobs())
		defer t.loader.close()
		if err := t.loop(ctx); err != nil {
			return &Result{Epochs: t.past.Epochs, Best: t.best()}, err
		}
	}
	if err := t.dp.Check(); err != nil {
		return nil, err
	}
	params, err := t.dp.Hash()
	return &Result{t.past.Epochs, t.best(), params}, err
}

// prepare finds out what a step is, or why all ranks refuse it.
func (t *trainer) prepare() (err error) {
	t.runs, t.weight = t.machine.Runs()
	t.local, err = t.data.check()
	wrong := ""
	switch {
	case err != nil || t.missing != nil:
	case t.data.Loss == nil:
		wrong = "Data has no Loss"
	case t.epochs < 1 || t.readers < 0 || t.every < 0 || t.patience < 0:
		wrong = "Epochs must be at least 1; goroutines, steps and patience at least 0"
	case t.watched != "" && !t.validation.has(t.watched):
		wrong = fmt.Sprintf("Watch: no metric of Validate has the name %q", t.watched)
	}
	if wrong != "" {
		err = fmt.Errorf("%w: %s", backend.ErrArgument, wrong)
	}
	err = errors.Join(t.missing, err)
	text := fmt.Sprintf("fit has %d epochs, patience %d, checkpoints: %v, each %d, best by %q\n",
		t.epochs, t.patience, t.dir != "", t.every, t.watched)
	if err := autograd.Agree(t.comm, text, err); err != nil {
		return err
	}
	n, global := t.data.Set.Len(), t.local*t.runs*t.comm.Size()
	if t.sampler, err = autograd.NewSampler(t.comm, n, global, t.seed); err != nil {
		return err
	}
	if t.data.Weights != nil {
		t.sampler = t.sampler.Rest()
	}
	t.past.Training = fmt.Sprintf("%d samples, batches of %d, the seed %d", n, global, t.seed)
	return nil
}

// resume goes on with the newest checkpoint, if there is one.
func (t *trainer) resume() error {
	if t.dir == "" {
		return nil
	}
	var kept past
	err := t.dp.Load(t.dir, t.machine.Solver(), &kept)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case kept.Training != t.past.Training:
		return fmt.Errorf("%w: the checkpoint in %s is of a training with %s, and this one has %s",
			backend.ErrArgument, t.dir, kept.Training, t.past.Training)
	}
	t.past = kept
	return nil
}

// jobs yields what the runs of this rank need, from where the training is.
func (t *trainer) jobs() iter.Seq[job] {
	epoch, step := len(t.past.Epochs), t.past.Step
	return func(yield func(job) bool) {
		for ; epoch < t.epochs; epoch, step = epoch+1, 0 {
			steps := t.sampler.Epoch(epoch)
			for ; step < len(steps); step++ {
				for i := range t.runs {
					share := steps[step]
					from, to := min(i*t.local, len(share)), min((i+1)*t.local, len(share))
					j := job{share[from:to], 1 / t.counts(step), t.seed + uint64(epoch)<<32, true}
					if !yield(j) {
						return
					}
				}
			}
		}
	}
}

// counts returns how many samples a run's loss is divided by, in a step of an epoch: the batch of
// the step, as far as a run counts in it.
func (t *trainer) counts(step int) float64 { return float64(t.samples(step)) * t.weight }

// samples returns how many samples a step of an epoch has on all ranks.
func (t *trainer) samples(step int) int {
	global := t.local * t.runs * t.comm.Size()
	return min(global, t.data.Set.Len()-step*global)
}

// loop trains until all epochs are done. Before each step all ranks have its batch, and know that
// none was told to stop.
func (t *trainer) loop(ctx context.Context) error {
	_, stop, err := t.vote(ctx, 0, t.loader.next())
	t.began = time.Now().Add(-time.Duration(t.past.Seconds * float64(time.Second)))
	for err == nil && !stop {
		loss, wrong := t.step()
		if wrong != nil {
			t.comm.Abort(wrong) // the others may wait for this rank in the middle of the step
			return wrong
		}
		loss, stop, err = t.vote(ctx, loss, errors.Join(t.hooked, t.loader.next()))
		if err == nil {
			err = t.count(loss)
		}
		switch {
		case err != nil:
			return err
		case t.past.Step == t.sampler.Steps():
			if err = t.endEpoch(stop); err != nil || t.done() {
				return err
			}
		case t.dir != "" && (stop || t.every > 0 && t.past.Steps%t.every == 0):
			err = t.save(stop)
		}
	}
	if err == nil {
		err = fmt.Errorf("%w after step %d, in epoch %d of %d", ErrStopped, t.past.Steps,
			len(t.past.Epochs)+1, t.epochs)
	}
	return err
}

// step runs a step with the batch that is bound, and returns the sum of this rank's losses.
func (t *trainer) step() (loss float64, err error) {
	if t.rate != nil {
		t.machine.Solver().SetRate(t.rate(t.past.Steps))
	}
	for i := range t.runs {
		if i > 0 {
			if err := t.loader.next(); err != nil {
				return 0, err
			}
		}
		if t.random != nil {
			t.random.Seek(uint64(t.past.Steps), (t.comm.Rank()*t.runs+i)*t.local)
		}
		if err := t.machine.RunAll(); err != nil {
			return 0, fmt.Errorf("epoch %d, step %d: %w", len(t.past.Epochs)+1, t.past.Step+1, err)
		}
		loss += number(t.data.Loss, 0) * t.counts(t.past.Step)
	}
	return loss, nil
}

// vote adds up the losses of all ranks, and returns on all of them whether one was told to stop,
// and the error of one that cannot go on.
func (t *trainer) vote(ctx context.Context, loss float64, wrong error) (sum float64, stop bool,
	err error) {
	var stopped, failed float64
	if ctx.Err() != nil {
		stopped = 1
	}
	if wrong != nil {
		failed = 1
	}
	if err := autograd.Sum(t.comm, &loss, &stopped, &failed); err != nil {
		return 0, false, errors.Join(wrong, err)
	}
	if failed > 0 {
		return 0, false, autograd.Agree(t.comm, "", wrong)
	}
	return loss, stopped > 0, nil
}

// count counts a step, whose samples have a sum of losses.
func (t *trainer) count(loss float64) error {
	p, n := &t.past, t.samples(t.past.Step)
	p.Steps, p.Step, p.Samples, p.Loss = p.Steps+1, p.Step+1, p.Samples+n, p.Loss+loss
	p.Seconds = time.Since(t.began).Seconds()
	if !finite(loss) {
		return fmt.Errorf("the loss is %v in step %d of epoch %d: lower the rate, or bound the "+
			"gradients by vm.ClipNorm", loss, p.Step, len(p.Epochs)+1)
	}
	t.hooked = nil
	for _, f := range t.onStep {
		t.hooked = errors.Join(t.hooked, f(Step{p.Steps, p.Step, t.sampler.Steps(),
			loss / float64(n)}))
	}
	return nil
}

// endEpoch validates, reports and saves.
func (t *trainer) endEpoch(stop bool) error {
	p := &t.past
	e := Epoch{Epoch: len(p.Epochs) + 1, Steps: p.Steps, Loss: p.Loss / float64(p.Samples),
		Seconds: p.Seconds}
	if t.rate != nil {
		e.Rate = t.rate(p.Steps - 1)
	}
	if t.validation != nil {
		err := t.machine.Averaged(func() (err error) {
			full := float64(t.runs*t.comm.Size()) * t.weight
			e.Metrics, err = t.validation.run(t.comm, t.readers, full)
			return err
		})
		if err != nil {
			return err
		}
	}
	e.Best = t.better(e)
	*p = past{Training: p.Training, Epochs: append(p.Epochs, e), Steps: p.Steps}
	for _, f := range t.onEpoch {
		t.hooked = errors.Join(t.hooked, f(e))
	}
	if t.comm.Rank() == 0 {
		t.hooked = errors.Join(t.hooked, t.report(e))
	}
	if err := autograd.Agree(t.comm, "", t.hooked); err != nil {
		return err
	}
	t.began = time.Now()
	if t.dir == "" {
		return nil
	}
	if e.Best {
		return t.save(stop || t.done(), autograd.Pin())
	}
	return t.save(stop || t.done())
}

// save saves, behind the training unless it ends.
func (t *trainer) save(ends bool, options ...autograd.SaveOption) error {
	options = append(options, t.saveOptions...)
	if ends {
		return t.dp.Save(t.dir, t.machine.Solver(), t.past, options...)
	}
	return t.dp.SaveAsync(t.dir, t.machine.Solver(), t.past, options...)
}

// done reports whether all epochs are trained, or the last ones were not better. It depends on what
// all ranks have in common alone.
func (t *trainer) done() bool {
	n, best := len(t.past.Epochs), t.bestEpoch()
	return n >= t.epochs || t.patience > 0 && best >= 0 && n-1-best >= t.patience
}

// bestEpoch returns the index of the best epoch, -1 for none.
func (t *trainer) bestEpoch() int {
	for i, e := range slices.Backward(t.past.Epochs) {
		if e.Best {
			return i
		}
	}
	return -1
}

// best returns the checkpoint of the best epoch.
func (t *trainer) best() string {
	i := t.bestEpoch()
	if t.dir == "" || i < 0 {
		return ""
	}
	return filepath.Join(t.dir, fmt.Sprintf("step-%08d", t.past.Epochs[i].Steps))
}

// better reports whether an epoch is better than the best one so far.
func (t *trainer) better(e Epoch) bool {
	x, best := t.judged(e), t.bestEpoch()
	if best < 0 || !finite(x) {
		return finite(x)
	}
	if t.validation.less(t.watched) {
		return x < t.judged(t.past.Epochs[best])
	}
	return x > t.judged(t.past.Epochs[best])
}

// judged returns the number by which an epoch is the best one, NaN if it has none.
func (t *trainer) judged(e Epoch) float64 {
	name := t.watched
	if name == "" {
		name = "loss"
	}
	if x, ok := e.Metrics[name]; ok {
		return x
	}
	if t.watched == "" && (t.validation == nil || t.validation.data.Loss == nil) {
		return e.Loss
	}
	return math.NaN()
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
