package cuda

import (
	"errors"
	"fmt"
)

// Available returns nil if there is a GPU and a driver that is new enough, and
// otherwise an error that says what is missing. A program built without tag gpu has no GPU.
func Available() error { return available() }

// Devices opens every device that this process can see, in the order of their
// ordinals.
func Devices() ([]*Device, error) {
	if err := Available(); err != nil {
		return nil, err
	}
	n, err := count()
	if err != nil {
		return nil, fmt.Errorf("cuda: count the devices: %w", err)
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
// products, convolutions, attention and collectives are loaded for what needs them: see
// Prepare of [Device]. Opening a device again gives another Device, with its own memory and queues.
// Without a GPU, it fails with what [Available] returns.
func Open(ordinal int) (*Device, error) {
	if err := Available(); err != nil {
		return nil, err
	}
	return open(ordinal)
}
