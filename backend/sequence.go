package backend

import "sync"

// Sequence is for a wrapper that starts kernels before or after the collectives of an inner
// communicator. It keeps the promise of [Communicator] that calls happen in the order in which they
// were started, also across queues. The inner communicator orders its collectives: those that share
// memory follow each other, and each ends after those before it. But it does not know of the
// kernels.
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

// follow orders q after b.
func (b begun) follow(q Queue) {
	if b.work != nil && b.on != q {
		// Its own Work reports its error, and so does the next call if it has ended the
		// communicator.
		_ = b.work.Wait(q)
	}
}

// Start calls start, which starts a call on q. own says that the call has kernels of the wrapper: q
// is then ordered after all earlier calls first, and otherwise after the last call that had such
// kernels. Only another queue needs to wait. Other goroutines that start calls wait until start
// returns.
func (s *Sequence) Start(q Queue, own bool, start func() (Work, error)) (Work, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if own {
		s.last.follow(q) // the last call ends after those before it
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
