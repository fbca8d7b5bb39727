// Package nvml asks NVIDIA's management library for what CUDA does not tell: the
// version of the driver, and where NVLinks lead. It needs build tag gpu.
//
// The library is opened when it is first needed, so that programs start without
// it. It is a part of the driver; a container gets it with
// NVIDIA_DRIVER_CAPABILITIES=compute,utility.
//
// NVIDIA's own binding, github.com/NVIDIA/go-nvml, leaves its symbols undefined until the
// library is there. Linkers that resolve all of them when a program starts (-z now, which is
// what gcc of Ubuntu and of hardened systems asks for) make programs of that which do not
// start without a driver: "undefined symbol: nvmlGpuInstanceGetComputeInstanceProfileInfoV"
// (v0.13.4-1); LD_BIND_NOW=1 does the same to all programs. It has the linker take undefined
// symbols of all other packages, too.
package nvml
