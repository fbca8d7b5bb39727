package proof

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/plan"
)

// Which memory is another's, and what that means for steps that run at one time.

// share reports whether two buffers have memory in common.
func (r *proof) share(x, y int) bool {
	if x == y || r.spaces[x] == r.spaces[y] {
		return true
	}
	a, b := &r.plan.Buffers[x], &r.plan.Buffers[y]
	return placed(a) && placed(b) && max(a.Offset, b.Offset) < min(a.Offset+a.Bytes,
		b.Offset+b.Bytes)
}

// meet reports whether any value of one list shares memory with one of another.
func (r *proof) meet(x, y []plan.Ref) bool {
	for i := range x {
		for k := range y {
			if r.share(x[i].Buffer, y[k].Buffer) {
				return true
			}
		}
	}
	return false
}

// beside returns an error if a step meets an operation that is under way, see [plan.Step].Until: it
// reads or writes what that writes, or writes what that reads. Operations of the graph run one
// after the other.
func (r *proof) beside(i int) error {
	r.under = slices.DeleteFunc(r.under, func(o int) bool { return r.plan.Steps[o].Until < i })
	s := &r.plan.Steps[i]
	_, opaque := s.Op.(ir.Opaque)
	for _, o := range r.under {
		u := &r.plan.Steps[o]
		if opaque || r.meet(u.Dsts, s.Args) || r.meet(u.Dsts, s.Dsts) || r.meet(u.Args, s.Dsts) {
			return fmt.Errorf("it meets step %d, %v of %s, which runs until step %d", o, u.Op,
				u.Name, u.Until)
		}
	}
	return nil
}

// leave notes an operation that is under way from now on.
func (r *proof) leave(i int) error {
	s := &r.plan.Steps[i]
	if s.Until == 0 {
		return nil
	}
	op, ok := s.Op.(ir.Opaque)
	if end := s.Until + 1; !ok || !op.Placed || s.Until <= i || end >= len(r.plan.Steps) ||
		r.plan.Steps[end].Runs != s.Runs || r.plan.Steps[end].Epilogue {
		return fmt.Errorf("nothing waits for it: it runs until step %d", s.Until)
	}
	r.under = append(r.under, i)
	return nil
}

// alone returns an error if a step writes over what it, or a step before it that runs it, still
// reads, or over what that writes.
func (r *proof) alone(i int, s *plan.Step) error {
	for k := range s.Dsts {
		if at := s.Dsts[k].Step; at != i {
			return fmt.Errorf("it writes a value of step %d", at)
		}
	}
	switch s.Op.(type) {
	case plan.Send, plan.Receive: // of memory that is the same before and after
		return nil
	}
	if err := r.cover(i, s.Dsts); err != nil {
		return err
	}
	by := i + 1
	for k := range s.Args {
		a := &s.Args[k]
		c := r.present[r.spaces[a.Buffer]].cover
		if c.by == by && (c.result < 0 || !r.aligned(s, c.result, k)) {
			return fmt.Errorf("it writes over an operand, %s", r.plan.Text(*a))
		}
	}
	for ; r.plan.Steps[i].Epilogue; i-- {
		if i == 0 || !r.inside(&r.plan.Steps[i-1], &r.plan.Steps[i]) {
			return errors.New("it is no epilogue of the step before it")
		}
		if err := r.chained(i-1, s, by); err != nil {
			return err
		}
	}
	return nil
}

// chained returns an error if a step writes over what another one, which may run it before it is
// done, reads or writes. What it reads itself it may write over: see aligned.
func (r *proof) chained(before int, s *plan.Step, by int) error {
	of := &r.plan.Steps[before]
	for k := range of.Args {
		if c := r.present[r.spaces[of.Args[k].Buffer]].cover; c.by == by {
			return fmt.Errorf("it writes over an operand of step %d, which may run it, %s", before,
				r.plan.Text(of.Args[k]))
		}
	}
	for k := range of.Dsts {
		d := &of.Dsts[k]
		reads := slices.ContainsFunc(s.Args, func(a plan.Ref) bool { return a.Buffer == d.Buffer })
		if !reads && r.meet(s.Dsts, of.Dsts[k:k+1]) {
			return fmt.Errorf("it writes over a result of step %d, which may run it, %s", before,
				r.plan.Text(*d))
		}
	}
	return nil
}

// cover notes which memory that has a value now the results of a step overlap. Results must not
// overlap each other.
func (r *proof) cover(step int, dsts []plan.Ref) error {
	arena := r.arena[:0]
	for j := range dsts {
		d := &dsts[j]
		covers := r.spaces[d.Buffer : d.Buffer+1]
		if placed(&r.plan.Buffers[d.Buffer]) {
			from, to := r.covered(d.Buffer)
			covers, arena = r.live[from:to], append(arena, d.Buffer)
		}
		for _, x := range covers {
			if r.present[x].by == step+1 {
				j = -1
			}
			r.present[x].cover = cover{step + 1, j}
		}
		if j < 0 && !placed(&r.plan.Buffers[d.Buffer]) {
			return fmt.Errorf("it writes two results at %s", r.plan.Text(*d))
		}
	}
	if r.arena = arena; len(arena) < 2 {
		return nil
	}
	slices.SortFunc(arena, func(x, y int) int {
		return cmp.Compare(r.plan.Buffers[x].Offset, r.plan.Buffers[y].Offset)
	})
	for k := range len(arena) - 1 {
		b, next := &r.plan.Buffers[arena[k]], &r.plan.Buffers[arena[k+1]]
		if b.Offset+b.Bytes > next.Offset {
			return fmt.Errorf("it writes two results at @%d", next.Offset)
		}
	}
	return nil
}

// covered returns which of the buffers of the arena that have a value share bytes with one:
// live[from:to].
func (r *proof) covered(buffer int) (from, to int) {
	b := &r.plan.Buffers[buffer]
	from, _ = slices.BinarySearchFunc(r.live, b.Offset+1, func(x, end int) int {
		return cmp.Compare(r.plan.Buffers[x].Offset+r.plan.Buffers[x].Bytes, end)
	})
	for to = from; to < len(r.live) && r.plan.Buffers[r.live[to]].Offset < b.Offset+b.Bytes; to++ {
	}
	return from, to
}
