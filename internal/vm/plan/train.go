package plan

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// training is the program of a step: behind the values of a run, what becomes of its gradients.
type training struct {
	*ir.Program
	first     ir.ID            // of what is behind a run's values
	gradients []ir.ID          // by update: what ranks and runs make of it, for this rank
	rows      []ir.ID          // by update: what lookups add to that, -1 for nothing
	scalars   []ir.ID          // from gradients to their norm: each is stored
	norm      []ir.ID          // the norm of all gradients, and what they are multiplied by
	assigns   [][]ir.Assign    // by update
	variables map[int]ir.Value // of the run, by input
	args      []ir.ID          // of all values: fewer allocations
}

// Squares is the index of the [ir.Opaque] that replaces a rank's sum of squares by that of all
// ranks with parts of the variables.
const Squares = -1

// train returns the program of a step, of that of a run whose last results are gradients. For each
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
func train(p *ir.Program, updates []Update) (*training, error) {
	t := &training{Program: p, first: ir.ID(len(p.Values)), variables: map[int]ir.Value{}}
	if len(updates) == 0 {
		return t, nil
	}
	own := tail(p, updates)
	t.Program = &ir.Program{Values: append(make([]ir.Value, 0, len(p.Values)+
		perUpdate*len(updates)), p.Values...), Results: p.Results[:own:own]}
	for _, v := range p.Values {
		if in, ok := v.Op.(ir.Input); ok {
			t.variables[in.Index] = v
		}
	}
	var all []ir.ID
	all, t.rows = gradients(p, updates)
	for i, u := range updates {
		t.gradients = append(t.gradients, t.own(u.Shard, t.combined(u, i, all[i])))
	}
	if updates[0].Limit > 0 {
		t.clip(updates)
		t.Results = append(t.Results, t.norm[0])
	}
	for i := range updates {
		assigns, err := t.update(&updates[i], i, all[i])
		if err != nil {
			return nil, fmt.Errorf("plan: update of %s: %w", p.Values[all[i]].Name, err)
		}
		t.assigns = append(t.assigns, assigns)
	}
	t.Assigns = append(t.Assigns, slices.Concat(t.assigns...)...)
	return t, nil
}

// perUpdate is how many values an update adds at the most without micro-batches, as those of AdamW
// with a norm: there is room for them.
const perUpdate = 40

// value adds a value with the shape, the dtype and the name of another one.
func (t *training) value(op ir.Op, like ir.Value, args ...ir.ID) ir.ID {
	t.args = append(t.args, args...)
	like.Op, like.Args = op, t.args[len(t.args)-len(args):len(t.args):len(t.args)]
	return t.Add(like)
}

// combined adds what runs add to the sums of a gradient, and returns what all runs and ranks make
// of it: with updates in a run of their own, as the run before leaves it.
func (t *training) combined(u Update, update int, gradient ir.ID) ir.ID {
	a, like := u.Accumulation, t.Values[gradient]
	x := t.value(ir.Reshape{}, like, gradient)
	branches := len(a.branches())
	kinds, _ := a.Sums()
	kept := func(i int) ir.ID {
		if i < branches {
			return t.value(ir.PartialSum{Index: update, Vector: i}, like)
		}
		return t.value(ir.PartialSum{Index: update, Vector: i - branches, Inner: true}, like)
	}
	var sums []ir.ID
	for kind, s := range kinds {
		y := x
		for _, i := range s.Add {
			y = t.value(ir.Binary{Op: fuse.Add}, like, kept(i), y)
		}
		if kind < len(kinds)-1 {
			t.Assigns = append(t.Assigns, ir.Assign{To: kept(s.To), Value: y, Runs: 1 << kind})
			continue
		}
		for branch := range s.To {
			sums = append(sums, kept(branch))
		}
		sums = append(sums, y)
	}
	if x = sums[0]; u.Bucket > 0 {
		x = t.value(ir.AllReduce{Index: update}, like, sums...)
	}
	if a.Apart {
		t.Assigns = append(t.Assigns, ir.Assign{To: kept(0), Value: x, Runs: a.lastRun()})
		x = kept(0)
	}
	return x
}

// own returns the elements of x that this rank updates.
func (t *training) own(s *Shard, x ir.ID) ir.ID {
	if s == nil {
		return x
	}
	v := t.Values[x]
	v.Shape = ir.Of(v.Shape.Size())
	x = t.value(ir.Reshape{}, v, x)
	v.Shape = ir.Of(s.To - s.From)
	return t.value(ir.Slice{Start: s.From, Step: 1}, v, x)
}

// repeats reports whether a value is one number.
func (t *training) repeats(id ir.ID) bool {
	_, setting := t.Values[id].Op.(ir.Setting)
	_, factor := t.Values[id].Op.(ir.Broadcast)
	return setting || factor
}

// like returns what the values of an update are like: its gradient, as loops compute it.
func (t *training) like(update int) ir.Value {
	v := t.Values[t.gradients[update]]
	v.DType = fuse.Type(v.DType)
	return v
}

// times returns x times a number, unless that is 1.
func (t *training) times(x ir.ID, number float64, like ir.Value) ir.ID {
	if number == 1 {
		return x
	}
	return t.value(ir.Binary{Op: fuse.Mul}, like, x, t.value(ir.ScalarOf(number), like))
}

// gradient returns a gradient as it is applied: the sum of all runs and ranks, scaled.
func (t *training) gradient(u *Update, update int) ir.ID {
	x, like := t.gradients[update], t.like(update)
	if of := u.Lookups; of != nil && of.Alone {
		x = t.times(x, of.Weight, like)
	} else if of != nil {
		y := t.times(t.value(ir.Reshape{}, like, t.rows[update]), of.Weight, like)
		x = t.value(ir.Binary{Op: fuse.Add}, like, x, y)
	}
	return t.times(x, cmp.Or(u.Scale, 1), like)
}

// maxNumbers is how many numbers one loop adds up: a [fuse.Program] has at most 64 operands.
const maxNumbers = 60

// clip adds the norm of all gradients, in F64, and the factor that makes it at most the limit.
func (t *training) clip(updates []Update) {
	one := ir.Value{DType: backend.F64, Name: "norm"}
	var sums []ir.ID
	for i := range updates {
		if u := &updates[i]; !u.Uncounted && !u.Shard.empty() {
			sums = append(sums, t.squares(t.gradient(u, i)))
		}
	}
	t.scalars = slices.Clone(sums)
	sum := func(of []ir.ID) ir.ID {
		x := of[0]
		for _, y := range of[1:] {
			x = t.value(ir.Binary{Op: fuse.Add}, one, x, y)
		}
		return x
	}
	stored := func(op ir.Op, x ir.ID) ir.ID {
		t.scalars = append(t.scalars, t.value(op, one, x))
		return t.scalars[len(t.scalars)-1]
	}
	for len(sums) > maxNumbers {
		sums = append(sums[maxNumbers:], stored(ir.Copy{}, sum(sums[:maxNumbers])))
	}
	number := func(x float64) ir.ID { return t.value(ir.ScalarOf(x), one) }
	if len(sums) == 0 { // other ranks have all shards
		sums = append(sums, number(0))
	}
	if updates[0].Parts {
		sums = []ir.ID{stored(ir.Opaque{Index: Squares, Name: "sum of the squares of all parts",
			Placed: true}, stored(ir.Copy{}, sum(sums)))}
	}
	do := func(op fuse.Op, x, y ir.ID) ir.ID { return t.value(ir.Binary{Op: op}, one, x, y) }
	limit := updates[0].Limit
	norm := t.value(ir.Unary{Op: fuse.Sqrt}, one, sum(sums))
	larger := do(fuse.Greater, norm, number(limit))
	less := do(fuse.Div, number(limit), norm)
	factor := t.value(ir.Where{}, one, larger, less, number(1))
	finite := do(fuse.LessEqual, norm, number(math.MaxFloat64))
	t.norm = []ir.ID{norm, t.value(ir.Where{}, one, finite, factor, number(math.NaN()))}
}

// squares returns the sum of the squares of a gradient.
func (t *training) squares(x ir.ID) ir.ID {
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

// variable returns the variable of an update, like its gradient.
func (t *training) variable(u *Update, like ir.Value) (ir.ID, error) {
	if v, ok := t.variables[u.Input]; ok {
		if like.Name = v.Name; v.DType != like.DType || v.Shape.Size() != like.Shape.Size() {
			return 0, fmt.Errorf("a variable of shape %v of %v has a gradient of shape %v of %v",
				v.Shape, v.DType, like.Shape, like.DType)
		}
	}
	return t.value(ir.Input{Index: u.Input}, like), nil
}

// update adds what an update does, given the gradient in a run.
func (t *training) update(u *Update, update int, gradient ir.ID) ([]ir.Assign, error) {
	whole, runs := t.Values[gradient], u.Accumulation.updateRun()
	if u.Half {
		whole.DType = backend.F32
	}
	dw := t.gradient(u, update)
	w, err := t.variable(u, whole)
	switch {
	case err != nil || u.Shard.empty() && u.Shard.FullyShard:
		return nil, err
	case u.Rule == nil:
		return []ir.Assign{{To: w, Value: gradient}}, nil
	case u.Shard.empty():
		return []ir.Assign{{To: w, Value: t.value(ir.AllGather{Index: update}, whole),
			Runs: runs}}, nil
	}
	before, like := []ir.ID{t.own(u.Shard, w)}, t.like(update)
	for k := range u.Kept {
		kept := like
		kept.Name = fmt.Sprintf("state %d of %s", k, t.Values[w].Name)
		before = append(before, t.value(ir.State{Input: u.Input, Vector: k}, kept))
	}
	var finite ir.ID
	if t.norm != nil {
		dw, finite = t.clipped(dw, like)
	}
	after, err := t.rule(u, dw, before, like)
	if err != nil {
		return nil, err
	}
	assigns := make([]ir.Assign, len(after))
	for k, x := range after {
		if t.norm != nil {
			x = t.value(ir.Where{}, like, finite, x, before[k])
		}
		assigns[k] = ir.Assign{To: before[k], Value: x, Runs: runs}
	}
	if u.Shard != nil && !u.Shard.FullyShard {
		assigns[0].To = w
		assigns[0].Value = t.value(ir.AllGather{Index: update}, whole, assigns[0].Value)
	}
	return assigns, nil
}

// clipped returns the product of a gradient and the factor, and whether that is a number.
func (t *training) clipped(dw ir.ID, like ir.Value) (scaled, finite ir.ID) {
	one, wide := t.Values[t.norm[1]], like
	one.Shape = ir.Of(slices.Repeat([]int{1}, like.Shape.Len())...)
	wide.DType = one.DType
	factor := t.value(ir.Broadcast{}, wide, t.value(ir.Reshape{}, one, t.norm[1]))
	scaled = t.value(ir.Binary{Op: fuse.Mul}, like, dw, t.value(ir.Cast{}, like, factor))
	return scaled, t.value(ir.Binary{Op: fuse.Equal}, wide, factor, factor)
}

// rule adds what a rule makes of a variable and what is kept for it. It says of each instruction
// that the rule writes which value that is.
func (t *training) rule(u *Update, dw ir.ID, before []ir.ID, like ir.Value) ([]ir.ID, error) {
	p := &fuse.Program{Code: make([]fuse.Instr, 0, perUpdate)} // of no axes
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
			return nil, fmt.Errorf("%w: a solver's rule with %v", backend.ErrUnsupported, c.Op)
		}
		ids[k] = t.value(op, like, args...)
	}
	after := []ir.ID{ids[w]}
	for _, x := range kept {
		after = append(after, ids[x])
	}
	return after, nil
}
