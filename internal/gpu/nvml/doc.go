// Package nvml asks NVIDIA's management library for the version of the driver and the ends of
// NVLinks, which CUDA does not report. It needs build tag gpu.
//
// The library is opened when it is first used, so that programs start without it. It is part of
// the driver; a container gets it with NVIDIA_DRIVER_CAPABILITIES=compute,utility.
//
// NVIDIA's own binding, github.com/NVIDIA/go-nvml, leaves its symbols undefined until it has opened
// the library. With -z now, the default of gcc on Ubuntu and on hardened systems, such a program
// does not start without a driver: "undefined symbol:
// nvmlGpuInstanceGetComputeInstanceProfileInfoV" (v0.13.4-1). LD_BIND_NOW=1 has the same effect on
// any program. The binding also makes the linker accept undefined symbols of all other packages.
package nvml
