package gpu

import (
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
)

// status is two words of host memory: the host tells kernels to stop in one, and a kernel names
// the rank that it gave up waiting for in the other. A status without memory does nothing.
type status struct {
	mu    sync.RWMutex // guards against use of words after their memory is freed
	words backend.Buffer
}

func (s *status) set(words backend.Buffer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.words = words
}

// takeMemory returns the memory to be freed, and forgets it.
func (s *status) takeMemory() backend.Buffer {
	s.mu.Lock()
	defer s.mu.Unlock()
	words := s.words
	s.words = backend.Buffer{}
	return words
}

// flag is a word, which the device uses too. mu is held.
func (s *status) flag(i int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&s.words.Bytes()[4*i]))
}

// stop ends all waits of kernels; later kernels end as they begin to wait.
func (s *status) stop() {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.words.Len() > 0 {
		s.flag(0).Store(1)
	}
}

// straggler returns the rank that a kernel has given up waiting for, -1 if there is none.
func (s *status) straggler() int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.words.Len() == 0 {
		return -1
	}
	return int(s.flag(1).Load()) - 1
}
