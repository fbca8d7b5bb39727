package elastic

import (
	"cmp"
	"slices"
)

// maxTries is how many generations in a row the same members may fail in without a step. A fault of
// the network shows in the first one: these are for what no report explains. firstTries is the same
// before the first step, where all give up: there is nothing to lose.
const (
	maxTries   = 2
	firstTries = 2 * maxTries
)

// maxBranches bounds the search for the most members that reach each other. Links of whole machines
// take few; beyond the bound the result is good, and may not be best.
const maxBranches = 1 << 12

// choose makes the next generation of the present members and of replacements, without those with
// whom it would fail as the present one has. All processes that decide do so by the same reports.
// The state is never left out. It reports whether there is no reason to go on: before the first
// step there is nothing to lose, and it is not clear who is at fault.
func (p *Process) choose(next *View) (failing bool) {
	members := len(next.Members)
	if !next.Ending {
		for _, id := range p.replacements() {
			next.add(id, Position{Part: p.posted[id].Position.Part})
		}
	}
	branches := maxBranches
	next.keep(p.mutual(next, next.Members, &branches))
	most := p.limits.Most
	if one := max(1, next.Parts); members == one && slices.ContainsFunc(next.Members,
		func(id ID) bool { return p.posted[id].Position.Retiring }) {
		most = max(most, 2*one) // who replaces it comes first
	}
	next.limit(most)
	kept := next.Members
	if !p.enough(p.view) || members < len(p.view.Members) ||
		!slices.ContainsFunc(kept, func(id ID) bool { return p.posted[id].Idle }) {
		return false
	}
	isNew := func(id ID) bool { return p.view.Rank(id) < 0 }
	old := slices.DeleteFunc(slices.Clone(kept), isNew)
	if len(old) < members {
		return false
	}
	next.Tries = p.view.Tries + 1
	out, clear := p.culprit(next, old)
	switch begun := clear || next.Next() > 0 || len(p.view.Fresh()) > 0; {
	case !begun:
		return next.Tries >= firstTries
	case next.Tries < maxTries:
		return false
	case out == 0:
		return true
	}
	next.Tries, next.Fault = 0, out
	next.keep(slices.DeleteFunc(slices.Clone(kept), func(id ID) bool { return id == out }))
	next.limit(most)
	return false
}

// reaches reports whether a process and others reach each other, as far as they have said.
func (p *Process) reaches(id ID, others []ID) bool { return len(p.apart(id, others)) == 0 }

// apart returns those of others that a process cannot reach, or that cannot reach it.
func (p *Process) apart(id ID, others []ID) (ids []ID) {
	for _, o := range others {
		if slices.Contains(p.posted[id].Unreached, o) ||
			slices.Contains(p.posted[o].Unreached, id) {
			ids = append(ids, o)
		}
	}
	return ids
}

// mutual returns the best of the groups in a view that all reach each other: see better.
func (p *Process) mutual(v *View, ids []ID, branches *int) []ID {
	if !slices.ContainsFunc(ids, func(id ID) bool { return len(p.posted[id].Unreached) > 0 }) {
		return ids
	}
	var worst ID
	var apart []ID
	for _, id := range ids {
		if a := p.apart(id, ids); len(a) > 0 && len(a) >= len(apart) {
			worst, apart = id, a
		}
	}
	if len(apart) == 0 {
		return ids
	}
	without := p.mutual(v, slices.DeleteFunc(slices.Clone(ids), func(id ID) bool {
		return id == worst
	}), branches)
	if *branches--; *branches < 0 && v.holds(without) {
		return without
	}
	with := p.mutual(v, slices.DeleteFunc(slices.Clone(ids), func(id ID) bool {
		return slices.Contains(apart, id)
	}), branches)
	if p.better(v, without, with) {
		return without
	}
	return with
}

// better reports whether a group of a view can go on better than another one: it has the state, it
// is large enough, it has more of the present members, it is larger, or its ranks are lower.
func (p *Process) better(v *View, ids, others []ID) bool {
	score := func(ids []ID) [4]int {
		if v.Parts > 0 {
			trains := *v
			trains.keep(ids)
			trains.limit(len(ids))
			ids = trains.Members
		}
		s := [4]int{0, 0, 0, len(ids)}
		if v.holds(ids) {
			s[0] = 1
		}
		if v.Ending || len(ids) >= p.limits.Least {
			s[1] = 1
		}
		for _, id := range ids {
			if p.view.Rank(id) >= 0 {
				s[2]++
			}
		}
		return s
	}
	a, b := score(ids), score(others)
	ranks := func(a, b ID) int { return cmp.Compare(v.Rank(a), v.Rank(b)) }
	return cmp.Or(slices.Compare(b[:], a[:]), slices.CompareFunc(ids, others, ranks)) <= 0
}

// culprit returns the member without whom the others go on, 0 if there is none: the one that most
// others blame, then one that blames itself, one that is new, and one of a high rank.
func (p *Process) culprit(v *View, members []ID) (id ID, clear bool) {
	const other, self, new = 4, 3, 2 // weights
	most := -1
	for _, m := range members {
		weight := 0
		for _, o := range members {
			switch {
			case p.posted[o].Blames != m:
			case o == m:
				weight += self
			default:
				weight += other
			}
		}
		if p.view.New(m) {
			weight += new
		}
		others := slices.DeleteFunc(slices.Clone(members), func(o ID) bool { return o == m })
		if v.holds(others) && weight >= most {
			id, most, clear = m, weight, weight > most && weight > 0
		}
	}
	return id, clear
}
