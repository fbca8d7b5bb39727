package autograd

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
)

// The files of a checkpoint: the common part, and one for each rank with its own state.
const (
	recordFile = "checkpoint.json"
	modelFile  = "model.safetensors"
	rankFile   = "rank%d.safetensors"
)

// Save writes a checkpoint: the parameters, the state of the solver, the variables of
// [WithFrozen], the moving averages of batch norms, the step of random numbers and the residuals
// of a compression. Averages and random numbers are those of the parameters' graphs; averages
// become the mean over all ranks before. Training resumes from it with the same bits as if it had
// never stopped. Save is collective. dir is a directory that all ranks reach. Save replaces it as
// a whole, once all ranks have written their files and these are on the disk. progress is whatever
// else the program needs to resume (its epoch, its seeds), as JSON; nil for nothing. Save writes
// that of rank 0.
//
// dir contains checkpoint.json, model.safetensors with the parameters and the solver's state, and a
// file for each rank if ranks have state of their own. All files have checksums. Save writes to
// dir.new and moves the last checkpoint to dir.old before it renames dir.new; if it is interrupted
// there, Load finds the last checkpoint. If Save fails it leaves the last checkpoint unchanged, and
// no other file.
//
// Errors, on all ranks: a solver whose state cannot be read (of Gorgonia's only VanillaSolver has
// none: use a [Solver] of this package); ErrArgument while a step is in progress, from the first
// hook, the begin of Accumulate, or the first run of a step of package vm, to its end; ErrMismatch
// if ranks have trained without a Sync; those of the file system and of the communicator.
func (d *DataParallel) Save(dir string, solver gorgonia.Solver, progress any) error {
	return d.collectively(backend.ForSave, "save "+dir, func() error { return d.save(dir, solver, progress) })
}

// Load restores what Save has written, and unmarshals its progress; a nil progress ignores it.
// Load is collective. Build the graph before. The program must have the same parameters, batch
// norms and options, and the same settings of the solver, which are not in the checkpoint.
// Checkpoints of older versions lack the number of parameters, the reduction and the compression's
// options; Load does not compare these then. They lack moving averages and frozen parameters, too:
// these stay as they are, and Load says so ([WithNotice]).
//
// Gorgonia's machines throw moving averages away when they are made for training. Make a
// gorgonia.NewTapeMachine before Load.
//
// The number of ranks may differ, unless ranks have state of their own, as with package sparse and
// [WithPartial]. The batches of a [Sampler] are the same for any number of ranks: count its steps
// in the progress.
//
// To change the reduction or the compression, load with the old one, Close d, and pass the same
// parameters to another New. Residuals then start empty; their content is lost.
//
// Errors, on all ranks: a checkpoint that is damaged or does not fit, or ErrArgument while a step
// is in progress; then nothing has changed on any rank; those of the communicator. If a rank fails
// later (a device is lost, or a [Stateful] that is not a [Checker] refuses its state), ranks may
// differ, so that error ends d like one of Sync.
func (d *DataParallel) Load(dir string, solver gorgonia.Solver, progress any) error {
	return d.collectively(backend.ForLoad, "load "+dir, func() error { return d.restore(dir, solver, progress) })
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
		return fmt.Errorf("autograd: rank %d of %s: %s: %w", d.comm.Rank(), d.comm.Name(), what, err)
	}
	return nil
}

// save writes to a directory beside dir, which replaces dir when all ranks are done. After an
// error nothing is left beside dir.
func (d *DataParallel) save(dir string, solver gorgonia.Solver, progress any) error {
	dir = filepath.Clean(dir)
	fresh := dir + ".new"
	_, err := stateOf(solver)
	err = errors.Join(err, d.apart())
	if err == nil && d.first() {
		if err = os.RemoveAll(fresh); err == nil {
			err = os.MkdirAll(fresh, 0o777)
		}
	}
	made := err == nil && d.first()
	err = d.agree("", err)
	if err == nil {
		if err = d.settle(); err == nil {
			err = d.write(fresh, solver, progress)
		}
		err = d.agree("", err)
	}
	if err != nil {
		if made {
			err = errors.Join(err, os.RemoveAll(fresh))
		}
		return err
	}
	if d.first() {
		err = replace(dir, fresh)
	}
	return d.agree("", err)
}

// first reports whether this rank writes what all ranks have in common.
func (d *DataParallel) first() bool { return d.comm.Rank() == 0 && d.parts.first() }

// agree is agree over all ranks, those with other parts of the parameters included.
func (d *DataParallel) agree(description string, err error) error {
	return d.parts.agree(agree(d.comm, description, err))
}

// replace renames fresh to dir. Whenever the machine stops, the last checkpoint or this one is
// complete in dir or, between the two renames, in oldOf(dir).
func replace(dir, fresh string) error {
	old := oldOf(dir)
	if exists(dir) {
		if err := os.RemoveAll(old); err != nil { // left by a stop
			return err
		}
		if err := os.Rename(dir, old); err != nil {
			return err
		}
	}
	if err := os.Rename(fresh, dir); err != nil {
		return errors.Join(err, os.RemoveAll(fresh)) // Load finds the last one
	}
	if err := syncDir(filepath.Dir(dir)); err != nil { // before what it replaces is gone
		return err
	}
	return os.RemoveAll(old)
}

// oldOf is where the last checkpoint is while another one replaces it.
func oldOf(dir string) string { return dir + ".old" }

// exists reports whether there is a directory or file. It also does if that is unknown.
func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// whole returns where the checkpoint of dir is, as rank 0 sees it: all ranks must read the same.
func (d *DataParallel) whole(dir string) (string, error) {
	dir = filepath.Clean(dir)
	interrupted := byte(0)
	if !exists(dir) && exists(oldOf(dir)) {
		interrupted = 1
	}
	if d.comm.Size() > 1 {
		notes, err := gather(d.comm, []byte{interrupted})
		if err != nil {
			return "", err
		}
		interrupted = notes[0][0]
	}
	if interrupted != 0 {
		return oldOf(dir), nil
	}
	return dir, nil
}

// write writes this rank's part of a checkpoint.
func (d *DataParallel) write(dir string, solver gorgonia.Solver, progress any) error {
	model, own := map[string]stored{}, map[string]stored{}
	if d.partial || d.comm.Rank() == 0 { // the ranks that write it
		var err error
		model, err = d.modelState(solver)
		if model, err = d.wholeState(model, solver, err); err != nil {
			return err
		}
	}
	if s, ok := d.compression(); ok {
		state, err := s.State()
		if err != nil {
			return err
		}
		add(own, state)
	}
	if d.partial { // ranks differ
		maps.Copy(own, model)
	}
	if d.ranksDiffer() {
		if err := writeTensors(filepath.Join(dir, fmt.Sprintf(rankFile, d.comm.Rank())), own); err != nil {
			return err
		}
	}
	if d.first() {
		if err := d.writeCommon(dir, model, solver, progress); err != nil {
			return err
		}
	}
	return syncDir(dir)
}

// writeCommon writes what all ranks have in common.
func (d *DataParallel) writeCommon(dir string, model map[string]stored, solver gorgonia.Solver, progress any) (err error) {
	if err := writeTensors(filepath.Join(dir, modelFile), model); err != nil {
		return err
	}
	r := d.record(solver)
	if progress != nil {
		if r.Progress, err = json.Marshal(progress); err != nil {
			return fmt.Errorf("progress: %w", err)
		}
	}
	if r.Checksum, err = r.checksum(); err != nil {
		return err
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(filepath.Join(dir, recordFile), func(w io.Writer) { w.Write(append(text, '\n')) })
}

// restore reads a checkpoint. It changes nothing unless all ranks can restore it.
func (d *DataParallel) restore(dir string, solver gorgonia.Solver, progress any) error {
	dir, err := d.whole(dir)
	if err != nil {
		return err
	}
	l, err := d.read(dir, solver)
	if err == nil {
		err = d.validate(l, solver, progress)
	}
	if err := d.agree(l.describe(), err); err != nil {
		return err
	}
	if err := d.agree("", d.apply(l, solver, progress)); err != nil {
		return d.end(fmt.Errorf("a part of the checkpoint is loaded, ranks may differ: %w", err))
	}
	d.sayMissing(l.record)
	return nil
}

// read reads what this rank needs of a checkpoint of such a program.
func (d *DataParallel) read(dir string, solver gorgonia.Solver) (l loaded, err error) {
	if l.record, err = readRecord(filepath.Join(dir, recordFile)); err != nil {
		return l, err
	}
	if c, ok := backend.As[resumer](d.through); ok && c.Resumes(l.CompressedBy) {
		l.CompressedBy = d.compressor()
	}
	if err = l.record.fits(d.record(solver)); err != nil {
		return l, err
	}
	if l.Turn < 0 || l.Turn >= len(d.buckets) {
		return l, fmt.Errorf("%w: the checkpoint is of turn %d, this program has %d buckets: load another checkpoint", backend.ErrArgument, l.Turn, len(d.buckets))
	}
	if d.ranksDiffer() {
		if l.own, err = readTensors(filepath.Join(dir, fmt.Sprintf(rankFile, d.comm.Rank()))); err != nil {
			return l, err
		}
	}
	l.model = l.own
	if !d.partial {
		if l.model, err = readTensors(filepath.Join(dir, modelFile)); err == nil {
			err = d.ownState(l.model, solver)
		}
	}
	return l, err
}

// readRecord reads a record. One that was written by hand need not have a checksum.
func readRecord(path string) (r record, err error) {
	text, err := readText(path)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(text, &r); err != nil {
		return r, fmt.Errorf("%s: %w", path, err)
	}
	is, err := r.checksum()
	if err == nil && r.Checksum != "" && r.Checksum != is {
		err = fmt.Errorf("%s: %w", path, damaged(is, r.Checksum))
	}
	return r, err
}

// readText reads a file of at most maxHeader bytes.
func readText(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.Size() > maxHeader {
		return nil, fmt.Errorf("%s: it has %d bytes, and a record has at most %d: it is damaged, load another checkpoint", path, info.Size(), maxHeader)
	}
	return os.ReadFile(path)
}
