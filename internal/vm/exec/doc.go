// Package exec runs plans: on host memory, or in the memory of a device.
//
//   - exec.go: an Executor and its memory
//   - outside.go: a device's copies of outside values: variables in copies that machines share, the
//     rest in uploads
//   - transfer.go: numbers of the plan, and results on their way back to the host
//   - segment.go: runs of steps, which devices that record graphs launch as graphs
//   - compile.go: a function for each step of a plan
//   - device.go: what plans need from a device, and the Device over a queue of package backend
//   - host.go: the host as a Device: loops by package kernels/fuse, matrix multiplications and the
//     rest by package kernels
//   - convolution.go: convolutions on the host, as products of patches
//   - opaque.go: operations that only the graph knows, run in place or by their Do on copies of
//     their operands
package exec
