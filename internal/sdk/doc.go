// Package sdk prepares a machine to build Go programs under tag gpu: CUDA's
// headers, a cuda.h that gorgonia.org/cu compiles with, and a libcuda.a that
// opens the driver when it is first called, so that the program also starts
// where there is none.
//
// No CUDA toolkit is needed. [Prepare] uses the headers of an installed toolkit, or downloads
// them, and makes the rest. [SDK.Script] is the environment for the go
// command. `euryale env` does all of this as a command.
package sdk
