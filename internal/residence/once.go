package residence

import (
	"encoding/binary"
	"iter"
	"slices"
	"sync"

	"github.com/euryale-ml/euryale/backend"
)

// Once is memory with what is computed of tensors that its machines do not change. Machines that
// compute the same of the same tensors share it.
type Once struct {
	Memory backend.Buffer // none before Fill

	mu     sync.Mutex
	leaves []backend.Buffer // of the host, which must stay while their addresses are a key
	key    recipe
	users  int  // guarded by Copies.mu
	stale  bool // likewise: somebody has written a leaf
}

// recipe is what is computed, and of which memory.
type recipe struct{ text, leaves string }

// Host has what machines on the host share.
var host Copies

// OnHost returns what machines on the host share.
func OnHost() *Copies { return &host }

// Compute counts a user of what a text says of leaves in host memory.
func (s *Copies) Compute(text string, leaves []backend.Buffer) *Once {
	var addresses []byte
	for _, b := range leaves {
		addresses = binary.LittleEndian.AppendUint64(addresses, uint64(b.Addr()))
	}
	key := recipe{text, string(addresses)}
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

// Current reports whether it was computed of leaves, which the host has not written since.
func (s *Copies) Current(o *Once, leaves []backend.Buffer) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !o.stale && slices.Equal(o.leaves, leaves)
}

// Outdated notes that the host or another machine writes tensors: what was computed of them is
// computed again.
func (s *Copies) Outdated(written iter.Seq[backend.Buffer]) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.once) == 0 {
		return
	}
	all := map[backend.Buffer]bool{}
	for b := range written {
		all[b] = true
	}
	for key, o := range s.once {
		if slices.ContainsFunc(o.leaves, func(b backend.Buffer) bool { return all[b] }) {
			o.stale = true
			delete(s.once, key)
		}
	}
}

// LeaveOnce ends what Compute began. It returns the memory, for the last user to free.
func (s *Copies) LeaveOnce(o *Once) (unused backend.Buffer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o.users--; o.users > 0 {
		return backend.Buffer{}
	}
	if s.once[o.key] == o {
		delete(s.once, o.key)
	}
	return o.Memory
}
