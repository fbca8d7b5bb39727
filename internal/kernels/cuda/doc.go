// Package cuda is the arithmetic of package kernels, and more, on a CUDA device.
//
// The kernels are the .cu files of this directory, one family each. They are compiled ahead to PTX
// (make ptx), which is embedded here by gzip and which drivers since CUDA 11 compile for devices
// since the V100. A family.ptx.gz is for compute capability 7.0 and newer. Where instructions of
// newer devices pay, there is a family.sm_80.ptx.gz, family.sm_90.ptx.gz or family.sm_90a.ptx.gz
// (9.0 alone), too, and a device takes the newest that it runs. All variants give bitwise identical
// results, except matrix multiplications, attention and recurrent layers of floats that are rounded
// to fewer bits. EURYALE_KERNELS=sm_70 takes the oldest on any device: [ptxWith].
//
// What ptxas makes of the texts for 8.0 and 9.0 is embedded, too (make machine-code), so that on
// devices of compute capability 8.x and 9.0 the driver compiles none of them: all would take 13
// seconds. It compiles the text on other devices, and where it is too old for the machine code,
// which is for CUDA 12 and newer.
//
// On Hopper and newer, with a driver for CUDA 12.3 or newer, kernels use programmatic dependent
// launch: see pdl.go. In the text for Hopper, some kernels of allreduce let the next kernel start
// before they end.
//
// [Kernels] turns a call of [backend.Arithmetic] into a [Launch]: the name of an
// entry, the geometry of the launch and the parameters. It is plain Go and
// touches no device; a [Launcher] does the rest. Under tag gpu, Load returns one
// that launches on a stream of gorgonia.org/cu.
//
// The directory emulator compiles the same sources for the host. The tests
// launch there, and make gpu-emulated runs the GPU's tests on a driver made of
// it, so that all of this is tested without a GPU.
//
// Results are bitwise those of the host's kernels, except for payloads of NaNs that arithmetic
// makes, and for matrix multiplications, attention and recurrent layers, which add in an order of
// their own.
package cuda
