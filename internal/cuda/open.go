package cuda

import (
	"errors"
	"fmt"
)

// Available returns nil if there is a GPU and a driver that is new enough, and
// otherwise an error that says what is missing. A program built without tag gpu has no GPU.
func Available() error { return available() }

// Driver returns how many devices this process can see, and up to which CUDA the driver is for,
// such as 13000 for 13.0.
func Driver() (devices, version int, err error) {
	if err := Available(); err != nil {
		return 0, 0, err
	}
	if devices, version, err = look(); err != nil {
		err = fmt.Errorf("cuda: count the devices: %w", err)
	}
	return devices, version, err
}

// Devices opens every device that this process can see, in the order of their
// ordinals.
func Devices() ([]*Device, error) {
	n, _, err := Driver()
	if err != nil {
		return nil, err
	}
	all := make([]*Device, 0, n)
	for ordinal := range n {
		d, err := Open(ordinal)
		if err != nil {
			for _, open := range all {
				err = errors.Join(err, open.Close())
			}
			return nil, err
		}
		all = append(all, d)
	}
	return all, nil
}

// Open opens a device. The kernels of queues' arithmetic are loaded when it returns; those of
// matrix multiplications, convolutions, attention and collectives are loaded for what needs them:
// see Prepare of [Device]. Opening a device again gives another Device, with its own memory and
// queues. Without a GPU, it fails with what [Available] returns.
func Open(ordinal int) (*Device, error) {
	if err := Available(); err != nil {
		return nil, err
	}
	return open(ordinal)
}
