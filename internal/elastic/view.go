package elastic

import (
	"cmp"
	"errors"
	"slices"
	"strconv"
)

// ID names a process for its life, from 1 on. It is never given to another one.
type ID int

// String is the number that the launcher gives the process in what it tells, from 0 on.
func (id ID) String() string { return strconv.Itoa(int(id) - 1) }

// Phase says how far a process is with a step.
type Phase uint8

// The phases.
const (
	// Empty is a process without the state of the training: a replacement.
	Empty Phase = iota
	// Computing has the state before the step, and nothing of the step that counts.
	Computing
	// Reduced has that state, and the gradients of all members, which it has not applied.
	Reduced
)

// Position is where a process has stopped.
type Position struct {
	Step  int
	Phase Phase
	// Leaving is a member that has done all its steps, and will not be in another generation.
	Leaving bool
	// Retiring is a member that was told to end before its last step: the others go on without it.
	Retiring bool `json:",omitempty"`
	// Part is the part of the model that the process is made for: see [View].Parts.
	Part int `json:",omitempty"`
}

// compare orders positions by progress; Empty is before all.
func (p Position) compare(q Position) int {
	if p.Phase == Empty || q.Phase == Empty {
		return cmp.Compare(min(p.Phase, Computing), min(q.Phase, Computing))
	}
	return cmp.Or(cmp.Compare(p.Step, q.Step), cmp.Compare(p.Phase, q.Phase))
}

// View is a generation: who its members are, and where each has stopped before.
type View struct {
	Generation int
	// Members are in the order of their ranks.
	Members []ID
	At      []Position // of each member
	// Ending says that a member has done its last step: the others finish in any number.
	Ending bool
	// Tries counts the generations in a row that had these members, and in which one of them has
	// completed no step.
	Tries int `json:",omitempty"`
	// Fault is the member of the last generation that was left out as the culprit, 0 for none.
	Fault ID `json:",omitempty"`
	// Parts is how many parts the model has, 0 if members have all of it. Rank r of a generation
	// has part r % Parts then, so that members form replicas; a process has one part for life.
	Parts int `json:",omitempty"`
}

// First returns the first generation, whose members begin with one state.
func First(members ...ID) View {
	at := make([]Position, len(members))
	for i := range at {
		at[i].Phase = Computing
	}
	return View{Members: members, At: at}
}

// divided returns the first generation of a job whose model has parts.
func (v View) divided(parts int) View {
	if v.Generation > 0 || parts < 2 {
		return v
	}
	v.Parts, v.At = parts, slices.Clone(v.At)
	for r := range v.At {
		v.At[r].Part = r % parts
	}
	return v
}

// Rank returns the rank of a process, -1 if it is no member.
func (v View) Rank(id ID) int { return slices.Index(v.Members, id) }

// Next returns the step that the members do next. Of the members that have a state, the one that is
// furthest behind decides. If it has reduced a step, so have the others, and those that have not
// applied it do so first. If not, nobody has applied the step, and all repeat it.
func (v View) Next() (step int) {
	var least Position
	for _, p := range v.At {
		if p.Phase != Empty && (least.Phase == Empty || p.compare(least) < 0) {
			least = p
		}
	}
	if least.Phase == Reduced {
		return least.Step + 1
	}
	return least.Step
}

// blamed returns the member that an error blames by a method Blames() int, which returns its rank.
// An error without one is of the process that reports it. It returns 0 if nobody is to blame.
func (v View) blamed(err error, reports ID) ID {
	var other interface{ Blames() int }
	switch {
	case !errors.As(err, &other):
		return reports
	case other.Blames() < 0 || other.Blames() >= len(v.Members):
		return 0
	}
	return v.Members[other.Blames()]
}

// add adds a member.
func (v *View) add(id ID, at Position) {
	v.Members, v.At = append(v.Members, id), append(v.At, at)
}

// order puts the members that have a state first, so that rank 0 has one.
func (v *View) order() {
	empty := func(r int) int { return int(min(v.At[r].Phase, Computing)) }
	ranks := make([]int, len(v.Members))
	for r := range ranks {
		ranks[r] = r
	}
	slices.SortStableFunc(ranks, func(a, b int) int { return empty(b) - empty(a) })
	members, at := v.Members, v.At
	v.Members, v.At = nil, nil
	for _, r := range ranks {
		v.Members, v.At = append(v.Members, members[r]), append(v.At, at[r])
	}
}

// New reports whether a process is a member that has no state.
func (v View) New(id ID) bool {
	r := v.Rank(id)
	return r >= 0 && v.At[r].Phase == Empty
}

// Fresh returns the ranks of the members that have no state.
func (v View) Fresh() (ranks []int) {
	for r, p := range v.At {
		if p.Phase == Empty {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// Whole reports whether members have the state of the training, one of each part. The first ranks
// have it then, and hand it to those that have none.
func (v View) Whole() bool { return v.holds(v.Members) }

// holds reports whether some of the members have the state of the training. Where the training
// ends, each has all that it needs.
func (v View) holds(ids []ID) bool {
	parts := map[int]bool{}
	return slices.ContainsFunc(ids, func(id ID) bool {
		if at := v.At[v.Rank(id)]; at.Phase != Empty {
			parts[at.Part] = true
		}
		return len(parts) >= max(1, v.Parts) || v.Ending && len(parts) > 0
	})
}

// has reports whether a member has the state of a part.
func (v View) has(part int) bool {
	return slices.ContainsFunc(v.At, func(p Position) bool {
		return p.Phase != Empty && p.Part == part
	})
}

// limit leaves out members beyond a number, and those that are in no whole replica. It puts the
// others in the order of replicas; of each part the first ones stay.
func (v *View) limit(most int) {
	if v.Parts == 0 || v.Ending {
		v.keep(v.Members[:min(len(v.Members), most)])
		return
	}
	of := make([][]int, v.Parts) // the ranks
	for r, at := range v.At {
		of[at.Part] = append(of[at.Part], r)
	}
	n := most / v.Parts
	for _, ranks := range of {
		n = min(n, len(ranks))
	}
	all := *v
	v.Members, v.At = nil, nil
	for i := range n * v.Parts {
		r := of[i%v.Parts][i/v.Parts]
		v.add(all.Members[r], all.At[r])
	}
}

// keep leaves out all members but some.
func (v *View) keep(ids []ID) {
	if len(ids) == len(v.Members) {
		return
	}
	all := *v
	v.Members, v.At = nil, nil
	for r, id := range all.Members {
		if slices.Contains(ids, id) {
			v.Members, v.At = append(v.Members, id), append(v.At, all.At[r])
		}
	}
}
