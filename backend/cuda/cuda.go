// Package cuda is a GPU as a device of one process, for machines of package vm that train alone:
//
//	d, err := cuda.Open(0)        // a [backend.Device]
//	machine, err := vm.New(g, d)  // vm.New(g, nil) runs on the host
//	...
//	err = errors.Join(machine.Close(), d.Close())
//
// Ranks of a job need it not: euryale.Init opens the GPU of each, which the Device of its
// communicator is. Programs are built with tag gpu (docs/running.md); others have no GPU.
package cuda

import "github.com/euryale-ml/euryale/internal/cuda"

// Open opens the GPU of an ordinal, as CUDA_VISIBLE_DEVICES leaves them. Opening a GPU again gives
// another device, with its own memory and queues.
//
// Errors: what is missing for GPUs, such as the build tag or a driver; what the driver says.
func Open(ordinal int) (*cuda.Device, error) { return cuda.Open(ordinal) }
