package fakedevice

import (
	"bytes"
	"errors"

	"github.com/euryale-ml/euryale/backend"
)

// idle is memory that was freed on a queue and is for this queue to use again.
type idle struct {
	queue  backend.Queue // the host's
	nbytes int
}

// garbage is what memory holds that is not zeroed.
const garbage = 0xAB

// Alloc returns memory for use on this queue, from now on, that holds garbage.
// What was freed on the queue is used again, at another address.
func (q *queue) Alloc(nbytes int) (backend.Buffer, error) {
	memory, ok := q.device.reuse(idle{q.Queue, nbytes})
	var b backend.Buffer
	var err error
	if ok {
		b, err = q.device.adopt(memory, true)
	} else {
		b, err = q.device.Alloc(nbytes)
	}
	if err != nil {
		return b, err
	}
	return b, q.Move(b, backend.Of(bytes.Repeat([]byte{garbage}, nbytes)))
}

// Free gives back memory that only this queue uses, once everything started on it
// so far is done.
func (q *queue) Free(b backend.Buffer) error {
	memory, err := q.device.remove(b, true)
	if err != nil {
		return err
	}
	d := q.device
	d.mu.Lock()
	defer d.mu.Unlock()
	of := idle{q.Queue, memory.Len()}
	d.idle[of] = append(d.idle[of], memory)
	return nil
}

// reuse returns memory that is idle.
func (d *Device) reuse(of idle) (memory backend.Buffer, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := d.idle[of]
	if len(all) == 0 {
		return memory, false
	}
	d.idle[of] = all[:len(all)-1]
	return all[len(all)-1], true
}

// drop gives idle memory back to the host.
func (m *Host) drop() error {
	var errs []error
	for _, all := range m.idle {
		for _, memory := range all {
			errs = append(errs, m.host.Free(memory))
		}
	}
	m.idle = nil
	return errors.Join(errs...)
}

// Allocs returns how often memory was taken from the host. What a queue uses again
// does not count.
func (m *Host) Allocs() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.allocs
}
