package guard

import (
	"fmt"
	"sync"

	"github.com/euryale-ml/euryale/backend"
)

// Communicator runs the collectives of a communicator of the host on buffers of
// a [Device].
type Communicator struct {
	backend.Communicator // the host's
	device               *Device

	mu     sync.Mutex
	owned  []backend.Buffer // addresses of memory from Alloc
	closed bool
}

var _ backend.Wrapper = (*Communicator)(nil)

// Over returns inner for buffers of d. It owns inner.
func Over(inner backend.Communicator, d *Device) *Communicator {
	return &Communicator{Communicator: inner, device: d}
}

// Unwrap returns the communicator of the host.
func (c *Communicator) Unwrap() []backend.Communicator { return []backend.Communicator{c.Communicator} }

// Device returns the guarded device.
func (c *Communicator) Device() backend.Device { return c.device }

// Start implements [backend.Communicator] for buffers and queues of the device.
func (c *Communicator) Start(q backend.Queue, call backend.Collective, dst, src backend.Buffer) (backend.Work, error) {
	inner, err := c.device.inner(q)
	if err != nil {
		return nil, err
	}
	dst, src, err = c.behind(dst, src)
	if err != nil {
		return nil, fmt.Errorf("%v: %w", call, err)
	}
	w, err := c.Communicator.Start(inner, call, dst, src)
	if err != nil {
		return nil, err
	}
	return work{w, c.device}, nil
}

// behind returns the memory of both buffers. That of a closed communicator is
// gone, so that its call must end before it matters.
func (c *Communicator) behind(dst, src backend.Buffer) (backend.Buffer, backend.Buffer, error) {
	hostDst, err := c.device.behind(dst)
	if err == nil {
		var hostSrc backend.Buffer
		if hostSrc, err = c.device.behind(src); err == nil {
			return hostDst, hostSrc, nil
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return backend.Buffer{}, backend.Buffer{}, c.Communicator.Close() // nil, and Start says ErrClosed
	}
	return backend.Buffer{}, backend.Buffer{}, err
}

// Alloc gives the memory that all ranks can reach an address of the device.
func (c *Communicator) Alloc(nbytes int) (backend.Buffer, error) {
	memory, err := c.Communicator.Alloc(nbytes)
	if err != nil {
		return backend.Buffer{}, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	b, err := c.device.adopt(memory, false)
	if err == nil {
		c.owned = append(c.owned, b)
	}
	return b, err
}

// Split implements [backend.Communicator]; the parts are on the same device.
func (c *Communicator) Split(color, key int) (backend.Communicator, error) {
	part, err := c.Communicator.Split(color, key)
	if err != nil || part == nil {
		return nil, err
	}
	return Over(part, c.device), nil
}

// Close closes the communicator of the host, whose memory goes with it.
func (c *Communicator) Close() error {
	err := c.Communicator.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, b := range c.owned {
		c.device.remove(b, false) // fails only if the device is closed already
	}
	c.owned, c.closed = nil, true
	return err
}

// work orders queues of the device.
type work struct {
	backend.Work
	device *Device
}

// Wait implements [backend.Work].
func (w work) Wait(q backend.Queue) error {
	inner, err := w.device.inner(q)
	if err != nil {
		return err
	}
	return w.Work.Wait(inner)
}
