package group

import (
	"github.com/euryale-ml/euryale/backend"
)

// RunOnHost runs a collective on host memory, staged ([Staged]) if the communicator is on a device
// of other memory, and waits for it.
func RunOnHost(comm backend.Communicator, c backend.Collective, dst, src backend.Buffer) error {
	device := comm.Device()
	probe, err := device.Alloc(1)
	if err != nil {
		return err
	}
	if err := device.Free(probe); err != nil {
		return err
	}
	if !probe.Device() {
		return backend.Run(comm, c, dst, src)
	}
	q := device.Default()
	_, err = Staged(comm, q, dst, src, func(dst, src backend.Buffer) (backend.Work, error) {
		return comm.Start(q, c, dst, src)
	})
	return err
}
