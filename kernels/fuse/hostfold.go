package fuse

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// folded is a folded output: one accumulator for each of its elements, a float64 for floats and
// an int64 for integers, which both types of each hold exactly.
type folded[T number, A int64 | float64] struct {
	h       *host
	output  int
	op      backend.ReduceOp
	count   A // elements that are folded into one
	v       [][]T
	sums    []A
	from    cursor // of the accumulators, along the loop
	to      cursor // of the output, along the kept axes
	block   backend.Buffer
	initial A
}

// fold adds the fold of an output.
func (h *host) fold(k int, out Output) {
	switch Type(out.DType) {
	case backend.F32:
		foldOf[float32, float64](h, h.f32, k, out, math.Inf(1))
	case backend.F64:
		foldOf[float64, float64](h, h.f64, k, out, math.Inf(1))
	case backend.I32:
		foldOf[int32, int64](h, h.i32, k, out, math.MaxInt32)
	case backend.I64:
		foldOf[int64, int64](h, h.i64, k, out, math.MaxInt64)
	}
}

// foldOf takes the largest number, with which a minimum begins.
func foldOf[T number, A int64 | float64](h *host, v [][]T, k int, out Output, largest A) {
	all, kept := h.layout.size()
	f := &folded[T, A]{h: h, output: k, op: out.Op, count: A(all / kept), v: v, sums: make([]A, kept)}
	f.from = cursor{shape: h.layout.shape, strides: h.layout.dense()}
	f.to = h.keptCursor(h.layout.outputs[k])
	f.block = backend.Of(make([]float64, BlockSize)).As(out.DType).Slice(0, BlockSize)
	f.initial = initial[T](out.Op, largest)
	h.folds = append(h.folds, f)
	h.stores = append(h.stores, f.add)
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
	return A(math.Copysign(0, -1)) // -0 + x is x, also for zeros
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

func (f *folded[T, A]) begin() { fill(f.sums, f.initial) }

// add folds a block.
func (f *folded[T, A]) add(lo, n int) error {
	f.from.seek(lo)
	for x := f.v[f.h.p.Outputs[f.output].Value][:n]; len(x) > 0; {
		at, count := f.from.next(len(x))
		if f.from.run() == 0 {
			f.sums[at] = foldRun(f.op, f.sums[at], x[:count])
		} else {
			foldInto(f.op, f.sums[at:at+count], x[:count])
		}
		x = x[count:]
	}
	return nil
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

// finish stores the folded elements.
func (f *folded[T, A]) finish() error {
	f.to.seek(0)
	for lo := 0; lo < len(f.sums); lo += BlockSize {
		sums := f.sums[lo:min(lo+BlockSize, len(f.sums))]
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
