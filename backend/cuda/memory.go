package cuda

import (
	"errors"
	"fmt"
	"sync"

	"github.com/euryale-ml/euryale/backend"
)

const (
	// leastSlab is the least that the arena takes from the device at a time.
	leastSlab = 8 << 20
	// align is what addresses in the arena are multiples of: enough for any
	// vector load, and for the slots of a device's own allocator.
	align = 256
)

// memory is the device memory of an engine: tensors that live until they are freed, and the
// arena of what lives until Reset.
type memory struct {
	device backend.Device

	mu      sync.Mutex
	tensors map[uintptr]backend.Buffer // by address
	arena   []slab                     // by age
	current int                        // index of the slab that is being filled
}

// slab is a part of the arena.
type slab struct {
	bytes backend.Buffer
	used  int
}

// take returns memory of the arena. It is not zeroed.
func (m *memory) take(nbytes int) (backend.Buffer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for ; m.current < len(m.arena); m.current++ {
		if s := &m.arena[m.current]; s.bytes.Len()-s.used >= nbytes {
			return s.take(nbytes), nil
		}
	}
	if err := m.grow(max(nbytes, leastSlab)); err != nil {
		return backend.Buffer{}, err
	}
	return m.arena[m.current].take(nbytes), nil
}

func (s *slab) take(nbytes int) backend.Buffer {
	lo := s.used
	s.used = min((lo+nbytes+align-1)/align*align, s.bytes.Len())
	return s.bytes.Slice(lo, lo+nbytes)
}

// grow adds a slab to the arena.
func (m *memory) grow(nbytes int) error {
	b, err := m.device.Alloc(nbytes)
	if err != nil {
		return fmt.Errorf("%d bytes for results, which have %d already: %w", nbytes, m.arenaBytes(), err)
	}
	m.arena = append(m.arena, slab{bytes: b})
	return nil
}

func (m *memory) arenaBytes() int {
	n := 0
	for _, s := range m.arena {
		n += s.bytes.Len()
	}
	return n
}

// reserve makes the arena at least nbytes large.
func (m *memory) reserve(nbytes int) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if missing := nbytes - m.arenaBytes(); missing > 0 {
		return m.grow(missing)
	}
	return nil
}

// rewind makes the whole arena free.
func (m *memory) rewind() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.arena {
		m.arena[i].used = 0
	}
	m.current = 0
}

// keep returns new memory, to be given back with free.
func (m *memory) keep(nbytes int) (backend.Buffer, error) {
	b, err := m.device.Alloc(nbytes)
	if err != nil {
		return backend.Buffer{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.tensors[b.Addr()] = b
	return b, nil
}

// free gives back what keep returned, and nothing else.
func (m *memory) free(addr uintptr) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	b, ok := m.tensors[addr]
	if !ok {
		return nil
	}
	delete(m.tensors, addr)
	return m.device.Free(b)
}

// close gives back everything.
func (m *memory) close() (all error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, b := range m.tensors {
		all = errors.Join(all, m.device.Free(b))
	}
	for _, s := range m.arena {
		all = errors.Join(all, m.device.Free(s.bytes))
	}
	clear(m.tensors)
	m.arena, m.current = nil, 0
	return all
}
