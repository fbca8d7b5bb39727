package fakedevice

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Communicator runs the collectives of a communicator of the host on buffers of
// a [Device].
type Communicator struct {
	backend.Base // the host's
	device       *Device
}

var _ backend.Wrapper = (*Communicator)(nil)

// Over returns inner for buffers of d. It owns inner.
func Over(inner backend.Communicator, d *Device) *Communicator {
	return &Communicator{Base: backend.Wrap(inner), device: d}
}

// Device returns the guarded device.
func (c *Communicator) Device() backend.Device { return c.device }

// Start implements [backend.Communicator] for buffers and queues of the device. A call that is
// recorded is started anew by each replay.
func (c *Communicator) Start(q backend.Queue, call backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	if of, ok := q.(*queue); ok && of.Recording() != nil {
		return c.record(of, call, dst, src)
	}
	inner, err := c.device.inner(q)
	if err != nil {
		return nil, err
	}
	return c.start(inner, call, dst, src)
}

// start starts a call on a queue of the host.
func (c *Communicator) start(inner backend.Queue, call backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	hostDst, err := c.device.hostMemory(dst)
	if err != nil {
		return nil, fmt.Errorf("%v: destination: %w", call, err)
	}
	hostSrc, err := c.device.hostMemory(src)
	if err != nil {
		return nil, fmt.Errorf("%v: source: %w", call, err)
	}
	begin := c.Base.Start
	if call.Rows != nil {
		begin = c.permute
	}
	w, err := begin(inner, call, hostDst, hostSrc)
	if err != nil {
		return nil, err
	}
	return work{w, c.device}, nil
}

// record records a call.
func (c *Communicator) record(q *queue, call backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	if _, err := call.Check(c.Rank(), c.Size(), dst, src); err != nil {
		return nil, err
	}
	create := func() backend.Participant { return &participant{of: c} }
	p := q.Recording().Participant(c, create).(*participant)
	err := q.start(func(on backend.Queue) (err error) {
		p.last, err = c.start(on, call, dst, src)
		return err
	})
	if err != nil {
		return nil, err
	}
	e, err := q.Record()
	return backend.RecordedWork(e), err
}

// participant is what the recorded calls of a communicator have in common.
type participant struct {
	of   *Communicator
	last backend.Work // of a replay: calls end in order, and the errors of a communicator stay
}

// Of implements [backend.Participant].
func (p *participant) Of() backend.Communicator { return p.of }

// Err implements [backend.Participant].
func (p *participant) Err() error { return p.of.Err() }

// Complete implements [backend.Participant].
func (p *participant) Complete(backend.Queue) error { return nil }

// Made implements [backend.Participant].
func (p *participant) Made(*backend.Graph) func() { return func() {} }

// Replay implements [backend.Participant].
func (p *participant) Replay(_ backend.Queue, launch func() error) (backend.Work, error) {
	if err := launch(); err != nil {
		return nil, err
	}
	return p.last, nil
}

// Alloc gives the memory that all ranks can reach an address of the device.
func (c *Communicator) Alloc(nbytes int) (backend.Buffer, error) {
	memory, err := c.Base.Alloc(nbytes)
	if err != nil {
		return backend.Buffer{}, err
	}
	return c.device.adopt(memory, false)
}

// Free ends an allocation of Alloc. Using it later is an error of whatever does.
func (c *Communicator) Free(b backend.Buffer) error {
	if b.Len() == 0 {
		return nil
	}
	memory, err := c.device.remove(b, false)
	if err != nil {
		return err
	}
	return c.Base.Free(memory)
}

// Split implements [backend.Communicator]; the parts are on the same device.
func (c *Communicator) Split(color, key int) (backend.Communicator, error) {
	part, err := c.Base.Split(color, key)
	if err != nil || part == nil {
		return nil, err
	}
	return Over(part, c.device), nil
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
