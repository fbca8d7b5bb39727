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
	"reflect"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
)

// The files of a checkpoint: the common part, and one for each rank with its own state.
const (
	recordFile = "checkpoint.json"
	modelFile  = "model.safetensors"
	rankFile   = "rank%d.safetensors"
)

// record describes a checkpoint.
type record struct {
	Format      int             `json:"format"`
	Ranks       int             `json:"ranks"`
	Solver      string          `json:"solver"`
	Partial     bool            `json:"partial"`
	Turn        int             `json:"turn"` // of partial averaging
	Compression bool            `json:"compression"`
	Buckets     []int           `json:"buckets,omitempty"` // elements, where residuals or turns belong to them
	Random      *randomState    `json:"random,omitempty"`
	Frozen      int             `json:"frozen,omitempty"`   // variables of WithFrozen
	Averages    int             `json:"averages,omitempty"` // moving averages of batch norms
	Progress    json.RawMessage `json:"progress,omitempty"`
	origin
	Checksum string `json:"crc32c,omitempty"` // of the rest
}

// origin is missing in checkpoints of older versions.
type origin struct {
	Parameters   int    `json:"parameters,omitempty"`
	Reduction    string `json:"reduction,omitempty"`
	CompressedBy string `json:"compressed_by,omitempty"`
}

// randomState is what a checkpoint has of a [Random].
type randomState struct {
	Seed  uint32 `json:"seed"`
	Step  uint64 `json:"step"`
	Found bool   `json:"found,omitempty"` // in a graph, not given by WithRandom
}

// found reports whether there are random numbers that nobody has asked to keep.
func (s *randomState) found() bool { return s != nil && s.Found }

// String says which random numbers a program has, whatever their step.
func (s *randomState) String() string {
	if s == nil {
		return "the step of no random numbers is kept (WithRandom)"
	}
	return fmt.Sprintf("the seed of random numbers is %d", s.Seed)
}

const format = 1

// checksum returns that of a record.
func (r record) checksum() (string, error) {
	r.Checksum = ""
	text, err := json.Marshal(r)
	if err != nil {
		return "", err
	}
	h := newChecksum()
	h.Write(text)
	return textOf(h), nil
}

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

func (d *DataParallel) record(solver gorgonia.Solver) record {
	r := record{
		Format: format, Ranks: d.comm.Size(), Solver: kindOf(solver), Partial: d.partial, Turn: d.turn,
		Compression: d.through != d.comm, origin: origin{len(d.params), d.reduced, d.compressor()},
		Random: d.model.randomState(), Frozen: len(d.model.frozen), Averages: len(d.model.averages),
	}
	if d.ranksDiffer() {
		for _, b := range d.buckets {
			r.Buckets = append(r.Buckets, b.data.Len())
		}
	}
	return r
}

// describer is a communicator that describes everything on which the bits of its results depend.
type describer interface{ Describe() string }

// resumer is a describer that can resume from the state of others, such as earlier versions.
type resumer interface{ Resumes(description string) bool }

// compressor describes what gradients are compressed by.
func (d *DataParallel) compressor() string {
	if c, ok := backend.As[describer](d.through); ok {
		return c.Describe()
	}
	if d.through != d.comm {
		return fmt.Sprintf("%T", d.through)
	}
	return "nothing"
}

// compression returns the state of the compression, if it has any.
func (d *DataParallel) compression() (Stateful, bool) { return backend.As[Stateful](d.through) }

// ranksDiffer reports whether each rank has its own state, which a checkpoint keeps in a file for
// each rank.
func (d *DataParallel) ranksDiffer() bool {
	_, stateful := d.compression()
	return stateful || d.partial
}

// add adds state to tensors.
func add(tensors map[string]stored, state map[string]backend.Buffer) {
	for name, b := range state {
		tensors[name] = vector(b)
	}
}

// modelState returns the parameters and the state of the solver.
func (d *DataParallel) modelState(solver gorgonia.Solver) (map[string]stored, error) {
	s, err := stateOf(solver)
	if err != nil {
		return nil, err
	}
	model := map[string]stored{}
	for _, p := range d.params {
		memory, err := p.bytes()
		if err != nil {
			return nil, err
		}
		model[p.key()] = stored{p.dims(), backend.Of(memory).As(p.dtype)}
	}
	if err := d.model.store(model); err != nil {
		return nil, err
	}
	if s == nil {
		return model, nil
	}
	state, err := s.State()
	if err != nil {
		return nil, err
	}
	add(model, state)
	return model, nil
}

// parameterPrefix begins the names of parameters in a file.
const parameterPrefix = "parameter."

// key names a parameter in a file.
func (p *param) key() string { return fmt.Sprintf("%s%d.%s", parameterPrefix, p.index, p.name) }

// dims returns the shape as a list, empty for a scalar.
func (p *param) dims() []int { return append([]int{}, p.shape...) }

// stateOf returns the state of a solver, nil if it has none.
func stateOf(solver gorgonia.Solver) (Stateful, error) {
	if err := supported(solver); err != nil {
		return nil, err
	}
	switch s := solver.(type) {
	case Stateful:
		return s, nil
	case *gorgonia.VanillaSolver:
		return nil, nil
	}
	return nil, fmt.Errorf("%w: the state of a %T cannot be read, so training could not go on from the checkpoint: use a solver of package autograd, or one that is autograd.Stateful",
		backend.ErrUnsupported, solver)
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

// loaded is what a rank has read of a checkpoint.
type loaded struct {
	record
	model, own map[string]stored
}

// describe lists what the parts of the ranks must have in common: names, dtypes and shapes.
func (l loaded) describe() string {
	var s strings.Builder
	for _, name := range slices.Sorted(maps.Keys(l.own)) {
		fmt.Fprintf(&s, "in the rank's own file is %s %v%v\n", name, l.own[name].data.DType(), l.own[name].shape)
	}
	return s.String()
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

// validate returns an error if apply would fail. It changes nothing.
func (d *DataParallel) validate(l loaded, solver gorgonia.Solver, progress any) error {
	var sizes []backend.Buffer
	for _, p := range d.params {
		t, ok := l.model[p.key()]
		if !ok {
			return fmt.Errorf("%w: the checkpoint has no parameter %v at place %d: load that of a model whose parameters have the same names and order", backend.ErrArgument, p, p.index)
		}
		if t.data.DType() != p.dtype || !slices.Equal(t.shape, p.dims()) {
			return fmt.Errorf("%w: in the checkpoint parameter %s is %v%v, in this program %v%v: give the model the checkpoint's sizes, or load another checkpoint",
				backend.ErrArgument, p.name, t.data.DType(), tensor.Shape(t.shape), p.dtype, p.shape)
		}
		if _, err := p.value(); err != nil {
			return err
		}
		sizes = append(sizes, t.data)
	}
	if err := d.model.fits(l); err != nil {
		return err
	}
	s, err := stateOf(solver)
	if err != nil {
		return err
	}
	if c, ok := s.(Checker); ok {
		if err := c.CheckState(buffers(l.model), sizes); err != nil {
			return err
		}
	}
	if c, ok := backend.As[Checker](d.through); ok {
		sizes = nil
		for _, b := range d.buckets {
			sizes = append(sizes, b.data)
		}
		if err := c.CheckState(buffers(l.own), sizes); err != nil {
			return err
		}
	}
	return l.checkProgress(progress)
}

// checkProgress unmarshals the progress into another value of the program's type. It does not if
// that type unmarshals itself: its method may rely on a constructor.
func (l loaded) checkProgress(progress any) error {
	if progress == nil {
		return nil
	}
	if l.Progress == nil {
		return fmt.Errorf("%w: the checkpoint has no progress: pass nil", backend.ErrArgument)
	}
	if _, own := progress.(json.Unmarshaler); own {
		return nil
	}
	v := reflect.ValueOf(progress)
	if v.Kind() == reflect.Pointer && !v.IsNil() { // else Unmarshal says that it must be
		progress = reflect.New(v.Type().Elem()).Interface()
	}
	return l.unmarshalProgress(progress)
}

func (l loaded) unmarshalProgress(progress any) error {
	if progress == nil {
		return nil
	}
	if err := json.Unmarshal(l.Progress, progress); err != nil {
		return fmt.Errorf("progress: %w", err)
	}
	return nil
}

// fits returns an error if a program cannot resume from a checkpoint. want is what the program
// would write.
func (r record) fits(want record) error {
	if r.origin == (origin{}) {
		want.origin = r.origin // unknown
	}
	if r.Random == nil && want.Random.found() || want.Random == nil && r.Random.found() {
		r.Random, want.Random = nil, nil // sayMissing says so
	}
	has, wants := r.terms(), want.terms()
	for i := range has {
		if has[i] != wants[i] {
			return fmt.Errorf("%w: in the checkpoint %s, in this program %s: give the program what the checkpoint has, or load another checkpoint", backend.ErrArgument, has[i], wants[i])
		}
	}
	return r.fitsRanks(want)
}

// fitsRanks returns an error if the number of ranks must not change: state that belongs to one
// rank cannot be given to another.
func (r record) fitsRanks(want record) error {
	if r.Ranks == want.Ranks || len(r.Buckets) == 0 {
		return nil
	}
	what := "the residuals of " + r.CompressedBy
	if r.Partial {
		what = "the parameters and the solver of WithPartial"
	}
	return fmt.Errorf("%w: the checkpoint was written by %d ranks, this program has %d, and %s are of each rank its own: start the program with %d ranks (euryale run -n %d), or load another checkpoint",
		backend.ErrArgument, r.Ranks, want.Ranks, what, r.Ranks, r.Ranks)
}

// terms are what a program must have in common with the checkpoints that it loads.
func (r record) terms() []string {
	return []string{
		fmt.Sprintf("the format is %d", r.Format),
		fmt.Sprintf("the solver is a %s", r.Solver),
		fmt.Sprintf("partial averaging is %v", r.Partial),
		fmt.Sprintf("the number of parameters is %d", r.Parameters),
		fmt.Sprintf("the reduction is %s", r.Reduction),
		fmt.Sprintf("gradients are compressed by %s", r.CompressedBy),
		fmt.Sprintf("compression is %v", r.Compression),
		fmt.Sprintf("buckets are of %v elements", r.Buckets),
		r.Random.String(),
	}
}

// apply restores everything that was read.
func (d *DataParallel) apply(l loaded, solver gorgonia.Solver, progress any) error {
	if s, ok := d.compression(); ok {
		if err := s.SetState(buffers(l.own)); err != nil {
			return err
		}
	}
	if s, err := stateOf(solver); err != nil {
		return err
	} else if s != nil {
		if err := s.SetState(buffers(l.model)); err != nil {
			return err
		}
	}
	for _, b := range d.buckets {
		if err := b.fill(l.model); err != nil {
			return err
		}
	}
	if r := d.model.random; r != nil && l.Random != nil {
		r.Seek(l.Random.Step, r.First())
	}
	if err := d.model.restore(l); err != nil {
		return err
	}
	d.turn, d.initial = l.Turn, false
	return l.unmarshalProgress(progress)
}

// fill gives the parameters of a bucket their values, through their slots.
func (b *bucket) fill(model map[string]stored) error {
	e := b.params[0].engine
	for _, p := range b.params {
		t := model[p.key()].data
		if e == nil {
			copy(p.slot.Bytes(), t.Bytes())
		} else if err := e.Queue().Move(p.slot, t); err != nil {
			return err
		}
	}
	if err := b.unpack(); err != nil || e == nil {
		return err
	}
	return drain(e.Queue()) // the host memory is in use until then
}

func buffers(tensors map[string]stored) map[string]backend.Buffer {
	all := map[string]backend.Buffer{}
	for name, t := range tensors {
		all[name] = t.data
	}
	return all
}
