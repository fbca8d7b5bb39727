// Package samples finds out which elements of a program's values depend on which samples of a
// batch, so that a batch may be incomplete: the rows of samples that are not there must reach
// nothing else.
package samples

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// Kind says how a value depends on the samples of a batch.
type Kind uint8

// The kinds.
const (
	Free  Kind = iota // the same whatever the rows of missing samples are
	Rows              // each element depends on one sample
	Mixed             // elements depend on several samples, of which some may be missing
)

// Value says how the elements of a value depend on samples.
type Value struct {
	Kind  Kind
	Inner int // of Rows: element f, in row-major order, is of sample f/Inner % batch
	// Known says that all elements of missing samples are Missing. The elements of a Free value
	// are, if they are one number.
	Known   bool
	Missing float64
	Cause   ir.ID // of Mixed: the first value that is
}

// Batch returns the value of a variable of samples, [batch, ...].
func Batch(shape ir.Dims, missing float64, known bool) Value {
	return Value{Kind: Rows, Inner: shape.Size() / max(1, shape.At(0)), Missing: missing,
		Known: known}
}

// Counts reports whether missing samples can change a value that is no list of rows: a loss.
func (v Value) Counts() bool {
	return v.Kind == Mixed || v.Kind == Rows && !(v.Known && v.Missing == 0)
}

// Of returns how the values of a program depend on the samples of a batch. given are the variables
// that have rows of samples; together says which opaque operations take operands of other samples,
// from other ranks.
//
// It does not follow the elements that indices select, and takes an opaque operation of [batch,
// ...] for one that computes row by row.
func Of(p *ir.Program, batch int, given map[ir.ID]Value, together func(opaque int) bool) []Value {
	a := &analysis{p: p, batch: batch, together: together}
	for i, v := range p.Values {
		if known, ok := given[ir.ID(i)]; ok {
			a.of = append(a.of, known)
			continue
		}
		y := a.value(v)
		if y.Kind == Mixed && y.Cause < 0 {
			y.Cause = ir.ID(i)
		}
		a.of = append(a.of, y)
	}
	return a.of
}

type analysis struct {
	p        *ir.Program
	batch    int
	together func(opaque int) bool
	of       []Value
}

var (
	free  = Value{}
	mixed = Value{Kind: Mixed, Cause: -1}
)

// value returns how the result of an operation depends on samples.
func (a *analysis) value(v ir.Value) Value {
	if s, ok := v.Op.(ir.Scalar); ok {
		return Value{Known: true, Missing: s.Float()}
	}
	var x []Value
	rows := false
	for _, id := range v.Args {
		if x = append(x, a.of[id]); a.of[id].Kind == Mixed {
			return a.of[id]
		}
		rows = rows || a.of[id].Kind == Rows
	}
	y := free
	switch {
	case len(x) == 0:
		return free
	case rows && a.batch == 1: // all elements are of the sample
		y = Value{Kind: Rows, Inner: v.Shape.Size()}
		if op, ok := v.Op.(ir.Opaque); ok && a.together(op.Index) {
			return mixed
		}
	case rows:
		y = a.rows(v, x)
	}
	if y.Kind == Rows || y.Kind == Free && !rows { // a sum of samples is no known number
		if missing, ok := a.missing(v, x); ok {
			y.Missing, y.Known = missing, true
		}
	}
	return y
}

// spot is where an axis of a value has samples: element i is of sample i/unit % batch.
type spot struct{ axis, unit int }

// at returns the axis of an operand of Rows that has all samples; false if none has.
func (a *analysis) at(id ir.ID) (spot, bool) {
	shape, inner := a.p.Values[id].Shape, a.of[id].Inner
	strides := shape.Strides()
	for axis := range shape.Len() {
		stride, n := strides.At(axis), shape.At(axis)
		if n > 1 && stride <= inner && inner < stride*n {
			unit := inner / stride
			return spot{axis, unit}, inner%stride == 0 && n%(unit*a.batch) == 0
		}
	}
	return spot{}, false
}

// on returns Rows of a shape with the samples at a place.
func on(shape ir.Dims, at spot) Value {
	return Value{Kind: Rows, Inner: at.unit * shape.Strides().At(at.axis)}
}

// wholeBatches reports whether a length of an axis at a place, or an offset, is of whole batches.
func (a *analysis) wholeBatches(at spot, n int) bool { return n%(at.unit*a.batch) == 0 }

// rows is value for an operation with operands of Rows.
func (a *analysis) rows(v ir.Value, x []Value) Value {
	if ir.Elementwise(v.Op) {
		return alike(x)
	}
	if _, ok := v.Op.(ir.Reshape); ok {
		return Value{Kind: Rows, Inner: x[0].Inner}
	}
	if r, ok := v.Op.(ir.Reduce); ok && r.Axes.Len() == a.p.Values[v.Args[0]].Shape.Len() {
		return summed(r.Op == backend.Sum && zero(x[0]))
	}
	spots := make([]spot, len(x)) // of those of Rows
	for i, arg := range v.Args {
		var ok bool
		if spots[i], ok = a.at(arg); x[i].Kind == Rows && !ok {
			return mixed
		}
	}
	return a.moved(v, x, spots)
}

// moved is rows for an operation that moves axes, or computes along them.
func (a *analysis) moved(v ir.Value, x []Value, spots []spot) Value {
	at := spots[0]
	switch op := v.Op.(type) {
	case ir.Permute:
		at.axis = slices.Index(op.Axes.Slice(), at.axis)
		return on(v.Shape, at)
	case ir.Broadcast:
		return on(v.Shape, at)
	case ir.Slice:
		if at.axis == op.Axis && !(op.Step == 1 && a.wholeBatches(at, op.Start) &&
			a.wholeBatches(at, v.Shape.At(op.Axis))) {
			return mixed
		}
		return on(v.Shape, at)
	case ir.Unslice:
		if at.axis == op.Axis && !(op.Step == 1 && a.wholeBatches(at, op.Start) &&
			a.wholeBatches(at, a.p.Values[v.Args[0]].Shape.At(op.Axis))) {
			return mixed
		}
		return on(v.Shape, at)
	case ir.Reduce:
		if op.Axes.Has(at.axis) {
			return summed(op.Op == backend.Sum && zero(x[0]))
		}
		before := 0
		for _, axis := range op.Axes.Slice() {
			if axis < at.axis {
				before++
			}
		}
		return on(v.Shape, spot{at.axis - before, at.unit})
	case ir.Concat:
		return a.concat(v, op.Axis, x, spots)
	case ir.Gather:
		return gathered(v, op.Axis, x, spots)
	case ir.MatMul:
		return a.product(v, op, x, spots)
	case ir.Opaque:
		if a.together(op.Index) {
			return mixed
		}
	}
	return a.layer(v, x, spots)
}

// layer is rows for an operation that computes the samples of the first axis one by one.
func (a *analysis) layer(v ir.Value, x []Value, spots []spot) Value {
	to := spot{0, 1}
	switch op := v.Op.(type) {
	case ir.LSTM: // of input, h0 and c0
		n, inner := v.Shape.At(1), v.Shape.At(2)
		if op.Grad || n != a.batch || x[3].Kind == Rows ||
			x[0].Kind == Rows && x[0].Inner != 4*inner {
			return mixed
		}
		spots, x, to.axis = spots[1:3], x[1:3], 1
	case ir.Result:
		if of, ok := a.p.Values[v.Args[0]].Op.(ir.LSTM); ok && !of.Grad {
			return Value{Kind: Rows, Inner: v.Shape.At(v.Shape.Len() - 1)}
		}
	case ir.Convolution, ir.Put, ir.Gather, ir.GatherGrad, ir.AttentionGrad, ir.MaxPoolGrad:
		if c, ok := op.(ir.Convolution); !ok || c.Pass != 0 || x[1].Kind == Rows {
			return mixed
		}
	}
	for i, at := range spots {
		if x[i].Kind == Rows && (at.axis != 0 || at.unit != spots[first(x)].unit) {
			return mixed
		}
	}
	if i := first(x); i >= 0 {
		to.unit = spots[i].unit
	}
	if v.Shape.Len() <= to.axis || !a.wholeBatches(to, v.Shape.At(to.axis)) {
		return mixed
	}
	return on(v.Shape, to)
}

// alike is of elements that are each computed from one of every operand.
func alike(x []Value) Value {
	i := first(x)
	for _, other := range x {
		if other.Kind == Rows && other.Inner != x[i].Inner {
			return mixed
		}
	}
	return Value{Kind: Rows, Inner: x[i].Inner}
}

// first returns the first operand of Rows, -1 for none.
func first(x []Value) int {
	return slices.IndexFunc(x, func(v Value) bool { return v.Kind == Rows })
}

// summed is a sum over samples, of which the missing ones are zeros or count.
func summed(zeros bool) Value {
	if zeros {
		return free
	}
	return mixed
}

func zero(x Value) bool { return x.Known && x.Missing == 0 }

func (a *analysis) concat(v ir.Value, axis int, x []Value, spots []spot) Value {
	at := spots[first(x)]
	for i, arg := range v.Args {
		if x[i].Kind == Rows && spots[i] != at ||
			at.axis == axis && !a.wholeBatches(at, a.p.Values[arg].Shape.At(axis)) {
			return mixed
		}
	}
	return on(v.Shape, at)
}

// gathered takes elements of x by a list: rows of a table, or elements of each sample.
func gathered(v ir.Value, axis int, x []Value, spots []spot) Value {
	switch {
	case x[0].Kind == Free:
		return on(v.Shape, spot{axis, spots[1].unit})
	case x[1].Kind == Rows || spots[0].axis == axis:
		return mixed
	}
	return on(v.Shape, spots[0])
}

// product is of the rows of a, the columns of b, or of a sum of products of both.
func (a *analysis) product(v ir.Value, op ir.MatMul, x []Value, spots []spot) Value {
	n := v.Shape.Len()
	inner := [2]int{n - 1, n - 2}
	if op.TransA {
		inner[0] = n - 2
	}
	if op.TransB {
		inner[1] = n - 1
	}
	i := first(x)
	at, other := spots[i], 1-i
	both := x[other].Kind == Rows
	switch {
	case at.axis == inner[i]:
		if both && (spots[other].axis != inner[other] || spots[other].unit != at.unit) {
			return mixed
		}
		return summed(zero(x[i]) || both && zero(x[other]))
	case both && (at.axis >= n-2 || spots[other] != at):
		return mixed
	case at.axis >= n-2: // rows of a are rows, columns of b columns
		at.axis = n - 2 + i
	}
	return on(v.Shape, at)
}
