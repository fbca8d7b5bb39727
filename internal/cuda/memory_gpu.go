//go:build gpu

package cuda

import (
	"errors"
	"fmt"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
)

// allocations is the driver's memory, for a cache. It is plain device memory,
// which other processes and libraries can use.
type allocations struct{ device *Device }

func (a allocations) malloc(nbytes int) (addr uintptr, err error) {
	err = a.device.on("allocate", func() error {
		p, err := cu.MemAlloc(int64(nbytes))
		if errors.Is(err, cu.OutOfMemory) {
			free, total, _ := cu.MemInfo() // as far as it is known
			return fmt.Errorf("%w: %d of %d bytes are free, other processes and libraries counted",
				ErrOutOfMemory, free, total)
		}
		addr = p.Uintptr()
		return err
	})
	return addr, err
}

func (a allocations) free(addr uintptr) error {
	return a.device.onRetained("free", func() error { return cu.MemFree(cu.DevicePtr(addr)) })
}

// Alloc implements [backend.Device]. The memory is zeroed on the default queue,
// before everything that is started later on any queue of the device; the host
// does not wait. Order other devices and streams after the default queue
// yourself.
//
// After the first calls of a size it takes memory that was freed, and the driver
// is not asked. [ErrOutOfMemory] says who uses how much.
func (d *Device) Alloc(nbytes int) (backend.Buffer, error) {
	b, err := d.main.Alloc(nbytes)
	if err != nil || nbytes == 0 {
		return b, err
	}
	err = d.on("alloc", func() error {
		if err := cu.MemsetD8Async(cu.DevicePtr(b.Addr()), 0, int64(nbytes),
			d.main.stream); err != nil {
			return err
		}
		return d.publish()
	})
	if err != nil {
		return backend.Buffer{}, errors.Join(err, d.Free(b))
	}
	return b, nil
}

// publish orders all queues after the default one.
func (d *Device) publish() error {
	queues := d.open()
	if len(queues) == 1 {
		return nil
	}
	e, err := d.main.Mark()
	if err != nil {
		return err
	}
	for _, q := range queues {
		// by another goroutine
		if err := q.After(e); err != nil && !errors.Is(err, backend.ErrClosed) {
			return err
		}
	}
	return nil
}

// Free implements [backend.Device]. Work on the device's queues may still use
// the memory; work elsewhere must be done, or a queue of the device ordered after
// it. Memory from Disown goes back to the driver at once, which waits for the device.
func (d *Device) Free(b backend.Buffer) error {
	if ok, err := d.memory.freeDisowned(b.Addr()); ok {
		return err
	}
	var lines []line
	for _, q := range d.open() {
		lines = append(lines, q)
	}
	return d.named("free", d.memory.give(b.Addr(), lines...))
}

// Alloc returns memory for use on this queue, from now on. It is not zeroed, and
// costs nothing where memory of the size was freed on this queue.
func (q *Queue) Alloc(nbytes int) (backend.Buffer, error) {
	if nbytes < 0 {
		return backend.Buffer{},
			q.device.named("alloc", fmt.Errorf("%w: %d bytes", backend.ErrArgument, nbytes))
	}
	addr, err := q.device.memory.takeMemory(q, nbytes)
	if err != nil {
		return backend.Buffer{}, q.device.named("alloc", err)
	}
	return backend.OnDevice(backend.U8, addr, nbytes), nil
}

// Free gives back memory from either Alloc that only this queue uses, once
// everything started on it so far is done.
func (q *Queue) Free(b backend.Buffer) error {
	return q.device.named("free", q.device.memory.give(b.Addr(), q))
}

// Copies returns the copies of host memory that machines of package vm share.
func (d *Device) Copies() *residence.Copies { return &d.copies }

// Disown takes memory from Alloc out of the device's books: Close neither frees nor reports
// it. Free gives it back, after Close only with Retain.
func (d *Device) Disown(b backend.Buffer) error {
	return d.named("disown", d.memory.disown(b.Addr()))
}

// MemoryStats returns what the allocator holds.
func (d *Device) MemoryStats() MemoryStats { return d.memory.snapshot() }

// ReleaseMemory gives cached memory back to the driver, which stops the device.
func (d *Device) ReleaseMemory() error { return d.memory.release() }

// FreeMemory returns what the driver has left, for all processes, and what the
// device has.
func (d *Device) FreeMemory() (free, total int, err error) {
	err = d.on("memory", func() error {
		f, t, err := cu.MemInfo()
		free, total = int(f), int(t)
		return err
	})
	return free, total, err
}

// Holds reports whether an address is memory of this device, whoever allocated
// it.
func (d *Device) Holds(addr uintptr) bool {
	if d.memory.owns(addr) {
		return true
	}
	unbind, err := d.Bind()
	if err != nil {
		return false
	}
	defer unbind()
	return ordinalOf(addr) == d.ordinal
}
