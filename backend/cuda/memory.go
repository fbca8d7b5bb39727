package cuda

import (
	"errors"
	"fmt"
	"slices"
	"sort"
	"sync"

	"github.com/euryale-ml/euryale/backend"
)

const (
	// slab is the least that the arena takes from the device at a time.
	slab = 8 << 20
	// align is what addresses in the arena are multiples of: enough for any
	// vector load, and for the slots of a device's own allocator.
	align = 256
)

// errStale is what becomes of a tensor that was not kept.
var errStale = errors.New("it is a value of an earlier run, whose memory is recycled: keep it with ToDevice or ToHost before the next run")

// errUnwritten is what becomes of a view that package tensor could not copy.
var errUnwritten = errors.New("nothing was written to it: package tensor cannot copy a transposed or sliced view in device memory; make it contiguous with ToDevice first, or fill it with Copy")

// memory is the device memory of an engine: the registry of every address, and
// the arena where results live.
//
// Neither a tensor's engine nor a finalizer tells where its memory is or when it
// dies: the tape machine stamps its engine on every value, and tensors are
// pooled objects. So the registry answers the first question, and the arena
// makes the second one simple: everything in it ends with the next run.
type memory struct {
	device backend.Device

	mu      sync.Mutex
	regions []*region // by address
	arena   []*region // by age
	current int       // index of the region of the arena that is being filled
}

// region is one allocation of the device.
type region struct {
	bytes  backend.Buffer
	arena  bool
	owned  bool    // to be given back to the device
	used   int     // bytes
	pieces []piece // by offset
}

// piece is one tensor's memory in a region.
type piece struct {
	lo, hi  int
	written bool
}

func (r *region) base() uintptr { return r.bytes.Addr() }
func (r *region) end() uintptr  { return r.base() + uintptr(r.bytes.Len()) }

// take returns memory from the arena. It is not zeroed.
func (m *memory) take(nbytes int, written bool) (backend.Buffer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for ; m.current < len(m.arena); m.current++ {
		if r := m.arena[m.current]; r.bytes.Len()-r.used >= nbytes {
			return r.take(nbytes, written), nil
		}
	}
	r, err := m.grow(max(nbytes, slab))
	if err != nil {
		return backend.Buffer{}, err
	}
	return r.take(nbytes, written), nil
}

func (r *region) take(nbytes int, written bool) backend.Buffer {
	lo := r.used
	r.pieces = append(r.pieces, piece{lo, lo + nbytes, written})
	r.used = min((lo+nbytes+align-1)/align*align, r.bytes.Len())
	return r.bytes.Slice(lo, lo+nbytes)
}

// grow adds a region to the arena.
func (m *memory) grow(nbytes int) (*region, error) {
	b, err := m.device.Alloc(nbytes)
	if err != nil {
		return nil, fmt.Errorf("%d bytes for the results of a run, which have %d already: %w", nbytes, m.arenaBytes(), err)
	}
	r := &region{bytes: b, arena: true, owned: true}
	m.insert(r)
	m.arena = append(m.arena, r)
	m.current = len(m.arena) - 1
	return r, nil
}

func (m *memory) arenaBytes() int {
	n := 0
	for _, r := range m.arena {
		n += r.bytes.Len()
	}
	return n
}

// reserve makes the arena at least nbytes large.
func (m *memory) reserve(nbytes int) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	missing := nbytes - m.arenaBytes()
	if missing <= 0 {
		return nil
	}
	current := m.current
	_, err := m.grow(missing)
	m.current = min(current, len(m.arena))
	return err
}

// rewind recycles the arena.
func (m *memory) rewind() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.arena {
		r.used, r.pieces = 0, r.pieces[:0]
	}
	m.current = 0
}

// keep returns new memory, to be given back with free.
func (m *memory) keep(nbytes int) (backend.Buffer, error) {
	b, err := m.device.Alloc(nbytes)
	if err != nil {
		return backend.Buffer{}, err
	}
	return b, m.add(b, true)
}

// add registers memory that is not of the arena.
func (m *memory) add(b backend.Buffer, owned bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	i := m.find(b.Addr() + uintptr(max(b.Len(), 1)) - 1) // the last region that it reaches
	if i >= 0 && b.Addr() < m.regions[i].end() {
		return fmt.Errorf("%w: memory at %#x belongs to the engine already", backend.ErrArgument, max(b.Addr(), m.regions[i].base()))
	}
	m.insert(&region{bytes: b, owned: owned, used: b.Len(), pieces: []piece{{0, b.Len(), true}}})
	return nil
}

func (m *memory) insert(r *region) {
	m.regions = slices.Insert(m.regions, m.find(r.base())+1, r)
}

// find returns the index of the last region that starts at addr or before, -1
// if there is none.
func (m *memory) find(addr uintptr) int {
	return sort.Search(len(m.regions), func(i int) bool { return m.regions[i].base() > addr }) - 1
}

// free gives back what keep or add registered; memory of the arena stays in use
// until it is rewound.
func (m *memory) free(addr uintptr) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	i := m.find(addr)
	if i < 0 || addr >= m.regions[i].end() || m.regions[i].arena {
		return nil
	}
	r := m.regions[i]
	if r.base() != addr {
		return fmt.Errorf("%w: free of a part of a tensor", backend.ErrArgument)
	}
	m.regions = slices.Delete(m.regions, i, i+1)
	if !r.owned {
		return nil
	}
	return m.device.Free(r.bytes)
}

// close gives back everything.
func (m *memory) close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all error
	for _, r := range m.regions {
		if r.owned {
			all = errors.Join(all, m.device.Free(r.bytes))
		}
	}
	m.regions, m.arena, m.current = nil, nil, 0
	return all
}

// access is how memory is about to be used.
type access int

const (
	reading access = iota
	writing
)

// locate reports whether nbytes at addr are device memory, and prepares them for
// access: reading what nobody wrote is an error, and so is anything with the
// memory of an earlier run.
func (m *memory) locate(addr uintptr, nbytes int, how access) (device bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	i := m.find(addr)
	if i < 0 || addr >= m.regions[i].end() {
		return false, nil
	}
	r := m.regions[i]
	lo := int(addr - r.base())
	p := sort.Search(len(r.pieces), func(i int) bool { return r.pieces[i].lo > lo }) - 1
	switch {
	case p < 0 || lo+nbytes > r.pieces[p].hi:
		return true, fmt.Errorf("%w: %w", backend.ErrArgument, errStale)
	case how == writing:
		r.pieces[p].written = true
	case !r.pieces[p].written:
		return true, fmt.Errorf("%w: %w", backend.ErrUnsupported, errUnwritten)
	}
	return true, nil
}
