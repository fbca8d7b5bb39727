package backend

import "sync"

// Sequence keeps the promise of [Communicator] that calls happen in the order in which
// they were started, also across queues, for a wrapper that starts its own kernels
// before or behind the collectives of an inner communicator. That one orders its
// collectives: those that share memory follow each other, and each ends after those before
// it. But it does not know of the kernels.
//
// The zero value has seen no call.
type Sequence struct {
	mu        sync.Mutex
	last, own begun // the last call, and the last one with kernels of the wrapper
}

// begun is a call that was started.
type begun struct {
	work Work // nil if there was none
	on   Queue
}

// follow orders q after it.
func (b begun) follow(q Queue) {
	if b.work != nil && b.on != q {
		// Its error is told by its own Work, and if it has ended the communicator by the
		// next call, too.
		_ = b.work.Wait(q)
	}
}

// Start calls start, which starts a call on q. Before that q is ordered after all calls
// before, if this one has kernels of the wrapper, which own says; else after the last one
// that had: waits that only another queue takes. Other goroutines that start calls wait
// until start returns.
func (s *Sequence) Start(q Queue, own bool, start func() (Work, error)) (Work, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if own {
		s.last.follow(q) // which ends after those before it
	} else {
		s.own.follow(q)
	}
	w, err := start()
	if err != nil {
		return w, err
	}
	s.last = begun{w, q}
	if own {
		s.own = s.last
	}
	return w, nil
}
