package plan

import "github.com/euryale-ml/euryale/internal/vm/ir"

// adds reports whether a run adds its gradient to a sum of others.
func (l *layouter) adds(sum ir.Assign) bool {
	_, adds := l.program.Values[sum.Value].Op.(ir.Binary)
	return adds
}

// firstRuns appends the step that computes a gradient in runs that add it to nothing, and write it
// where these keep it: that needs no pass of its own. It returns the other runs.
func (l *layouter) firstRuns(update int, s Step) (others ir.Runs) {
	for _, sum := range l.training.Sums[update] {
		if l.adds(sum) {
			others |= sum.Runs
			continue
		}
		to := l.ref(sum.To)
		to.Shape, to.Strides = s.Dsts[0].Shape, s.Dsts[0].Strides // a reshape may be between
		to.Step = len(l.plan.Steps)
		l.first[update] = to.Step
		l.plan.Steps = append(l.plan.Steps, Step{Op: s.Op, Dsts: []Ref{to}, Args: s.Args,
			Name: s.Name, Runs: sum.Runs})
	}
	return others
}

// accumulate appends the steps that add a gradient to those of the runs before, of which each run
// has at most one, and returns where the sums lie in the end that are exchanged.
func (l *layouter) accumulate(update int, name string) (branches []Ref) {
	var to Ref
	for _, sum := range l.training.Sums[update] {
		to = l.ref(sum.To)
		step, computed := l.first[update]
		if to.Step = step; computed && !l.adds(sum) {
			continue
		}
		b := l.loopOver(false, sum.Value)
		to.Step = len(l.plan.Steps)
		b.store(l.value[sum.Value], to)
		s := b.newStep(name, "accumulate")
		s.Runs = sum.Runs
		l.plan.Steps = append(l.plan.Steps, s)
	}
	all := l.training.Branches[update]
	for _, id := range all[:len(all)-1] { // of runs before
		branches = append(branches, l.ref(id))
	}
	return append(branches, to)
}
