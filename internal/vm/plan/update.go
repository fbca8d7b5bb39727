package plan

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

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
func (l *layouter) before(id ir.ID) Ref {
	r := l.ref(id)
	b := l.plan.Buffers[r.Buffer]
	if b.Kind == Unsharded || b.Kind == Input && r.Step < 0 && l.changes(b.Index) {
		return l.copy(r, l.program.Values[id].Name)
	}
	return r
}

// changes reports whether updates change a variable.
func (l *layouter) changes(input int) bool {
	return slices.ContainsFunc(l.updates, func(u lower.Update) bool {
		return u.Input == input
	})
}

// casts appends the casts of variables that change, such as the weights of products of BF16, as one
// step, and returns the other groups. Most of these are read until the backward pass, so that they
// take no more memory if they are there from the beginning.
func (l *layouter) casts(all []*group) []*group {
	return slices.DeleteFunc(all, func(g *group) bool {
		id := g.members[0]
		v := l.program.Values[id]
		if v.Op != (ir.Cast{}) || len(g.members) > 1 {
			return false
		}
		for v = l.program.Values[v.Args[0]]; v.Op == (ir.Reshape{}); {
			v = l.program.Values[v.Args[0]]
		}
		if _, sharded := v.Op.(ir.AllGather); sharded { // which is cast when it is read
			return true
		}
		in, ok := v.Op.(ir.Input)
		if ok = ok && l.changes(in.Index); ok {
			l.cast(id)
		}
		return ok
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

// update appends the steps of updates: those of each bucket once it has come back.
func (l *layouter) update() {
	for i, u := range l.updates { // copies come before the first update
		id := l.gradients[i]
		switch {
		case u.Bucket > 0, u.Lookups != nil:
		case l.training.Accumulation.Keeps():
			l.applies(i, l.exchanged(i)[0])
		case l.carries(i) && l.program.Values[id].Op == (ir.Input{Index: u.Input}):
			l.applies(i, l.ref(id))
		default:
			l.applies(i, l.before(id))
		}
	}
	for i := range l.updates {
		if !l.updates[i].Shard.Copied() {
			continue
		}
		for b := range l.plan.Buffers {
			if to := &l.plan.Buffers[b]; to.Kind == Input && to.Index == l.updates[i].Input {
				to.Written = true // by the caller
			}
		}
	}
	a, clips := l.training.Accumulation, l.training.Norm != nil
	for bucket := range l.buckets {
		if clips || a.Apart {
			l.receive(bucket + 1)
		}
	}
	defer l.inRuns(a.UpdateRun())()
	for _, id := range l.training.Gradients {
		if a.Apart { // of a run before
			l.refs[id].Step = -1
		}
	}
	if clips {
		l.lookUp()
		l.clip()
	}
	for bucket := range len(l.buckets) + 1 {
		if bucket > 0 && bucket <= l.shards.updated {
			continue
		}
		l.receive(bucket)
		l.updateBucket(bucket)
		if l.allGatherUpdated(bucket) {
			l.endAllGathers(bucket)
		}
	}
	l.lookUp()
	for i, id := range l.lookups {
		if id >= 0 {
			l.updating(i)
		}
	}
	l.endAllGathers(0)
}

// applies says where the gradient of an update is that this rank applies.
func (l *layouter) applies(update int, dw Ref) {
	l.setRef(l.training.Gradients[update], dw)
}

// inRuns returns a function that makes the steps since then those of some runs alone.
func (l *layouter) inRuns(runs ir.Runs) func() {
	first := len(l.plan.Steps)
	return func() {
		for i := range l.plan.Steps[first:] {
			l.plan.Steps[first+i].Runs = runs
		}
	}
}

// updateBucket appends the updates of a bucket, number 0 for those that ranks do not exchange, but
// those of lookups, which come last.
func (l *layouter) updateBucket(bucket int) {
	for i, u := range l.updates {
		if u.Bucket == bucket && u.Lookups == nil {
			l.updating(i)
		}
	}
}

// updating appends the step of one update, or adds it to the one before.
func (l *layouter) updating(update int) {
	assigns, u := l.training.ByUpdate[update], l.updates[update]
	if len(assigns) == 0 || u.Shard.Empty() {
		return
	}
	dw, name := l.ref(l.training.Gradients[update]), l.program.Values[l.gradients[update]].Name
	if l.carries(update) {
		l.assign(l.ref(assigns[0].To), dw, name)
		return
	}
	var written []Ref
	var values []ir.ID
	for _, a := range assigns {
		r := l.ref(a.To)
		if v := l.program.Values[a.Value]; v.Op == (ir.AllGather{Index: update}) {
			// what becomes of it takes the gradient's place, until all ranks have it
			a.Value, r = v.Args[0], dw
		} else {
			l.plan.Buffers[r.Buffer].Written = true
		}
		values, written = append(values, a.Value), append(written, r)
	}
	b := l.loopOver(true, values...)
	for k, r := range written {
		r.Shape = ir.Of(b.program.Shape...)
		r.Strides = r.Shape.Strides()
		b.store(l.value[values[k]], r)
	}
	l.join(name, "update", b)
	if u.Shard.Divides() {
		l.applies(update, b.dsts[0])
	}
}

// clip appends what finds the norm of all gradients, the last result, and the factor that bounds
// it.
func (l *layouter) clip() {
	for _, id := range l.training.Scalars {
		v := l.program.Values[id]
		switch v.Op.(type) {
		case ir.Reduce: // of the squares of a gradient
			b := l.loopOver(true, v.Args[0])
			b.program.Reduced = slices.Repeat([]bool{true}, len(b.program.Shape))
			b.fold(backend.Sum, l.value[v.Args[0]], l.result(v.Shape, v.DType, v.Name))
			l.join(v.Name, "squares", b)
			l.setRef(id, b.dsts[0])
		case ir.Copy:
			l.numbers(id)
		default:
			r := l.result(v.Shape, v.DType, v.Name)
			l.plan.Steps = append(l.plan.Steps, Step{Op: v.Op, Dsts: []Ref{r},
				Args: []Ref{l.refs[v.Args[0]]}, Name: v.Name})
			l.setRef(id, r)
		}
	}
	l.numbers(l.training.Norm...)
	l.plan.Results = append(l.plan.Results, l.refs[l.training.Norm[0]])
}

// numbers appends a loop of one element.
func (l *layouter) numbers(of ...ir.ID) {
	b := l.loopOver(true, of...)
	for _, id := range of {
		v := l.program.Values[id]
		r := l.result(v.Shape, v.DType, v.Name)
		b.store(l.value[id], r)
		l.setRef(id, r)
	}
	l.plan.Steps = append(l.plan.Steps, b.newStep("norm", "norm"))
}

// carries reports whether a variable gets a value of the run.
func (l *layouter) carries(update int) bool {
	assigns := l.training.ByUpdate[update]
	return len(assigns) > 0 && assigns[0].Value < l.training.First
}

// loopOver returns a loop that computes values of the end of a step, and loads what is there. If
// dense, and that has no gaps, it is along one axis.
func (l *layouter) loopOver(dense bool, values ...ir.ID) *loopBuilder {
	members, shape := l.members(values), l.program.Values[values[0]].Shape
	for _, id := range members {
		dense = dense && (l.computes(id) || l.training.Repeats(id) || l.ref(id).Dense())
	}
	if dense {
		shape = ir.Of(shape.Size())
	}
	b := newLoop(shape, ir.Dims{})
	var args [3]fuse.Value
	for _, id := range members {
		if v := &l.program.Values[id]; l.computes(id) {
			for i, a := range v.Args {
				args[i] = l.value[a]
			}
			l.value[id] = v.Compute(b.program, args[:len(v.Args)])
			continue
		}
		r := l.ref(id)
		if r.Shape = shape; l.training.Repeats(id) {
			r.Strides = zeros(shape.Len())
		} else if dense {
			r.Strides = shape.Strides()
		}
		l.value[id] = b.load(l.plan, r)
	}
	return b
}

// computes reports whether loops compute a value of the end of a step.
func (l *layouter) computes(id ir.ID) bool {
	op := l.program.Values[id].Op
	_, number := op.(ir.Scalar)
	return (number || ir.Elementwise(op)) && !l.placed[id]
}

// members returns what a loop loads and computes for some values, in the program's order.
func (l *layouter) members(values []ir.ID) []ir.ID {
	all := append(make([]ir.ID, 0, lower.PerUpdate), values...)
	for k := 0; k < len(all); k++ {
		if !l.computes(all[k]) {
			continue
		}
		for _, a := range l.program.Values[all[k]].Args {
			if !slices.Contains(all, a) {
				all = append(all, a)
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// assign appends the step that gives a variable its value, unless that is there.
func (l *layouter) assign(w, x Ref, name string) {
	l.plan.Buffers[w.Buffer].Written = true
	if x.Buffer == w.Buffer && x.Dense() {
		return
	}
	w.Shape, w.Strides = x.Shape, x.Shape.Strides()
	b := newLoop(x.Shape, ir.Dims{})
	b.store(b.load(l.plan, x), w)
	l.join(name, "assign", b)
}

// over returns where a put leaves its result, which is where its operand lies: the variable that
// gets the value, if nothing else reads what that was, or else a copy.
func (l *layouter) over(id ir.ID, x Ref) Ref {
	v := l.program.Values[id]
	for i, u := range l.updates {
		if l.gradients[i] == id && l.carries(i) && len(l.users[v.Args[0]]) == 1 &&
			l.program.Values[v.Args[0]].Op == (ir.Input{Index: u.Input}) {
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

// zeros returns n zeros: strides of a number.
func zeros(n int) ir.Dims { return ir.Of(make([]int, n)...) }
