// Package sdk prepares a machine to build Go programs under tag gpu: CUDA's
// headers, a cuda.h that gorgonia.org/cu compiles with, and a libcuda.a that
// opens the driver when it is first called, so that the program also starts
// where there is none.
//
// No CUDA toolkit is needed. Where there is one, its headers are used; where
// there is none, [Download] gets them. [Build] makes the rest, and [SDK.Env] is
// what the go command must find in its environment.
package sdk
