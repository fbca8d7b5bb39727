package rendezvous

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/euryale-ml/euryale/internal/spinwait"
)

// queued is how many frames may wait for a peer that reads slowly. Once that many wait, senders to
// this peer block; senders to other peers do not.
const queued = 64

// lastWords is how long a link that takes no more data is still read. A peer that has ended may
// have said before whom to blame for that. Its reader ends the link afterwards.
const lastWords = 200 * time.Millisecond

// link sends frames of several goroutines over a connection. It never waits for the peer
// while it holds a lock.
type link struct {
	conn    net.Conn
	timeout time.Duration // of writing one frame
	out     chan frame
	over    context.Context
	end     context.CancelCauseFunc // closes the connection; only the first cause counts
	written chan struct{}           // closed when writing has ended
}

func newLink(conn net.Conn, timeout time.Duration) *link {
	l := &link{conn: conn, timeout: timeout, out: make(chan frame, queued),
		written: make(chan struct{})}
	l.over, l.end = context.WithCancelCause(context.Background())
	context.AfterFunc(l.over, func() { conn.Close() })
	go l.write()
	return l
}

// send queues a frame.
func (l *link) send(ctx context.Context, f frame) error {
	select {
	case l.out <- f:
		return nil
	case <-l.over.Done():
		return context.Cause(l.over)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// write sends what is queued, up to a goodbye.
func (l *link) write() {
	defer close(l.written)
	for {
		select {
		case <-l.over.Done():
			return
		case f := <-l.out:
			l.conn.SetWriteDeadline(time.Now().Add(l.timeout))
			if err := f.writeTo(l.conn); err != nil {
				spinwait.Patient(lastWords).Await(l.over.Done())
				l.end(fmt.Errorf("its connection does not take data: %w", err))
				return
			}
			if f.sent != nil {
				close(f.sent)
			}
			if f.kind == kindBye {
				return
			}
		}
	}
}

// bye sends a goodbye after everything that is queued, and waits until it is written or
// ctx ends.
func (l *link) bye(ctx context.Context, body []byte) {
	if l.send(ctx, frame{kind: kindBye, body: body}) != nil {
		return
	}
	select {
	case <-l.written:
	case <-ctx.Done():
	}
}
