package rendezvous

import (
	"context"
	"errors"
	"net"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// strangers bounds the connections that have not proven the token yet;
	// 1/strangerShare is the part of the process's file descriptors that they may use.
	strangers     = 128
	strangerShare = 4
)

// gate takes connections, of which a few may be strangers'.
type gate struct {
	ln        net.Listener
	strangers *crowd
	over      context.Context
	end       context.CancelFunc
	running   sync.WaitGroup
}

// start begins to take connections, each of which is a stranger's until take says otherwise.
func (g *gate) start(ln net.Listener, take func(net.Conn)) {
	g.ln, g.strangers = ln, newCrowd()
	g.over, g.end = context.WithCancel(context.Background())
	g.running.Go(func() { g.accept(take) })
}

// accept takes connections until ln is closed.
func (g *gate) accept(take func(net.Conn)) {
	for {
		conn, err := g.ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of file descriptors, say
			g.strangers.thin()
			pause(g.over, 10*time.Millisecond)
			continue
		}
		g.strangers.enter(conn)
		g.running.Go(func() { take(conn) })
	}
}

// crowd holds the connections that have not proven the token yet. When it is full,
// the oldest is dropped: a peer that has the token needs a place only for a moment.
type crowd struct {
	room int

	mu    sync.Mutex
	conns []net.Conn // oldest first
}

func newCrowd() *crowd {
	room := strangers
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err == nil {
		room = int(max(1, min(uint64(room), files.Cur/strangerShare)))
	}
	return &crowd{room: room}
}

// enter gives a connection a place.
func (c *crowd) enter(conn net.Conn) {
	full := func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.conns = append(c.conns, conn)
		return len(c.conns) > c.room
	}()
	if full {
		c.thin()
		runtime.Gosched() // the remaining ones may be about to prove the token
	}
}

// thin drops the oldest connection, if there is one.
func (c *crowd) thin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.conns) > 0 {
		c.conns[0].Close()
		c.conns = c.conns[1:]
	}
}

// leave gives up a connection's place, and reports false if it was dropped.
func (c *crowd) leave(conn net.Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.Index(c.conns, conn)
	if i >= 0 {
		c.conns = slices.Delete(c.conns, i, i+1)
	}
	return i >= 0
}
