package cuda

import (
	"context"
	"sync"

	"github.com/euryale-ml/euryale/backend"
)

// pending are the collectives that results may come from: the last of each
// communicator, since its calls end in order and its errors are sticky.
type pending struct {
	mu   sync.Mutex
	last []collective
	err  error // the first of those that have failed
}

type collective struct {
	name string // of the communicator
	work backend.Work
}

// Expect tells the engine of a collective on its queue that writes to its memory. The
// host does not wait for it here. Every copy of a value to the host from now on does, and
// fails if the collective has, until a Reset after the first that did: what failed
// collectives leave means nothing, and a Reset that nobody was told before, as that of
// [Machine.RunAll], must not hide it.
func (e *Engine) Expect(comm backend.Communicator, w backend.Work) {
	name := comm.Name()
	e.pending.mu.Lock()
	defer e.pending.mu.Unlock()
	for i := range e.pending.last {
		if e.pending.last[i].name == name {
			e.pending.last[i].work = w
			return
		}
	}
	e.pending.last = append(e.pending.last, collective{name, w})
}

// join waits for the collectives, and returns the first error since the last reset.
func (p *pending) join() error {
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

// reset forgets an error that was told. What nobody has waited for stays.
func (p *pending) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = nil
}
