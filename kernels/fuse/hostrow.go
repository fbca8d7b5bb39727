package fuse

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
)

// Values that are alike along rows have one element for each row of a block. Where others are computed
// from them, they are copied to each element, as values of their own: that of value k has the number
// len(Code)+k.

// alike reports whether a value has one element for each row.
func (h *host) alike(k Value) bool { return h.rows != nil && h.rows.alike[k] }

// once makes a step that computes or stores value k do it once for each row, if the value has one
// element for each.
func (h *host) once(k Value, do step) step {
	if !h.alike(k) {
		return do
	}
	return func(lo, n int) error { return do(lo/h.row, n/h.row) }
}

// cursor returns a cursor along the loop, or along its rows.
func (h *host) cursor(strides []int, rows bool) *cursor {
	shape := h.layout.shape
	if rows {
		shape, strides = shape[:len(shape)-1], strides[:len(strides)-1]
	}
	if len(shape) == 0 { // a loop has an inner axis
		shape, strides = []int{1}, []int{0}
	}
	return &cursor{shape: shape, strides: strides}
}

// typeOf returns the type of a value, or of the copies of one.
func (h *host) typeOf(k Value) backend.DType { return h.p.Code[k%len(h.p.Code)].Type }

// each returns the number of a value that has an element for each of the loop. Constants have.
func (h *host) each(k Value) Value {
	if !h.alike(k) || h.p.Code[k].Op == Const {
		return k
	}
	copies, t := len(h.p.Code)+k, h.typeOf(k)
	if len(h.f32[copies])+len(h.f64[copies])+len(h.i32[copies])+len(h.i64[copies]) > 0 {
		return copies
	}
	h.set(copies, backend.Of(make([]float64, h.block)).As(t).Slice(0, h.block))
	var do step
	switch t {
	case backend.F32:
		do = repeat(h.f32, copies, k, h.row)
	case backend.F64:
		do = repeat(h.f64, copies, k, h.row)
	case backend.I32:
		do = repeat(h.i32, copies, k, h.row)
	default:
		do = repeat(h.i64, copies, k, h.row)
	}
	h.computes = append(h.computes, do)
	return copies
}

func repeat[T any](v [][]T, to, from, row int) step {
	return func(_, n int) error {
		for i, x := range v[from][:n/row] {
			fill(v[to][i*row:(i+1)*row], x)
		}
		return nil
	}
}

// foldRows returns the step that folds the rows of value x into value k.
func (h *host) foldRows(k Value, op backend.ReduceOp, x Value) step {
	switch h.typeOf(k) {
	case backend.F32:
		return foldRowsOf(h.f32, k, x, h.row, op, initial[float32](op, math.Inf(1)))
	case backend.F64:
		return foldRowsOf(h.f64, k, x, h.row, op, initial[float64](op, math.Inf(1)))
	case backend.I32:
		return foldRowsOf(h.i32, k, x, h.row, op, initial[int32](op, int64(math.MaxInt32)))
	}
	return foldRowsOf(h.i64, k, x, h.row, op, initial[int64](op, int64(math.MaxInt64)))
}

func foldRowsOf[T number, A int64 | float64](v [][]T, k, x, row int, op backend.ReduceOp, initial A) step {
	return func(_, n int) error {
		d, s := v[k][:n/row], v[x][:n]
		for i := range d {
			d[i] = T(foldRun(op, initial, s[i*row:(i+1)*row]))
		}
		return nil
	}
}
