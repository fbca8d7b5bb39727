package autograd

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
)

// Save writes a checkpoint: the parameters, the state of the solver, the variables of
// [WithFrozen], the moving averages of batch norms, the step of random numbers and the residuals of
// a compression. Averages and random numbers belong to the parameters' graphs; Save first replaces
// averages by their mean over all ranks. Training resumes from it with the same bits as if it had
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

// Load restores what Save has written, and unmarshals its progress; a nil progress ignores it. dir
// is a directory of Save, or one checkpoint in it. From a directory Load takes the newest
// checkpoint that is whole and finite, and reports a newer one that is not ([WithNotice]). Load is
// collective.
// Build the graph first. The program must have parameters with the same names, in any order, the
// same batch norms and options, and the same solver settings, which the checkpoint does not
// contain. The order of parameters must also be the same with a compression that keeps residuals,
// with WithPartial, and for checkpoints of older versions, which number parameters. Checkpoints of
// older versions lack the number of parameters, the reduction and the compression's options; Load
// then does not compare these. They also lack moving averages and frozen parameters: these stay as
// they are, and Load reports it ([WithNotice]).
//
// Gorgonia's machines discard moving averages when they are made for training, so call
// gorgonia.NewTapeMachine before Load.
//
// The number of ranks may differ, unless ranks have state of their own, as with package sparse and
// [WithPartial]. The batches of a [Sampler] are the same for any number of ranks: count its steps
// in the progress.
//
// [WeightsOnly] loads only parameters, frozen variables and moving averages, for another solver.
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
	return d.load(dir, solver, progress, opts...)
}

// load is Load, also for an Elastic.
func (d *DataParallel) load(dir string, solver gorgonia.Solver, progress any,
	opts ...LoadOption) error {
	return d.collectively(backend.ForLoad, "load "+dir, func() error {
		return d.restore(dir, solver, progress, loadOptionsOf(opts))
	})
}

// collectively runs f on all ranks, between steps.
func (d *DataParallel) collectively(purpose backend.Purpose, what string, f func() error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return err
	}
	err := residence.Bound(d.comm.Device(), func() error {
		// This detects a rank that makes the call alone.
		problem := errors.Join(d.betweenSteps(), d.model.find())
		if err := d.parts.agree(agree(backend.Label(d.comm, purpose), "", problem)); err != nil {
			return err
		}
		return f()
	})
	if err != nil {
		return wrapped("rank %d of %s: %s: %w", d.comm.Rank(), d.comm.Name(),
			what, err)
	}
	return nil
}

// first reports whether this rank writes what all ranks have in common.
func (d *DataParallel) first() bool { return d.comm.Rank() == 0 && d.parts.first() }

// agree is agree over all ranks, those with other parts of the parameters included.
func (d *DataParallel) agree(description string, err error) error {
	return d.parts.agree(agree(d.comm, description, err))
}

// restore reads a checkpoint. It changes nothing unless all ranks can restore it.
func (d *DataParallel) restore(dir string, solver gorgonia.Solver, progress any,
	o loadOptions) error {
	o.missing = errors.Join(o.missing, d.pull(!d.sharded))
	err := d.finish()
	if err != nil {
		return err
	}
	l, err := d.find(dir, solver, progress, o)
	if err != nil {
		return err
	}
	if err = d.agree("", d.apply(l, solver, progress)); err == nil {
		err = d.gatherParams()
	}
	if err != nil {
		return d.end(fmt.Errorf("only a part of the checkpoint is loaded, so ranks may differ: %w",
			err))
	}
	if !l.weightsOnly { // which begin another training
		d.saves.steps, d.saves.known = l.Step, nil
		d.saves.learn(l.Stamp)
	}
	d.sayMissing(l.record)
	return nil
}

// find reads the newest checkpoint of a directory that is whole for all ranks.
func (d *DataParallel) find(dir string, solver gorgonia.Solver, progress any,
	o loadOptions) (l loaded, err error) {
	c := choice{dir: dir, tried: map[string]bool{}}
	for {
		path, err := c.next(d)
		if err != nil {
			return l, err
		}
		l, err = d.read(path, solver, o)
		if err == nil {
			err = d.validate(l, solver, progress)
		}
		damaged := errors.As(err, new(*checkpoint.Damaged))
		if err = d.agree(l.describe(), err); err == nil {
			if c.passed != nil {
				d.say(fmt.Sprintf("%s is loaded, since every newer checkpoint is damaged, "+
					"incomplete or not finite: %v", path, c.passed))
			}
			return l, nil
		}
		other, unheard := d.anywhere(damaged)
		if unheard != nil || !other {
			return l, errors.Join(err, unheard)
		}
		c.pass(err)
	}
}

// readRecord reads the record of a checkpoint.
func readRecord(dir string) (r record, err error) {
	text, stamp, err := checkpoint.ReadRecord(dir)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(text, &r); err != nil {
		return r, fmt.Errorf("%s: %w", filepath.Join(dir, checkpoint.RecordName), err)
	}
	r.Stamp = stamp
	return r, nil
}

// read reads what this rank needs of a checkpoint of such a program.
func (d *DataParallel) read(dir string, solver gorgonia.Solver,
	o loadOptions) (l loaded, err error) {
	if err := errors.Join(o.missing, d.trainsBy(solver)); err != nil {
		return l, err
	}
	if l.record, err = readRecord(dir); err != nil {
		return l, err
	}
	stamp, ranks := l.Stamp, l.Ranks
	if l.weightsOnly = o.weightsOnly; l.weightsOnly {
		l.record = l.record.ofWeights(d.record(solver))
	}
	if c, ok := backend.As[resumer](d.gradComm); ok && c.Resumes(l.CompressedBy) {
		l.CompressedBy = d.compressor()
	}
	if err = l.record.fits(d.record(solver)); err != nil {
		return l, err
	}
	if l.Turn < 0 || l.Turn >= len(d.buckets) {
		return l, fmt.Errorf("%w: the checkpoint is of turn %d, this program has %d buckets: "+
			"load another checkpoint", backend.ErrArgument, l.Turn, len(d.buckets))
	}
	if d.ranksDiffer() && !l.weightsOnly {
		if l.own, err = checkpoint.ReadPart(dir, stamp, checkpoint.RankName(d.comm.Rank()),
			d.model.constant); err != nil {
			return l, err
		}
	}
	if l.tables, err = d.readTables(dir, stamp, ranks); err != nil {
		return l, err
	}
	want, keyOf := d.wanted(l, solver)
	all := l.own
	if !d.partial || l.weightsOnly {
		if err = d.divides(solver); err != nil {
			return l, err
		}
		if all, err = checkpoint.Read(dir, stamp, l.Shards, want); err != nil {
			return l, err
		}
	}
	l.model = map[string]stored{}
	for name, t := range all {
		l.model[keyOf(name)] = t
	}
	return l, nil
}
