package hierarchy

import (
	"context"
	"errors"

	"github.com/euryale-ml/euryale/backend"
)

// stream is the queue of a phase. All slices go through it in the order in which
// they were started, which is the same on every rank.
type stream struct {
	queue backend.Queue
	watch stopwatch // nil if nothing is timed
}

// timed runs f, which starts something on the stream.
func (l *stream) timed(s Span, f func() error) error {
	if l.watch == nil {
		return f()
	}
	return l.watch.timed(s, f)
}

// close waits for the queue to drain.
func (l *stream) close() error {
	err := l.queue.Close()
	if l.watch != nil {
		err = errors.Join(err, l.watch.close())
	}
	return err
}

// admission is the end of a phase as seen by the next one, on queues of the host. It
// makes a failure end all communicators of this rank before the next phase can
// begin, so that nobody is sent what a failed phase has left behind.
type admission struct {
	call *call
	at   step
	work backend.Work
}

// Join implements [backend.Event]. Its error is that of ctx alone: the call has
// the other ones.
func (g admission) Join(ctx context.Context) error {
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
func (g admission) Done() bool { return g.work.Done() }

// after orders stream l after a work of call k.
func (c *Communicator) after(l *stream, k *call, at step, w backend.Work) error {
	if c.onHost {
		return l.queue.Wait(admission{k, at, w})
	}
	return w.Wait(l.queue)
}
