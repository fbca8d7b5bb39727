// Package sdk prepares a machine to build Go programs under tag gpu: CUDA's
// headers, a cuda.h that gorgonia.org/cu compiles with, and a libcuda.a that
// opens the driver when it is first called, so that the program also starts
// where there is none.
//
// No CUDA toolkit is needed. [Prepare] uses the headers of one where it is, gets
// them where it is not ([Download]), and makes the rest ([Build]); [SDK.Script] is
// what the go command must find in its environment. `euryale env` is that as a
// command.
package sdk
