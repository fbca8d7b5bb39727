// Package kernels is the arithmetic around collectives: zero, copy, cast,
// scale, reduce.
//
// [Host] runs on host memory, on the calling goroutine or a pool of workers. The loop in the doc
// comment of [backend.Arithmetic] defines each kernel. Every implementation gives bitwise identical
// results, so a result does not depend on where it was computed. 16-bit floats are widened to 32
// bits for the computation and rounded once to nearest even.
package kernels
