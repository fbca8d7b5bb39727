package autograd

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"iter"
	"reflect"
	"sync"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/residence"
)

// Save writes a checkpoint: the parameters, the state of the solver, the variables of [WithFrozen],
// the running statistics of batch norms, the step of random numbers and the residuals of a
// compression. Averages and random numbers belong to the parameters' graphs; Save first replaces
// averages by their mean over all ranks. Training resumes from it bitwise identically, as if it had
// never stopped. Save is collective. progress is whatever else the program needs to resume (its
// epoch, its seeds), as JSON, which keeps exported fields; nil for nothing. Save writes rank 0's.
//
// dir is a directory that all ranks can reach. It may contain other files, and need not exist.
// After 1,200 steps of training the checkpoint is dir/step-00001200; it gets that name once all
// files are on the disk. Save then removes older checkpoints of this training ([KeepLast], [Pin]),
// but nothing that it has not written. If it fails or is interrupted, the last checkpoint is
// unchanged; this or the next Save removes what it has written. The first Save locks dir until
// Close. docs/checkpoints.md describes the directory.
//
// Errors, on all ranks: a NaN or an infinity in what is written, by the rule of
// [DataParallel.CheckFinite]; a solver whose state cannot be read (of Gorgonia's solvers, only
// VanillaSolver has no state: use a [solver.Solver]); [ErrLocked] if another job saves to dir;
// ErrArgument for parameters without a name, or with the same name as another (see [SaveWeights]),
// and while a step is in progress, from the first hook or the first run of several of package vm to
// the step's end; ErrMismatch if ranks have trained without a Sync; those of the file system and of
// the communicator.
func (d *DataParallel) Save(
	dir string, solver gorgonia.Solver, progress any, opts ...SaveOption,
) error {
	return d.collectively(backend.ForSave, "save "+dir, func() error {
		return d.save(dir, solver, progress, opts, false)
	})
}

// SaveAsync is [DataParallel.Save] in the background: it returns once it has copied the content of
// the checkpoint, which a goroutine then writes. The checkpoint has the bits that Save would have
// written. SaveAsync is collective.
//
// A machine of package vm on a device copies parameters and the solver's state there, and fetches
// the copies while steps go on. The device needs memory for them, which it keeps until the
// machine's Close. If it has too little, and in all other cases, copies are made on the host. With
// [WithParts], unless there are shards (vm.WithShards), ranks first exchange the whole parameters
// and solver state.
//
// The checkpoint gets its name as soon as its files are on the disk. If each rank writes a file, as
// with shards, package sparse and [WithPartial], the ranks must agree first: the next SaveAsync,
// Save, Load or Close does that, and Close is then collective. Each of these waits for the last
// SaveAsync and returns its error; SaveAsync and Save begin their own checkpoint nevertheless.
//
// Errors: those of Save that occur before files are written.
func (d *DataParallel) SaveAsync(
	dir string, solver gorgonia.Solver, progress any, opts ...SaveOption,
) error {
	return d.collectively(backend.ForSave, "save "+dir, func() error {
		return d.save(dir, solver, progress, opts, true)
	})
}

// TrySave returns the error that a Save would return before its files are written, and locks dir as
// Save does: so a training finds out before its first step whether it can be saved. It leaves the
// directory, and no checkpoint. It is collective.
func (d *DataParallel) TrySave(dir string, solver gorgonia.Solver, opts ...SaveOption) error {
	return d.collectively(backend.ForSave, "save to "+dir, func() error {
		return d.saver.Try(d.request(dir, solver, opts, false))
	})
}

// Weights gives the model to take, on the first rank alone, by name and one tensor after the other:
// whole parameters, wherever ranks or a device have them, in the order of New, then variables of
// [WithFrozen] and running statistics. No rank puts together more than one parameter at a time.
// Weights is collective, and returns an error of one rank, such as that of take, on all ranks
// before they put together another parameter. On the first rank hash is what [DataParallel.Hash]
// returns, made beside take:
//
//	hash, err := dp.Weights(func(weights iter.Seq2[string, *tensor.Dense]) error {
//		return model.Save("tuned", weights)
//	})
//
// Tensors may be the program's own: they stay as they are until the next step. take must not call
// methods of d. After an error the last tensor is nil.
func (d *DataParallel) Weights(
	take func(weights iter.Seq2[string, *tensor.Dense]) error,
) (hash string, err error) {
	err = d.collectively(backend.ForSave, "weights", func() error {
		err := d.saver.Agree("", errors.Join(backend.Given("", "take", take), d.fresh.apart(),
			d.settle()))
		if err != nil {
			return err
		}
		s := newStream(d)
		if d.saver.First() {
			err = take(s.weights)
		}
		s.wrong = cmp.Or(s.wrong, err)
		s.weights(func(string, *tensor.Dense) bool { return true }) // what take has left
		hash, err = s.sum()
		return d.saver.Agree("", err)
	})
	return hash, err
}

// stream is the tensors of a model, one after the other.
type stream struct {
	d      *DataParallel
	next   int // parameter
	wrong  error
	over   bool // ranks know of an error
	hash   hash.Hash
	hashed sync.WaitGroup
	bytes  chan []byte // to hash
}

func newStream(d *DataParallel) *stream {
	s := &stream{d: d, hash: sha256.New(), bytes: make(chan []byte)}
	s.hashed.Go(func() {
		for b := range s.bytes {
			s.hash.Write(b)
		}
	})
	return s
}

// weights goes on with the parameters, and then gives the rest. Ranks that have no part in it do
// nothing.
func (s *stream) weights(yield func(string, *tensor.Dense) bool) {
	first := s.d.saver.First()
	for s.next < len(s.d.params) && !s.over && (first || s.d.divided()) {
		p := s.d.params[s.next]
		s.next++
		if s.wrong == nil {
			s.wrong = s.d.ready(p)
		}
		if s.d.divided() {
			s.wrong = s.d.saver.Agree("", s.wrong)
		}
		var all stored
		if s.over = s.wrong != nil; !s.over { // else the next one tells the others of an error
			all, s.wrong = s.d.wholeParam(p)
		}
		if s.wrong == nil && first {
			s.bytes <- all.Data.Bytes()
		}
		if !s.give(p.node.Name(), all, yield) {
			return
		}
	}
	for _, p := range s.d.model.pieces() {
		if s.wrong == nil && first {
			all := stored{Shape: p.shape}
			all.Data, s.wrong = p.memory()
			if !s.give(p.file, all, yield) {
				return
			}
		}
	}
}

func (s *stream) give(name string, all stored, yield func(string, *tensor.Dense) bool) bool {
	var x *tensor.Dense
	if s.wrong == nil {
		x, s.wrong = tensorOf(all)
	}
	return yield(name, x)
}

// sum returns the hash of what was given, unless there is an error.
func (s *stream) sum() (string, error) {
	close(s.bytes)
	s.hashed.Wait()
	err := s.wrong
	if err == nil {
		err = s.d.model.hash(s.hash)
	}
	if err != nil || !s.d.saver.First() {
		return "", err
	}
	return hex.EncodeToString(s.hash.Sum(nil)), nil
}

// divided reports whether ranks have parts of parameters, of whatever kind.
func (d *DataParallel) divided() bool { return d.sharded || d.parts != nil }

// ready returns why this rank could not take part in wholeParam.
func (d *DataParallel) ready(p *param) error {
	err := d.planned.bring(false, p.node)
	if err != nil {
		return err
	}
	if d.sharded { // the host has a shard
		_, err = p.value()
	} else {
		_, err = p.present()
	}
	return err
}

// wholeParam returns all elements of a parameter, on the first rank and others. It is collective
// where ranks have parts.
func (d *DataParallel) wholeParam(p *param) (all stored, err error) {
	if d.sharded {
		err = d.planned.bring(true, p.node)
	}
	if err == nil {
		all.Shape = p.dims()
		all.Data, err = p.present()
	}
	if err == nil && d.parts.isPart(p.index) && d.comm.Rank() == 0 {
		all, err = d.parts.join(p, all.Data)
	}
	return all, err
}

// ErrLocked is wrapped by the error of Save, on all ranks, if another job saves to the directory.
var ErrLocked = checkpoint.ErrLocked

// SaveOption changes what [DataParallel.Save] keeps. Rank 0's options count.
type SaveOption func(*saveOptions)

type saveOptions struct {
	keep   int // checkpoints of this training
	pinned bool
}

// KeepLast makes Save keep the last n checkpoints of this training, this one included. The default
// is 2. Save returns ErrArgument for n < 1.
func KeepLast(n int) SaveOption { return func(o *saveOptions) { o.keep = n } }

// Pin makes Save keep this checkpoint, such as the best one so far, beside the last ones until this
// training pins another.
func Pin() SaveOption { return func(o *saveOptions) { o.pinned = true } }

// request is what the ranks are told of a Save, and why this one cannot save.
func (d *DataParallel) request(dir string, solver gorgonia.Solver, opts []SaveOption,
	behind bool) (checkpoint.Request, error) {
	o := saveOptions{keep: 2}
	for _, opt := range opts {
		if opt != nil {
			opt(&o)
		}
	}
	r := checkpoint.Request{Dir: dir, Keep: o.keep, Pinned: o.pinned, Behind: behind,
		Each: d.ownFiles()}
	if d.sharded || r.Each && d.parts.first() {
		r.Own = checkpoint.RankName(d.saver.Number())
	}
	_, unknown := stateOf(solver)
	return r, errors.Join(backend.Given("DataParallel.Save", "opts", opts), unknown,
		d.trainsBy(solver), checkNames(d.model.tensors()))
}

// trainsBy returns an error for a solver that has no state of this training, because a machine
// trains by another one.
func (d *DataParallel) trainsBy(solver gorgonia.Solver) error {
	if d.solver != nil && gorgonia.Solver(d.solver) != solver {
		return fmt.Errorf("%w: a %T that is not the machine's has no state of this training: pass "+
			"Machine.Solver", backend.ErrArgument, solver)
	}
	return nil
}

// save lists what is to be written, on a device or on the host, once all ranks can save.
func (d *DataParallel) save(dir string, solver gorgonia.Solver, progress any, opts []SaveOption,
	behind bool) error {
	last := d.saver.Finish()
	r, problem := d.request(dir, solver, opts, behind)
	onDevice := behind && d.planned.has(&d.contents, solver)
	if !onDevice {
		problem = errors.Join(problem, d.planned.bring(!d.sharded))
	}
	err := d.saver.Save(r, errors.Join(problem, d.fresh.apart(), d.mirrors.gone()),
		func(of checkpoint.Stamp) (checkpoint.Content, error) {
			return d.content(solver, progress, behind, onDevice)
		})
	return errors.Join(last, err)
}

// content returns what this rank writes of a checkpoint: copies, started on the machine's device or
// made here, if the training goes on.
func (d *DataParallel) content(by gorgonia.Solver, progress any, behind, onDevice bool) (
	c checkpoint.Content, err error) {
	r := d.record(by)
	r.Solver = inFile(r.Solver)
	c.Seal = func(of checkpoint.Stamp) ([]byte, error) {
		r.Stamp = of
		return checkpoint.Seal(r)
	}
	if err := d.settle(); err != nil {
		return c, err
	}
	for _, op := range d.model.unkept {
		d.say(fmt.Sprintf("the checkpoint does not keep the random numbers of %s, so training "+
			"that loads it draws others: those of one nn.Random, in nn.Dropout, are kept", op))
	}
	first := d.saver.First()
	if d.partial.on || d.sharded || d.comm.Rank() == 0 { // who writes it, or has parts
		if onDevice {
			c.Tensors, c.Fetch, err = d.planned.copies(&d.contents, by, first)
		} else {
			c.Tensors, err = d.onHost(by, first, behind)
		}
		if err != nil {
			return c, err
		}
	}
	own, err := d.own(d.parts.first())
	c.Tensors = append(c.Tensors, own...)
	if err != nil || progress == nil || !first {
		return c, err
	}
	if err = leftOut(reflect.TypeOf(progress), map[reflect.Type]bool{}); err == nil {
		r.Progress, err = marshal(progress)
	}
	if err != nil {
		err = fmt.Errorf("progress: %w", err)
	}
	return c, err
}

// Pinned returns the path of the checkpoint in dir that was pinned last ([Pin]), by this training
// or by the one it was loaded from, or "" if dir has none. It is collective, and waits for the last
// SaveAsync.
//
// Errors, on all ranks: that of the last SaveAsync; those of the file system and the communicator.
func (d *DataParallel) Pinned(dir string) (path string, err error) {
	err = d.collectively(backend.ForLoad, "find what is pinned in "+dir, func() error {
		if err = d.saver.Finish(); err == nil {
			path, err = d.saver.Pinned(dir)
		}
		return err
	})
	return path, err
}

// Load restores what Save has written, and unmarshals its progress; a nil progress ignores it. dir
// is a directory of Save, or one checkpoint in it. From a directory Load takes the newest
// checkpoint that is whole and finite, and reports a newer one that is not ([WithNotice]). Load is
// collective. Build the graph first. The program must have parameters with the same names, in any
// order, the same batch norms and options, and the same solver settings, which the checkpoint does
// not contain. The order of parameters must also be the same with a compression that keeps
// residuals, with WithPartial, and for checkpoints of older versions, which number parameters.
// Checkpoints of older versions lack the number of parameters, the reduction and the compression's
// options; Load then does not compare these. They also lack running statistics and frozen
// parameters: these stay as they are, and Load reports it ([WithNotice]).
//
// Gorgonia's machines discard running statistics when they are made for training, so call
// gorgonia.NewTapeMachine before Load.
//
// The number of ranks may differ, unless ranks have state of their own, as with package sparse and
// [WithPartial]. The batches of a [Sampler] are the same for any number of ranks: count its steps
// in the progress.
//
// [WeightsOnly] loads only parameters, frozen variables and running statistics, for another solver.
//
// To change the reduction or the compression and keep the solver's state, load with the old one,
// Close d, and pass the same parameters to another New. Residuals then start empty; their content
// is lost.
//
// Errors, on all ranks: fs.ErrNotExist if dir has no checkpoint, so that a program can begin
// training; a checkpoint that is damaged or does not fit, or ErrArgument while a step is in
// progress: nothing has then changed on any rank; those of the communicator. If a rank fails later
// (a device is lost, or a [solver.Stateful] that is not a [solver.Checker] refuses its state),
// ranks may differ, so that error ends d like an error of Sync.
func (d *DataParallel) Load(dir string, solver gorgonia.Solver, progress any,
	opts ...LoadOption) error {
	if d.elastic {
		return fmt.Errorf("autograd: load %s: %w: ranks may be lost during the load, and "+
			"their replacements would not load: call Elastic.Load", dir, backend.ErrArgument)
	}
	return d.collectively(backend.ForLoad, "load "+dir, func() error {
		return d.restore(dir, solver, progress, loadOptionsOf(opts))
	})
}

// restore reads a checkpoint. It changes nothing unless all ranks can restore it.
func (d *DataParallel) restore(dir string, solver gorgonia.Solver, progress any,
	o loadOptions) error {
	problem := errors.Join(o.missing, d.planned.bring(!d.sharded), d.trainsBy(solver))
	if err := d.saver.Finish(); err != nil {
		return err
	}
	var l loaded
	err := d.saver.Load(dir, func(in files.Dir) (description string, err error) {
		if err = problem; err == nil {
			l, err = d.read(in, solver, o.weightsOnly)
		}
		if err == nil {
			err = d.validate(l, solver, progress)
		}
		return l.describe(), err
	})
	if err != nil {
		return err
	}
	d.fresh.over()
	if err = d.saver.Agree("", d.apply(l, solver, progress)); err == nil {
		err = d.gatherParams()
	}
	if err != nil {
		err = fmt.Errorf("only a part of the checkpoint is loaded, so ranks may differ: %w", err)
		d.fail(err)
		return err
	}
	if !l.weightsOnly { // which begin another training
		d.saver.Resume(l.Stamp)
	}
	for _, text := range d.model.missing(l.record) {
		d.say(text)
	}
	return nil
}

// collectively runs f on all ranks, between steps.
func (d *DataParallel) collectively(purpose backend.Purpose, what string, f func() error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return err
	}
	return onRank(d.comm, what, residence.Bound(d.comm.Device(), func() error {
		// This detects a rank that makes the call alone.
		problem := errors.Join(d.betweenSteps(), d.model.find())
		ranks := d.saver.Ranks
		ranks.Data = backend.Label(d.comm, purpose)
		if err := ranks.Agree("", problem); err != nil {
			return err
		}
		return f()
	}))
}
