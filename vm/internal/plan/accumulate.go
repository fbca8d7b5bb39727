package plan

import (
	"math/bits"
	"slices"

	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// Accumulation says how the gradients of several runs become the sum that a step of the solver
// applies. The zero value is for steps of one run.
//
// Sums that are not complete are kept from run to run: one in the order of the runs, and in a tree
// those of the digits of a binary counter, of which the largest lies where the whole sum will.
type Accumulation struct {
	Runs int  // of a step; 0 is 1
	Tree bool // in the association backend.Tree, otherwise in the order of the runs
}

// Several reports whether there is anything to add.
func (a Accumulation) Several() bool { return a.Runs > 1 }

// Kinds returns how many kinds of runs there are: runs of one kind have the same steps. The last
// kind is the kind of the last run of a step of the solver, which has updates and exchanges, too.
func (a Accumulation) Kinds() int {
	switch {
	case !a.Several():
		return 1
	case a.Tree:
		return a.top() + 2
	}
	return 3 // the first run, those between, and the last one
}

// Kind returns that of a run; the first one of a step of the solver has number 0.
func (a Accumulation) Kind(run int) int {
	switch {
	case run >= a.Runs-1:
		return a.Kinds() - 1
	case a.Tree:
		return bits.TrailingZeros(^uint(run))
	}
	return min(run, 1)
}

// top is the level of the largest sum that is kept: that of level k has 2^k runs.
func (a Accumulation) top() int {
	if !a.Tree {
		return 0
	}
	return bits.Len(uint(a.Runs-1)) - 1
}

// sum says to which of the sums a run of a kind adds its gradients, one after the other, and as
// which sum the result is kept.
func (a Accumulation) sum(kind int) (add []int, to int) {
	switch last := kind == a.Kinds()-1; {
	case !a.Tree && kind == 0:
		return nil, 0
	case !a.Tree:
		return []int{0}, 0
	case !last:
		for level := range kind {
			add = append(add, level)
		}
		return add, kind
	}
	for level := range a.top() + 1 {
		if (a.Runs-1)>>level&1 == 1 {
			add = append(add, level)
		}
	}
	return add, a.top()
}

// lastRun is the kind of the last run.
func (a Accumulation) lastRun() Runs {
	if !a.Several() {
		return 0
	}
	return 1 << (a.Kinds() - 1)
}

// laterRuns are all kinds but the first, in which a gradient is not added to anything.
func (a Accumulation) laterRuns() Runs { return 1<<a.Kinds() - 2 }

// Runs is a set of kinds of runs: bit k is for kind k. The zero value is the set of all.
type Runs uint64

// Has reports whether a kind is in the set.
func (r Runs) Has(kind int) bool { return r == 0 || r>>kind&1 == 1 }

// partialSums returns the sums of runs of a gradient that are kept, the largest last.
func (l *layouter) partialSums(update int, dw Ref, name string) []Ref {
	a, kept := l.bucketing.accumulation, l.bucketing.sums[update]
	for level := len(kept); level <= a.top(); level++ {
		b := Buffer{Kind: Partial, Index: update, Vector: level, Name: "sum of " + name}
		if level == a.top() {
			b.Kind, b.Vector = Slot, 0
		}
		kept = append(kept, l.buffer(b, dw.Shape, dw.DType, -1))
	}
	l.bucketing.sums[update] = kept
	for level := range kept { // a reshape may be between
		kept[level].Shape, kept[level].Strides = dw.Shape, dw.Shape.Strides()
	}
	return kept
}

// firstRun returns the step that computes a gradient, writing it where first runs keep it: what is
// added to nothing needs no pass of its own.
func (l *layouter) firstRun(update int, s Step) Step {
	to := l.partialSums(update, s.Dsts[0], s.Name)[0]
	to.Step = len(l.plan.Steps)
	s.Dsts, s.Runs = []Ref{to}, 1
	l.bucketing.first[update] = true
	return s
}

// accumulate appends the steps that add a gradient to those of the runs before, of which each run
// has at most one, and returns where the sum of all lies in the end.
func (l *layouter) accumulate(update int, dw Ref, name string) Ref {
	a, kept := l.bucketing.accumulation, l.partialSums(update, dw, name)
	sum := kept[a.top()]
	var before []int
	for kind := range a.Kinds() {
		add, to := a.sum(kind)
		if kind == 0 && l.bucketing.first[update] {
			continue
		}
		if kind > 0 && slices.Equal(add, before) { // and to the same place
			l.plan.Steps[len(l.plan.Steps)-1].Runs |= 1 << kind
			continue
		}
		before = add
		b := newLoop(dw.Shape, ir.Dims{})
		x := b.load(l.plan, dw)
		for _, level := range add {
			x = b.program.Do(fuse.Add, b.load(l.plan, kept[level]), x)
		}
		sum = kept[to]
		sum.Step = len(l.plan.Steps)
		b.store(x, sum)
		step := b.newStep(name, "accumulate")
		step.Runs = 1 << kind
		l.plan.Steps = append(l.plan.Steps, step)
	}
	return sum
}

// gradient loads a gradient as updates apply it: the sum of all runs and ranks, scaled.
func (l *layouter) gradient(b *loopBuilder, dw Ref) fuse.Value {
	x := b.load(l.plan, dw)
	if s := l.bucketing.scale; s != 0 && s != 1 {
		x = b.program.Do(fuse.Mul, x, b.program.Const(fuse.Type(dw.DType), s))
	}
	return x
}
