package session

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/observe"
)

// withdrawTime bounds how long a call waits for the store, once, after an error that was survived.
const withdrawTime = 250 * time.Millisecond

// survival are the hooks of a session. They find out that the program has survived the error of a
// part: a call of another group, begun after that error, has ended well. What ends this rank later
// has another cause.
type survival struct {
	*observe.Recorder
	session *Session
	failed  atomic.Bool   // a part has, and no later call has ended well
	since   atomic.Uint64 // 1 + the id of the first call after that, 0 before it
}

// Start implements [backend.Hooks].
func (s *survival) Start(c *backend.Call) uint64 {
	id := s.Recorder.Start(c)
	if s.failed.Load() {
		s.since.CompareAndSwap(0, id+1)
	}
	return id
}

// End implements [backend.Hooks].
func (s *survival) End(id uint64, err error) {
	s.Recorder.End(id, err)
	if err == nil && !s.failed.Load() {
		return
	}
	var e *backend.Error
	since := s.since.Load()
	switch {
	case errors.As(err, &e) && e.Comm != s.session.Name():
		s.failed.Store(true)
		s.since.Store(0) // calls under way began before this error
	case err == nil && since > 0 && id+1 >= since && s.failed.CompareAndSwap(true, false):
		s.since.Store(0)
		s.session.parts.forgive()
		_ = s.session.world.Withdraw(withdrawTime) // if it is not heard, it lapses
	}
}
