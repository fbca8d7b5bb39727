package fakedevice

import (
	"errors"
	"fmt"
	"slices"
	"sort"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
)

const (
	// space is what no allocation exceeds.
	space = 1 << 36
	// chunk is how much address space a machine reserves at a time. No memory stands behind it, but
	// an emulated processor keeps a few bytes for each page, also after it is given back.
	chunk = 1 << 26
	// align is what addresses are multiples of, as those of a GPU are.
	align = 256
)

// Device is a [backend.Device] whose memory faults when the host touches it: the only one of
// its [Host], or that of a [GPU].
type Device struct {
	*Host
	ordinal int // -1 if it is the only one
	main    *queue
	copies  residence.Copies
}

var _ backend.Device = (*Device)(nil)

// block is one allocation.
type block struct {
	addr   uintptr
	memory backend.Buffer // what stands behind it, as U8
	own    bool           // from Alloc, to be freed
	of     int            // the ordinal of its device
}

func (b block) endAddr() uintptr { return b.addr + uintptr(b.memory.Len()) }

// New returns a device with the memory and queues of another one behind it,
// which must be the host.
func New(host backend.Device) (*Device, error) {
	m, err := NewHost(host)
	if err != nil {
		return nil, err
	}
	d := &Device{Host: m, ordinal: -1}
	d.main = d.queueOn(host.Default())
	return d, nil
}

// Name returns "fakedevice", or "fake:1" for the second GPU.
func (d *Device) Name() string {
	if d.ordinal < 0 {
		return "fakedevice"
	}
	return fmt.Sprintf("fake:%d", d.ordinal)
}

// Default returns a queue that runs everything on the caller. That of a GPU runs by itself.
func (d *Device) Default() backend.Queue { return d.main }

// NewQueue returns a new queue.
func (d *Device) NewQueue() (backend.Queue, error) {
	q, err := d.host.NewQueue()
	if err != nil {
		return nil, err
	}
	return d.queueOn(q), nil
}

// Copies returns the copies of host memory that machines share.
func (d *Device) Copies() *residence.Copies { return &d.copies }

// Alloc returns zeroed memory that only kernels can reach, aligned to 256 bytes.
func (d *Device) Alloc(nbytes int) (backend.Buffer, error) {
	if nbytes > space {
		return backend.Buffer{}, fmt.Errorf("fakedevice: no room for %d bytes: a device has %d GiB",
			nbytes, space>>30)
	}
	if err := d.fail("alloc", nbytes); err != nil {
		return backend.Buffer{}, err
	}
	memory, err := d.host.Alloc(nbytes)
	if err != nil {
		return backend.Buffer{}, err
	}
	d.mu.Lock()
	d.allocs++
	d.mu.Unlock()
	return d.adopt(memory, true)
}

// adopt gives host memory an address.
func (d *Device) adopt(memory backend.Buffer, own bool) (backend.Buffer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.reserved == nil {
		return backend.Buffer{}, fmt.Errorf("fakedevice: %w: the device", backend.ErrClosed)
	}
	if need := uintptr(memory.Len()) + 2*align; d.limit-d.next < need {
		if err := d.reserve(need); err != nil {
			return backend.Buffer{}, err
		}
	}
	b := block{d.next, memory, own, d.ordinal}
	d.blocks = slices.Insert(d.blocks, d.find(b.addr)+1, b)
	d.held += memory.Len()
	d.peak = max(d.peak, d.held)
	// A gap after every block, so that one past its end is not in the next.
	d.next = (b.endAddr() + 2*align - 1) / align * align
	return backend.OnDevice(backend.U8, b.addr, memory.Len()), nil
}

// Free gives back memory from Alloc. Using it later is an error of the kernel
// that does.
func (d *Device) Free(b backend.Buffer) error {
	memory, err := d.remove(b, true)
	if err != nil {
		return err
	}
	return errors.Join(d.host.Free(memory), d.unused(b))
}

// remove ends an allocation, the device's own or a communicator's, and returns what
// stands behind it.
func (d *Device) remove(b backend.Buffer, own bool) (backend.Buffer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := d.find(b.Addr())
	if i < 0 || d.blocks[i].addr != b.Addr() || d.blocks[i].own != own {
		return backend.Buffer{},
			fmt.Errorf("fakedevice: %w: free of %#x, which Alloc did not return or which was "+
				"freed before", backend.ErrArgument, b.Addr())
	}
	memory := d.blocks[i].memory
	d.blocks = slices.Delete(d.blocks, i, i+1)
	d.held -= memory.Len()
	return memory, nil
}

// find returns the index of the last block that starts at addr or before, -1 if
// there is none.
func (m *Host) find(addr uintptr) int {
	return sort.Search(len(m.blocks), func(i int) bool { return m.blocks[i].addr > addr }) - 1
}

// Live returns how many allocations there are, and their bytes.
func (m *Host) Live() (n, nbytes int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, b := range m.blocks {
		if b.own {
			n, nbytes = n+1, nbytes+b.memory.Len()
		}
	}
	return n, nbytes
}

// Peak returns the most bytes that were allocated at a time, those of communicators among them.
func (m *Host) Peak() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.peak
}

// hostMemory returns the host memory behind a buffer of the device.
func (d *Device) hostMemory(b backend.Buffer) (backend.Buffer, error) {
	if b.Len() == 0 {
		return backend.Host(b.DType(), nil, 0), nil
	}
	if !b.Device() {
		return backend.Buffer{},
			fmt.Errorf("fakedevice: %w: host memory where memory of the device is needed",
				backend.ErrArgument)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	i := d.find(b.Addr())
	if i < 0 || b.Addr() >= d.blocks[i].endAddr() {
		return backend.Buffer{}, fmt.Errorf("fakedevice: %w: %d %v at %#x are in no allocation: "+
			"freed, or of another device", backend.ErrArgument, b.Len(), b.DType(), b.Addr())
	}
	found := d.blocks[i]
	lo := int(b.Addr() - found.addr)
	if lo+b.NBytes() > found.memory.Len() {
		return backend.Buffer{}, fmt.Errorf("fakedevice: %w: %d %v from byte %d reach past the "+
			"end of an allocation of %d bytes", backend.ErrArgument, b.Len(), b.DType(), lo,
			found.memory.Len())
	}
	return found.memory.Slice(lo, lo+b.NBytes()).As(b.DType()), nil
}
