package cuda

import (
	"context"
	"sync"

	"github.com/euryale-ml/euryale/backend"
)

// inFlight are the collectives that values may depend on: the last one of each
// communicator, since its calls end in order and its errors are sticky.
type inFlight struct {
	mu   sync.Mutex
	last []collective
	err  error // the first of those that have failed
}

type collective struct {
	name string // of the communicator
	work backend.Work
}

// TrackWork tells the engine of a collective on its queue that writes to its memory. The
// host does not wait here, but every later copy of a value to the host does, and fails if the
// collective has failed, since its result is meaningless. The error lasts until a Reset after
// a copy has returned it: an earlier Reset, such as that of [Machine.RunAll], must not hide it.
func (e *Engine) TrackWork(comm backend.Communicator, w backend.Work) {
	name := comm.Name()
	e.inFlight.mu.Lock()
	defer e.inFlight.mu.Unlock()
	for i := range e.inFlight.last {
		if e.inFlight.last[i].name == name {
			e.inFlight.last[i].work = w
			return
		}
	}
	e.inFlight.last = append(e.inFlight.last, collective{name, w})
}

// join waits for the collectives, and returns the first error since the last reset.
func (p *inFlight) join() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.last {
		if err := c.work.Join(context.Background()); p.err == nil {
			p.err = err
		}
	}
	clear(p.last)
	p.last = p.last[:0]
	return p.err
}

// reset clears an error that was returned. Collectives that no copy has waited for stay.
func (p *inFlight) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = nil
}
