package plan

import (
	"slices"
)

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
