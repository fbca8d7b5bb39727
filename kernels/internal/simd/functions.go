package simd

import "github.com/euryale-ml/euryale/backend"

// Erf is the error function: a UnaryOp that package backend does not have.
const Erf = backend.Softplus + 1

// Repeat is the length of an operand that is one element for all: 64 bytes of float32 have as many,
// and more than 64 bytes do no harm.
const Repeat = 16

// Unary computes dst[i] = op(x[i]) and reports true, or reports false if the level has no vector
// instructions for op: the caller's loop in Go is what it means. x has at least len(dst) elements
// and may be dst. The results are the same at each level that has some. Those of rounded functions
// are right up to four units in the last place, float32 up to three: of all float32 the largest
// errors are 0.84 of log, 0.87 of log1p, 1.05 of exp, 1.44 of expm1, 1.67 of softplus, 1.83 of
// log2, 2.33 of erf, 2.40 of sigmoid and 2.42 of tanh (2026-11-23-epyc2-vector.md). All others have
// the bits of the loop, except those of a NaN.
func Unary[T Float](l Level, op backend.UnaryOp, dst, x []T) bool {
	if len(dst) == 0 {
		return l > Go
	}
	return unary(l, op, &dst[0], &x[:len(dst)][0], len(dst))
}

// Binary computes dst[i] = op(x[i], y[i]), as Unary does. An operand may also be [Repeat] times the
// same element, which is then the operand of each element.
func Binary[T Float](l Level, op backend.BinaryOp, dst, x, y []T) bool {
	if len(dst) == 0 {
		return l > Go
	}
	xstep, ystep := step(x, len(dst)), step(y, len(dst))
	return binary(l, op, &dst[0], &x[0], &y[0], xstep, ystep, len(dst))
}

// Where computes dst[i] = c[i] != 0 ? x[i] : y[i], with operands as Binary has them.
func Where[T Float](l Level, dst, c, x, y []T) bool {
	if len(dst) == 0 {
		return l > Go
	}
	cstep, xstep, ystep := step(c, len(dst)), step(x, len(dst)), step(y, len(dst))
	return where(l, &dst[0], &c[0], &x[0], &y[0], cstep, xstep, ystep, len(dst))
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
