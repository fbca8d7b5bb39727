package autograd

import (
	"cmp"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/residence"
)

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

// saving is a Save, from its draft to the checkpoint. Once it is started, the goroutine of run has
// it until done.
type saving struct {
	dir, id string
	held    int // locks before it
	record  record
	options saveOptions
	first   bool            // this rank writes what all have in common
	behind  bool            // the training goes on
	alone   bool            // the first rank needs no other one to end it
	own     string          // the name of this rank's own file, if it has one
	known   map[string]bool // see saves

	tensors        []checkpoint.Tensor
	fetch          func() error // brings those that are on a device, nil for none
	fetched, ended chan struct{}

	common  []checkpoint.File
	file    checkpoint.File // this rank's own
	notices []string
	err     error
}

// save writes to a draft in dir, which becomes a checkpoint when all ranks are done. After an error
// nothing is left of it.
func (d *DataParallel) save(dir string, solver gorgonia.Solver, progress any, opts []SaveOption,
	behind bool) error {
	last := d.finish()
	s, err := d.start(dir, solver, progress, opts, behind)
	switch {
	case err != nil:
	case behind:
		d.pending = s
		go s.run()
	default:
		s.run()
		err = d.endSave(s)
	}
	return errors.Join(last, err)
}

// start makes a draft, and copies what is to be written if the training goes on.
func (d *DataParallel) start(dir string, solver gorgonia.Solver, progress any, opts []SaveOption,
	behind bool) (*saving, error) {
	o, err := d.canSave(dir, solver, opts)
	onDevice := behind && d.copiesOf(solver)
	if !onDevice {
		err = errors.Join(err, d.pull(!d.sharded))
	}
	if err := d.agree("", errors.Join(err, d.apart())); err != nil {
		return nil, err
	}
	s := &saving{dir: dir, held: len(d.saves.locks), options: o, first: d.first(), behind: behind,
		alone: behind && !d.ownFiles(), fetched: make(chan struct{}), ended: make(chan struct{})}
	if d.sharded && d.parts != nil {
		s.own = checkpoint.RankName(d.parts.comm.Rank()*d.comm.Size() + d.comm.Rank())
	} else if d.ownFiles() && d.parts.first() {
		s.own = checkpoint.RankName(d.comm.Rank())
	}
	if s.id, err = d.begin(dir); err == nil {
		// ranks may have to continue without the one that knows whether this becomes a checkpoint
		d.saves.training = cmp.Or(d.saves.training, s.id)
		s.err = d.take(s, solver, progress, onDevice)
		if behind {
			err = d.agree("", s.err)
		}
	}
	if err != nil {
		return nil, errors.Join(err, d.abandon(dir, s.id, s.held))
	}
	return s, nil
}

// canSave returns what options say, or what cannot be saved.
func (d *DataParallel) canSave(dir string, solver gorgonia.Solver, opts []SaveOption) (
	saveOptions, error) {
	o, err := saveOptionsOf(opts)
	if dir == "" {
		err = errors.Join(err, errNoName)
	}
	_, unknown := stateOf(solver)
	return o, errors.Join(err, unknown, d.trainsBy(solver), checkNames(d.model.tensors()))
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

// TrySave returns the error that a Save would return before its files are written, and locks dir as
// Save does: so a training finds out before its first step whether it can be saved. It leaves the
// directory, and no checkpoint. It is collective.
func (d *DataParallel) TrySave(dir string, solver gorgonia.Solver, opts ...SaveOption) error {
	return d.collectively(backend.ForSave, "save to "+dir, func() error {
		_, err := d.canSave(dir, solver, opts)
		if err := d.agree("", err); err != nil {
			return err
		}
		held := len(d.saves.locks)
		id, err := d.begin(dir)
		if err == nil {
			if d.ownFiles() {
				_, err = os.Stat(checkpoint.Draft(dir, id))
			}
			if err = d.agree("", err); err == nil {
				held = len(d.saves.locks)
			}
		}
		return errors.Join(err, d.agree("", d.abandon(dir, id, held)))
	})
}

// take notes what is to be written.
func (d *DataParallel) take(s *saving, solver gorgonia.Solver, progress any, onDevice bool) error {
	s.record = d.record(solver)
	s.record.Solver = inFile(s.record.Solver)
	s.record.Stamp = checkpoint.Stamp{
		ID: s.id, Training: d.saves.training, Step: d.saves.steps, Pinned: s.options.pinned,
		Best: d.saves.best,
	}
	if s.options.pinned {
		s.record.Best = s.id
	}
	s.known = d.saves.known
	if err := d.settle(); err != nil {
		return err
	}
	if err := d.contents(s, solver, onDevice); err != nil {
		return err
	}
	if progress == nil || !s.first {
		return nil
	}
	err := leftOut(reflect.TypeOf(progress), map[reflect.Type]bool{})
	if err == nil {
		s.record.Progress, err = json.Marshal(progress)
	}
	if err != nil {
		return fmt.Errorf("progress: %w", err)
	}
	return nil
}

// leftOut returns an error for a field that JSON leaves out of a value because its name is not
// exported: it would be zero after Load. Locks, functions and channels have nothing to keep.
func leftOut(t reflect.Type, seen map[reflect.Type]bool) error {
	if seen[t] || t.Implements(reflect.TypeFor[json.Marshaler]()) ||
		t.Implements(reflect.TypeFor[encoding.TextMarshaler]()) ||
		reflect.PointerTo(t).Implements(reflect.TypeFor[json.Marshaler]()) {
		return nil
	}
	seen[t] = true
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		return leftOut(t.Elem(), seen)
	case reflect.Struct:
		for i := range t.NumField() {
			if err := leftOutField(t, t.Field(i), seen); err != nil {
				return err
			}
		}
	}
	return nil
}

func leftOutField(t reflect.Type, f reflect.StructField, seen map[reflect.Type]bool) error {
	kind := f.Type.Kind()
	switch {
	case f.Name == "_" || f.Tag.Get("json") == "-" || f.Type.PkgPath() == "sync" ||
		kind == reflect.Func || kind == reflect.Chan:
		return nil
	case f.IsExported() || f.Anonymous:
		return leftOut(f.Type, seen)
	}
	return fmt.Errorf("%w: JSON leaves out the field %s of %v, whose name begins with a small "+
		"letter: capitalise it, or tag it `json:\"-\"` if a training resumes without it",
		backend.ErrArgument, f.Name, t)
}

// contents notes the tensors that this rank writes.
func (d *DataParallel) contents(s *saving, by gorgonia.Solver, onDevice bool) (err error) {
	if d.partial || d.sharded || d.comm.Rank() == 0 { // the ranks that write it, or have parts
		if onDevice {
			err = d.copyOnDevice(s, by)
		} else {
			err = d.copyOnHost(s, by)
		}
		if err != nil {
			return err
		}
	}
	own, err := d.own(d.parts.first())
	s.tensors = append(s.tensors, own...)
	return err
}

// copyOnHost notes the model as the host has it, or a copy if the training goes on.
func (d *DataParallel) copyOnHost(s *saving, by gorgonia.Solver) error {
	state, err := d.modelState(by)
	if d.sharded {
		err = errors.Join(err, d.divides(by))
	} else {
		state, err = d.wholeState(state, by, err)
	}
	if err != nil {
		return err
	}
	s.tensors = d.listed(state, by)
	for i := range s.tensors {
		t := &s.tensors[i]
		written := s.first || t.Merge != checkpoint.Common
		if s.behind && written && !strings.HasPrefix(t.Name, checkpoint.SolverPrefix) {
			t.Data = residence.Clone(t.Data) // of a solver it is a copy
		}
	}
	return nil
}

// copiesOf reports whether a machine has copies of all that is to be saved, on its device.
func (d *DataParallel) copiesOf(solver gorgonia.Solver) bool {
	return d.planned != nil && d.planned.copy != nil && (d.parts == nil || d.sharded) &&
		d.planned.by.Has(solver)
}

// copyOnDevice starts copies of parameters and the solver's vectors where a machine has them: only
// of shards if this rank writes shards.
func (d *DataParallel) copyOnDevice(s *saving, by gorgonia.Solver) error {
	state := map[string]stored{}
	if s.first {
		if err := d.model.store(state); err != nil {
			return err
		}
	}
	for key, t := range state {
		state[key] = stored{Shape: t.Shape, Data: residence.Clone(t.Data)}
	}
	counts, moving := d.planned.by.State() // memory of which the device has newer elements
	for _, p := range d.params {
		memory, err := p.value()
		if err != nil {
			return err
		}
		moving[p.key()] = memory
		state[p.key()] = stored{Shape: p.dims(), Data: memory}
	}
	add(state, counts)
	for key, memory := range moving {
		if _, param := state[key]; !param {
			add(state, map[string]backend.Buffer{key: memory})
		}
	}
	s.tensors = d.listed(state, by)
	var at []int
	var memory []backend.Buffer
	for i, key := range slices.Sorted(maps.Keys(state)) {
		if _, moves := moving[key]; moves {
			at, memory = append(at, i), append(memory, s.tensors[i].Data)
		}
	}
	fetch, err := d.planned.copy(memory)
	s.fetch = func() error {
		all, err := fetch()
		for k, memory := range all {
			s.tensors[at[k]].Data = memory
		}
		return err
	}
	return err
}

// run writes this rank's files, and ends the Save if that takes no other rank.
func (s *saving) run() {
	defer close(s.ended)
	if s.err == nil && s.fetch != nil {
		s.err = s.fetch()
	}
	close(s.fetched)
	if s.err == nil {
		s.err = s.write()
	}
	if s.err == nil && s.alone && s.first {
		s.err = s.commit(s.common)
	}
	s.tensors, s.fetch = nil, nil
}

// write writes this rank's files to the draft.
func (s *saving) write() (err error) {
	if s.own == "" && !s.first { // the draft may have become a checkpoint
		return nil
	}
	draft := checkpoint.Draft(s.dir, s.id)
	of := checkpoint.Remarks{Save: s.id, Step: fmt.Sprint(s.record.Step)}
	s.common, s.file, err = checkpoint.Write(draft, s.own, s.first, s.tensors, of)
	if err != nil {
		return err
	}
	if s.alone && !s.first { // the draft may have become a checkpoint
		return nil
	}
	if err = files.SyncDir(draft); errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("all ranks must reach the directory: %w", err)
	}
	return err
}

// commit makes a draft a checkpoint, once all ranks have written their files to it, and removes
// older ones. It is for the first rank.
func (s *saving) commit(files []checkpoint.File) error {
	all, err := checkpoint.List(s.dir)
	if err != nil {
		return err
	}
	r := s.record
	if !checkpoint.Follows(all, r.Training, r.Step, s.known) {
		r.Training = s.id
	}
	r.Files = files
	done, err := checkpoint.Commit(s.dir, all, r.Stamp, func(stamp checkpoint.Stamp) ([]byte,
		error) {
		r.Stamp = stamp
		return checkpoint.Seal(r)
	})
	if err != nil {
		return err
	}
	s.record.Stamp = done
	if err := checkpoint.Prune(s.dir, r.Training, s.options.keep); err != nil {
		s.notices = append(s.notices, fmt.Sprintf(
			"%s is saved, and an older checkpoint cannot be removed: %v", done.Name, err))
	}
	return nil
}

// endSave waits for a Save on all ranks, and ends it.
func (d *DataParallel) endSave(s *saving) error {
	<-s.ended
	if s.alone {
		return d.conclude(s, d.agree("", s.err))
	}
	files, err := d.filesOf(s.common, s.file, s.err)
	if err == nil {
		s.record.Training, err = d.decide(func() (string, error) {
			err := s.commit(files)
			return s.record.Training, err
		})
	}
	return d.conclude(s, err)
}

// conclude notes what has become of a Save on this rank.
func (d *DataParallel) conclude(s *saving, err error) error {
	for _, text := range s.notices {
		d.say(text)
	}
	if err != nil {
		return errors.Join(err, d.abandon(s.dir, s.id, s.held))
	}
	d.saves.learn(s.record.Stamp)
	return nil
}

// finish ends the last SaveAsync, if it has not ended.
func (d *DataParallel) finish() error {
	s := d.pending
	if s == nil {
		return nil
	}
	d.pending = nil
	return s.failed(d.endSave(s))
}

// closePending is finish for when other ranks may have failed: it exchanges nothing unless it must.
func (d *DataParallel) closePending() error {
	s := d.pending
	switch {
	case s == nil:
		return nil
	case s.alone:
		<-s.ended
		d.pending = nil
		return s.failed(d.conclude(s, s.err))
	case d.err != nil:
		<-s.ended
		d.pending = nil
		return s.failed(d.conclude(s, d.err))
	}
	return d.finish()
}

// failed says which Save has failed.
func (s *saving) failed(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("SaveAsync to %s, of step %d: %w", s.dir, s.record.Step, err)
}
