package bench

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// memory lets the host read and write buffers: host buffers directly, device buffers by
// copies.
type memory struct {
	device  backend.Device
	staging []byte // as large as the largest buffer; nil on the host
}

// away reports whether the host cannot access the buffers.
func (m memory) away() bool { return m.staging != nil }

// write fills b by fill.
func (m memory) write(b backend.Buffer, fill func([]byte)) error {
	if !b.Device() {
		fill(b.Bytes())
		return nil
	}
	host := backend.Of(m.staging[:b.NBytes()])
	fill(host.Bytes())
	return m.copyAndWait(b, host)
}

// read calls look with the content of b.
func (m memory) read(b backend.Buffer, look func([]byte)) error {
	if !b.Device() {
		look(b.Bytes())
		return nil
	}
	host := backend.Of(m.staging[:b.NBytes()])
	if err := m.copyAndWait(host, b); err != nil {
		return err
	}
	look(host.Bytes())
	return nil
}

// copyAndWait copies bytes between the host and the device, and waits.
func (m memory) copyAndWait(dst, src backend.Buffer) error {
	if !dst.Device() && !src.Device() {
		copy(dst.Bytes(), src.Bytes())
		return nil
	}
	q := m.device.Default()
	if err := q.Move(dst.As(backend.U8), src.As(backend.U8)); err != nil {
		return err
	}
	e, err := q.Record()
	if err != nil {
		return err
	}
	return e.Join(context.Background())
}

// together runs a collective in place on a few numbers of each rank.
func together[T backend.Element](r *run, c backend.Collective, numbers []T) error {
	host := backend.Of(numbers)
	b := r.words.Slice(0, host.NBytes()).As(host.DType())
	if err := r.memory.copyAndWait(b, host); err != nil {
		return err
	}
	if err := backend.Run(r.comm, c, b, b); err != nil {
		return err
	}
	return r.memory.copyAndWait(host, b)
}

// OnDevice reports whether the host cannot access a device's memory.
func OnDevice(d backend.Device) (bool, error) {
	b, err := d.Alloc(1)
	if err != nil {
		return false, fmt.Errorf("bench: try the memory of %s: %w", d.Name(), err)
	}
	return b.Device(), d.Free(b)
}

// eager is how long Await polls without a pause.
const eager = time.Second

// Await waits for a [backend.Work] or a [backend.Event] like Join, but without pauses. On
// a GPU Join polls at intervals of up to a millisecond, which would dominate the
// measurement.
func Await(w interface {
	Join(context.Context) error
	Done() bool
}) error {
	for began := time.Now(); !w.Done() && time.Since(began) < eager; runtime.Gosched() {
	}
	return w.Join(context.Background())
}
