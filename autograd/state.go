package autograd

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/residence"
)

// contents are what a rank has of a training besides the state of its solver, and what checkpoints
// keep of both, as tensors with names.
type contents struct {
	reducer           // buckets, which ranks may shard, and a compression
	model   inventory // of everything that ranks have in common
	params  []*param  // as given to New
	parts   *parts    // nil if parameters are whole
	tables  tables
	partial rotation
	sharded bool   // a solver's state is of this rank's shards: see Shards
	reduced string // how
}

func (d *contents) record(by gorgonia.Solver) record {
	r := record{
		Format: namedFormat, Ranks: d.comm.Size(), Solver: solver.Kind(by),
		numbered: solver.Kind(by), Partial: d.partial.on, Turn: d.partial.turn,
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

// onHost lists the model as the host has it, or copies if the training goes on: of what this rank
// writes.
func (d *contents) onHost(by gorgonia.Solver, first, behind bool) ([]checkpoint.Tensor, error) {
	state, err := d.modelState(by)
	if d.sharded {
		err = errors.Join(err, d.checkShards(by))
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

// read reads what this rank needs of a checkpoint of such a program.
func (d *contents) read(in files.Dir, solver gorgonia.Solver, weightsOnly bool) (l loaded,
	err error) {
	if l.record, err = readRecord(in); err != nil {
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
		if l.own, err = checkpoint.ReadPart(in, stamp, checkpoint.RankName(d.comm.Rank()),
			d.model.constant); err != nil {
			return l, err
		}
	}
	if l.tables, err = d.tables.read(in, stamp, ranks); err != nil {
		return l, err
	}
	want, keyOf := d.wanted(l, solver)
	all := l.own
	if !d.partial.on || weightsOnly {
		if err = d.checkShards(solver); err != nil {
			return l, err
		}
		if all, err = checkpoint.Read(in, stamp, l.Shards, want); err != nil {
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
		residence.Written(value)
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

// gatherParams gives all ranks the whole parameters after each has loaded its shard.
func (d *contents) gatherParams() error {
	for _, p := range d.params {
		if !d.sharded {
			break
		}
		value, err := p.value()
		if err != nil {
			return err
		}
		all, err := d.gatherShards(backend.ForLoad, p, d.regionOf(p).Of(value))
		if err != nil {
			return err
		}
		residence.Write(value, all)
	}
	return nil
}

// regionOf returns which elements this rank keeps of a parameter, and of what belongs to it element
// by element.
func (d *contents) regionOf(p *param) checkpoint.Region {
	r := checkpoint.All(p.dims())
	if d.parts != nil {
		r = d.parts.regionOf(p, d.parts.comm.Rank())
	}
	if d.sharded {
		s := d.shardOf(p, d.comm.Rank())
		r.From, r.N = s.from, s.to-s.from
	}
	return r
}

// wholeState returns the whole of the state that this rank would write, by key, unless a rank has a
// problem. It is collective.
func (d *contents) wholeState(state map[string]stored, by gorgonia.Solver, problem error) (
	map[string]stored, error) {
	s := d.parts
	if s == nil {
		return state, problem
	}
	_, err := group.Alike(s.comm, "", nil, errors.Join(problem, d.checkShards(by)))
	if err != nil {
		return nil, err
	}
	of := map[string]*param{}
	for _, n := range d.tensors(by) {
		of[n.key] = n.of
	}
	for _, key := range slices.Sorted(maps.Keys(state)) {
		p := of[key]
		if p == nil || !s.isPart(p.index) {
			continue
		}
		whole, err := s.join(p, state[key].Data)
		if err != nil {
			return nil, err
		}
		if len(state[key].Shape) != len(p.shape) { // the solver's have one axis
			whole.Shape = []int{whole.Data.Len()}
		}
		state[key] = whole
	}
	return state, nil
}

// checkShards returns an error for a state that ranks cannot shard, where they shard it.
func (d *contents) checkShards(by gorgonia.Solver) (err error) {
	if d.parts == nil && !d.sharded {
		return nil
	}
	if _, ok := d.compression(); ok {
		err = fmt.Errorf("%w: WithParts: the residuals of a compression belong to parts: "+
			"checkpoints cannot keep them, use f16 or bf16", backend.ErrUnsupported)
	}
	_, ours := solver.VectorNames(by, 0)
	if _, vanilla := by.(*gorgonia.VanillaSolver); !ours && !vanilla {
		err = errors.Join(fmt.Errorf("%w: what a %T keeps cannot be sharded: use a solver of "+
			"package solver", backend.ErrUnsupported, by), err)
	}
	return err
}

// tensors returns the names of all tensors of the model, and of the vectors that a solver keeps for
// parameters. Everything else is the solver's.
func (d *contents) tensors(by gorgonia.Solver) []namedTensor {
	all := d.model.tensors()
	for i, p := range d.params {
		keys, _ := solver.VectorNames(by, i)
		for _, key := range keys {
			kept := checkpoint.SolverPrefix + key[:strings.LastIndex(key, ".")]
			all = append(all, namedTensor{key: key, file: kept + "/" + p.node.Name(),
				shape: []int{d.regionOf(p).N}, dtype: p.dtype, of: p})
		}
	}
	return all
}

// vectors returns what a solver keeps for each parameter, by key.
func (d *contents) vectors(by gorgonia.Solver) map[string]namedTensor {
	all := map[string]namedTensor{}
	for _, n := range d.tensors(by)[len(d.model.tensors()):] {
		all[n.key] = n
	}
	return all
}

// listed returns tensors of the model and the solver, given by key, as a checkpoint keeps them: in
// the order of their keys, and where ranks shard them, what this rank has.
func (d *contents) listed(state map[string]stored, by gorgonia.Solver) (
	list []checkpoint.Tensor) {
	named := map[string]namedTensor{}
	for _, n := range d.tensors(by) {
		named[n.key] = n
	}
	if d.stepsSome(state, by) {
		for _, n := range d.tensors(by)[len(d.model.tensors()):] {
			delete(named, n.key)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(state)) {
		n, t := named[key], state[key]
		c := checkpoint.Whole(cmp.Or(n.file, checkpoint.SolverPrefix+key), t.Shape, t.Data,
			checkpoint.Common)
		c.Constant = n.constant
		if d.partial.on {
			c.Merge = checkpoint.Each
		}
		if n.of != nil && d.sharded {
			c.Region = d.regionOf(n.of)
			c.Shape, c.Data = []int{c.Region.N}, c.Region.Of(t.Data)
			if (d.parts.first() || d.parts.isPart(n.of.index)) && // others have the same
				d.mirrors.writes(d.comm.Rank()) {
				c.Merge = checkpoint.Divided
			}
		}
		list = append(list, c)
	}
	return list
}

// stepsSome reports whether a solver has been given only some of the parameters, which is allowed:
// then its keys count only these.
func (d *contents) stepsSome(state map[string]stored, by gorgonia.Solver) bool {
	if _, groups := by.(*solver.Groups); groups {
		return false // of all
	}
	keys, _ := solver.VectorNames(by, len(d.params)-1)
	if len(keys) == 0 {
		return false
	}
	_, all := state[keys[0]]
	return !all
}

// wanted returns what this rank wants of a checkpoint, and the function that gives tensors there
// their keys in this program.
func (d *contents) wanted(l loaded, by gorgonia.Solver) (checkpoint.Wanted,
	func(name string) string) {
	keys := map[string]string{}
	keyOf := func(name string) string {
		return cmp.Or(keys[name], strings.TrimPrefix(name, checkpoint.SolverPrefix))
	}
	if l.Format == numberedFormat {
		keyOf = func(name string) string { return name }
	}
	want := checkpoint.Wanted{Rest: func(name string) bool {
		return !l.weightsOnly || numberedAverage(keyOf(name)) != ""
	}}
	if l.weightsOnly {
		by = nil
	}
	for _, n := range d.tensors(by) {
		t := checkpoint.Whole(n.file, n.shape, residence.Zeros(n.dtype, 0), checkpoint.Common)
		if t.Constant = n.constant; n.of != nil {
			t.Region = d.regionOf(n.of)
		}
		if keys[n.file] = n.key; l.Format == numberedFormat {
			t.Name = n.key
		}
		want.Tensors = append(want.Tensors, t)
	}
	return want, keyOf
}

// supported returns an error for a solver that would train nothing.
func supported(solver gorgonia.Solver) error {
	if _, ok := solver.(*gorgonia.AdamW); ok {
		return fmt.Errorf("%w: Gorgonia's AdamW takes only gradients of its nodes and would "+
			"leave the parameters unchanged: use solver.AdamW", backend.ErrUnsupported)
	}
	return nil
}

// piecesOf returns the pieces that a checkpoint has, without kinds of which it has none.
func (v *inventory) piecesOf(r record) (all []piece) {
	if r.Frozen > 0 {
		all = append(all, v.frozen...)
	}
	if r.Averages > 0 {
		all = append(all, v.averages...)
	}
	return all
}

// missing says what stays as it is because a checkpoint does not have it.
func (v *inventory) missing(r record) (texts []string) {
	why := "the checkpoint has no %s (an older version wrote it, or a program without " +
		"them): this program keeps its own"
	if len(v.averages) > 0 && r.Averages == 0 {
		texts = append(texts, fmt.Sprintf(why+", so train before you evaluate",
			"running statistics of batch norms"))
	}
	if len(v.frozen) > 0 && r.Frozen == 0 {
		texts = append(texts, fmt.Sprintf(why, "frozen parameters"))
	}
	if v.random != nil && r.Random == nil {
		texts = append(texts, fmt.Sprintf(why, "step of random numbers"))
	}
	return texts
}

// fits returns an error if a checkpoint has other pieces.
func (v *inventory) fits(l loaded) error {
	if err := v.rename(l.model, func(p piece) string { return p.key }); err != nil {
		return err
	}
	for _, n := range []struct {
		what      string
		has, want int
	}{
		{"frozen parameters (WithFrozen)", l.Frozen, len(v.frozen)},
		{"running statistics of batch norms", l.Averages, len(v.averages)},
	} {
		if n.has != n.want && n.has > 0 {
			return fmt.Errorf("%w: the checkpoint has %d %s, and this program %d: build the same "+
				"graph before Load, or load another checkpoint", backend.ErrArgument, n.has, n.what,
				n.want)
		}
	}
	for _, p := range v.piecesOf(l.record) {
		t, ok := l.model[p.key]
		if !ok {
			return fmt.Errorf("%w: the checkpoint has no %s (%s): load that of a model with the "+
				"same names", backend.ErrArgument, p.name, p.file)
		}
		_, err := p.memory()
		if err = cmp.Or(fits(p.name, t, p.dtype, p.shape), err); err != nil {
			return err
		}
	}
	return nil
}

// restore gives the pieces what a checkpoint has of them.
func (v *inventory) restore(l loaded) error {
	return fill(v.piecesOf(l.record), func(p piece, _ int) []byte {
		return l.model[p.key].Data.Bytes()
	})
}
