package ops

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// none stands for an axis that a transform does not have. No axis of a tensor,
// counted from either end, is equal to it.
const none = math.MinInt

// transform is a linear map (Max, Min and Prod aside) from one tensor on each
// rank to one tensor on each rank:
//
//  1. cut x along the axis scatter into one piece for each rank,
//  2. communicate,
//  3. join what was received along the axis gather,
//  4. multiply by scale.
//
// It is the same on every rank. Its adjoint is another transform.
type transform struct {
	kind backend.Kind // what communicates; 0 if nothing does
	op   backend.ReduceOp
	root int

	scatter, gather int // axes, or none

	// cut[r] is the length of rank r's piece along scatter, join[s] the length of rank s's x along
	// gather. If scatter and gather are the same axis, every rank sends equal pieces or every rank
	// receives equal pieces, so one list is enough and the other is nil.
	cut, join []int

	// rows describes the operands of an AllToAll to a communicator that permutes on the way; nil if
	// pieces are packed before and joined after.
	rows *backend.Rows

	scale float64
}

// layout returns the rows of an AllToAll of x, nil where pieces lie one after the other, or the
// communicator wants them so. It is the same on every rank.
func (t transform) layout(comm backend.Communicator, d backend.DType,
	x tensor.Shape) *backend.Rows {
	if t.kind != backend.AllToAll {
		return nil
	}
	P := comm.Size()
	c, count := t.collective(x, P), product(x)/P
	if c.Splits != nil {
		count = sum(c.Splits)
	}
	c.Rows = &backend.Rows{Src: rows(x, t.scatter, t.gather, t.join, P),
		Dst: rows(x, t.gather, t.scatter, t.cut, P)}
	if slices.Max(c.Rows.Src)*slices.Max(c.Rows.Dst) == 1 || !comm.Capabilities().RunsRows(
		c, d, count) {
		return nil
	}
	return c.Rows
}

// rows returns how many rows there are before an axis, at least 1, by rank, if the other axis has
// these lengths.
func rows(x tensor.Shape, axis, other int, lengths []int, P int) []int {
	all := make([]int, P)
	for r := range all {
		before := slices.Clone(x[:axis])
		if other < axis {
			before[other] = lengths[r]
		}
		all[r] = max(1, product(before))
	}
	return all
}

// shape returns the shape of y on rank r of P, from the shape of x.
func (t transform) shape(x tensor.Shape, r, P int) tensor.Shape {
	y := x.Clone()
	if t.scatter != none && t.cut != nil {
		y[t.scatter] = t.cut[r]
	}
	if t.gather != none {
		y[t.gather] = sum(t.received(r, P))
	}
	return y
}

// common returns a shape of x that all ranks have in common: along an axis where lengths differ, it
// has their total.
func (t transform) common(x tensor.Shape) []int {
	shape := slices.Clone(x)
	if t.gather != none && len(slices.Compact(slices.Clone(t.join))) > 1 {
		shape[t.gather] = sum(t.join)
	}
	return shape
}

// sent returns the lengths, along scatter, of the pieces that rank r sends.
func (t transform) sent(r, P int) []int {
	if t.cut == nil {
		return slices.Repeat([]int{t.join[r]}, P)
	}
	return t.cut
}

// received returns the lengths, along gather, of the pieces that rank r gets.
func (t transform) received(r, P int) []int {
	if t.join == nil {
		return slices.Repeat([]int{t.cut[r]}, P)
	}
	return t.join
}

// collective returns the call that the transform makes for an x of this shape.
func (t transform) collective(x tensor.Shape, P int) backend.Collective {
	c := backend.Collective{Kind: t.kind, Op: t.op, Root: t.root, Rows: t.rows}
	if !t.uneven() {
		return c
	}
	unit := 1 // elements of a piece of length 1 by 1
	for axis, n := range x {
		if axis != t.scatter && axis != t.gather {
			unit *= n
		}
	}
	switch {
	case t.kind == backend.AllToAll:
		for s := range P {
			for r := range P {
				c.Splits = append(c.Splits, unit*length(t.join, s)*length(t.cut, r))
			}
		}
	default:
		for r := range P {
			c.Splits = append(c.Splits, unit*length(t.join, r)*length(t.cut, r))
		}
	}
	return c
}

// length returns lengths[r], 1 if there is no list.
func length(lengths []int, r int) int {
	if lengths == nil {
		return 1
	}
	return lengths[r]
}

// uneven reports whether pieces differ in length.
func (t transform) uneven() bool {
	return len(slices.Compact(slices.Clone(t.cut))) > 1 ||
		len(slices.Compact(slices.Clone(t.join))) > 1
}

// adjoint returns the transform that carries gradients backward, for a loss that
// is the sum of the ranks' losses.
func (t transform) adjoint(P int) (transform, error) {
	adj, scale, err := backend.Collective{Kind: t.kind, Op: t.op, Root: t.root}.Adjoint(P)
	if err != nil {
		return transform{}, err
	}
	return transform{
		kind: adj.Kind, op: adj.Op, root: adj.Root, scale: scale * t.scale,
		scatter: t.gather, gather: t.scatter, cut: t.join, join: t.cut,
	}, nil
}

// takes reports whether rank r's x matters.
func (t transform) takes(r int) bool {
	return r == t.root || t.kind != backend.Broadcast && t.kind != backend.Scatter
}

// gives reports whether rank r gets a result other than zeros.
func (t transform) gives(r int) bool {
	return r == t.root || t.kind != backend.Reduce && t.kind != backend.Gather
}

// name is the operation, as in the name of its constructor.
func (t transform) name() string {
	switch {
	case t.kind != 0:
		return kindNames[t.kind]
	case t.scatter != none:
		return "Split"
	default:
		return "Identity"
	}
}

// kindNames are the names of the constructors.
var kindNames = [...]string{
	backend.AllReduce: "AllReduce", backend.ReduceScatter: "ReduceScatter",
	backend.AllGather: "AllGather",
	backend.AllToAll:  "AllToAll", backend.Broadcast: "Broadcast", backend.Reduce: "Reduce",
	backend.Gather: "Gather", backend.Scatter: "Scatter",
}

// String returns the operation as errors and graphs print it:
// "ReduceScatter{sum, axis 1}", "AllToAll{2→1}".
func (t transform) String() string {
	var args []string
	if t.kind.Reduces() {
		args = append(args, t.op.String())
	}
	if t.kind.Rooted() {
		args = append(args, fmt.Sprintf("root %d", t.root))
	}
	switch {
	case t.kind == backend.AllToAll:
		args = append(args, fmt.Sprintf("%d→%d", t.scatter, t.gather))
	case t.scatter != none:
		args = append(args, fmt.Sprintf("axis %d", t.scatter))
	case t.gather != none:
		args = append(args, fmt.Sprintf("axis %d", t.gather))
	}
	if t.uneven() {
		args = append(args, "uneven")
	}
	if t.scale != 1 {
		args = append(args, fmt.Sprintf("×%g", t.scale))
	}
	if len(args) == 0 {
		return t.name()
	}
	return t.name() + "{" + strings.Join(args, ", ") + "}"
}

// identity is all of the transform, for hashes.
func (t transform) identity() string {
	return fmt.Sprintf("%v cut %v join %v scale %x", t, t.cut, t.join, t.scale)
}

func sum(xs []int) int {
	n := 0
	for _, x := range xs {
		n += x
	}
	return n
}

// product returns the number of elements of a shape, 1 for a scalar's.
func product(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}
