package plan

import (
	"slices"

	"github.com/euryale-ml/euryale/internal/sumtree"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Accumulation says how the gradients of several runs become the sum that a step of the solver
// applies, or in a tree the sums of branches that ranks exchange. The zero value is for steps of
// one run.
//
// Sums that are not complete are kept from run to run: one in the order of the runs, and in a tree
// those of [sumtree.Carry], of which the largest lies where that of the whole branch will. One of a
// single run lies where that of two will, if it can: what is added in place is in the caches.
type Accumulation struct {
	Runs int  // of a step; 0 is 1
	Tree bool // in the association backend.Tree, otherwise in the order of the runs
	// The runs are those from number First on, of All on all ranks: 0 stands for Runs.
	First, All int
	// Apart makes the updates a run of their own, of kind [ir.Apply], which follows the last one.
	// In between the gradients that it applies stay where they are added up.
	Apart bool
}

// Several reports whether there is anything to add.
func (a Accumulation) Several() bool { return a.Runs > 1 }

// keeps reports whether gradients are kept from run to run.
func (a Accumulation) keeps() bool { return a.Several() || a.Apart }

// branches returns how many runs each sum has that is exchanged.
func (a Accumulation) branches() []int {
	if runs := max(1, a.Runs); a.Tree {
		return sumtree.Branches(nil, a.First, runs, max(a.All, runs))
	}
	return []int{a.Runs}
}

// Sum says to which of the kept sums a run adds its gradients, one after the other, and as which
// one the result is kept. Those of branches come first, and then those of levels.
type Sum struct {
	Add []int
	To  int
}

func (s Sum) equal(other Sum) bool { return s.To == other.To && slices.Equal(s.Add, other.Add) }

// sum returns the sum of a run.
func (a Accumulation) sum(run int) (s Sum) {
	switch {
	case !a.Tree && run > 0:
		return Sum{Add: []int{0}}
	case !a.Tree:
		return s
	}
	branches, branch := a.branches(), 0
	for ; run >= branches[branch]; branch++ {
		run -= branches[branch]
	}
	size := branches[branch]
	top := sumtree.TopLevel(size)
	at := func(level int) int {
		if level == 0 && top > 0 && run>>1&1 == 0 {
			level = 1 // which is free, and gets the sum of this run and the next, then in place
		}
		if level == top {
			return branch
		}
		return level + len(branches)
	}
	add, to := sumtree.Carry(run, size)
	for _, level := range add {
		s.Add = append(s.Add, at(level))
	}
	s.To = at(to)
	return s
}

// Kinds returns how many kinds of runs there are, beside ir.Apply. The last one is the last run's,
// which has exchanges, too, and updates unless they are Apart.
func (a Accumulation) Kinds() int {
	kinds, _ := a.Sums()
	return len(kinds)
}

// Every returns all kinds of runs.
func (a Accumulation) Every() (kinds []int) {
	for kind := range a.Kinds() {
		kinds = append(kinds, kind)
	}
	if a.Apart {
		kinds = append(kinds, ir.Apply)
	}
	return kinds
}

// Sums returns what runs of each kind add up, beside ir.Apply, and the kind of each run: those of
// one kind have the same steps.
func (a Accumulation) Sums() (kinds []Sum, of []int) {
	for run := range max(1, a.Runs) {
		s := a.sum(run)
		kind := slices.IndexFunc(kinds, s.equal)
		if kind < 0 || run == a.Runs-1 {
			kind, kinds = len(kinds), append(kinds, s)
		}
		of = append(of, kind)
	}
	return kinds, of
}

// lastRun is the kind of the last run.
func (a Accumulation) lastRun() ir.Runs {
	if !a.Several() {
		return 0
	}
	return 1 << (a.Kinds() - 1)
}

// updateRun is the kind of the run with the updates.
func (a Accumulation) updateRun() ir.Runs {
	if a.Apart {
		return 1 << ir.Apply
	}
	return a.lastRun()
}

// partialSums returns the sums of runs of a gradient that are kept.
func (l *layouter) partialSums(update int, dw Ref, name string) []Ref {
	branches, kept := l.accumulation.branches(), l.sums[update]
	most := len(branches)
	if l.accumulation.Tree {
		most += max(0, sumtree.TopLevel(slices.Max(branches)))
	}
	for i := len(kept); i < most; i++ {
		b := Buffer{Kind: Gradient, Index: update, Vector: i, Name: "sum of " + name}
		if i >= len(branches) {
			b.Kind, b.Vector = PartialSum, i-len(branches)
		}
		kept = append(kept, l.buffer(b, dw.Shape, dw.DType, -1))
	}
	l.sums[update] = kept
	for i := range kept { // a reshape may be between
		kept[i].Shape, kept[i].Strides = dw.Shape, dw.Shape.Strides()
	}
	return kept
}

// firstRuns appends the steps that compute a gradient in runs that add it to nothing, and write it
// where these keep it: that needs no pass of its own. It returns the other runs.
func (l *layouter) firstRuns(update int, s Step) (others ir.Runs) {
	kinds, _ := l.accumulation.Sums()
	for kind, sum := range kinds {
		if len(sum.Add) > 0 {
			others |= 1 << kind
			continue
		}
		to := l.partialSums(update, s.Dsts[0], s.Name)[sum.To]
		to.Step = len(l.plan.Steps)
		l.first[update] = to.Step
		l.plan.Steps = append(l.plan.Steps, Step{Op: s.Op, Dsts: []Ref{to}, Args: s.Args,
			Name: s.Name, Runs: 1 << kind})
	}
	return others
}

// accumulate appends the steps that add a gradient to those of the runs before, of which each run
// has at most one, and returns where the sums lie in the end that are exchanged.
func (l *layouter) accumulate(update int, dw Ref, name string) []Ref {
	kinds, _ := l.accumulation.Sums()
	kept := slices.Clone(l.partialSums(update, dw, name))
	for kind, s := range kinds {
		if step, ok := l.first[update]; ok && len(s.Add) == 0 {
			if kind == len(kinds)-1 {
				kept[s.To].Step = step
			}
			continue
		}
		if kind > 0 && s.equal(kinds[kind-1]) {
			l.plan.Steps[len(l.plan.Steps)-1].Runs |= 1 << kind
			kept[s.To].Step = len(l.plan.Steps) - 1
			continue
		}
		b := newLoop(dw.Shape, ir.Dims{})
		x := b.load(l.plan, dw)
		for _, i := range s.Add {
			x = b.program.Do(fuse.Add, b.load(l.plan, kept[i]), x)
		}
		sum := kept[s.To]
		sum.Step = len(l.plan.Steps)
		b.store(x, sum)
		step := b.newStep(name, "accumulate")
		step.Runs = 1 << kind
		l.plan.Steps = append(l.plan.Steps, step)
		if kind == len(kinds)-1 {
			kept[s.To] = sum
		}
	}
	return kept[:len(l.accumulation.branches())]
}
