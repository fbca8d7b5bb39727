package samples

import (
	"math"

	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// missing returns what the elements of missing samples are in the result of an operation, if they
// are one number. Other elements are taken for finite: 0 times one is 0.
func (a *analysis) missing(v ir.Value, x []Value) (float64, bool) {
	switch op := v.Op.(type) {
	case ir.Reshape, ir.Permute, ir.Slice, ir.Broadcast, ir.Copy, ir.Cast, ir.Dropout:
		_, random := op.(ir.Dropout)
		return x[0].Missing, x[0].Known && (!random || zero(x[0]))
	case ir.Unary:
		return unary(op.Op, x[0])
	case ir.Binary:
		return binary(op.Op, x[0], x[1])
	case ir.Where:
		return chosen(x[0], zero(x[0]), x[2], x[1])
	case ir.Select:
		n := float64(v.Shape.At(op.Axis))
		if x[0].Known && (x[0].Missing < 0 || x[0].Missing >= n) {
			return x[2].Missing, x[2].Known
		}
		return x[1].Missing, x[1].Known && x[2].Known && x[1].Missing == x[2].Missing
	case ir.MatMul:
		return 0, zero(x[0]) && x[0].Kind == Rows || zero(x[1]) && x[1].Kind == Rows
	case ir.Concat:
		for _, other := range x {
			if !other.Known || other.Missing != x[0].Missing {
				return 0, false
			}
		}
		return x[0].Missing, true
	case ir.Reduce, ir.Unslice:
		return 0, zero(x[0])
	}
	return 0, false
}

// chosen is one of two values, of which a condition takes the first.
func chosen(condition Value, first bool, y, z Value) (float64, bool) {
	switch {
	case !condition.Known:
		return y.Missing, y.Known && z.Known && y.Missing == z.Missing
	case first:
		return y.Missing, y.Known
	}
	return z.Missing, z.Known
}

func unary(op fuse.Op, x Value) (float64, bool) {
	switch op {
	case fuse.Neg:
		return 0 - x.Missing, x.Known
	case fuse.Abs:
		return math.Abs(x.Missing), x.Known
	case fuse.Square:
		return x.Missing * x.Missing, x.Known
	case fuse.Sign, fuse.Sqrt, fuse.Cube, fuse.Tanh, fuse.Sin, fuse.Ceil, fuse.Floor, fuse.Relu:
		return 0, zero(x)
	}
	return 0, false
}

func binary(op fuse.Op, x, y Value) (float64, bool) {
	known := x.Known && y.Known
	switch op {
	case fuse.Mul:
		return x.Missing * y.Missing, known || zero(x) || zero(y)
	case fuse.Div:
		return 0, zero(x) && !zero(y)
	case fuse.Add:
		return x.Missing + y.Missing, known
	case fuse.Sub:
		return x.Missing - y.Missing, known
	case fuse.Maximum:
		return math.Max(x.Missing, y.Missing), known
	case fuse.Minimum:
		return math.Min(x.Missing, y.Missing), known
	}
	holds, ok := map[fuse.Op]bool{
		fuse.Less: x.Missing < y.Missing, fuse.LessEqual: x.Missing <= y.Missing,
		fuse.Greater: x.Missing > y.Missing, fuse.GreaterEqual: x.Missing >= y.Missing,
		fuse.Equal: x.Missing == y.Missing, fuse.NotEqual: x.Missing != y.Missing,
	}[op]
	if holds {
		return 1, ok && known
	}
	return 0, ok && known
}
