package plan

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/vm/internal/ir"
	"github.com/euryale-ml/euryale/vm/internal/lower"
)

// Update is how a variable changes at the end of each run: a step of a solver, or another value.
type Update struct {
	Input    int   // the variable
	Gradient ir.ID // of the program, or the value that the variable gets if there is no Rule
	Kept     int   // how many vectors like the variable are kept from run to run
	Group    int   // updates of one group have the same Rule
	// Bucket says with what other gradients ranks exchange this one, in one call. Buckets have the
	// numbers 1, 2 and so on, in the order in which they leave; 0 is for gradients that stay.
	Bucket int
	// Half says that ranks exchange the gradient in BF16: the step that computes it rounds it. Not
	// with shards, nor with several runs.
	Half bool
	// Shard is what this rank updates of the variable, nil for all of it: see [Shard].
	Shard *Shard
	// Lookups says what ranks exchange besides in place of a part of the gradient, nil for nothing.
	// Not with shards, nor with several runs.
	Lookups *lower.Lookups
	// Accumulation is how gradients of several runs are added up before the updates, the same for
	// all.
	Accumulation Accumulation
	// Scale is what the sum of all runs and ranks is multiplied by, the same for all; 0 is 1.
	Scale float64
	// Limit bounds the norm of the gradients of all updates together, which have the same limit; 0
	// for no bound. With a norm that is not finite, no update changes anything.
	Limit float64
	// Parts says that ranks have parts of the variables: the norm covers all, and the operation
	// [Squares] adds up the ranks' sums of squares. Uncounted gradients are the same on several
	// ranks, of which another one counts them.
	Parts, Uncounted bool
	// Rule adds the update of one element to a program: what becomes of w and of kept. Settings
	// are numbers that are bound before each run. Updates without a Rule have nothing else, and no
	// others may be beside them.
	Rule func(p *fuse.Program, w, dw fuse.Value, kept []fuse.Value,
		setting func(i int) fuse.Value) (fuse.Value, []fuse.Value, error)
}

// Joined are loops that may run at once and differ only in their length: see [fuse.Joiner]. Results
// and operands of one loop come behind those of another. The results of an update are the variable
// and what is kept for it, over which it writes. Updates come last, when everything else has read
// the variables.
type Joined struct {
	What     string // one of them computes, for people
	Programs []*fuse.Program
}

// String implements [ir.Op].
func (j Joined) String() string {
	if len(j.Programs) == 1 {
		return j.What
	}
	return fmt.Sprintf("%s of %d", j.What, len(j.Programs))
}

// before returns where a value lies that must stay as it was before the updates: a copy, if it
// is one of the variables that change.
func (l *layouter) before(updates []Update, id ir.ID) Ref {
	r := l.ref(id)
	b := l.plan.Buffers[r.Buffer]
	if b.Kind == Unsharded || b.Kind == Input && r.Step < 0 && slices.ContainsFunc(updates,
		func(u Update) bool { return u.Input == b.Index }) {
		return l.copy(r, l.program.Values[id].Name)
	}
	return r
}

// casts appends the casts of variables that change, such as the weights of products of BF16, as one
// step, and returns the other groups. Most of these are read until the backward pass, so that they
// take no more memory if they are there from the beginning.
func (l *layouter) casts(all []*group, updates []Update) []*group {
	changes := func(id ir.ID) bool {
		for l.program.Values[id].Op == (ir.Reshape{}) {
			id = l.program.Values[id].Args[0]
		}
		in, ok := l.program.Values[id].Op.(ir.Input)
		return ok && slices.ContainsFunc(updates, func(u Update) bool {
			return u.Input == in.Index
		})
	}
	return slices.DeleteFunc(all, func(g *group) bool {
		id := g.members[0]
		v := l.program.Values[id]
		if v.Op != (ir.Cast{}) || len(g.members) > 1 || !changes(v.Args[0]) {
			return false
		}
		if _, sharded := l.sharded(id); !sharded { // which is cast when it is read
			l.cast(id)
		}
		return true
	})
}

// cast appends the cast of a variable.
func (l *layouter) cast(id ir.ID) {
	v := l.program.Values[id]
	x, y := flat(l.ref(v.Args[0])), l.resultOf(id)
	b := newLoop(x.Shape, ir.Dims{})
	b.store(v.Compute(b.program, []fuse.Value{b.load(l.plan, x)}), flat(y))
	l.join(v.Name, "cast", b)
	y.Step = b.dsts[0].Step
	l.setRef(id, y)
}

// update appends the steps of updates, given the gradients: those of each bucket once it has come
// back.
func (l *layouter) update(updates []Update, gradients []ir.ID) error {
	refs := make([]Ref, len(updates))
	for i, u := range updates { // copies come before the first update
		switch {
		case u.Bucket > 0, u.Lookups != nil:
		case u.Accumulation.keeps():
			refs[i] = l.slots(i)[0]
		case u.Rule == nil && l.stands(u.Input, gradients[i]):
			refs[i] = l.ref(gradients[i])
		default:
			refs[i] = l.before(updates, gradients[i])
		}
	}
	var factor *Ref
	received, a, clips := 0, l.bucketing.accumulation, len(updates) > 0 && updates[0].Limit > 0
	if clips || a.Apart {
		for ; received < len(l.bucketing.buckets); received++ {
			l.receive(received+1, refs)
		}
	}
	first := len(l.plan.Steps)
	defer func() {
		for i := range l.plan.Steps[first:] {
			l.plan.Steps[first+i].Runs = a.updateRun()
		}
	}()
	for i := range refs {
		if a.Apart { // of a run before
			refs[i].Step = -1
		}
	}
	if clips {
		l.lookUp(refs)
		r := l.clip(updates, refs)
		factor = &r
	}
	for bucket := range len(l.bucketing.buckets) + 1 {
		if bucket > 0 && bucket <= l.bucketing.shards.updated {
			continue
		}
		if bucket > received {
			l.receive(bucket, refs)
		}
		if err := l.updateBucket(bucket, refs, factor); err != nil {
			return err
		}
		if l.gatherUpdated(bucket) {
			if err := l.endGathers(bucket); err != nil {
				return err
			}
		}
	}
	l.lookUp(refs)
	for i, id := range l.bucketing.lookups {
		if id < 0 {
			continue
		}
		if err := l.updating(i, refs[i], factor, l.program.Values[gradients[i]].Name); err != nil {
			return err
		}
	}
	return l.endGathers(0)
}

// inLastRun returns a function that makes the steps since then those of the last run alone.
func (l *layouter) inLastRun() func() {
	first := len(l.plan.Steps)
	return func() {
		for i := range l.plan.Steps[first:] {
			l.plan.Steps[first+i].Runs = l.bucketing.accumulation.lastRun()
		}
	}
}

// updateBucket appends the updates of a bucket, number 0 for those that ranks do not exchange, but
// those of lookups, which come last.
func (l *layouter) updateBucket(bucket int, refs []Ref, factor *Ref) error {
	for i, u := range l.bucketing.shards.updates {
		if u.Bucket != bucket || u.Lookups != nil {
			continue
		}
		name := l.program.Values[l.bucketing.gradients[i]].Name
		if err := l.updating(i, refs[i], factor, name); err != nil {
			return err
		}
	}
	return nil
}

// setting is a number of an update, and its type.
type setting struct {
	index int
	dtype backend.DType
}

// number returns a setting, of the type of a variable, as often as that has elements.
func (l *layouter) number(index int, w Ref) Ref {
	key := setting{index, w.DType}
	r, ok := l.settings[key]
	if !ok {
		r = l.buffer(Buffer{Kind: Setting, Index: index}, ir.Dims{}, w.DType, -1)
		l.settings[key] = r
	}
	r.Shape, r.Strides = w.Shape, zeros(w.Shape.Len())
	return r
}

// updating appends the step of one update, or adds it to the one before. The loop has one axis, or
// the gradient's axes if that has gaps. factor is the factor of clipping, nil for none.
func (l *layouter) updating(update int, dw Ref, factor *Ref, name string) error {
	u := l.bucketing.shards.updates[update]
	if u.Shard.empty() {
		return nil
	}
	like := dw
	if !u.Shard.fullySharded() {
		like = l.bucketing.shards.whole(update, dw)
	}
	if u.Half {
		like.DType = backend.F32
	}
	w, err := l.variable(u.Input, like)
	if err != nil {
		return err
	}
	if u.Rule == nil {
		return l.assign(w, dw, name)
	}
	dw = flat(dw)
	w.Shape, w.Strides = dw.Shape, dw.Shape.Strides()
	b := newLoop(dw.Shape, ir.Dims{})
	variable := l.plan.Buffers[w.Buffer].Name
	written, read := []Ref{w}, w
	if u.Shard != nil && !u.Shard.FullyShard {
		// what becomes of it takes the gradient's place, until all ranks have it
		written[0], read.Offset = dw, u.Shard.From
	}
	for k := range u.Kept {
		written = append(written, l.buffer(Buffer{Kind: State, Index: u.Input, Vector: k,
			Name: fmt.Sprintf("state %d of %s", k, variable)}, dw.Shape, like.DType, -1))
	}
	values := []fuse.Value{l.gradient(b, update, dw)}
	for k, r := range written {
		l.plan.Buffers[r.Buffer].Written = u.Shard == nil || u.Shard.FullyShard || k > 0
		if k == 0 {
			r = read
		}
		values = append(values, b.load(l.plan, r))
	}
	number := func(i int) fuse.Value { return b.load(l.plan, l.number(i, w)) }
	var finite fuse.Value
	if factor != nil {
		values[0], finite = l.clipped(b, values[0], dw, *factor)
	}
	value, kept, err := u.Rule(b.program, values[1], values[0], values[2:], number)
	if err != nil {
		return fmt.Errorf("update of %s: %w", name, err)
	}
	for k, x := range append([]fuse.Value{value}, kept...) {
		if factor != nil {
			x = b.program.Do(fuse.Where, finite, x, values[1+k])
		}
		b.store(x, written[k])
	}
	l.join(name, "update", b)
	if u.Shard != nil {
		l.bucketing.shards.mine[update] = b.dsts[0]
	}
	return nil
}

// assign appends the step that gives a variable its value, unless that is there.
func (l *layouter) assign(w, x Ref, name string) error {
	l.plan.Buffers[w.Buffer].Written = true
	if x.Buffer == w.Buffer && x.Dense() {
		return nil
	}
	b := newLoop(x.Shape, ir.Dims{})
	b.store(b.load(l.plan, x), w)
	l.join(name, "assign", b)
	return nil
}

// stands reports whether a value is a variable as it was before the run.
func (l *layouter) stands(input int, id ir.ID) bool {
	return l.program.Values[id].Op == (ir.Input{Index: input})
}

// over returns where a put leaves its result, which is where its operand lies: the variable that
// gets the value, if nothing else reads what that was, or else a copy.
func (l *layouter) over(id ir.ID, updates []Update, x Ref) Ref {
	v := l.program.Values[id]
	for i, u := range updates {
		if l.bucketing.gradients[i] == id && u.Rule == nil && l.stands(u.Input, v.Args[0]) &&
			len(l.users[v.Args[0]]) == 1 {
			l.plan.Buffers[x.Buffer].Written = true
			return x
		}
	}
	c := l.result(v.Shape, v.DType, v.Name)
	return l.copyTo(c, x, v.Name)
}

// flat returns r with one axis, if it has no gaps.
func flat(r Ref) Ref {
	if r.Dense() {
		r.Shape, r.Strides = ir.Of(r.Shape.Size()), ir.Of(1)
	}
	return r
}

// join appends a loop to one of the joined steps just before, whose loops are alike, or as a step:
// such steps need nothing of each other.
func (l *layouter) join(name, what string, b *loopBuilder) {
	at := len(l.plan.Steps)
	for k := at - 1; k >= 0; k-- {
		j, ok := l.plan.Steps[k].Op.(Joined)
		if !ok || j.What != what {
			break
		}
		if j.Programs[0].Alike(b.program) {
			at = k
			break
		}
	}
	if at == len(l.plan.Steps) {
		l.plan.Steps = append(l.plan.Steps, Step{Op: Joined{What: what}, Name: name})
	}
	for k := range b.dsts {
		b.dsts[k].Step = at
	}
	s := &l.plan.Steps[at]
	s.Op = Joined{what, append(s.Op.(Joined).Programs, b.program)}
	s.Dsts, s.Args = append(s.Dsts, b.dsts...), append(s.Args, b.args...)
}

// variable returns where a variable lies, with the shape of its gradient.
func (l *layouter) variable(index int, dw Ref) (Ref, error) {
	for i, b := range l.plan.Buffers {
		if b.Kind != Input || b.Index != index {
			continue
		}
		if b.DType != dw.DType || b.Bytes != dw.Shape.Size()*dw.DType.Size() {
			return Ref{}, fmt.Errorf("plan: a variable of %d bytes of %v has a gradient of shape "+
				"%v of %v", b.Bytes, b.DType, dw.Shape, dw.DType)
		}
		return Ref{Buffer: i, Shape: dw.Shape, Strides: dw.Shape.Strides(), DType: dw.DType,
			Step: -1}, nil
	}
	// nothing else reads it
	return l.buffer(Buffer{Kind: Input, Index: index}, dw.Shape, dw.DType, -1), nil
}

// zeros returns n zeros: strides of a number.
func zeros(n int) ir.Dims { return ir.Of(make([]int, n)...) }
