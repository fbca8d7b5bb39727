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

// client is the store of a rank other than 0. It drives a caller by a connection.
type client struct {
	link   *link
	token  string
	host   atomic.Pointer[string] // where other machines reach this rank, if not by link
	closed context.Context
	close  context.CancelCauseFunc
	read   chan struct{} // closed when reading has ended

	mu sync.Mutex
	caller
	found chan struct{} // closed once next is known; nil before this rank is asked to follow
	next  Store         // serves the failure detector after the server has left; nil for none
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
	c := &client{link: newLink(conn, timeout), caller: newCaller(me, server), token: token,
		read: make(chan struct{})}
	c.closed, c.close = context.WithCancelCause(context.Background())
	go c.replies()
	return c
}

// tell tells the caller what happens, and carries out what it says.
func (c *client) tell(event func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = time.Now()
	event()
	for _, a := range c.todo {
		switch a := a.(type) {
		case push:
			c.link.push(a.frame)
		case finish:
			close(a.call.done)
		case follow:
			c.follow(a.frame)
		case hand:
			go func() {
				next := c.successor(c.closed)
				if next != nil && next.Set(c.closed, reportKey(c.me.rank), a.value) == nil {
					c.tell(func() { c.handed(a) })
				}
			}()
		case pass:
			go func() {
				c.toldNext(a.failure, a.most)
				c.tell(func() { c.passed(a.failure, a.call) })
			}()
		case patience:
			time.AfterFunc(a.most, func() { c.tell(func() { c.endAll(a.why) }) })
		case hangUp:
			c.link.end(a.why)
		}
	}
	c.todo = nil
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

// replies reads what the server sends, until the link ends.
func (c *client) replies() {
	defer close(c.read)
	for {
		f, err := readFrame(c.link.conn, maxBody)
		if err != nil {
			c.tell(func() { c.broke(err, context.Cause(c.link.over)) })
			return
		}
		c.tell(func() { c.heard(f) })
		if f.kind == kindBye {
			return
		}
	}
}

// toldNext tells the successor of a failure.
func (c *client) toldNext(f *Failure, most time.Duration) {
	ctx, cancel := context.WithTimeout(c.closed, most)
	defer cancel()
	if next := c.successor(ctx); next != nil {
		next.CompareAndSwap(ctx, downKey, nil, f.encode()) // no effect after another failure
		// if this rank serves, it returns once the others know
		next.Get(ctx, downKey)
	}
}

// request sends a request and waits for its reply. It returns the successor's store, too, if that
// has the key.
func (c *client) request(ctx context.Context, k kind, key string, body []byte) (u *unpacker,
	next Store, err error) {
	if c.link.room(ctx); ctx.Err() != nil {
		return nil, nil, context.Cause(ctx) // the reply could come first
	}
	call := &request{kind: k, key: key, done: make(chan struct{})}
	c.tell(func() { c.sendRequest(call, body) })
	select {
	case <-call.done:
	case <-ctx.Done():
		c.tell(func() { c.giveUp(call, context.Cause(ctx)) })
		<-call.done
	}
	if call.moved {
		next = c.successor(ctx)
	}
	if call.err != nil {
		return nil, next, call.err
	}
	u, err = result(call.reply)
	return u, next, err
}

func result(f frame) (*unpacker, error) {
	u := &unpacker{rest: f.body}
	if f.kind == kindFailed {
		return nil, errors.New(Printable(u.string()))
	}
	return u, nil
}

func (c *client) Set(ctx context.Context, key string, value []byte) error {
	if err := checkPair(key, value); err != nil {
		return err
	}
	body := packBytes(packString(nil, key), copied(value))
	u, next, err := c.request(ctx, kindSet, key, body)
	if next != nil {
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
	u, next, err := c.request(ctx, kindGet, key, packString(nil, key))
	if next != nil {
		return next.Get(ctx, key)
	}
	if err != nil {
		return nil, err
	}
	return u.rest, nil
}

func (c *client) CompareAndSwap(ctx context.Context, key string, old, new []byte) ([]byte, bool,
	error) {
	if err := checkPair(key, new); err != nil {
		return nil, false, err
	}
	if len(old) > maxValue {
		old = old[:maxValue+1] // no value is that long, so it matches none
	}
	body := packBytes(packBytes(packString(nil, key), old), copied(new))
	u, next, err := c.request(ctx, kindSwap, key, body)
	if next != nil {
		return next.CompareAndSwap(ctx, key, old, new)
	}
	if err != nil {
		return nil, false, err
	}
	swapped, current := u.int() == 1, u.bytes()
	return current, swapped, u.done()
}

// Append implements [Log].
func (c *client) Append(ctx context.Context, key string, i int, value []byte) (at int, err error) {
	if err := checkPair(rankKey(key, i), value); err != nil {
		return 0, err
	}
	body := packBytes(packInt(packString(nil, key), int64(i)), copied(value))
	u, _, err := c.request(ctx, kindAppend, key, body)
	if err != nil {
		return 0, err
	}
	at = int(u.int())
	return at, u.done()
}

// Entries implements [Log].
func (c *client) Entries(ctx context.Context, key string, i int) ([][]byte, error) {
	if err := checkPair(rankKey(key, i), nil); err != nil {
		return nil, err
	}
	u, _, err := c.request(ctx, kindEntries, key, packInt(packString(nil, key), int64(i)))
	if err != nil {
		return nil, err
	}
	return u.list()
}

// Peek implements [Log].
func (c *client) Peek(ctx context.Context, key string, entries ...int) ([][]byte, error) {
	return peekEntries(ctx, c, key, entries)
}

// Close leaves the store.
func (c *client) Close() error {
	c.close(ErrClosed)
	c.tell(c.shut)
	<-c.read
	<-c.link.written
	if next := c.successor(context.Background()); next != nil {
		return next.Close()
	}
	return nil
}
