// Package kernels is the arithmetic around collectives: zero, copy, cast,
// scale, reduce.
//
// [Host] runs on host memory, on the calling goroutine. What each kernel means
// is the loop in the doc comment of [backend.Arithmetic]; every implementation
// gives the same bits, so that a result does not depend on where it was
// computed. 16-bit floats are widened to 32 bits, computed with, and rounded
// once to nearest even.
package kernels
