package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// keepAlive detects within seconds that a machine has vanished without closing its
// connections.
func keepAlive() net.KeepAliveConfig {
	return net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: time.Second, Count: 5}
}

// client is the store of a rank other than 0.
type client struct {
	link   *link
	server identity
	me     identity
	token  string
	next   successor              // serves the failure detector after the server has left
	host   atomic.Pointer[string] // where other machines reach this rank, if not by link
	moved  atomic.Bool            // this rank has left the server for its successor
	closed context.Context
	close  context.CancelCauseFunc
	read   chan struct{} // closed when reading has ended
	wills  wills         // of the server
	// the server did not answer a call that it answers at once, or was reported lost
	silent atomic.Bool

	mu    sync.Mutex
	last  uint64
	calls map[uint64]chan frame
}

// dial connects to a store and waits at most wait. ctx bounds only the connecting, timeout the
// writing of a frame.
func dial(ctx context.Context, addr, token string, me identity, wait,
	timeout time.Duration) (*client, error) {
	conn, server, err := reach(ctx, addr, token, me, wait)
	if err != nil {
		return nil, fmt.Errorf("the store at %s: %w", addr, err)
	}
	return newClient(conn, server, token, me, timeout), nil
}

func newClient(conn net.Conn, server identity, token string, me identity,
	timeout time.Duration) *client {
	c := &client{link: newLink(conn, timeout), server: server, me: me, token: token,
		read: make(chan struct{}), calls: map[uint64]chan frame{}}
	c.closed, c.close = context.WithCancelCause(context.Background())
	go c.replies()
	return c
}

// reach connects to a server that proves the token, and waits at most wait.
func reach(ctx context.Context, addr, token string, me identity, wait time.Duration) (net.Conn,
	identity, error) {
	d := net.Dialer{KeepAliveConfig: keepAlive(), Timeout: wait}
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, identity{}, err
	}
	if me.tls {
		conn = overTLS(conn)
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	server, err := greet(conn, token, me, wait)
	if !stop() && (err == nil || errors.Is(err, net.ErrClosed)) {
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		return nil, identity{}, err
	}
	return conn, server, nil
}

// replies dispatches what the server sends, until the link ends.
func (c *client) replies() {
	defer close(c.read)
	for {
		f, err := readFrame(c.link.conn, maxBody)
		switch {
		case err != nil && c.closed.Err() != nil:
			c.link.end(ErrClosed) // the answer to this rank's goodbye
			return
		case err != nil && c.moved.Load():
			c.link.end(c.left())
			return
		case err != nil:
			c.link.end(c.told(c.wills.instead(c.server.loss(err), time.Now())))
			return
		case f.kind == kindBye:
			c.link.end(c.parting(f))
			return
		case f.kind == kindWill:
			c.wills.take(f.body, time.Now())
		case f.kind == kindServe || f.kind == kindMove:
			c.follow(f)
		case f.kind == kindDone || f.kind == kindFailed:
			c.deliver(f)
		}
	}
}

// parting returns the error that the server's goodbye carries: a failure, if any.
func (c *client) parting(f frame) error {
	u := unpacker{rest: f.body}
	if failure := u.bytes(); failure != nil {
		return c.told(decodeFailure(failure))
	}
	return c.left()
}

// told passes a failure on to the ranks that have moved to the successor.
func (c *client) told(f *Failure) *Failure {
	if next := c.next.get(c.closed); next != nil {
		next.CompareAndSwap(c.closed, downKey, nil, f.encode()) // no effect after another failure
		// if this rank serves, it returns once the others know
		next.Get(c.closed, downKey)
	}
	return f
}

func (c *client) deliver(f frame) {
	c.silent.Store(false)
	c.mu.Lock()
	defer c.mu.Unlock()
	if reply := c.calls[f.id]; reply != nil { // nil: the caller has stopped waiting
		reply <- f
		delete(c.calls, f.id)
	}
}

// request sends a request and waits for its reply.
func (c *client) request(ctx context.Context, k kind, body []byte) (*unpacker, error) {
	if c.closed.Err() != nil {
		return nil, ErrClosed
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx) // the reply could come first
	}
	ctx, cancel := endWith(ctx, c.closed)
	defer cancel()
	id, reply := c.register()
	defer c.forget(id)
	if err := c.link.send(ctx, frame{kind: k, id: id, body: body}); err != nil {
		return nil, c.lost(err)
	}
	select {
	case f := <-reply:
		return result(f)
	case <-ctx.Done():
		if waits := k == kindGet || k == kindGather; waits {
			c.link.push(frame{kind: kindCancel, id: id}) // the server forgets it
		} else {
			c.silent.Store(true)
		}
		return nil, context.Cause(ctx)
	case <-c.link.over.Done():
	}
	select {
	case f := <-reply: // it came before the end
		return result(f)
	default:
		return nil, c.lost(context.Cause(c.link.over))
	}
}

// lost turns the end of the connection into a failure of the server.
func (c *client) lost(err error) error {
	var f *Failure
	if c.link.over.Err() == nil || errors.Is(err, ErrClosed) || errors.As(err, &f) {
		return err
	}
	return &Failure{Rank: c.server.rank, Cause: err}
}

func result(f frame) (*unpacker, error) {
	u := &unpacker{rest: f.body}
	if f.kind == kindFailed {
		return nil, errors.New(Printable(u.string()))
	}
	return u, nil
}

func (c *client) register() (uint64, chan frame) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last++
	reply := make(chan frame, 1)
	c.calls[c.last] = reply
	return c.last, reply
}

func (c *client) forget(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.calls, id)
}

func (c *client) Set(ctx context.Context, key string, value []byte) error {
	if err := checkPair(key, value); err != nil {
		return err
	}
	u, err := c.request(ctx, kindSet, packBytes(packString(nil, key), copied(value)))
	if next := c.after(ctx, key, err); next != nil {
		return next.Set(ctx, key, value)
	}
	if err != nil {
		return err
	}
	return u.done()
}

func (c *client) Get(ctx context.Context, key string) ([]byte, error) {
	if err := checkPair(key, nil); err != nil {
		return nil, err
	}
	u, err := c.request(ctx, kindGet, packString(nil, key))
	if next := c.after(ctx, key, err); next != nil {
		return next.Get(ctx, key)
	}
	if err != nil {
		return nil, err
	}
	if key == downKey {
		// before this rank ends, which would look like another failure
		c.told(decodeFailure(u.rest))
	}
	return u.rest, nil
}

func (c *client) Add(ctx context.Context, key string, delta int64) (int64, error) {
	if err := checkPair(key, nil); err != nil {
		return 0, err
	}
	u, err := c.request(ctx, kindAdd, packInt(packString(nil, key), delta))
	if err != nil {
		return 0, err
	}
	sum := u.int()
	return sum, u.done()
}

func (c *client) CompareAndSwap(ctx context.Context, key string, old, new []byte) ([]byte, bool,
	error) {
	if err := checkPair(key, new); err != nil {
		return nil, false, err
	}
	if len(old) > maxValue {
		old = old[:maxValue+1] // no value is that long, so it matches none
	}
	u, err := c.request(ctx, kindSwap, packBytes(packBytes(packString(nil, key), old), copied(new)))
	if next := c.after(ctx, key, err); next != nil {
		return next.CompareAndSwap(ctx, key, old, new)
	}
	if err != nil {
		return nil, false, err
	}
	swapped, current := u.int() == 1, u.bytes()
	return current, swapped, u.done()
}

// after returns the store that now holds a key. It is nil unless a call failed because the server
// has left and the key belongs to the failure detector.
func (c *client) after(ctx context.Context, key string, err error) Store {
	if !detects(key) || !errors.Is(err, ErrClosed) || c.closed.Err() != nil {
		return nil
	}
	return c.next.get(ctx)
}

// newsTime returns how long to wait for the server to take news. If the server has been silent
// before, the wait is short: it is stopped, or cut off, and this rank must report that without
// delay.
func (c *client) newsTime() time.Duration {
	if c.silent.Load() {
		return silentTime
	}
	return newsTime
}

// sayGoodbye says goodbye and waits briefly for the server to take it.
func (c *client) sayGoodbye(why error) {
	ctx, cancel := context.WithTimeout(context.Background(), c.newsTime())
	defer cancel()
	c.link.bye(ctx)
	select {
	case <-c.link.over.Done(): // the server closes the connection
	case <-ctx.Done():
	}
	c.link.end(why)
}

// Close leaves the store.
func (c *client) Close() error {
	c.close(ErrClosed)
	c.sayGoodbye(ErrClosed)
	<-c.read
	<-c.link.written
	return c.next.close()
}
