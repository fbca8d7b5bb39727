package lower

import (
	"slices"

	"github.com/euryale-ml/euryale/internal/sumtree"
	"github.com/euryale-ml/euryale/internal/vm/ir"
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
	// Idles says that ranks with fewer runs than others have idle ones, of kind [ir.Idle], in which
	// they only take part in the gathers of a run.
	Idles bool
}

// Several reports whether there is anything to add.
func (a Accumulation) Several() bool { return a.Runs > 1 }

// Keeps reports whether gradients are kept from run to run.
func (a Accumulation) Keeps() bool { return a.Several() || a.Apart }

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

// Kinds returns how many kinds of runs there are, beside ir.Idle and ir.Apply. The last one is the
// last run's, which has exchanges, too, and updates unless they are Apart.
func (a Accumulation) Kinds() int {
	kinds, _ := a.Sums()
	return len(kinds)
}

// Every returns all kinds of runs.
func (a Accumulation) Every() (kinds []int) {
	for kind := range a.Kinds() {
		kinds = append(kinds, kind)
	}
	if a.Idles {
		kinds = append(kinds, ir.Idle)
	}
	if a.Apart {
		kinds = append(kinds, ir.Apply)
	}
	return kinds
}

// Sums returns what runs of each kind add up, beside ir.Idle and ir.Apply, and the kind of each
// run: those of one kind have the same steps.
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

// Gathers are the runs in which ranks gather variables.
func (a Accumulation) Gathers() ir.Runs {
	if a.Idles {
		return ir.WithIdle
	}
	return 0
}

// LastRun is the kind of the last run.
func (a Accumulation) LastRun() ir.Runs {
	if !a.Several() {
		return 0
	}
	return 1 << (a.Kinds() - 1)
}

// UpdateRun is the kind of the run with the updates.
func (a Accumulation) UpdateRun() ir.Runs {
	if a.Apart {
		return 1 << ir.Apply
	}
	return a.LastRun()
}
