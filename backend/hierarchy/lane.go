package hierarchy

import (
	"context"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// lane is the queue of a phase. All slices go through it in the order in which
// they were started, which is the same on every rank.
type lane struct {
	queue    backend.Queue
	spans    *spans
	watching sync.WaitGroup
	pending  chan pending // nil if nothing is timed
}

// pending is a phase whose times are not known yet.
type pending struct {
	span       Span
	start, end backend.Event
}

// maxPending is how many phases of a lane may wait to be timed; those beyond are
// left out, because the program must not wait for the one who watches it.
const maxPending = 1024

func newLane(q backend.Queue, s *spans) *lane {
	l := &lane{queue: q, spans: s}
	if s.keep > 0 {
		l.pending = make(chan pending, maxPending)
		l.watching.Go(l.watch)
	}
	return l
}

// watch sees when phases begin and end, in order.
func (l *lane) watch() {
	for p := range l.pending {
		if p.start.Join(context.Background()) != nil {
			continue // the device is lost, and has no times
		}
		p.span.Start = time.Now()
		if p.end.Join(context.Background()) == nil {
			p.span.End = time.Now()
			l.spans.add(p.span)
		}
	}
}

// timed runs f, which starts something on the lane.
func (l *lane) timed(s Span, f func() error) error {
	if l.pending == nil {
		return f()
	}
	start, err := l.queue.Record()
	if err != nil {
		return err
	}
	if err := f(); err != nil {
		return err
	}
	end, err := l.queue.Record()
	if err != nil {
		return err
	}
	select {
	case l.pending <- pending{s, start, end}:
	default:
	}
	return nil
}

// close waits for the queue to drain.
func (l *lane) close() error {
	err := l.queue.Close()
	if l.pending != nil {
		close(l.pending)
		l.watching.Wait()
	}
	return err
}

// gate is the end of a phase as seen by the next one, on queues of the host. It
// makes a failure end all communicators of this rank before the next phase can
// begin, so that nobody is sent what a failed phase has left behind.
type gate struct {
	call *call
	at   step
	work backend.Work
}

// Join implements [backend.Event]. Its error is that of ctx alone: the call has
// the other ones.
func (g gate) Join(ctx context.Context) error {
	err := g.work.Join(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		g.call.c.fail(g.call, g.at, err)
	}
	return nil
}

// after orders lane l after a work of call k.
func (c *Communicator) after(l *lane, k *call, at step, w backend.Work) error {
	if c.onHost {
		return l.queue.Wait(gate{k, at, w})
	}
	return w.Wait(l.queue)
}
