package rendezvous

import (
	"context"
	"errors"
	"net"
)

// The failure detector outlives the rank that serves it. A server that leaves asks the
// lowest remaining rank to take over, and tells the others its address. Each rank
// connects to the new server and gives it its last report before it leaves the old one, so at every
// moment one of them would notice its death. Only the failure detector moves: all other values of
// the store end with rank 0.
//
//	old server                    lowest rank       another rank
//	     ---- kindServe: how many ------>
//	     <--- kindServing: address ------
//	     ---- kindMove: address ---------------------------->
//	                              <---- handshake, last report -----
//	     <--- kindBye ----------------------------------------
//	     ---- kindBye: failure --------->

// follow finds the successor of a leaving server, or becomes it. c.mu is held.
func (c *client) follow(f frame) {
	before, found := c.found, make(chan struct{})
	c.found = found
	go func() {
		if before != nil { // it was to be this rank, which was too slow
			if <-before; c.next != nil {
				c.next.Close()
			}
		}
		var next Store // none after an error: the server before watches this rank
		u, addr := unpacker{rest: f.body}, ""
		if f.kind == kindServe {
			next, addr, _ = c.serveNext(int(u.int()))
		} else if there, err := dial(context.Background(), u.string(), c.token, c.me, handshakeTime,
			c.link.timeout); err == nil {
			// Close does not interrupt this: a connection that ends without a goodbye looks like a
			// lost rank to the new server.
			next = there
		}
		c.tell(func() {
			if c.next = next; next != nil {
				c.caller.found(addr)
			}
		})
		close(found)
	}()
}

// successor waits for the store that serves the failure detector once the server has left. It
// returns nil if there is none: this rank is no longer watched.
func (c *client) successor(ctx context.Context) Store {
	for {
		var found chan struct{}
		if c.tell(func() { found = c.found }); found == nil {
			return nil
		}
		select {
		case <-found:
		case <-ctx.Done():
			return nil
		}
		var next Store
		last := false
		if c.tell(func() { next, last = c.next, c.found == found }); last {
			return next
		}
	}
}

// serveNext makes this rank the server for others. It listens where they can reach it, too: on the
// local address of its connection to the current server, unless it was told another.
func (c *client) serveNext(others int) (store Store, addr string, err error) {
	at, ok := c.link.conn.LocalAddr().(*net.TCPAddr)
	if !ok {
		return nil, "", errors.New("the connection to the store has no address")
	}
	host := at.IP.String()
	if told := c.host.Load(); told != nil {
		host = *told
	}
	config := net.ListenConfig{KeepAliveConfig: keepAlive()}
	ln, err := config.Listen(c.closed, "tcp", net.JoinHostPort(host, "0"))
	if err == nil {
		ln, err = secured(ln, c.me)
	}
	if err != nil {
		return nil, "", err
	}
	s := serve(ln, c.token, c.me, c.link.timeout, nil)
	s.table.tell(func() { s.table.expected = others })
	return s.open(), ln.Addr().String(), nil
}
