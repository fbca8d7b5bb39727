package plan

import (
	"slices"

	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// tail returns where the results of a program end that are not of updates: behind it come their
// gradients, and what lookups add to some of them.
func tail(p *ir.Program, updates []Update) (results int) {
	results = len(p.Results) - len(updates)
	for _, u := range updates {
		if u.Lookups != nil && !u.Lookups.Alone {
			results--
		}
	}
	return results
}

// gradients returns the gradients of updates, and what lookups add to them: -1 for nothing.
func gradients(p *ir.Program, updates []Update) (all, lookups []ir.ID) {
	rest := p.Results[tail(p, updates):]
	all, rest = rest[:len(updates)], rest[len(updates):]
	for i, u := range updates {
		id := ir.ID(-1)
		switch {
		case u.Lookups == nil:
		case u.Lookups.Alone:
			id = all[i]
		default:
			id, rest = rest[0], rest[1:]
		}
		lookups = append(lookups, id)
	}
	return all, lookups
}

// withoutLookups returns the groups but those of what lookups add to gradients: [layouter.lookUp]
// appends their steps, behind the updates of all others, which run while the rows are on their way.
func (l *layouter) withoutLookups(all []*group) []*group {
	return slices.DeleteFunc(all, func(g *group) bool {
		return slices.Contains(l.lookups, g.members[0])
	})
}

// lookUp appends the sums of the rows of all ranks, unless they are there.
func (l *layouter) lookUp() {
	for _, id := range l.lookups {
		if id >= 0 && !l.placed[id] {
			l.appendStep(id)
		}
	}
}
