package backend

import "sync"

// Sequence keeps the promise of [Communicator] that calls happen in the order in which
// they were started, also across queues, for a wrapper that starts kernels of its own
// before or behind the collectives of an inner communicator. That one orders its
// collectives, but does not know of the kernels.
//
// The zero value has seen no call.
type Sequence struct {
	mu   sync.Mutex
	q    Queue // of the last call
	last Work
	own  bool // whether that had kernels of the wrapper
}

// Start calls start, which starts a call on q, behind the call before. That takes a wait
// of q only where the queue changes and one of the two calls has kernels of the wrapper:
// own says that this one has. Other goroutines that start calls wait until start returns.
func (s *Sequence) Start(q Queue, own bool, start func() (Work, error)) (Work, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last != nil && s.q != q && (own || s.own) {
		// Its error is told by its own Work, and if it has ended the communicator by the
		// next call, too.
		_ = s.last.Wait(q)
	}
	w, err := start()
	if err == nil {
		s.q, s.last, s.own = q, w, own
	}
	return w, err
}
