package kernels

import "github.com/euryale-ml/euryale/backend"

// block is how many elements are combined at a time, so that the running
// result stays in the first-level cache (8 KiB of float64).
const block = 1024

type number interface {
	float32 | float64 | int32 | int64 | byte
}

// reduce combines the sources in order, a block at a time. The running result
// of a block is kept apart and written to dst last, so that dst may be any of
// the sources.
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

// divide ends an average.
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

func widenAll[H half](out []float32, x []H) {
	x = x[:len(out)]
	for i := range out {
		out[i] = widen(x[i])
	}
}

func narrowAll[H half](out []H, x []float32) {
	x = x[:len(out)]
	for i := range out {
		out[i] = narrow[H](x[i])
	}
}

func scaleFloat[T float](dst, src backend.Buffer, factor T) {
	d, s := backend.View[T](dst), backend.View[T](src)
	for i, x := range s {
		d[i] = x * factor
	}
}

func scaleHalf[H half](dst, src backend.Buffer, factor float32) {
	d, s := backend.View[H](dst), backend.View[H](src)
	for i, x := range s {
		d[i] = narrow[H](widen(x) * factor)
	}
}

func scaleInt[T int32 | int64 | byte](dst, src backend.Buffer, factor float64) {
	d, s := backend.View[T](dst), backend.View[T](src)
	for i, x := range s {
		d[i] = T(float64(x) * factor)
	}
}

// cast converts by way of float64, which holds every float exactly.
func cast(dst, src backend.Buffer) {
	if dst.DType() == src.DType() {
		copy(dst.Bytes(), src.Bytes())
		return
	}
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
	s := backend.View[H](src)
	switch dst.DType() {
	case backend.F16:
		for i, d := range s {
			backend.View[backend.Float16](dst)[i] = narrow[backend.Float16](widen(d))
		}
	case backend.BF16:
		for i, d := range s {
			backend.View[backend.BFloat16](dst)[i] = narrow[backend.BFloat16](widen(d))
		}
	case backend.F32:
		widenAll(backend.View[float32](dst), s)
	case backend.F64:
		for i, d := range s {
			backend.View[float64](dst)[i] = float64(widen(d))
		}
	}
}

func castFloat[T float](dst, src backend.Buffer) {
	s := backend.View[T](src)
	switch dst.DType() {
	case backend.F16:
		for i, x := range s {
			backend.View[backend.Float16](dst)[i] = narrow[backend.Float16](toOdd(float64(x)))
		}
	case backend.BF16:
		for i, x := range s {
			backend.View[backend.BFloat16](dst)[i] = narrow[backend.BFloat16](toOdd(float64(x)))
		}
	case backend.F32:
		for i, x := range s {
			backend.View[float32](dst)[i] = float32(x)
		}
	case backend.F64:
		for i, x := range s {
			backend.View[float64](dst)[i] = float64(x)
		}
	}
}
