package kernels

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
)

// block is how many elements are combined at a time, so that the running
// result stays in the first-level cache (8 KiB of float64).
const block = 1024

type number interface {
	float32 | float64 | int32 | int64 | byte
}

// reduce combines the sources in order, a block at a time. It writes the result of a
// block to dst last, so that dst may be one of the sources.
func reduce[T number](op backend.ReduceOp, dst backend.Buffer, srcs []backend.Buffer) {
	var scratch [block]T
	d := backend.View[T](dst)
	for lo := 0; lo < len(d); lo += block {
		hi := min(lo+block, len(d))
		acc := scratch[:hi-lo]
		first := backend.View[T](srcs[0])[lo:hi]
		if len(srcs) == 1 {
			copy(d[lo:hi], first)
			continue
		}
		for i, src := range srcs[1:] {
			out, left := acc, acc
			if i == 0 {
				left = first
			}
			if i == len(srcs)-2 {
				out = d[lo:hi]
			}
			combine(op, out, left, backend.View[T](src)[lo:hi])
		}
		if op == backend.Avg {
			divide(d[lo:hi], len(srcs))
		}
	}
}

// reduceHalf is reduce in 32 bits, rounded once at the end.
func reduceHalf[H half](op backend.ReduceOp, dst backend.Buffer, srcs []backend.Buffer) {
	var scratch, wide [block]float32
	d := backend.View[H](dst)
	for lo := 0; lo < len(d); lo += block {
		hi := min(lo+block, len(d))
		acc, next := scratch[:hi-lo], wide[:hi-lo]
		widenAll(acc, backend.View[H](srcs[0])[lo:hi])
		for _, src := range srcs[1:] {
			widenAll(next, backend.View[H](src)[lo:hi])
			combine(op, acc, acc, next)
		}
		if op == backend.Avg {
			divide(acc, len(srcs))
		}
		narrowAll(d[lo:hi], acc)
	}
}

// combine is one step of a reduction: out[i] = op(x[i], y[i]). out may be x or y.
func combine[T number](op backend.ReduceOp, out, x, y []T) {
	x, y = x[:len(out)], y[:len(out)]
	switch op {
	case backend.Sum, backend.Avg:
		if sumVector(out, x, y) {
			return
		}
		for i := range out {
			out[i] = x[i] + y[i]
		}
	case backend.Prod:
		for i := range out {
			out[i] = x[i] * y[i]
		}
	case backend.Min:
		for i := range out {
			out[i] = min(x[i], y[i]) // Go's min: NaN wins, -0 before +0
		}
	case backend.Max:
		for i := range out {
			out[i] = max(x[i], y[i])
		}
	}
}

// divide divides the sum of an average.
func divide[T number](x []T, n int) {
	// A byte cannot hold every n; no sum of bytes reaches n then.
	if T(n) == 0 || int(T(n)) != n {
		clear(x)
		return
	}
	for i := range x {
		x[i] /= T(n)
	}
}

// widenAll and narrowAll choose the format once, not for each element.

func widenAll[H half](out []float32, x []H) {
	switch x := any(x).(type) {
	case []backend.BFloat16:
		x = x[:len(out)]
		for i := range out {
			out[i] = math.Float32frombits(uint32(x[i]) << 16)
		}
	case []backend.Float16:
		x = x[:len(out)]
		for i := range out {
			out[i] = widenF16(uint16(x[i]))
		}
	}
}

func narrowAll[H half](out []H, x []float32) {
	x = x[:len(out)]
	switch out := any(out).(type) {
	case []backend.BFloat16:
		for i := range out {
			out[i] = backend.BFloat16(narrowBF16(x[i]))
		}
	case []backend.Float16:
		for i := range out {
			out[i] = backend.Float16(narrowF16(x[i]))
		}
	}
}

func scaleFloat[T float](dst, src backend.Buffer, factor T) {
	d, s := backend.View[T](dst), backend.View[T](src)
	for i, x := range s {
		d[i] = x * factor
	}
}

func scaleHalf[H half](dst, src backend.Buffer, factor float32) {
	var scratch [block]float32
	d, s := backend.View[H](dst), backend.View[H](src)
	for lo := 0; lo < len(d); lo += block {
		wide := scratch[:min(block, len(d)-lo)]
		widenAll(wide, s[lo:])
		for i := range wide {
			wide[i] *= factor
		}
		narrowAll(d[lo:lo+len(wide)], wide)
	}
}

func scaleInt[T int32 | int64 | byte](dst, src backend.Buffer, factor float64) {
	d, s := backend.View[T](dst), backend.View[T](src)
	for i, x := range s {
		d[i] = T(float64(x) * factor)
	}
}

// cast converts between floats, through float32 where that is exact or right.
func cast(dst, src backend.Buffer) {
	switch src.DType() {
	case backend.F16:
		castHalf[backend.Float16](dst, src)
	case backend.BF16:
		castHalf[backend.BFloat16](dst, src)
	case backend.F32:
		castFloat[float32](dst, src)
	case backend.F64:
		castFloat[float64](dst, src)
	}
}

func castHalf[H half](dst, src backend.Buffer) {
	if dst.DType() == backend.F32 {
		widenAll(backend.View[float32](dst), backend.View[H](src))
		return
	}
	var scratch [block]float32
	for lo := 0; lo < src.Len(); lo += block {
		hi := min(lo+block, src.Len())
		wide := scratch[:hi-lo]
		widenAll(wide, backend.View[H](src)[lo:hi])
		castFloat[float32](dst.Slice(lo, hi), backend.Of(wide))
	}
}

func castFloat[T float](dst, src backend.Buffer) {
	s := backend.View[T](src)
	switch dst.DType() {
	case backend.F16:
		narrowEach(backend.View[backend.Float16](dst), s)
	case backend.BF16:
		narrowEach(backend.View[backend.BFloat16](dst), s)
	case backend.F32:
		convert(backend.View[float32](dst), s)
	case backend.F64:
		convert(backend.View[float64](dst), s)
	}
}

func narrowEach[H half, T float](out []H, x []T) {
	if narrow, ok := any(x).([]float32); ok { // rounded once as it is
		narrowAll(out, narrow)
		return
	}
	var scratch [block]float32
	for lo := 0; lo < len(out); lo += block {
		once := scratch[:min(block, len(out)-lo)]
		for i := range once {
			once[i] = toOdd(float64(x[lo+i]))
		}
		narrowAll(out[lo:lo+len(once)], once)
	}
}

func convert[D, S float](out []D, x []S) {
	for i := range out {
		out[i] = D(x[i])
	}
}
