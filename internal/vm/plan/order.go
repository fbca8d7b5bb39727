package plan

import (
	"cmp"
	"slices"

	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// sequence is a list of all groups in which each comes behind those that it needs. It stays so when
// groups are merged: see [grouping.merge].
//
// Places are compared far more often than groups move, so that each has a number.
type sequence struct {
	first, last *group
}

// gap is between the places of groups that are appended: so many groups move there before all get
// new places.
const gap = 1 << 32

// append adds a group behind all others.
func (s *sequence) append(x *group) {
	x.prev = s.last
	if s.last == nil {
		s.first = x
	} else {
		s.last.next, x.place = x, s.last.place+gap
	}
	s.last = x
}

// remove takes a group out.
func (s *sequence) remove(x *group) {
	if x.prev == nil {
		s.first = x.next
	} else {
		x.prev.next = x.next
	}
	if x.next == nil {
		s.last = x.prev
	} else {
		x.next.prev = x.prev
	}
	x.prev, x.next = nil, nil
}

// moveBehind puts groups, in their order, right behind another one, or at the beginning if that is
// nil.
func (s *sequence) moveBehind(groups []*group, behind *group) {
	for _, x := range groups {
		s.remove(x)
	}
	for _, x := range groups {
		next := s.first
		if x.prev = behind; behind != nil {
			next, behind.next = behind.next, x
		} else {
			s.first = x
		}
		if x.next = next; next != nil {
			next.prev = x
		} else {
			s.last = x
		}
		behind = x
	}
	if len(groups) > 0 {
		s.number(groups)
	}
}

// number gives groups that lie together places between their neighbours.
func (s *sequence) number(groups []*group) {
	before, after := groups[0].prev, groups[len(groups)-1].next
	low := int64(-gap)
	if before != nil {
		low = before.place
	} else if after != nil {
		low = after.place - int64(len(groups)+1)*gap
	}
	step := int64(gap)
	if after != nil {
		step = (after.place - low) / int64(len(groups)+1)
	}
	if step == 0 { // no room: all get new ones
		place := int64(0)
		for x := s.first; x != nil; x = x.next {
			x.place = place
			place += gap
		}
		return
	}
	for i, x := range groups {
		x.place = low + int64(i+1)*step
	}
}

// search follows the dependencies between two groups, of which a comes first, from both ends in
// turns, until it meets a way from a to b through other groups, or knows that there is none: aside
// are then all groups between the two, in their order, that b depends on (above), or all that
// depend on a.
func (g *grouping) search(a, b *group) (aside []*group, above, way bool) {
	g.searches++
	up := walk{grouping: g, edges: g.needs, mark: 2 * g.searches, all: []*group{b}}
	down := walk{grouping: g, edges: g.needed, mark: 2*g.searches + 1, all: []*group{a}}
	for range g.Search {
		if up.follow(a, func(x *group) bool { return x.place > a.place }) ||
			down.follow(b, func(x *group) bool { return x.place < b.place }) {
			return nil, false, true
		}
		if up.done() || down.done() {
			of := up
			if !up.done() {
				of = down
			}
			aside = of.all[1:]
			slices.SortFunc(aside, func(x, y *group) int { return cmp.Compare(x.place, y.place) })
			return aside, up.done(), false
		}
	}
	return nil, false, true
}

// walk visits what a group needs, or what needs it, a dependency a step.
type walk struct {
	*grouping
	edges               [][]ir.ID // by value
	mark                int       // of the groups that it has met
	all                 []*group  // which it has met, the group where it began first
	group, member, edge int       // where it is
}

// done reports whether it has met everything.
func (w *walk) done() bool { return w.group == len(w.all) }

// follow follows the next dependency, and reports whether that leads to the end, unless right from
// the beginning. Only groups that are between the two count.
func (w *walk) follow(end *group, between func(*group) bool) bool {
	for !w.done() {
		x := w.all[w.group]
		if w.member == len(x.members) {
			w.group, w.member = w.group+1, 0
			continue
		}
		edges := w.edges[x.members[w.member]]
		if w.edge == len(edges) {
			w.member, w.edge = w.member+1, 0
			continue
		}
		y := w.of[edges[w.edge]]
		w.edge++
		switch {
		case y == nil || y == x || y.mark == w.mark:
		case y == end && x == w.all[0]: // right from the beginning
		case y == end || y.mark == w.mark^1: // the other walk has met it
			return true
		case between(y):
			y.mark = w.mark
			w.all = append(w.all, y)
		}
		return false
	}
	return false
}
