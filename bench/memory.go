package bench

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// memory lets the host read and write buffers: those of the host as they are,
// those of a device by copies.
type memory struct {
	device  backend.Device
	staging []byte // as large as the largest buffer; nil on the host
}

// away reports whether the host cannot touch the buffers.
func (m memory) away() bool { return m.staging != nil }

// write replaces what b holds by what fill writes.
func (m memory) write(b backend.Buffer, fill func([]byte)) error {
	if !b.Device() {
		fill(b.Bytes())
		return nil
	}
	host := backend.Of(m.staging[:b.NBytes()])
	fill(host.Bytes())
	return m.move(b, host)
}

// read shows look what b holds.
func (m memory) read(b backend.Buffer, look func([]byte)) error {
	if !b.Device() {
		look(b.Bytes())
		return nil
	}
	host := backend.Of(m.staging[:b.NBytes()])
	if err := m.move(host, b); err != nil {
		return err
	}
	look(host.Bytes())
	return nil
}

// move copies bytes between buffers of the host and of the device, to the end.
func (m memory) move(dst, src backend.Buffer) error {
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
	if err := r.memory.move(b, host); err != nil {
		return err
	}
	if err := backend.Run(r.comm, c, b, b); err != nil {
		return err
	}
	return r.memory.move(host, b)
}

// OnDevice reports whether what a device allocates is out of the host's reach.
func OnDevice(d backend.Device) (bool, error) {
	b, err := d.Alloc(1)
	if err != nil {
		return false, fmt.Errorf("bench: try the memory of %s: %w", d.Name(), err)
	}
	return b.Device(), d.Free(b)
}

// eager is how long Await looks without a pause.
const eager = time.Second

// Await waits for a [backend.Work] or a [backend.Event] as Join does, but without
// pauses. Join of what a GPU does looks at intervals of up to a millisecond,
// which would be most of what is measured.
func Await(w interface {
	Join(context.Context) error
	Done() bool
}) error {
	for began := time.Now(); !w.Done() && time.Since(began) < eager; runtime.Gosched() {
	}
	return w.Join(context.Background())
}
