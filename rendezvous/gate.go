package rendezvous

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"time"
)

const (
	// mostUnproven bounds the connections that have not proven the token yet: thousands may come in
	// a second, and a rank needs its place for two round trips, of some 100 ms each at most.
	// 1/unprovenShare is the part of the process's file descriptors that they may use.
	mostUnproven  = 1024
	unprovenShare = 4
)

// gate takes connections. It bounds how many may be unauthenticated clients'.
type gate struct {
	ln       net.Listener
	unproven *crowd
	over     context.Context
	end      context.CancelFunc
	running  sync.WaitGroup
}

// start begins to take connections. Each counts as an unauthenticated client's until take says
// otherwise.
func (g *gate) start(ln net.Listener, take func(net.Conn)) {
	g.ln, g.unproven = ln, newCrowd()
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
			g.unproven.thin()
			pause(g.over, 10*time.Millisecond)
			continue
		}
		g.unproven.enter(conn)
		g.running.Go(func() { take(conn) })
	}
}

// crowd holds the connections that have not proven the token yet, in two halls: those that have
// said nothing, and those that have said hello. When a hall is full, it drops a random connection
// of the source that has the most places there. So unauthenticated clients take places from each
// other as long as other sources have fewer. Unauthenticated clients at a rank's own source still
// leave it a chance in each attempt, however long its messages take.
type crowd struct {
	mu    sync.Mutex
	halls [2]hall
}

func newCrowd() *crowd {
	room := int(max(2, min(mostUnproven, mostFiles()/unprovenShare)))
	c := &crowd{}
	for i := range c.halls {
		c.halls[i] = hall{room: room / 2, from: map[netip.Prefix][]net.Conn{}}
	}
	return c
}

// enter gives a new connection a place.
func (c *crowd) enter(conn net.Conn) {
	full := func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.halls[0].enter(conn)
	}()
	if full {
		runtime.Gosched() // the remaining ones may be about to prove the token
	}
}

// greeted moves a connection that has said hello to the second hall. A dropped connection stays
// dropped.
func (c *crowd) greeted(conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.halls[0].giveUp(conn) {
		c.halls[1].enter(conn)
	}
}

// thin drops a connection, if there is one, preferably one that has said nothing.
func (c *crowd) thin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.halls[0].drop() {
		c.halls[1].drop()
	}
}

// giveUp gives up a connection's place, and reports false if it was dropped.
func (c *crowd) giveUp(conn net.Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.halls[0].giveUp(conn) || c.halls[1].giveUp(conn)
}

// hall has room for connections.
type hall struct {
	room, held int
	from       map[netip.Prefix][]net.Conn // by source
}

// enter gives a connection a place, and reports whether one was dropped for it.
func (h *hall) enter(conn net.Conn) (full bool) {
	source := sourceOf(conn)
	h.from[source] = append(h.from[source], conn)
	h.held++
	return h.held > h.room && h.drop()
}

// drop closes a random connection of the source that has the most, if there is one.
func (h *hall) drop() bool {
	var most netip.Prefix
	for source, conns := range h.from {
		if len(conns) > len(h.from[most]) {
			most = source
		}
	}
	conns := h.from[most]
	if len(conns) == 0 {
		return false
	}
	conn := conns[rand.IntN(len(conns))]
	conn.Close()
	return h.giveUp(conn)
}

// giveUp gives up a connection's place, and reports false if it has none.
func (h *hall) giveUp(conn net.Conn) bool {
	source := sourceOf(conn)
	conns := h.from[source]
	i := slices.Index(conns, conn)
	if i < 0 {
		return false
	}
	h.held--
	if h.from[source] = slices.Delete(conns, i, i+1); len(h.from[source]) == 0 {
		delete(h.from, source)
	}
	return true
}

// sourceOf returns the network that a connection comes from: an IPv4 address, or the 64 bits of an
// IPv6 address within which a host chooses its own.
func sourceOf(conn net.Conn) netip.Prefix {
	at, ok := conn.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	addr := at.AddrPort().Addr().Unmap().WithZone("")
	network, _ := addr.Prefix(min(addr.BitLen(), 64)) // 64 bits at most are there
	return network
}
