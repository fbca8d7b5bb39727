package lower

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Training is the program of a step: behind the values of a run, what becomes of its gradients.
type Training struct {
	*ir.Program
	Solver
	First     ir.ID         // of what is behind a run's values
	Runs      []ir.ID       // by update: the gradient of a run
	Sums      [][]ir.Assign // by update: what runs leave of it, the last one's behind the others
	Branches  [][]ir.ID     // by update: the sums of which the last run makes that of all ranks
	Gradients []ir.ID       // by update: what ranks and runs make of these, for this rank
	Rows      []ir.ID       // by update: what lookups add to that, -1 for nothing
	Scalars   []ir.ID       // from gradients to their norm: each is stored
	Norm      []ir.ID       // the norm of all gradients, and what they are multiplied by
	ByUpdate  [][]ir.Assign // of the variable and what is kept for it
	leaves    map[ir.Op]ir.ID
	args      []ir.ID // of all values: fewer allocations
}

// Squares is the index of the [ir.Opaque] that replaces a rank's sum of squares by that of all
// ranks with parts of the variables.
const Squares = -1

// Train returns the program of a step, of that of a run whose last results are gradients. For each
// variable w, with s what is kept for it, and for shards with the elements that this rank has:
//
//	g         = scale (AllReduce(sums of the gradients of runs) + weight rows)
//	norm      = sqrt(AllReduce(sum of g² over all variables))
//	f         = limit/norm if norm > limit, NaN if that is not finite, else 1
//	w, s      = rule(w, s, f g) where f = f, else w, s
//	Assign(w) = AllGather(w)
//
// Without a limit of the norm, f is left out. Sums are assigned to what keeps them for other runs.
// What several loops compute, each for itself, is there several times.
func Train(p *ir.Program, s Solver) (*Training, error) {
	t := &Training{Program: p, Solver: s, First: ir.ID(len(p.Values)),
		leaves: map[ir.Op]ir.ID{}}
	if len(s.Updates) == 0 {
		return t, nil
	}
	own := tail(p, s.Updates)
	t.Program = &ir.Program{Values: append(make([]ir.Value, 0, len(p.Values)+
		PerUpdate*len(s.Updates)), p.Values...), Results: p.Results[:own:own]}
	for i, v := range p.Values {
		if _, variable := v.Op.(ir.Input); variable {
			t.leaves[v.Op] = ir.ID(i)
		}
	}
	t.Runs, t.Rows = gradients(p, s.Updates)
	for i, u := range t.Updates {
		x := t.combined(u, i)
		if u.Shard.Divides() {
			x = t.own(u.Shard, x)
		}
		t.Gradients = append(t.Gradients, x)
	}
	if t.Limit > 0 {
		t.clip()
		t.Results = append(t.Results, t.Norm[0])
	}
	for i := range t.Updates {
		assigns, err := t.update(&t.Updates[i], i)
		if err != nil {
			return nil, fmt.Errorf("lower: update of %s: %w", p.Values[t.Runs[i]].Name, err)
		}
		t.ByUpdate = append(t.ByUpdate, assigns)
	}
	t.Assigns = append(t.Assigns, slices.Concat(t.ByUpdate...)...)
	return t, nil
}

// PerUpdate is how many values an update adds at the most without micro-batches, as those of AdamW
// with a norm: there is room for them.
const PerUpdate = 40

// value adds a value with the shape, the dtype and the name of another one.
func (t *Training) value(op ir.Op, like ir.Value, args ...ir.ID) ir.ID {
	t.args = append(t.args, args...)
	like.Op, like.Args = op, t.args[len(t.args)-len(args):len(t.args):len(t.args)]
	return t.Add(like)
}

// leaf returns a value from outside, which is there once.
func (t *Training) leaf(op ir.Op, like ir.Value) ir.ID {
	if _, known := t.leaves[op]; !known {
		t.leaves[op] = t.value(op, like)
	}
	return t.leaves[op]
}

// combined adds what runs add to the sums of a gradient, and returns what all runs and ranks make
// of it: with updates in a run of their own, as the run before leaves it.
func (t *Training) combined(u Update, update int) ir.ID {
	a, like := t.Accumulation, t.Values[t.Runs[update]]
	sum, n := like, len(a.branches())
	sum.Name = "sum of " + like.Name
	kept := func(i int) ir.ID {
		if i < n {
			return t.leaf(ir.PartialSum{Index: update, Vector: i}, sum)
		}
		return t.leaf(ir.PartialSum{Index: update, Vector: i - n, Inner: true}, sum)
	}
	x, sums, branches := t.value(ir.Reshape{}, like, t.Runs[update]), []ir.Assign{}, []ir.ID{}
	kinds, _ := a.Sums()
	for kind, s := range kinds {
		if kind == 0 || !s.equal(kinds[kind-1]) {
			y := x
			for _, i := range s.Add {
				before := t.value(ir.Reshape{}, like, kept(i)) // loops load in the order of values
				y = t.value(ir.Binary{Op: fuse.Add}, like, before, y)
			}
			sums = append(sums, ir.Assign{To: kept(s.To), Value: y})
		}
		of := &sums[len(sums)-1]
		if of.Runs |= 1 << kind; kind < len(kinds)-1 {
			t.Assigns = append(t.Assigns, ir.Assign{To: of.To, Value: of.Value, Runs: 1 << kind})
		}
	}
	for branch := range n - 1 {
		branches = append(branches, kept(branch))
	}
	branches = append(branches, sums[len(sums)-1].Value)
	t.Sums, t.Branches = append(t.Sums, sums), append(t.Branches, branches)
	if x = branches[0]; u.Bucket > 0 {
		x = t.value(ir.AllReduce{Index: update}, like, branches...)
	}
	if a.Apart {
		t.Assigns = append(t.Assigns, ir.Assign{To: kept(0), Value: x, Runs: a.LastRun()})
		return t.value(ir.Reshape{}, like, kept(0))
	}
	return x
}

// own returns the elements of x that this rank updates.
func (t *Training) own(s *Shard, x ir.ID) ir.ID {
	if s == nil {
		return x
	}
	return t.elements(Span{s.From, s.To}, x)
}

// elements returns a part of the elements of x.
func (t *Training) elements(of Span, x ir.ID) ir.ID {
	v := t.Values[x]
	v.Shape = ir.Of(v.Shape.Size())
	x = t.value(ir.Reshape{}, v, x)
	v.Shape = ir.Of(of.To - of.From)
	return t.value(ir.Slice{Start: of.From, Step: 1}, v, x)
}

// Repeats reports whether a value is one number.
func (t *Training) Repeats(id ir.ID) bool {
	_, setting := t.Values[id].Op.(ir.Setting)
	_, factor := t.Values[id].Op.(ir.Broadcast)
	return setting || factor
}

// like returns what the values of an update are like: its gradient, or a part of it, as loops
// compute it.
func (t *Training) like(gradient ir.ID) ir.Value {
	v := t.Values[gradient]
	v.DType = fuse.Type(v.DType)
	return v
}

// times returns x times a number, unless that is 1.
func (t *Training) times(x ir.ID, number float64, like ir.Value) ir.ID {
	if number == 1 {
		return x
	}
	return t.value(ir.Binary{Op: fuse.Mul}, like, x, t.value(ir.ScalarOf(number), like))
}

// gradient returns a gradient x, or a part of it, as it is applied: the sum of all runs and ranks,
// scaled.
func (t *Training) gradient(u *Update, update int, x ir.ID) ir.ID {
	like := t.like(x)
	if of := u.Lookups; of != nil && of.Alone {
		x = t.times(x, of.Weight, like)
	} else if of != nil {
		y := t.times(t.value(ir.Reshape{}, like, t.Rows[update]), of.Weight, like)
		x = t.value(ir.Binary{Op: fuse.Add}, like, x, y)
	}
	return t.times(x, cmp.Or(t.Scale, 1), like)
}

// maxNumbers is how many numbers one loop adds up: a [fuse.Program] has at most 64 operands.
const maxNumbers = 60

// clip adds the norm of all gradients, in F64, and the factor that makes it at most the limit.
func (t *Training) clip() {
	one := ir.Value{DType: backend.F64, Name: "norm"}
	var sums []ir.ID
	for i := range t.Updates {
		if u := &t.Updates[i]; !u.Uncounted && !(u.Shard.Divides() && u.Shard.Empty()) {
			sums = append(sums, t.squares(t.gradient(u, i, t.Gradients[i])))
		}
	}
	t.Scalars = slices.Clone(sums)
	sum := func(of []ir.ID) ir.ID {
		x := of[0]
		for _, y := range of[1:] {
			x = t.value(ir.Binary{Op: fuse.Add}, one, x, y)
		}
		return x
	}
	stored := func(op ir.Op, x ir.ID) ir.ID {
		t.Scalars = append(t.Scalars, t.value(op, one, x))
		return t.Scalars[len(t.Scalars)-1]
	}
	for len(sums) > maxNumbers {
		sums = append(sums[maxNumbers:], stored(ir.Copy{}, sum(sums[:maxNumbers])))
	}
	number := func(x float64) ir.ID { return t.value(ir.ScalarOf(x), one) }
	if len(sums) == 0 { // other ranks have all shards
		sums = append(sums, number(0))
	}
	if t.Parts {
		sums = []ir.ID{stored(ir.Opaque{Index: Squares, Name: "sum of the squares of all parts",
			Placed: true}, stored(ir.Copy{}, sum(sums)))}
	}
	do := func(op fuse.Op, x, y ir.ID) ir.ID { return t.value(ir.Binary{Op: op}, one, x, y) }
	norm := t.value(ir.Unary{Op: fuse.Sqrt}, one, sum(sums))
	larger := do(fuse.Greater, norm, number(t.Limit))
	less := do(fuse.Div, number(t.Limit), norm)
	factor := t.value(ir.Where{}, one, larger, less, number(1))
	finite := do(fuse.LessEqual, norm, number(math.MaxFloat64))
	t.Norm = []ir.ID{norm, t.value(ir.Where{}, one, finite, factor, number(math.NaN()))}
}

// squares returns the sum of the squares of a gradient.
func (t *Training) squares(x ir.ID) ir.ID {
	wide := t.Values[x]
	wide.DType = backend.F64
	x = t.value(ir.Cast{}, wide, x)
	x = t.value(ir.Binary{Op: fuse.Mul}, wide, x, x)
	axes := ir.Dims{}
	for axis := range wide.Shape.Len() {
		axes = axes.Insert(axis, axis)
	}
	return t.value(ir.Reduce{Op: backend.Sum, Axes: axes},
		ir.Value{DType: backend.F64, Name: "norm"}, x)
}

// variable returns what this rank has of the variable of an update, like its gradient or its shard.
func (t *Training) variable(u *Update, like ir.Value) (ir.ID, error) {
	if u.Shard.FullySharded() {
		like.Shape = ir.Of(u.Shard.To - u.Shard.From)
	}
	id := t.leaf(ir.Input{Index: u.Input}, like)
	v := t.Values[id]
	if like.Name = v.Name; v.DType != like.DType || v.Shape.Size() != like.Shape.Size() {
		return 0, fmt.Errorf("a variable of shape %v of %v has a gradient of shape %v of %v",
			v.Shape, v.DType, like.Shape, like.DType)
	}
	return t.value(ir.Reshape{}, like, id), nil
}

// update adds what an update does.
func (t *Training) update(u *Update, update int) ([]ir.Assign, error) {
	gradient := t.Runs[update]
	full, runs := t.Values[gradient], t.Accumulation.UpdateRun()
	if u.Half {
		full.DType = backend.F32
	}
	x := t.Gradients[update]
	if !u.Shard.Divides() {
		x = t.own(u.Shard, x)
	}
	dw := t.gradient(u, update, x)
	w, err := t.variable(u, full)
	switch {
	case err != nil || u.Shard.Empty() && (u.Shard.FullyShard || u.Shard.Mirrored):
		return nil, err
	case u.Rule == nil:
		return []ir.Assign{{To: w, Value: gradient}}, nil
	case u.Shard.Empty():
		return []ir.Assign{{To: w, Value: t.value(ir.AllGather{Index: update}, full),
			Runs: runs}}, nil
	}
	before, like := []ir.ID{w}, t.like(x)
	kept := func(k int) ir.ID {
		v := like
		v.Name = fmt.Sprintf("state %d of %s", k, t.Values[w].Name)
		return t.value(ir.State{Input: u.Input, Vector: k}, v)
	}
	switch {
	case u.Shard.Copied():
		before[0] = kept(u.Kept)
	case !u.Shard.FullySharded():
		before[0] = t.own(u.Shard, w)
	}
	for k := range u.Kept {
		before = append(before, kept(k))
	}
	var finite ir.ID
	if t.Norm != nil {
		dw, finite = t.clipped(dw, like)
	}
	after, err := t.rule(u, dw, before, like)
	if err != nil {
		return nil, err
	}
	assigns := make([]ir.Assign, len(after))
	for k, x := range after {
		if t.Norm != nil {
			x = t.value(ir.Where{}, like, finite, x, before[k])
		}
		assigns[k] = ir.Assign{To: before[k], Value: x, Runs: runs}
	}
	if u.Shard.Divides() && !u.Shard.FullyShard {
		assigns[0].To = w
		assigns[0].Value = t.value(ir.AllGather{Index: update}, full, assigns[0].Value)
	}
	return assigns, nil
}

// clipped returns the product of a gradient and the factor, and whether that is a number.
func (t *Training) clipped(dw ir.ID, like ir.Value) (scaled, finite ir.ID) {
	one, wide := t.Values[t.Norm[1]], like
	one.Shape = ir.Of(slices.Repeat([]int{1}, like.Shape.Len())...)
	wide.DType = one.DType
	factor := t.value(ir.Broadcast{}, wide, t.value(ir.Reshape{}, one, t.Norm[1]))
	scaled = t.value(ir.Binary{Op: fuse.Mul}, like, dw, t.value(ir.Cast{}, like, factor))
	return scaled, t.value(ir.Binary{Op: fuse.Equal}, wide, factor, factor)
}

// rule adds what a rule makes of a variable and what is kept for it. It says of each instruction
// that the rule writes which value that is.
func (t *Training) rule(u *Update, dw ir.ID, before []ir.ID, like ir.Value) ([]ir.ID, error) {
	p := &fuse.Program{Code: make([]fuse.Instr, 0, PerUpdate)} // of no axes
	operands, values := append([]ir.ID{dw}, before...), []fuse.Value(nil)
	for range operands {
		values = append(values, p.Load(like.DType))
	}
	var settings []ir.Op
	w, kept, err := u.Rule(p, values[1], values[0], values[2:], func(i int) fuse.Value {
		settings = append(settings, ir.Setting{Index: i})
		return p.Load(like.DType)
	})
	if err != nil {
		return nil, err
	}
	ids := make([]ir.ID, len(p.Code))
	for k, c := range p.Code {
		like.DType = c.Type
		args := make([]ir.ID, c.Op.Operands())
		for i := range args {
			args[i] = ids[c.Args[i]]
		}
		op := ir.Op(ir.Binary{Op: c.Op})
		switch {
		case c.Op == fuse.Load && c.Args[0] < len(operands):
			ids[k] = operands[c.Args[0]]
			continue
		case c.Op == fuse.Load:
			op = settings[c.Args[0]-len(operands)]
		case c.Op == fuse.Const && c.Type.Float():
			op = ir.Scalar{Bits: c.Bits}
		case c.Op == fuse.Cast:
			op = ir.Cast{}
		case c.Op == fuse.Where:
			op = ir.Where{}
		case len(args) == 1:
			op = ir.Unary{Op: c.Op}
		case len(args) != 2:
			return nil, fmt.Errorf("%w: a solver's rule with %v: write the rule without it",
				backend.ErrUnsupported, c.Op)
		}
		ids[k] = t.value(op, like, args...)
	}
	after := []ir.ID{ids[w]}
	for _, x := range kept {
		after = append(after, ids[x])
	}
	return after, nil
}
