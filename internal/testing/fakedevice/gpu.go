package fakedevice

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/cuda"
)

// Properties are what a GPU says of itself. Devices are named by their PCI bus ids.
type Properties struct {
	Product    string   // the model
	Bus        string   // its own bus id
	Capability int      // 90 for 9.0
	Reach      []string // devices whose memory its kernels use
	Direct     []string // the far end of each NVLink to a device
	Switches   int      // NVLinks to switches
}

// GPU is a device of a [Host], as communicators of GPUs use it.
type GPU struct {
	*Device
	Properties
}

// Close ends the default queue.
func (d *GPU) Close() error { return d.main.Close() }

// Ordinal returns the device's number.
func (d *GPU) Ordinal() int { return d.ordinal }

// Model returns Properties.Product.
func (d *GPU) Model() string { return d.Product }

// ComputeCapability returns Properties.Capability.
func (d *GPU) ComputeCapability() int { return d.Capability }

// Multiprocessors returns 0: that is not known.
func (d *GPU) Multiprocessors() int { return 0 }

// Prepare implements Device of package gpu: there is nothing to load.
func (d *GPU) Prepare(...string) error { return nil }

// PCIBusID returns Properties.Bus.
func (d *GPU) PCIBusID() string { return d.Bus }

// Reachable returns Properties.Reach.
func (d *GPU) Reachable() []string { return d.Reach }

// NVLinks returns Properties.Direct and Switches.
func (d *GPU) NVLinks() (direct []string, switches int) { return d.Direct, d.Switches }

// Bind does nothing.
func (d *GPU) Bind() (unbind func(), err error) { return func() {}, nil }

// Retain does nothing: what is freed late is freed on the [Host].
func (d *GPU) Retain() error { return nil }

// Release does nothing.
func (d *GPU) Release() error { return nil }

// Disown does nothing.
func (d *GPU) Disown(backend.Buffer) error { return nil }

// fail asks the test.
func (d *Device) fail(doing string, nbytes int) error {
	if d.Host.Fail == nil {
		return nil
	}
	return d.Host.Fail(d.ordinal, doing, nbytes)
}

// Holds reports whether an address is allocated memory of this device.
func (d *GPU) Holds(addr uintptr) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := d.find(addr)
	return i >= 0 && addr < d.blocks[i].endAddr() && d.blocks[i].of == d.ordinal
}

// EnablePeerAccess does nothing: devices of a machine reach each other.
func (d *GPU) EnablePeerAccess(int) error { return d.fail("peer access", 0) }

// Export names memory for Import by another device of the machine.
func (d *GPU) Export(b backend.Buffer) ([]byte, error) {
	name := binary.LittleEndian.AppendUint64(nil, uint64(b.Addr()))
	return binary.LittleEndian.AppendUint64(name, uint64(b.Len())), d.fail("export", b.Len())
}

// Import returns the memory that Export has named, until CloseImport.
func (d *GPU) Import(name []byte) (backend.Buffer, error) {
	at, nbytes := uintptr(binary.LittleEndian.Uint64(name)),
		int(binary.LittleEndian.Uint64(name[8:]))
	if err := d.fail("import", nbytes); err != nil {
		return backend.Buffer{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.imports[at]++
	return backend.OnDevice(backend.U8, at, nbytes), nil
}

// CloseImport gives back memory from Import.
func (d *GPU) CloseImport(b backend.Buffer) error {
	err := d.fail("close import", b.Len())
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.imports[b.Addr()]--; d.imports[b.Addr()] == 0 {
		delete(d.imports, b.Addr())
	}
	return err
}

// unused returns an error if memory that is freed is imported.
func (d *Device) unused(b backend.Buffer) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.imports[b.Addr()] == 0 {
		return nil
	}
	return fmt.Errorf("fakedevice: %#x was freed while another rank had it open", b.Addr())
}

// AllocHost returns zeroed memory of the host that kernels can use at its address.
func (d *GPU) AllocHost(nbytes int) (backend.Buffer, error) {
	if err := d.fail("pin", nbytes); err != nil {
		return backend.Buffer{}, err
	}
	b := backend.Of(make([]byte, nbytes))
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pinned[b.Addr()] = b
	return b, nil
}

// FreeHost gives back memory from AllocHost.
func (d *GPU) FreeHost(b backend.Buffer) error {
	err := d.fail("unpin", b.Len())
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.pinned[b.Addr()]; !ok {
		return fmt.Errorf("fakedevice: %w: free of host memory at %#x, which AllocHost did not "+
			"return or which was freed before", backend.ErrArgument, b.Addr())
	}
	delete(d.pinned, b.Addr())
	return err
}

// Pinned returns the memory from AllocHost at an address, nothing if there is none.
func (m *Host) Pinned(addr uintptr) backend.Buffer {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.pinned[addr]
}

// event counts its records, and those that are done.
type event struct{ recorded, done int }

// NewEvent returns an event, by its number.
func (m *Host) NewEvent() (uintptr, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	h := m.handle()
	m.events[h] = &event{}
	return h, nil
}

// FreeEvent ends an event.
func (m *Host) FreeEvent(number uintptr) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.events, number)
	return nil
}

// EventDone reports whether the last record of an event is done, if there was one.
func (m *Host) EventDone(number uintptr) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.events[number]
	return e == nil || e.done == e.recorded, nil
}

// RecordEvent records an event on a stream.
func (m *Host) RecordEvent(stream, number uintptr) error {
	m.mu.Lock()
	e := m.events[number]
	if e == nil {
		m.mu.Unlock()
		return fmt.Errorf("fakedevice: %w: event %d", backend.ErrClosed, number)
	}
	e.recorded++
	record := e.recorded
	m.mu.Unlock()
	return m.Submit(stream, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		e.done = max(e.done, record)
		m.changed.Broadcast()
	})
}

// WaitEvent orders a stream after the last record of an event.
func (d *GPU) WaitEvent(stream, number uintptr) error {
	if err := d.fail("wait for an event", 0); err != nil {
		return err
	}
	d.mu.Lock()
	e := d.events[number]
	if e == nil {
		d.mu.Unlock()
		return fmt.Errorf("fakedevice: %w: event %d", backend.ErrClosed, number)
	}
	record := e.recorded
	d.mu.Unlock()
	return d.Submit(stream, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		for e.done < record {
			d.changed.Wait()
		}
	})
}

// Stream returns the number of the queue.
func (q *queue) Stream() uintptr { return q.handle }

// Exchange runs a kernel by which ranks exchange data, as the test has it.
func (q *queue) Exchange(p *cuda.Peers, x *cuda.PeerCall) error {
	if q.device.Host.Exchange == nil {
		return fmt.Errorf("fakedevice: %w: kernels of several ranks", backend.ErrUnsupported)
	}
	return q.device.Host.Exchange(q.device.ordinal, q.handle, p, x)
}

// Push copies to memory of any device, which the ranks of a test all reach.
func (q *queue) Push(dst, src backend.Buffer) error { return q.Move(dst, src) }

// Fill sets a word of pinned memory, once everything before is done.
func (q *queue) Fill(dst backend.Buffer, bits uint64) error {
	word := q.device.Pinned(dst.Addr())
	if word.Len() == 0 {
		return fmt.Errorf("fakedevice: %w: fill of memory that is not pinned", backend.ErrArgument)
	}
	at := (*uint32)(unsafe.Pointer(unsafe.SliceData(word.Bytes())))
	return q.Wait(then(func() { atomic.StoreUint32(at, uint32(bits)) }))
}

// late is an event that happens late: see [Host].Busy.
type late struct {
	backend.Event
	busy chan struct{}
}

// Join implements [backend.Event].
func (l late) Join(ctx context.Context) error {
	if _, limited := ctx.Deadline(); limited {
		select {
		case <-l.busy:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return l.Event.Join(ctx)
}
