package fuse

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
)

// folded is a folded output: one accumulator for each of its elements, a float64 for floats and an
// int64 for integers, which hold both types of each exactly. If parts share elements, each has its
// own accumulators, which are combined in the order of the parts.
type folded[T number, A int64 | float64] struct {
	h       *host
	output  int
	op      backend.ReduceOp
	count   A // elements that are folded into one
	v       func(m *evaluator) [][]T
	folding folding[T, A]
	sums    []A
	apart   int    // accumulators of a part, if they are its own
	to      cursor // of the output, along the kept axes
	block   backend.Buffer
	initial A
}

// folding folds elements into one accumulator, and each into its own.
type folding[T number, A int64 | float64] struct {
	run  func(l simd.Level, op backend.ReduceOp, sum A, x []T) A
	into func(l simd.Level, op backend.ReduceOp, sums []A, x []T)
}

func floats[T simd.Float]() folding[T, float64] {
	return folding[T, float64]{foldFloats[T], foldFloatsInto[T]}
}

func integers[T int32 | int64]() folding[T, int64] {
	return folding[T, int64]{
		func(_ simd.Level, op backend.ReduceOp, sum int64, x []T) int64 {
			return foldRun(op, sum,
				x)
		},
		func(_ simd.Level, op backend.ReduceOp, sums []int64, x []T) { foldInto(op, sums, x) },
	}
}

// fold returns the fold of an output.
func (h *host) fold(k int, out Output) fold {
	switch Type(out.DType) {
	case backend.F32:
		return newFold(h, k, out, func(m *evaluator) [][]float32 {
			return m.f32
		}, math.Inf(1), floats[float32]())
	case backend.F64:
		return newFold(h, k, out, func(m *evaluator) [][]float64 {
			return m.f64
		}, math.Inf(1), floats[float64]())
	case backend.I32:
		return newFold(h, k, out, func(m *evaluator) [][]int32 { return m.i32 }, math.MaxInt32,
			integers[int32]())
	}
	return newFold(h, k, out, func(m *evaluator) [][]int64 { return m.i64 }, math.MaxInt64,
		integers[int64]())
}

// newFold takes the largest number, with which a minimum begins.
func newFold[T number, A int64 | float64](h *host, k int, out Output, v func(m *evaluator) [][]T,
	largest A, by folding[T, A]) fold {
	all, kept := h.layout.size()
	f := &folded[T, A]{h: h, output: k, op: out.Op, count: A(all / kept), v: v, folding: by,
		sums: make([]A, kept)}
	if h.split() {
		f.apart = kept
		f.sums = make([]A, h.parts*kept)
	}
	f.to = h.keptCursor(h.layout.outputs[k])
	f.block = backend.Of(make([]float64, blockSize)).As(out.DType).Slice(0, blockSize)
	f.initial = initial[T](out.Op, largest)
	return f
}

// initial returns what a fold begins with, given the largest number of the type.
func initial[T number, A int64 | float64](op backend.ReduceOp, largest A) A {
	switch op {
	case backend.Prod:
		return 1
	case backend.Min:
		return largest
	case backend.Max:
		if A(T(-largest-1)) < -largest { // integers have one more
			return -largest - 1
		}
		return -largest
	}
	return A(math.Copysign(0, -1)) // -0 + x is x, even for zeros
}

// keptCursor returns a cursor along the kept axes.
func (h *host) keptCursor(strides []int) cursor {
	var c cursor
	for k, extent := range h.layout.shape {
		if !h.layout.reduced[k] {
			c.shape, c.strides = append(c.shape, extent), append(c.strides, strides[k])
		}
	}
	if c.shape == nil {
		c.shape, c.strides = []int{1}, []int{0}
	}
	return c
}

// beginFold implements [fold].
func (f *folded[T, A]) beginFold() { fill(f.sums, f.initial) }

// add implements [fold].
func (f *folded[T, A]) add(m *evaluator, x Value) blockFunc {
	v := f.v(m)
	// of the accumulators, along the loop
	from := cursor{shape: m.layout.shape, strides: m.layout.dense()}
	return func(lo, n int) error {
		from.seek(lo)
		sums := f.sums[m.turn*f.apart:]
		for x := v[x][:n]; len(x) > 0; {
			at, count := from.next(len(x))
			if from.run() == 0 {
				sums[at] = f.folding.run(m.level, f.op, sums[at], x[:count])
			} else {
				f.folding.into(m.level, f.op, sums[at:at+count], x[:count])
			}
			x = x[count:]
		}
		return nil
	}
}

// foldFloats folds floats into one.
func foldFloats[T simd.Float](l simd.Level, op backend.ReduceOp, sum float64, x []T) float64 {
	switch op {
	case backend.Sum, backend.Avg:
		return sum + simd.Sum(l, x)
	case backend.Max:
		return max(sum, float64(simd.Max(l, x)))
	case backend.Min:
		return min(sum, float64(simd.Min(l, x)))
	}
	return foldRun(op, sum, x)
}

// foldFloatsInto folds each float into its own.
func foldFloatsInto[T simd.Float](l simd.Level, op backend.ReduceOp, sums []float64, x []T) {
	if op == backend.Sum || op == backend.Avg {
		simd.Accumulate(l, sums, x)
		return
	}
	foldInto(op, sums, x)
}

// foldRun folds elements into one.
func foldRun[T number, A int64 | float64](op backend.ReduceOp, sum A, x []T) A {
	switch op {
	case backend.Prod:
		for _, e := range x {
			sum *= A(e)
		}
	case backend.Min:
		for _, e := range x {
			sum = min(sum, A(e))
		}
	case backend.Max:
		for _, e := range x {
			sum = max(sum, A(e))
		}
	default:
		for _, e := range x {
			sum += A(e)
		}
	}
	return sum
}

// foldInto folds each element into its own.
func foldInto[T number, A int64 | float64](op backend.ReduceOp, sums []A, x []T) {
	x = x[:len(sums)]
	switch op {
	case backend.Prod:
		for i := range sums {
			sums[i] *= A(x[i])
		}
	case backend.Min:
		for i := range sums {
			sums[i] = min(sums[i], A(x[i]))
		}
	case backend.Max:
		for i := range sums {
			sums[i] = max(sums[i], A(x[i]))
		}
	default:
		for i := range sums {
			sums[i] += A(x[i])
		}
	}
}

// finish implements [fold].
func (f *folded[T, A]) finish() error {
	all := f.sums
	if f.apart > 0 {
		all = f.sums[:f.apart]
		for lo := f.apart; lo < len(f.sums); lo += f.apart {
			foldInto(f.op, all, f.sums[lo:lo+f.apart])
		}
	}
	f.to.seek(0)
	for lo := 0; lo < len(all); lo += blockSize {
		sums := all[lo:min(lo+blockSize, len(all))]
		block := f.block.Slice(0, len(sums))
		if err := f.narrow(block, sums); err != nil {
			return err
		}
		scatter(f.h.dst[f.output], block, &f.to)
	}
	return nil
}

// narrow converts accumulators to the type of the output. Integers wrap before a mean is taken.
func (f *folded[T, A]) narrow(block backend.Buffer, sums []A) error {
	if f.op == backend.Avg {
		for i, s := range sums {
			if !block.DType().Float() {
				s = A(T(s))
			}
			sums[i] = s / f.count
		}
	}
	switch sums := any(sums).(type) {
	case []float64:
		return kernels.Host{}.Cast(block, backend.Of(sums))
	case []int64:
		wrap(block, sums)
	}
	return nil
}

// wrap stores the low bits of integers.
func wrap(block backend.Buffer, x []int64) {
	switch block.DType() {
	case backend.U8:
		wrapTo(backend.View[byte](block), x)
	case backend.I32:
		wrapTo(backend.View[int32](block), x)
	case backend.I64:
		wrapTo(backend.View[int64](block), x)
	}
}

func wrapTo[T byte | int32 | int64](d []T, x []int64) {
	for i := range d {
		d[i] = T(x[i])
	}
}

// foldRows returns the step that folds the rows of value x, which has an element for each of the
// block, into value k.
func (m *evaluator) foldRows(k Value, op backend.ReduceOp, x Value) blockFunc {
	switch m.typeOf(k) {
	case backend.F32:
		return foldRowsOf(m, m.f32, k, x, op, floats[float32](), initial[float32](op, math.Inf(1)))
	case backend.F64:
		return foldRowsOf(m, m.f64, k, x, op, floats[float64](), initial[float64](op, math.Inf(1)))
	case backend.I32:
		return foldRowsOf(m, m.i32, k, x, op, integers[int32](),
			initial[int32](op, int64(math.MaxInt32)))
	}
	return foldRowsOf(m, m.i64, k, x, op, integers[int64](),
		initial[int64](op, int64(math.MaxInt64)))
}

func foldRowsOf[T number, A int64 | float64](m *evaluator, v [][]T, k, x Value, op backend.ReduceOp,
	by folding[T, A], initial A) blockFunc {
	if m.values[k].kind == single {
		return func(_, n int) error {
			fill(v[k], T(by.run(m.level, op, initial, v[x][:n])))
			return nil
		}
	}
	return func(_, n int) error {
		d, s := v[k][:n/m.inner], v[x][:n]
		for i := range d {
			d[i] = T(by.run(m.level, op, initial, s[i*m.inner:(i+1)*m.inner]))
		}
		return nil
	}
}
