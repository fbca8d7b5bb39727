package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
)

// The failure detector outlives the rank that serves it. A server that leaves asks the
// lowest remaining rank to take over, and tells the others its address. Each rank
// connects to the new server before it leaves the old one, so at every moment one of
// them would notice its death. Only the failure detector moves: all other values of the
// store end with rank 0.
//
//	old server                    lowest rank       another rank
//	     ---- kindServe: how many ------>
//	     <--- kindServing: address ------
//	     ---- kindMove: address ---------------------------->
//	                              <---- handshake -----------
//	     <--- kindBye ----------------------------------------
//	     ---- kindBye: failure --------->

// successor is the store that serves the failure detector once the server has left. A
// rank without one is no longer watched.
type successor struct {
	mu     sync.Mutex
	found  chan struct{} // closed once store is known; nil before dial
	store  Store         // nil if there is none
	closed bool
}

// dial connects to the store in the background, once.
func (n *successor) dial(find func() (Store, error), found func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.found != nil || n.closed {
		return
	}
	n.found = make(chan struct{})
	go func() {
		store, err := find()
		if err == nil {
			n.store = store
		}
		close(n.found)
		if err == nil {
			found()
		}
	}()
}

// get waits for the store. It returns nil if there is none.
func (n *successor) get(ctx context.Context) Store {
	n.mu.Lock()
	found := n.found
	n.mu.Unlock()
	if found == nil {
		return nil
	}
	select {
	case <-found:
		return n.store
	case <-ctx.Done():
		return nil
	}
}

// close closes the store, also one that is still being dialled.
func (n *successor) close() error {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	if store := n.get(context.Background()); store != nil {
		return store.Close()
	}
	return nil
}

// follow handles a leaving server's request to move to, or become, the next server.
func (c *client) follow(f frame) {
	u := unpacker{rest: f.body}
	if f.kind == kindMove {
		addr := u.string()
		c.next.dial(func() (Store, error) {
			// Close does not interrupt this: a connection that ends without a goodbye looks
			// like a lost rank to the new server.
			return dial(context.Background(), addr, c.token, c.me, handshakeTime, c.link.timeout)
		}, func() {
			c.moved.Store(true)
			c.sayGoodbye(c.left())
		})
		return
	}
	var addr string
	others := int(u.int())
	c.next.dial(func() (store Store, err error) {
		store, addr, err = c.serveNext(others)
		return store, err
	}, func() {
		c.link.send(c.closed, frame{kind: kindServing, body: packString(nil, addr)})
	})
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
	s.sealAfter(others)
	return s.open(), ln.Addr().String(), nil
}

// left is the error of a client whose server has said goodbye.
func (c *client) left() error {
	return fmt.Errorf("rank %d, which serves the store, has left the job: %w", c.server.rank,
		ErrClosed)
}
