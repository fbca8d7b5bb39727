package simd

import "unsafe"

// Repeat is the length of an operand that is one element for all: 64 bytes of float32 have as many,
// and more than 64 bytes do no harm.
const Repeat = 16

// Unary computes dst[i] = op(x[i]) and reports true, or reports false if the level has no vector
// instructions for op: UnaryLoop is what it means. x has at least len(dst) elements
// and may be dst. The results are the same at each level that has some. Those of rounded functions
// are right up to four units in the last place, float32 up to three: of all float32 the largest
// errors are 0.84 of log, 0.87 of log1p, 1.05 of exp, 1.44 of expm1, 1.67 of softplus, 1.83 of
// log2, 2.33 of erf, 2.40 of sigmoid and 2.42 of tanh (2026-11-23-epyc2-vector.md). All others have
// the bits of UnaryLoop, except those of a NaN. Without elements, it only reports.
func Unary[T Float](l Level, op Op, dst, x []T) bool {
	return l > Go &&
		unaryVectors(l, op, unsafe.SliceData(dst), unsafe.SliceData(x[:len(dst)]), len(dst))
}

// Binary computes dst[i] = op(x[i], y[i]), as Unary does. An operand may also be [Repeat] times the
// same element, which is then the operand of each element.
func Binary[T Float](l Level, op Op, dst, x, y []T) bool {
	xstep, ystep := step(x, len(dst)), step(y, len(dst))
	return l > Go && binaryVectors(l, op, unsafe.SliceData(dst), unsafe.SliceData(x),
		unsafe.SliceData(y), xstep, ystep, len(dst))
}

// Where computes dst[i] = c[i] != 0 ? x[i] : y[i], with operands as Binary has them.
func Where[T Float](l Level, dst, c, x, y []T) bool {
	if l > Go && len(dst) > 0 {
		cstep, xstep, ystep := step(c, len(dst)), step(x, len(dst)), step(y, len(dst))
		whereVectors(l, &dst[0], &c[0], &x[0], &y[0], cstep, xstep, ystep, len(dst))
	}
	return l > Go
}

// step returns 1 for an operand with an element for each of n, and 0 for one that repeats.
func step[T Float](x []T, n int) int {
	if len(x) >= n {
		return 1
	}
	if len(x) < Repeat {
		panic("simd: an operand has too few elements")
	}
	return 0
}
