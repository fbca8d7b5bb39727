// Package host runs plans on host memory: loops by package kernels/fuse, matrix products by
// gonum's BLAS, which is the one that Gorgonia's tensors use, and the rest by plain loops.
//
//   - host.go: an Executor and its memory
//   - compile.go: a function for each step of a plan
//   - image.go, softmax.go: the plain loops
//   - opaque.go: operations that only their Do method knows
package host
