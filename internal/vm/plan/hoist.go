package plan

import (
	"cmp"
	"slices"

	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// goal is the gradient of a variable, and the groups that compute it and nothing else.
type goal struct {
	bucket  int // that it is exchanged in; those that stay come after all buckets
	place   int // of its last group in the order of the program
	groups  []*group
	missing int // operands that other groups have still to compute
}

// hoistGradients returns groups in an order in which each gradient is computed as soon as its
// operands are there, gradients of the first bucket first: before the steps that go on backwards.
// The exchange of a bucket then has these to hide behind, also the last but one. Activations die
// earlier, too. All other groups stay in the order of the program.
func (g *grouping) hoistGradients(all []*group, x bucketing) []*group {
	of := g.goals(all, x)
	waiting := map[*group][]*goal{} // for a group
	for _, y := range all {
		for z := range g.needsOf(y) {
			if t := of[y]; t != nil && of[z] != t {
				waiting[z] = append(waiting[z], t)
				t.missing++
			}
		}
	}
	order, emitted := make([]*group, 0, len(all)), map[*group]bool{}
	var ready []*goal
	emit := func(y *group) {
		if emitted[y] {
			return
		}
		emitted[y], order = true, append(order, y)
		for _, t := range waiting[y] {
			if t.missing--; t.missing == 0 {
				ready = append(ready, t)
			}
		}
	}
	for i, y := range all {
		emit(y)
		if i+1 < len(all) && g.ends(y, all[i+1]) {
			continue
		}
		for len(ready) > 0 {
			t := slices.MinFunc(ready, (*goal).compare)
			ready = slices.DeleteFunc(ready, func(other *goal) bool { return other == t })
			for _, y := range t.groups {
				emit(y)
			}
		}
	}
	return order
}

func (t *goal) compare(other *goal) int {
	return cmp.Or(cmp.Compare(t.bucket, other.bucket), cmp.Compare(t.place, other.place))
}

// goals returns which gradient a group computes, and nothing else.
func (g *grouping) goals(all []*group, x bucketing) map[*group]*goal {
	of := map[*group]*goal{}
	bucket := slices.Repeat([]int{len(x.buckets)}, len(x.gradients))
	for b, updates := range x.buckets {
		for _, update := range updates {
			bucket[update] = b
		}
	}
	for update, id := range x.gradients {
		last := g.of[g.base[id]]
		if last == nil {
			continue
		}
		if t := of[last]; t == nil || bucket[update] < t.bucket {
			of[last] = &goal{bucket: bucket[update]}
		}
	}
	for i, y := range slices.Backward(all) {
		t := of[y]
		if t == nil {
			if t = g.onlyFor(y, of); t == nil {
				continue
			}
			of[y] = t
		}
		t.place = max(t.place, i)
		t.groups = append(t.groups, y)
	}
	for i, y := range all {
		if t := of[y]; t != nil && t.place == i {
			slices.Reverse(t.groups)
		}
	}
	return of
}

// onlyFor returns the goal that all readers of a group are for, nil if there is none.
func (g *grouping) onlyFor(y *group, of map[*group]*goal) (t *goal) {
	for _, m := range y.members {
		if ir.Effect(g.program.Values[m].Op) {
			return nil
		}
		for _, reader := range g.needed[m] {
			z := g.of[reader]
			if z == y {
				continue
			}
			if of[z] == nil || t != nil && of[z] != t {
				return nil
			}
			t = of[z]
		}
	}
	return t
}

// needsOf yields the groups that a group needs, one for each operand.
func (g *grouping) needsOf(y *group) func(yield func(*group) bool) {
	return func(yield func(*group) bool) {
		for _, m := range y.members {
			for _, id := range g.needs[m] {
				if z := g.of[id]; z != y && !yield(z) {
					return
				}
			}
		}
	}
}

// ends reports whether a loop may run in the product before it: see epilogues.
func (g *grouping) ends(product, loop *group) bool {
	if !loop.loop || !multiplies(g.program.Values[product.members[0]].Op) {
		return false
	}
	for z := range g.needsOf(loop) {
		if z == product {
			return true
		}
	}
	return false
}
