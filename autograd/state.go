package autograd

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/safetensors"
)

// contents are what a rank has of a training besides the state of its solver, and what checkpoints
// keep of both, as tensors with names.
type contents struct {
	reducer           // buckets, which ranks may divide, and a compression
	model   inventory // of everything that ranks have in common
	params  []*param  // as given to New
	parts   *parts    // nil if parameters are whole
	tables  tables
	partial rotation
	sharded bool   // a solver's state is of this rank's shards: see Shards
	reduced string // how
}

// record describes a checkpoint.
type record struct {
	checkpoint.Stamp
	Format      int    `json:"format"`
	Ranks       int    `json:"ranks"`
	Solver      string `json:"solver"`
	Partial     bool   `json:"partial"`
	Turn        int    `json:"turn"` // of partial averaging
	Compression bool   `json:"compression"`
	// elements, where residuals or turns belong to them
	Buckets  []int        `json:"buckets,omitempty"`
	Random   *randomState `json:"random,omitempty"`
	Frozen   int          `json:"frozen,omitempty"`   // variables of WithFrozen
	Averages int          `json:"averages,omitempty"` // running statistics of batch norms
	Tables   []string     `json:"tables,omitempty"`   // of WithTables
	Shards   int          `json:"shards,omitempty"`   // files of ranks that divide all of them
	// of parameters, where buckets are compared
	Order    []string        `json:"order,omitempty"`
	Progress json.RawMessage `json:"progress,omitempty"`
	origin

	numbered string // the solver, as in format 1
}

// origin is missing in checkpoints of older versions.
type origin struct {
	Parameters   int    `json:"parameters,omitempty"`
	Reduction    string `json:"reduction,omitempty"`
	CompressedBy string `json:"compressed_by,omitempty"`
}

// stored is a tensor in a file.
type stored = safetensors.Tensor

// randomState is what a checkpoint has of a [Random].
type randomState struct {
	Seed  uint32 `json:"seed"`
	Step  uint64 `json:"step"`
	Found bool   `json:"found,omitempty"` // in a graph, not given by WithRandom
}

// found reports whether there are random numbers that no option asked to keep.
func (s *randomState) found() bool { return s != nil && s.Found }

// String says which random numbers a program has, whatever their step.
func (s *randomState) String() string {
	if s == nil {
		return "the step of no random numbers is kept (WithRandom)"
	}
	return fmt.Sprintf("the seed of random numbers is %d", s.Seed)
}

const format = 2

func (d *contents) record(by gorgonia.Solver) record {
	r := record{
		Format: format, Ranks: d.comm.Size(), Solver: solver.Kind(by), numbered: solver.Kind(by),
		Partial: d.partial.on, Turn: d.partial.turn,
		Compression: d.gradComm != d.comm, origin: origin{len(d.params), d.reduced, d.compressor()},
		Random: d.model.randomState(), Frozen: len(d.model.frozen), Averages: len(d.model.averages),
		Tables: d.tables.described(),
	}
	if groups, ok := by.(*solver.Groups); ok {
		r.numbered = groups.String()
	}
	if d.sharded {
		r.Shards = d.comm.Size() * d.parts.size()
	}
	if d.ranksDiffer() {
		for _, b := range d.buckets {
			r.Buckets = append(r.Buckets, b.data.Len())
		}
		for _, p := range d.params {
			r.Order = append(r.Order, p.node.Name())
		}
	}
	return r
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
			c.Tensors, c.Fetch, err = d.planned.copies(by, first)
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
		r.Progress, err = json.Marshal(progress)
	}
	if err != nil {
		err = fmt.Errorf("progress: %w", err)
	}
	return c, err
}

// onHost lists the model as the host has it, or copies if the training goes on: of what this rank
// writes.
func (d *contents) onHost(by gorgonia.Solver, first, behind bool) ([]checkpoint.Tensor, error) {
	state, err := d.modelState(by)
	if d.sharded {
		err = errors.Join(err, d.divides(by))
	} else {
		state, err = d.wholeState(state, by, err)
	}
	if err != nil {
		return nil, err
	}
	list := d.listed(state, by)
	for i := range list {
		t := &list[i]
		written := first || t.Merge != checkpoint.Common
		if behind && written && !strings.HasPrefix(t.Name, checkpoint.SolverPrefix) {
			t.Data = residence.Clone(t.Data) // of a solver it is a copy
		}
	}
	return list, nil
}

// settle makes the model the same on all ranks before it is saved.
func (d *contents) settle() error {
	err := d.mergeAverages(backend.ForSave)
	if err != nil || d.parts == nil {
		return err
	}
	comm := backend.Label(d.parts.comm, backend.ForSave)
	if err := alikeOn(comm, d.model.rest(), nil); err != nil {
		return fmt.Errorf("WithParts: ranks with other parts must have the same of it: %w", err)
	}
	return nil
}

// mergeAverages makes the running statistics the same on all ranks, unless the ranks have models of
// their own.
func (d *contents) mergeAverages(purpose backend.Purpose) error {
	if d.partial.on {
		return nil
	}
	return d.model.merge(backend.Label(d.comm, purpose))
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

// ranksDiffer reports whether each rank has its own state, which a checkpoint keeps in a file for
// each rank.
func (d *contents) ranksDiffer() bool {
	_, stateful := d.compression()
	return stateful || d.partial.on
}

// ownFiles reports whether each rank writes one file.
func (d *contents) ownFiles() bool {
	return d.ranksDiffer() || len(d.tables.all) > 0 || d.sharded
}

// own returns what this rank alone has: the state of a compression, and rows of tables.
func (d *contents) own(tables bool) (all []checkpoint.Tensor, err error) {
	if c, ok := d.compression(); ok {
		state, err := c.State()
		if err != nil {
			return nil, err
		}
		for name, b := range state {
			all = append(all, checkpoint.Whole(name, []int{b.Len()}, b, checkpoint.Own))
		}
	}
	if tables {
		all = append(all, d.tables.rows()...)
	}
	return all, nil
}

// add adds state to tensors.
func add(tensors map[string]stored, state map[string]backend.Buffer) {
	for name, b := range state {
		tensors[name] = stored{Shape: []int{b.Len()}, Data: b}
	}
}

// modelState returns the parameters and the state of the solver.
func (d *contents) modelState(solver gorgonia.Solver) (map[string]stored, error) {
	s, err := stateOf(solver)
	if err != nil {
		return nil, err
	}
	model := map[string]stored{}
	for _, p := range d.params {
		value, err := p.present()
		if err != nil {
			return nil, err
		}
		model[p.key()] = stored{Shape: p.dims(), Data: value}
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

// parameterPrefix begins the keys of parameters.
const parameterPrefix = "parameter."

// key names a parameter in memory, and in files of format 1.
func (p *param) key() string {
	return parameterPrefix + strconv.Itoa(p.index) + "." + p.node.Name()
}

// dims returns the shape as a list, empty for a scalar.
func (p *param) dims() []int { return append([]int{}, p.shape...) }

// stateOf returns the state of a solver, nil if it has none.
func stateOf(by gorgonia.Solver) (solver.Stateful, error) {
	if err := supported(by); err != nil {
		return nil, err
	}
	switch s := by.(type) {
	case solver.Stateful:
		return s, nil
	case *gorgonia.VanillaSolver:
		return nil, nil
	}
	return nil,
		fmt.Errorf("%w: the state of a %T cannot be read, so training could not go on from "+
			"the checkpoint: use a solver of package solver, or one that is solver.Stateful",
			backend.ErrUnsupported, by)
}

// loaded is what a rank has read of a checkpoint.
type loaded struct {
	record
	model, own  map[string]stored
	tables      []map[string]backend.Buffer
	weightsOnly bool // all else stays as it is
}

// describe lists what the parts of the ranks must have in common: names, dtypes and shapes.
func (l loaded) describe() string {
	var s strings.Builder
	fmt.Fprintf(&s, "the checkpoint is of %v\n", l.Stamp)
	for _, name := range slices.Sorted(maps.Keys(l.own)) {
		shape := l.own[name].Shape
		if strings.HasPrefix(name, tableFiles) { // whose rows ranks divide, some have one more
			shape = shape[min(1, len(shape)):]
		}
		fmt.Fprintf(&s, "in the rank's own file is %s %v%v\n", name, l.own[name].Data.DType(),
			shape)
	}
	return s.String()
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
func (d *contents) read(dir string, solver gorgonia.Solver, weightsOnly bool) (l loaded,
	err error) {
	if l.record, err = readRecord(dir); err != nil {
		return l, err
	}
	stamp, ranks := l.Stamp, l.Ranks
	if l.weightsOnly = weightsOnly; weightsOnly {
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
	if d.ranksDiffer() && !weightsOnly {
		if l.own, err = checkpoint.ReadPart(dir, stamp, checkpoint.RankName(d.comm.Rank()),
			d.model.constant); err != nil {
			return l, err
		}
	}
	if l.tables, err = d.tables.read(dir, stamp, ranks); err != nil {
		return l, err
	}
	want, keyOf := d.wanted(l, solver)
	all := l.own
	if !d.partial.on || weightsOnly {
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

// validate returns an error if apply would fail. It changes nothing.
func (d *contents) validate(l loaded, by gorgonia.Solver, progress any) error {
	var sizes []backend.Buffer
	for _, p := range d.params {
		t, ok := l.model[p.key()]
		if !ok && l.Format == numberedFormat {
			return fmt.Errorf("%w: the checkpoint has no parameter %v at place %d: it is of an "+
				"older "+
				"version, so load it in a model whose parameters have the same names and order",
				backend.ErrArgument, p, p.index)
		}
		if !ok {
			return fmt.Errorf("%w: the checkpoint has no parameter %v: load it in a model whose "+
				"parameters have the same names", backend.ErrArgument, p)
		}
		if err := fits("parameter "+p.name, t, p.dtype, p.dims()); err != nil {
			return err
		}
		if _, err := p.present(); err != nil {
			return err
		}
		sizes = append(sizes, t.Data)
	}
	if err := d.model.fits(l); err != nil {
		return err
	}
	if l.weightsOnly {
		return l.checkProgress(progress)
	}
	s, err := stateOf(by)
	if err != nil {
		return err
	}
	if c, ok := s.(solver.Checker); ok {
		if err := c.CheckState(buffers(l.model), sizes); err != nil {
			return err
		}
	}
	if c, ok := backend.As[solver.Checker](d.gradComm); ok {
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

// fits returns an error for a tensor of a checkpoint that is not what a program has.
func fits(what string, t stored, d backend.DType, shape []int) error {
	if t.Data.DType() == d && slices.Equal(t.Shape, shape) {
		return nil
	}
	return fmt.Errorf("%w: in the checkpoint %s is %v%v, in this program %v%v: give the model the "+
		"checkpoint's sizes, or load another checkpoint", backend.ErrArgument, what,
		t.Data.DType(), tensor.Shape(t.Shape), d, tensor.Shape(shape))
}

// checkProgress unmarshals the progress into another value of the program's type, which must have
// all of its fields, unless that type unmarshals itself: its method may rely on a constructor.
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
	if err := l.unmarshalProgress(progress); err != nil {
		return err
	}
	all := json.NewDecoder(bytes.NewReader(l.Progress))
	all.DisallowUnknownFields()
	if err := all.Decode(progress); err != nil {
		return fmt.Errorf("%w: the progress that was saved has more than this program's %T (%w): "+
			"give a renamed field its old name by a tag of json, and one that is not wanted any "+
			"more the type json.RawMessage", backend.ErrArgument, progress, err)
	}
	return nil
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
	if r.Format == numberedFormat {
		want.Format, want.Solver, want.Order = r.Format, want.numbered, r.Order
	}
	r.Solver = today(r.Solver)
	if r.Random == nil && want.Random.found() || want.Random == nil && r.Random.found() {
		r.Random, want.Random = nil, nil // sayMissing says so
	}
	has, wants := r.terms(), want.terms()
	for i := range has {
		if has[i] != wants[i] {
			instead := "load its weights alone (WeightsOnly)"
			if r.Parameters != want.Parameters {
				instead = "load what both have in common (LoadWeights with NonStrict)"
			}
			return fmt.Errorf("%w: in the checkpoint %s, in this program %s: give the program "+
				"what the checkpoint has, %s, or load another checkpoint",
				backend.ErrArgument, has[i], wants[i], instead)
		}
	}
	return r.fitsRanks(want)
}

// inFile is how a checkpoint names a kind of solver: there, solvers are of package autograd.
func inFile(kind string) string { return strings.ReplaceAll(kind, "*solver.", "*autograd.") }

// today is the kind of a solver that a checkpoint names. In older ones an SGD could be a value.
func today(named string) string {
	named = strings.ReplaceAll(strings.ReplaceAll(named, "*autograd.SGD", "autograd.SGD"),
		"autograd.SGD", "*autograd.SGD")
	return strings.ReplaceAll(named, "*autograd.", "*solver.")
}

// fitsRanks returns an error if the number of ranks has changed but must not: state that belongs to
// one rank cannot be given to another.
func (r record) fitsRanks(want record) error {
	if r.Ranks == want.Ranks || len(r.Buckets) == 0 {
		return nil
	}
	what := "the residuals of " + r.CompressedBy
	if r.Partial {
		what = "the parameters and the solver of WithPartial"
	}
	return fmt.Errorf("%w: the checkpoint was written by %d ranks, this program has %d, and %s "+
		"belong to individual ranks: start the program with %d ranks (euryale run -n %d), or load "+
		"another checkpoint",
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
		fmt.Sprintf("the order of parameters is %s", strings.Join(r.Order, ", ")),
		r.Random.String(),
		fmt.Sprintf("tables are %q", r.Tables),
	}
}

// apply restores everything that was read.
func (d *contents) apply(l loaded, solver gorgonia.Solver, progress any) error {
	if err := d.applyState(l, solver); err != nil {
		return err
	}
	for _, p := range d.params {
		value, err := p.value()
		if err != nil {
			return err
		}
		copy(d.regionOf(p).Of(value).Bytes(), l.model[p.key()].Data.Bytes())
	}
	if r := d.model.random; r != nil && l.Random != nil {
		r.Seek(l.Random.Step, r.First())
	}
	if err := errors.Join(d.model.restore(l), d.tables.fill(l)); err != nil {
		return err
	}
	d.partial.turn = l.Turn
	return l.unmarshalProgress(progress)
}

// applyState restores what is not part of the model.
func (d *contents) applyState(l loaded, by gorgonia.Solver) error {
	if l.weightsOnly {
		if s, ok := by.(solver.Solver); ok {
			return s.SetState(nil)
		}
		return nil
	}
	if s, ok := d.compression(); ok {
		if err := s.SetState(buffers(l.own)); err != nil {
			return err
		}
	}
	s, err := stateOf(by)
	if err != nil || s == nil {
		return err
	}
	return s.SetState(buffers(l.model))
}

func buffers(tensors map[string]stored) map[string]backend.Buffer {
	all := map[string]backend.Buffer{}
	for name, t := range tensors {
		all[name] = t.Data
	}
	return all
}
