package elastic

import "slices"

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

// leaveOut takes those out of the next generation with whom it would fail as the present one has.
// All processes that decide do so by the same reports. The state is never left out. It reports
// whether there is no reason to go on: before the first step there is nothing to lose, and it is
// not clear who is at fault.
func (p *Process) leaveOut(next *View) (failing bool) {
	all := slices.Clone(next.Members)
	branches := maxBranches
	p.keep(next, p.mutual(next, all, &branches))
	idle := func(id ID) bool { return p.posted[id].Idle }
	if !p.enough(p.view) || len(next.Members) < len(p.view.Members) ||
		!slices.ContainsFunc(all, idle) {
		return false
	}
	next.Tries = p.view.Tries + 1
	out, clear := p.culprit(next)
	switch begun := clear || next.Next() > 0 || len(p.view.Fresh()) > 0; {
	case !begun:
		return next.Tries >= firstTries
	case next.Tries < maxTries:
		return false
	case out == 0:
		return true
	}
	next.Tries, next.Fault = 0, out
	p.keep(next, slices.DeleteFunc(all, func(id ID) bool { return id == out }))
	return false
}

// keep leaves out all members of a view but some.
func (p *Process) keep(next *View, ids []ID) {
	v := *next
	next.Members, next.At = nil, nil
	for r, id := range v.Members {
		if slices.Contains(ids, id) {
			next.Members, next.At = append(next.Members, id), append(next.At, v.At[r])
		} else {
			next.Out = append(next.Out, id)
		}
	}
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

// mutual returns the most of the members of a view that all reach each other, and of whom one has
// the state. Of several such groups it returns the one of the lowest ranks.
func (p *Process) mutual(v *View, ids []ID, branches *int) []ID {
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
	if v.better(without, with) {
		return without
	}
	return with
}

// culprit returns the member without whom the others go on, 0 if there is none: the one that most
// others blame, then one that blames itself, one that is new, and one of a high rank.
func (p *Process) culprit(v *View) (id ID, clear bool) {
	const other, self, new = 4, 3, 2 // weights
	most := -1
	for _, m := range v.Members {
		weight := 0
		for _, o := range v.Members {
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
		others := slices.DeleteFunc(slices.Clone(v.Members), func(o ID) bool { return o == m })
		if v.holds(others) && weight >= most {
			id, most, clear = m, weight, weight > most && weight > 0
		}
	}
	return id, clear
}
