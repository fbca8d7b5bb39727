// Package nvml asks NVIDIA's management library for what CUDA does not tell: the
// version of the driver, and where NVLinks lead. It needs build tag gpu.
//
// The library is opened when it is first needed, so that programs start without
// it. It is a part of the driver; a container gets it with
// NVIDIA_DRIVER_CAPABILITIES=compute,utility.
package nvml
