package hierarchy

import (
	"context"
	"errors"

	"github.com/euryale-ml/euryale/backend"
)

// lane is the queue of a phase. All slices go through it in the order in which
// they were started, which is the same on every rank.
type lane struct {
	queue backend.Queue
	watch stopwatch // nil if nothing is timed
}

// timed runs f, which starts something on the lane.
func (l *lane) timed(s Span, f func() error) error {
	if l.watch == nil {
		return f()
	}
	return l.watch.timed(s, f)
}

// close waits for the queue to drain.
func (l *lane) close() error {
	err := l.queue.Close()
	if l.watch != nil {
		err = errors.Join(err, l.watch.close())
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

// Done implements [backend.Event].
func (g gate) Done() bool { return g.work.Done() }

// after orders lane l after a work of call k.
func (c *Communicator) after(l *lane, k *call, at step, w backend.Work) error {
	if c.onHost {
		return l.queue.Wait(gate{k, at, w})
	}
	return w.Wait(l.queue)
}
