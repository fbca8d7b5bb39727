package rendezvous

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/internal/spinwait"
)

// queued is how many frames may wait for a peer that reads slowly. Once that many wait, senders to
// this peer block, and its requests are not read; senders to other peers go on.
const queued = 64

// lastWords is how long a link that takes no more data is still read. A peer that has ended may
// have said before whom to blame for that. Its reader ends the link afterwards.
const lastWords = 200 * time.Millisecond

// link sends frames of several goroutines over a connection. It never waits for the peer
// while it holds a lock.
type link struct {
	conn    net.Conn
	timeout time.Duration // of writing one frame
	over    context.Context
	end     context.CancelCauseFunc // closes the connection; only the first cause counts
	written chan struct{}           // closed when writing has ended

	mu      sync.Mutex
	queue   []frame
	changed *sync.Cond // the queue, or the link is over
}

func newLink(conn net.Conn, timeout time.Duration) *link {
	l := &link{conn: conn, timeout: timeout, written: make(chan struct{})}
	l.changed = sync.NewCond(&l.mu)
	l.over, l.end = context.WithCancelCause(context.Background())
	context.AfterFunc(l.over, func() { conn.Close(); l.wake() })
	go l.write()
	return l
}

func (l *link) wake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.changed.Broadcast()
}

// push queues a frame, even if there is no room: whoever can wait asks for that first.
func (l *link) push(f frame) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = append(l.queue, f)
	l.changed.Broadcast()
}

// room waits until there is room for a frame.
func (l *link) room(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) >= queued {
		defer context.AfterFunc(ctx, l.wake)()
	}
	for len(l.queue) >= queued && l.over.Err() == nil && ctx.Err() == nil {
		l.changed.Wait()
	}
	return cmp.Or(context.Cause(l.over), context.Cause(ctx))
}

// next takes a frame from the queue once there is one, unless the link is over.
func (l *link) next() (f frame, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.queue) == 0 && l.over.Err() == nil {
		l.changed.Wait()
	}
	if l.over.Err() != nil {
		return frame{}, false
	}
	f, l.queue[0] = l.queue[0], frame{} // its body may be large
	l.queue = l.queue[1:]
	l.changed.Broadcast()
	return f, true
}

// write sends what is queued, up to a goodbye.
func (l *link) write() {
	defer close(l.written)
	for {
		f, ok := l.next()
		if !ok {
			return
		}
		l.conn.SetWriteDeadline(time.Now().Add(l.timeout))
		if err := f.writeTo(l.conn); err != nil {
			spinwait.Patient(lastWords).Await(l.over.Done())
			l.end(fmt.Errorf("its connection does not take data: %w", err))
			return
		}
		if f.sent != nil {
			f.sent()
		}
		if f.kind == kindBye {
			return
		}
	}
}
