package residence

import (
	"encoding/binary"
	"slices"
	"sync"

	"github.com/euryale-ml/euryale/backend"
)

// Once is memory with what is computed of tensors that its machines do not change. Machines that
// compute the same of the same tensors share it.
type Once struct {
	Memory backend.Buffer // none before Fill

	mu     sync.Mutex
	leaves []Source // which must stay while their addresses are a key
	key    recipe
	users  int // guarded by Copies.mu
}

// recipe is what is computed, of which memory, and after how many writes.
type recipe struct{ text, leaves string }

// Compute counts a user of what a text says of leaves.
func (s *Copies) Compute(text string, leaves []Source) *Once {
	var all []byte
	for _, l := range leaves {
		all = binary.LittleEndian.AppendUint64(all, uint64(l.Memory.Addr()))
		all = binary.LittleEndian.AppendUint64(all, l.seen)
	}
	key := recipe{text, string(all)}
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s.once[key]
	if o == nil {
		if s.once == nil {
			s.once = map[recipe]*Once{}
		}
		o = &Once{leaves: slices.Clone(leaves), key: key}
		s.once[key] = o
	}
	o.users++
	return o
}

// Fill computes the memory unless it is there. Of machines that run at the same time the first one
// does, and the others wait.
func (o *Once) Fill(compute func() (backend.Buffer, error)) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.Memory.Len() > 0 {
		return nil
	}
	memory, err := compute()
	if err == nil { // else it is freed
		o.Memory = memory
	}
	return err
}

// Of reports whether it is computed of leaves.
func (o *Once) Of(leaves []Source) bool { return slices.Equal(o.leaves, leaves) }

// LeaveOnce ends what Compute began. It returns the memory, for the last user to free.
func (s *Copies) LeaveOnce(o *Once) (unused backend.Buffer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o.users--; o.users > 0 {
		return backend.Buffer{}
	}
	delete(s.once, o.key)
	return o.Memory
}
