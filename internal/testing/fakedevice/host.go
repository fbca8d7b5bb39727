package fakedevice

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/cuda"
)

// Host is what devices share that reach each other's memory: addresses, and what stands
// behind them; streams and events by number; and the failures that a test wants.
type Host struct {
	// Fail, if not nil, is asked before a device does something: "alloc", "copy", "pin", "unpin",
	// "export", "import", "close import", "peer access", "wait for an event". Its error is the
	// device's, but for a copy, which then does nothing, as on a link that is broken. It may block.
	Fail func(ordinal int, doing string, nbytes int) error
	// Exchange, if not nil, runs the kernels by which ranks exchange data.
	Exchange func(ordinal int, stream uintptr, p *cuda.Peers, x *cuda.PeerCall) error
	// Busy, if not nil, has events happen late for those who wait for a limited time only: once it
	// is closed.
	Busy chan struct{}

	host backend.Device

	mu       sync.Mutex
	reserved [][]byte // address space without access, in chunks; nil once closed
	next     uintptr  // the next address to give out; none is given out twice
	limit    uintptr  // the end of its chunk
	blocks   []block  // by address
	idle     map[idle][]backend.Buffer
	allocs   int // from the host
	held     int // bytes of all blocks
	peak     int // the most that held was

	devices map[int]*GPU
	handles uintptr                    // the last one given out
	streams map[uintptr]*queue         // by handle
	events  map[uintptr]*event         // by handle
	changed *sync.Cond                 // a record of an event is done
	imports map[uintptr]int            // that are not closed, by address
	pinned  map[uintptr]backend.Buffer // by address
}

// NewHost returns a machine whose devices have the memory and queues of another one behind
// them, which must be the host.
func NewHost(host backend.Device) (*Host, error) {
	m := &Host{
		host: host, idle: map[idle][]backend.Buffer{}, devices: map[int]*GPU{},
		streams: map[uintptr]*queue{}, events: map[uintptr]*event{}, imports: map[uintptr]int{},
		pinned: map[uintptr]backend.Buffer{},
	}
	m.changed = sync.NewCond(&m.mu)
	return m, m.reserve(chunk)
}

// reserve has addresses come from a new part of the address space, of nbytes or more. mu is held.
func (m *Host) reserve(nbytes uintptr) error {
	size := (nbytes + chunk - 1) / chunk * chunk
	more, err := reserveAddresses(int(size))
	if err != nil {
		return fmt.Errorf("fakedevice: cannot reserve %d MiB of address space (is it limited by "+
			"ulimit -v?): %w", size>>20, err)
	}
	m.reserved = append(m.reserved, more)
	m.next = uintptr(unsafe.Pointer(unsafe.SliceData(more)))
	m.limit = m.next + size
	return nil
}

// GPU returns a device of the machine, which it makes once. Its default queue runs by itself.
func (m *Host) GPU(ordinal int, p Properties) (*GPU, error) {
	m.mu.Lock()
	d := m.devices[ordinal]
	m.mu.Unlock()
	if d != nil {
		return d, nil
	}
	q, err := m.host.NewQueue()
	if err != nil {
		return nil, err
	}
	d = &GPU{&Device{Host: m, ordinal: ordinal}, p}
	d.main = d.queueOn(q)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.devices[ordinal] = d
	return d, nil
}

// CloseGPUs ends the GPUs, which can be made anew.
func (m *Host) CloseGPUs() error {
	m.mu.Lock()
	all := slices.Collect(maps.Values(m.devices))
	clear(m.devices)
	m.mu.Unlock()
	var errs []error
	for _, d := range all {
		errs = append(errs, d.Close())
	}
	return errors.Join(errs...)
}

// Close ends the machine and its GPUs; addresses mean nothing any more. Memory that was not
// freed, imports that were not closed among it, is an error.
func (m *Host) Close() error {
	errs := []error{m.CloseGPUs()}
	n, nbytes := m.Live()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.reserved == nil {
		return nil
	}
	for _, r := range m.reserved {
		errs = append(errs, freeAddresses(r))
	}
	errs = append(errs, m.drop())
	m.reserved, m.blocks = nil, nil
	if n > 0 {
		errs = append(errs, fmt.Errorf("fakedevice: %d allocations of %d bytes together were not "+
			"freed", n, nbytes))
	}
	if len(m.pinned) != 0 || len(m.imports) != 0 {
		errs = append(errs, fmt.Errorf("fakedevice: %d pieces of pinned memory and the imports "+
			"%v are left", len(m.pinned), m.imports))
	}
	return errors.Join(errs...)
}

// Move copies between the host and any device, and waits.
func (m *Host) Move(dst, src backend.Buffer) error {
	d := &Device{Host: m, ordinal: -1}
	return (&queue{device: d, Queue: m.host.Default()}).Move(dst, src)
}

// Imports returns how many imports are open.
func (m *Host) Imports() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 0
	for _, open := range m.imports {
		n += open
	}
	return n
}

// handle returns a number for a stream or an event. mu is held.
func (m *Host) handle() uintptr {
	m.handles++
	return m.handles
}

// Submit runs f on a stream, in its order.
func (m *Host) Submit(stream uintptr, f func()) error {
	m.mu.Lock()
	q := m.streams[stream]
	m.mu.Unlock()
	if q == nil {
		return fmt.Errorf("fakedevice: %w: stream %d", backend.ErrClosed, stream)
	}
	return q.Wait(then(f))
}

// OnFree calls f once the graph that a stream is recorded into is freed and all its replays have
// ended, as CUDA does for libraries. It reports false, and does nothing, if it is not recorded.
func (m *Host) OnFree(stream uintptr, f func()) bool {
	m.mu.Lock()
	r := m.streams[stream].recording.Load()
	m.mu.Unlock()
	if r == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.freed = append(r.freed, f)
	return true
}
