package fit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"path"
	"path/filepath"
	"slices"
	"time"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/vm"
)

// trainer is the state of a Run.
type trainer struct {
	epochs, readers, every, patience int
	seed                             uint64
	rate                             solver.Schedule
	random                           []autograd.Random
	dir, watched                     string
	saveOptions                      []autograd.SaveOption
	validation                       *evaluation // nil for none
	onStep                           []func(s StepLoss) error
	onEpoch                          []func(e Epoch) error
	says                             []io.Writer // of Progress
	logs                             []log
	trackers                         []tracker
	shown                            int            // trackers that options ask for, on all ranks
	counted                          gorgonia.Nodes // in histograms of TensorBoard
	plateau                          plateau
	restored                         bool     // RestoreBest
	missing                          error    // what is wrong with options
	given                            []string // options that may be given once

	machine *vm.Machine
	data    Data
	dp      *autograd.DataParallel
	comm    backend.Communicator
	sampler *autograd.Sampler
	blamed  error // the sample here that made the loss of the last step not finite
	// of all ranks: the norm of the gradients of the last step is not finite
	unbounded error
	n         int     // samples
	local     int     // samples of a run
	runs      int     // of a step
	first     int     // of all runs on all ranks, the number of the first one here
	all       int     // on all ranks
	weight    float64 // of a run's gradient
	loader    *loader
	watch     *observe.Watch // nil for none
	told      [][]float64    // by all ranks, of a step
	own       int            // samples of this rank in a step
	flops     int64          // of this rank in a step
	past      past
	began     time.Time // of the epoch
	stepped   time.Time // when the last step began
	opened    bool      // the trackers are
	untold    []point   // to them
	number    float64   // at random, of a training that begins here
	hooked    error     // of OnStep
	reported  int       // the last epoch that OnEpoch was called for

	elastic *autograd.Elastic // nil for ranks that do not change
	shared  error             // of the last exchange of elastic ranks: all that are left have it
}

// past is what a checkpoint has besides model and solver.
type past struct {
	Training      string // what must be the same on resuming
	Name          string `json:",omitempty"` // of the training, for trackers
	Epochs        []Epoch
	Steps, Step   int           // of the training, of the epoch
	Loss, Seconds float64       // of the epoch: the sum over its samples
	Saved         int           `json:",omitempty"` // the step of the last save within an epoch
	Mapping       *data.Mapping `json:",omitempty"`
	Judge         string        `json:",omitempty"` // the number that says which epoch is best
}

// global returns how many samples a whole step has.
func (t *trainer) global() int { return t.local * t.all }

// rest reports whether the last batch of an epoch may be incomplete.
func (t *trainer) rest() bool { return t.data.Weights != nil && !t.data.DropLast }

// prepare finds out what a step is, or why all ranks refuse it.
func (t *trainer) prepare() (err error) {
	_, t.weight = t.machine.Runs()
	t.first, t.runs, t.all = t.machine.MicroBatches()
	of := t.machine.Summary()
	if t.local, err = t.data.check(of); err == nil {
		t.n = t.data.Set.Len()
	}
	if err = errors.Join(err, t.check(of)); err == nil && t.rest() {
		err = t.data.fills(t.global())
	}
	if err == nil {
		err = t.checkSamples()
	}
	text := fmt.Sprintf("fit has %d epochs, patience %d, checkpoints in %q each %d, the best by "+
		"%q\nthere are weights: %v, incomplete batches: %v, a validation: %v\n", t.epochs,
		t.patience, path.Base(filepath.ToSlash(t.dir)), t.every, t.watched, t.data.Weights != nil,
		t.rest(), t.validation != nil)
	if t.rate != nil {
		text += fmt.Sprintf("the rate of fit.Schedule begins with %v\n", t.rate(0))
	}
	text += fmt.Sprintf("the rate on a plateau is %+v, the best epoch is restored: %v, there are "+
		"%d of TensorBoard and MLflow\n", t.plateau, t.restored, t.shown)
	mapping := t.data.mapping()
	text += fmt.Sprintf("the samples have columns %q with means %v and classes %q\n",
		mapping.Columns, mapping.Means, mapping.Classes)
	if err := autograd.Agree(t.comm, text, err); err != nil {
		return err
	}
	if err := t.data.same(t.comm); err != nil {
		return err
	}
	n, parts := t.n, t.comm
	if t.elastic != nil { // each has all samples of a step, and takes those of its micro-batches
		parts = autograd.Solo()
	}
	t.sampler, err = autograd.NewTreeSampler(parts, n, t.global(), t.all, t.seed)
	if err == nil && t.rest() {
		t.sampler = t.sampler.Rest()
	}
	t.past.Judge = cmp.Or(t.watched, "loss") + " of the training"
	if v := t.validation; v.metric(t.watched) != nil || v != nil && v.data.Loss != nil {
		t.past.Judge = cmp.Or(t.watched, "loss") + " of the validation"
	}
	t.past.Training = fmt.Sprintf("%d samples, batches of %d, the seed %d", n, t.global(), t.seed)
	if t.data.DropLast && t.data.Weights != nil {
		t.past.Training += ", complete batches"
	}
	if len(mapping.Columns)+len(mapping.Classes) > 0 {
		t.past.Mapping = &mapping
	}
	return err
}

// tryFiles returns an error on all ranks if checkpoints, logs or Progress cannot be written.
func (t *trainer) tryFiles() error {
	err := autograd.Agree(t.comm, "", errors.Join(t.tryLogs(), t.sayColumns(),
		t.openTrackers(t.past.Steps+1)))
	if err == nil && t.dir != "" {
		err = t.dp.TrySave(t.dir, t.machine.Solver(), t.saveOptions...)
	}
	return err
}

// checkSamples checks what the samples are with those of a validation and with the last batch.
func (t *trainer) checkSamples() error {
	if v := t.validation; v != nil && v.data.Set != nil {
		if err := checkMapping(t.data.mapping(), v.data.mapping()); err != nil {
			return fmt.Errorf("the samples of Validate: %w", err)
		}
	}
	if !t.rest() {
		return nil
	}
	err := t.data.checkIncomplete(t.machine, t.comm, t.n, t.global())
	if err != nil {
		err = fmt.Errorf("%w: set Data.DropLast, or choose batches that the samples fill", err)
	}
	return err
}

// resume continues from the newest checkpoint, if there is one.
func (t *trainer) resume() error {
	var kept past
	if t.dir == "" {
		return nil
	}
	err := t.dp.Load(t.dir, t.machine.Solver(), &kept)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, backend.ErrArgument): // sizes that differ may follow from other columns
		if known, unread := ReadMapping(t.dir); unread == nil {
			err = cmp.Or(t.sameSamples(known), err)
		}
	case err == nil && kept.Training != t.past.Training:
		return fmt.Errorf("%w: the checkpoint in %s is of a training with %s, but this one has "+
			"%s: use the same settings, or another directory", backend.ErrArgument, t.dir,
			kept.Training, t.past.Training)
	case err == nil:
		if err = t.sameSamples(kept.mapping()); err != nil {
			return err
		}
		if t.past.Mapping != nil {
			kept.Mapping = t.past.Mapping
		}
		judge := t.past.Judge
		if t.past = kept; t.bestEpoch() >= 0 && kept.Judge != "" && kept.Judge != judge {
			return fmt.Errorf("%w: in %s the best epoch was chosen by the %s, and this training "+
				"chooses by the %s: use the same Validate and Watch, or another directory",
				backend.ErrArgument, t.dir, kept.Judge, judge)
		}
		t.past.Judge = judge
	}
	return err
}

// sameSamples returns an error if the samples of a checkpoint were others.
func (t *trainer) sameSamples(kept data.Mapping) error {
	err := checkMapping(kept, t.past.mapping())
	if err != nil {
		err = fmt.Errorf("the checkpoint in %s is of other samples: %w, by fit.ReadMapping, or "+
			"use another directory", t.dir, err)
	}
	return err
}

// jobs yields what the runs of this rank read, from where the training is.
func (t *trainer) jobs(epoch, step int) func(yield func(job) bool) {
	return func(yield func(job) bool) {
		for ; epoch < t.epochs; epoch, step = epoch+1, 0 {
			for shares := t.sampler.Epoch(epoch); step < len(shares); step++ {
				for i := range t.runs {
					from, n := i*t.local, len(shares[step])
					if t.elastic != nil {
						from += t.first * t.local
					}
					if !yield(job{shares[step][min(from, n):min(from+t.local, n)],
						1 / t.divisor(step), t.seed + uint64(epoch)<<32, t.data.Augment}) {
						return
					}
				}
			}
		}
	}
}

// samples returns how many samples a step of an epoch has on all ranks.
func (t *trainer) samples(step int) int {
	return min(t.global(), t.n-step*t.global())
}

// divisor returns what the graph divides the loss of a sample by, in a step of an epoch.
func (t *trainer) divisor(step int) float64 { return float64(t.samples(step)) * t.weight }

// train trains until all epochs are done. Before each step all ranks have its batch, and know that
// none was told to stop.
func (t *trainer) train(ctx context.Context) error {
	if err := t.begin(); err != nil || t.done() {
		return err
	}
	t.loader = load(t.data, t.readers, t.jobs(len(t.past.Epochs), t.past.Step))
	defer t.loader.close()
	_, stop, err := t.vote(ctx, 0, t.loader.next())
	t.flops = t.machine.Summary().FLOPs * int64(t.runs)
	t.watch.Begin()
	t.began = time.Now().Add(-time.Duration(t.past.Seconds * float64(time.Second)))
	for err == nil && stop == 0 {
		loss, wrong := t.step()
		if wrong != nil {
			t.comm.Abort(wrong) // the others may wait for this rank in the middle of the step
			return wrong
		}
		loss, stop, err = t.vote(ctx, loss, errors.Join(t.hooked, t.next()))
		if err == nil {
			if mean := t.count(loss); !finite(mean) || t.unbounded != nil {
				err = t.whyNotFinite(mean)
			}
		}
		if err == nil && t.past.Step == t.sampler.Steps() {
			err = t.endEpoch(stop > 0)
			t.watch.Begin()
		} else if err == nil && (stop > 0 || t.every > 0 && t.past.Steps%t.every == 0) {
			err = t.save(stop > 0)
			t.watch.Begin()
		}
		if err == nil && t.done() {
			return nil
		}
	}
	if err == nil { // a hook of the last step may have failed
		err = autograd.Agree(t.comm, "", t.hooked)
	}
	if err != nil {
		return err
	}
	return t.stopped(stop, t.kept())
}

// begin prepares a training, and resumes it. If there is nothing left to train, it is evaluated
// again.
func (t *trainer) begin() error {
	if err := t.prepare(); err != nil {
		return err
	}
	if err := t.resume(); err != nil {
		return err
	}
	if t.done() {
		return t.again()
	}
	if err := t.name(); err != nil {
		return err
	}
	if err := t.tryFiles(); err != nil {
		return err
	}
	return t.dp.Check() // before ranks train models of their own
}

// stopped says where the training was told to stop, and what follows from that.
func (t *trainer) stopped(by exit.Stopped, then string) error {
	return fmt.Errorf("%w after step %d, in epoch %d of %d: %s", by, t.past.Steps,
		len(t.past.Epochs)+1, t.epochs, then)
}

// kept says what there is of a training that all ranks were told to stop.
func (t *trainer) kept() string {
	if t.dir == "" {
		return "nothing is saved without fit.Checkpoint"
	}
	return "start it again to go on from " + t.dir
}

// again validates and logs once more what an earlier run has trained.
func (t *trainer) again() error {
	var e Epoch
	if t.validation != nil {
		if err := t.validate(&e); err != nil {
			return err
		}
	}
	var opened error
	if t.past.Name != "" { // a server that was away may lack the end
		opened = t.openTrackers(t.past.Steps + 1)
	}
	said := t.say("fit: the training in %s is already finished, at step %d, in epoch %d: give "+
		"more epochs, or delete the directory to begin again", t.dir, t.past.Steps,
		len(t.past.Epochs))
	return autograd.Agree(t.comm, "", errors.Join(t.hooked, said, t.writeLogs(), opened))
}

// endBest restores the best epoch if that is wanted. It returns an error if an epoch was to be
// chosen, and none has a number to choose by.
func (t *trainer) endBest() error {
	best := t.bestEpoch()
	switch {
	case best < 0 && (t.watched != "" || t.patience > 0 || t.restored):
		return fmt.Errorf("the metric %q, by which the best epoch is chosen, has no finite value "+
			"in any of %d epochs", cmp.Or(t.watched, "loss"), len(t.past.Epochs))
	case !t.restored || best == len(t.past.Epochs)-1:
		return nil
	}
	path, err := t.dp.Pinned(t.dir)
	if err == nil && path == "" {
		err = fmt.Errorf("%w: the checkpoint of the best epoch, %d, is not in %s any more: leave "+
			"RestoreBest out, and start it again", fs.ErrNotExist, best+1, t.dir)
	}
	if err == nil {
		err = t.dp.Load(path, t.machine.Solver(), nil)
	}
	if err != nil {
		err = fmt.Errorf("fit.RestoreBest: %w", err)
	}
	return err
}

// beginStep forgets the last step, and gives the solver the rate of this one.
func (t *trainer) beginStep() (err error) {
	t.stepped, t.own, t.blamed, t.unbounded = time.Now(), 0, nil, nil
	if t.rate != nil {
		rate := t.rateOf(t.past.Steps)
		if rate >= 0 && !math.IsInf(rate, 0) {
			t.machine.Solver().SetRate(rate)
		} else {
			err = fmt.Errorf("fit.Schedule: the rate is %v: it must be finite and not negative",
				rate)
		}
	}
	return err
}

// step runs a step with the batch that is read, and returns the sum of this rank's losses.
func (t *trainer) step() (loss float64, err error) {
	err = t.beginStep()
	for i := 0; i < t.runs && err == nil; i++ {
		if i > 0 {
			err = t.next()
		}
		var one float64
		one, err = t.run(i, err)
		loss += one
	}
	if err != nil {
		err = t.inStep(err)
	}
	if err != nil && !finite(t.machine.Norm()) { // of all ranks: see vm.ClipNorm
		t.unbounded, err = err, nil
	}
	if err != nil {
		err = errors.Join(t.blamed, err)
	}
	return loss, err
}

// inStep says in which step an error is.
func (t *trainer) inStep(err error) error {
	return fmt.Errorf("epoch %d, step %d: %w", len(t.past.Epochs)+1, t.past.Step+1, err)
}

// run runs run i of a step with the batch that is read, unless something is wrong, and returns the
// sum of its losses.
func (t *trainer) run(i int, wrong error) (loss float64, err error) {
	err = errors.Join(wrong, t.loader.bind())
	t.own += len(t.loader.current.samples)
	for _, r := range t.random {
		r.Seek(uint64(t.past.Steps), (t.first+i)*t.local)
	}
	if err == nil {
		before := t.machine.HostTime()
		err = t.machine.RunAll()
		t.watch.Note(observe.HostOperation, t.machine.HostTime()-before)
		if err == nil && len(numbers(t.data.Loss)) != 1 {
			err = refused("fit.Data: the machine does not keep the Loss: give the cost of " +
				"gorgonia.Grad, or use vm.Keep")
		}
	}
	one := lossOf(t.data)
	if !finite(one) && t.blamed == nil {
		t.blamed = t.loader.current.blame(t.data.Inputs)
	}
	return one * t.divisor(t.past.Step), err
}

// next waits for the next batch.
func (t *trainer) next() error { return t.watch.During(observe.Loader, t.loader.next) }

// vote adds up the losses of all ranks, and returns, the same on all of them, what told one of them
// to stop (0 for nothing), and the error of one that cannot continue.
func (t *trainer) vote(ctx context.Context, loss float64, wrong error) (sum float64,
	stop exit.Stopped, err error) {
	failed := map[bool]float64{true: 1}[wrong != nil]
	t.told, err = autograd.Gather(t.comm, append([]float64{loss, float64(exit.By(ctx)), failed},
		t.watch.Sample()...)...)
	if err != nil {
		return 0, 0, errors.Join(wrong, err)
	}
	loss, failed = 0, 0
	for _, numbers := range t.told {
		loss, failed = loss+numbers[0], failed+numbers[2]
		stop = max(stop, exit.Stopped(numbers[1]))
	}
	if failed > 0 {
		err = autograd.Agree(t.comm, "", wrong)
	}
	return loss, stop, err
}

// count counts a step, and returns its mean loss. loss is the sum of its samples' losses.
func (t *trainer) count(loss float64) (mean float64) {
	p := &t.past
	mean = loss / float64(t.samples(p.Step))
	p.Steps, p.Step, p.Loss = p.Steps+1, p.Step+1, p.Loss+loss
	p.Seconds = time.Since(t.began).Seconds()
	ready, capacity := t.loader.ahead()
	t.watch.Step(observe.StepInfo{Number: p.Steps, Loss: mean, Samples: t.own, FLOPs: t.flops,
		Ready: ready, Capacity: capacity}, t.told)
	if !finite(mean) || t.unbounded != nil {
		return mean
	}
	t.hooked = nil
	for _, f := range t.onStep {
		t.hooked = errors.Join(t.hooked, f(StepLoss{p.Steps, p.Step, t.sampler.Steps(), mean}))
	}
	t.hooked = errors.Join(t.hooked, t.trackStep(mean))
	return mean
}

// whyNotFinite returns, on all ranks, why the loss of a step or the norm of its gradients is not
// finite: a sample of a rank, or what the training has become before.
func (t *trainer) whyNotFinite(loss float64) error {
	err := autograd.Agree(t.comm, "", t.blamed)
	if err == nil {
		err = t.unbounded
	}
	if err == nil {
		err = errors.New("its samples are finite, so the parameters were not, or the loss has no " +
			"value where they are (a root or a logarithm of 0, an overflow): lower the rate, or " +
			"bound the gradients by vm.ClipNorm")
	}
	if t.dir != "" { // a save in progress knows of the step before
		_, wrong := t.dp.Pinned(t.dir)
		err = errors.Join(err, wrong)
	}
	return fmt.Errorf("the loss is %v in step %d of epoch %d: %w", loss, t.past.Step,
		len(t.past.Epochs)+1, err)
}

// endEpoch validates, reports and saves.
func (t *trainer) endEpoch(stop bool) error {
	p := &t.past
	e := Epoch{Epoch: len(p.Epochs) + 1, Steps: p.Steps, Seconds: p.Seconds,
		Loss: p.Loss / float64(min(t.n, t.sampler.Steps()*t.global()))}
	if t.rate != nil {
		e.Rate = t.rateOf(p.Steps - 1)
	}
	if err := t.dp.CheckFinite(nil); err != nil {
		return fmt.Errorf("epoch %d: %w", e.Epoch, err)
	}
	histograms, err := t.histograms()
	t.hooked = errors.Join(t.hooked, err)
	if t.validation != nil {
		if err := t.validate(&e); err != nil {
			return err
		}
	}
	e.Best = t.better(e)
	*p = past{Training: p.Training, Name: p.Name, Epochs: append(p.Epochs, e), Steps: p.Steps,
		Mapping: p.Mapping, Judge: p.Judge}
	for i := 0; i < len(t.onEpoch) && t.reported < e.Epoch; i++ { // once, if the end is repeated
		told := e
		told.Metrics = maps.Clone(e.Metrics)
		t.hooked = errors.Join(t.hooked, t.onEpoch[i](told))
	}
	if t.reported < e.Epoch {
		shown := e.point()
		shown.histograms = histograms
		t.hooked = errors.Join(t.hooked, t.track(shown))
	}
	t.reported = e.Epoch
	t.hooked = errors.Join(t.hooked, t.writeLogs())
	if n := t.data.Set.Len(); n != t.n {
		t.hooked = errors.Join(t.hooked, refused("there were %d samples, and now there are %d: "+
			"their number must not change in a training", t.n, n))
	}
	if err := autograd.Agree(t.comm, "", t.hooked); err != nil {
		return err
	}
	t.began = time.Now()
	if e.Best { // which would be lost with a rank that writes it behind the turn
		return t.save(stop || t.done() || t.elastic != nil, autograd.Pin())
	}
	return t.save(stop || t.done())
}

// validate computes the metrics of an epoch. If this rank cannot switch to the averages of weights,
// it takes part nevertheless, and all ranks get its error; if it cannot switch back to the weights,
// they get the error with those of hooks.
func (t *trainer) validate(e *Epoch) (err error) {
	full, ran := float64(t.all)*t.weight, false
	wrong := t.machine.Averaged(func() error {
		ran = true
		e.Metrics, err = t.validation.run(t.comm, t.parts(), t.readers, full, nil)
		return err
	})
	if !ran {
		_, err = t.validation.run(t.comm, t.parts(), t.readers, full, wrong)
	}
	if err == nil {
		t.hooked = errors.Join(t.hooked, wrong)
	}
	return err
}

// parts returns which parts of a validation this rank does: of elastic ranks, those of a step, so
// that the number of ranks changes nothing.
func (t *trainer) parts() parts {
	if t.elastic != nil {
		return parts{t.first, t.runs, t.all}
	}
	return evenly(t.comm)
}

// save saves, in the background unless the training ends.
func (t *trainer) save(ends bool, options ...autograd.SaveOption) error {
	write := t.dp.SaveAsync
	switch {
	case t.dir == "":
		return nil
	case ends:
		write = t.dp.Save
	}
	return write(t.dir, t.machine.Solver(), t.past, append(options, t.saveOptions...)...)
}

// plateau is what ReduceOnPlateau is given.
type plateau struct {
	factor   float64
	patience int
}

// rateOf returns the rate of a step of the present epoch. It follows from the schedule and from
// which epochs were the best ones so far, so all ranks have the same, also on resuming.
func (t *trainer) rateOf(step int) float64 {
	rate, worse := t.rate(step), 0
	for _, e := range t.past.Epochs {
		if worse++; e.Best {
			worse = 0
		}
		if worse > 0 && t.plateau.patience > 0 && worse%t.plateau.patience == 0 {
			rate *= t.plateau.factor
		}
	}
	return rate
}

// done reports whether all epochs are trained, or the last ones were not better. It depends only on
// what all ranks have in common.
func (t *trainer) done() bool {
	n, best := len(t.past.Epochs), t.bestEpoch()
	return n >= t.epochs || t.patience > 0 && n-1-best >= t.patience
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

// better reports whether an epoch is better than the best one so far.
func (t *trainer) better(e Epoch) bool {
	x, best := t.judged(e), t.bestEpoch()
	if best < 0 || !finite(x) {
		return finite(x)
	}
	if m := t.validation.metric(t.watched); m == nil || m.Less {
		return x < t.judged(t.past.Epochs[best])
	}
	return x > t.judged(t.past.Epochs[best])
}

// judged returns the number by which epochs are compared, NaN if this one has none.
func (t *trainer) judged(e Epoch) float64 {
	if x, ok := e.Metrics[cmp.Or(t.watched, "loss")]; ok {
		return x
	}
	if v := t.validation; v.metric(t.watched) != nil || v != nil && v.data.Loss != nil {
		return math.NaN()
	}
	return e.Loss
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
