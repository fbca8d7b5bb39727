package lower

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Lookups says that ranks exchange what lookups of rows add to the gradient of a table as these
// rows, and not as a gradient of the table's size. Its other term, if it has one, such as the
// gradient of an output layer whose weights the table is, leaves in the bucket of the update: it is
// complete at the beginning of the backward pass, and that of the lookups at the end.
//
// All ranks get the indices and the rows of all ranks, and add the rows up in rank order. The
// gradient is what comes back of the bucket, and Weight times that sum.
type Lookups struct {
	Ranks  int
	Weight float64
	Alone  bool // there is no other term, and no bucket
}

// Table is how a variable is looked up: so many rows in a run, of as many as it has there, or 0 if
// that makes none of at most two terms of its gradient. Alone says that it is the only one.
type Table struct {
	Rows, Of int
	Alone    bool
}

// Rows is the index of the [ir.Opaque] that gives all ranks the rows, or indices, of all of them.
const Rows = -2

// Tables returns how the variables are looked up whose gradients these are.
func Tables(p *ir.Program, gradients ...ir.ID) []Table {
	all := make([]Table, len(gradients))
	if !slices.ContainsFunc(p.Values, func(v ir.Value) bool { return v.Op == ir.GatherGrad{} }) {
		return all
	}
	p = Program(p, gradients...)
	for i, id := range p.Results[len(p.Results)-len(gradients):] {
		if rest, lookup, ok := terms(p, id); ok {
			of := p.Values[lookup]
			all[i] = Table{p.Values[of.Args[1]].Shape.Size(), of.Shape.At(0), rest < 0}
		}
	}
	return all
}

// terms returns the two terms of a gradient, of which the second one is of lookups; the first one
// is -1 if there is none.
func terms(p *ir.Program, gradient ir.ID) (rest, lookup ir.ID, ok bool) {
	within := func(id ir.ID) ir.ID {
		for p.Values[id].Op == (ir.Reshape{}) {
			id = p.Values[id].Args[0]
		}
		return id
	}
	of := func(id ir.ID) bool { return p.Values[id].Op == ir.GatherGrad{} }
	id := within(gradient)
	if of(id) {
		return -1, id, true
	}
	if p.Values[id].Op != (ir.Binary{Op: fuse.Add}) {
		return -1, -1, false
	}
	x, y := p.Values[id].Args[0], within(p.Values[id].Args[1])
	if !of(y) {
		x, y = p.Values[id].Args[1], within(x)
	}
	return x, y, of(y) && !of(within(x))
}

// splitLookups returns the program with what lookups add to its last results, the gradients, as
// results behind these, as far as updates have lookups. Gradients are without that then, unless
// they have no other term. With sums over all ranks,
//
//	Sum(x + GatherGrad(dy, list)) = Sum(x) + GatherGrad(rows of all dy, rows of all lists)
//
// which adds the rows in the order of ranks.
func splitLookups(p *ir.Program, updates []Update) (*ir.Program, error) {
	n := len(p.Results) - len(updates)
	rests, sums := slices.Clone(p.Results[n:]), make([]ir.ID, len(updates))
	ranks := map[ir.ID]int{} // by value that all ranks get
	for i, u := range updates {
		of, ok := u.Lookups, false
		if of == nil {
			continue
		}
		rests[i], sums[i], ok = terms(p, p.Results[n+i])
		if !ok || (rests[i] < 0) != of.Alone {
			return nil, fmt.Errorf("lower: the gradient of update %d has other terms than lookups "+
				"of rows", i)
		}
		for _, a := range p.Values[sums[i]].Args {
			ranks[a] = of.Ranks
		}
	}
	if len(ranks) == 0 {
		return p, nil
	}
	q, to, all := rowsOfAll(p, ranks)
	q.Results = mapped(p.Results[:n], to)
	var behind []ir.ID
	for i, u := range updates {
		var sum ir.ID
		if u.Lookups != nil {
			v := p.Values[sums[i]]
			v.Args = mapped(v.Args, all)
			sum = q.Add(v)
		}
		if rests[i] < 0 {
			q.Results = append(q.Results, sum)
			continue
		}
		q.Results = append(q.Results, to[rests[i]])
		if u.Lookups != nil {
			behind = append(behind, sum)
		}
	}
	q.Results = append(q.Results, behind...)
	return prune(q), nil
}

// rowsOfAll returns the values of a program, and behind some of them the rows of so many ranks. It
// says what becomes of each value, and of those rows.
func rowsOfAll(p *ir.Program, ranks map[ir.ID]int) (q *ir.Program, to, all []ir.ID) {
	q, to, all = &ir.Program{}, make([]ir.ID, len(p.Values)), make([]ir.ID, len(p.Values))
	for i, v := range p.Values {
		v.Args = mapped(v.Args, to)
		to[i] = q.Add(v)
		if times := ranks[ir.ID(i)]; times > 0 {
			v.Shape = v.Shape.With(0, times*v.Shape.At(0))
			v.Op, v.Args = ir.Opaque{Index: Rows, Name: "rows of all ranks", Placed: true},
				[]ir.ID{to[i]}
			all[i] = q.Add(v)
		}
	}
	return q, to, all
}

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
