//go:build !unix || netconn

package tcp

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// alwaysTunnels says whether links have tunnels even without TLS.
const alwaysTunnels = true

// newLink makes a link from a connection, which it then owns. Its socket is in memory, with a
// tunnel to the connection: two goroutines, and a copy of each byte on either side.
func newLink(conn net.Conn) (*link, error) {
	s := &bridge{}
	s.moved.L = &s.mu
	switch c := conn.(type) {
	case *tls.Conn:
		return &link{sock: socket{s}, tunnel: newTunnel(c, c.NetConn(), s)}, nil
	case *net.TCPConn:
		return &link{sock: socket{s}, tunnel: newTunnel(c, c, s)}, nil
	}
	return nil, fmt.Errorf("a connection between ranks is a %T", conn)
}

// bridgeBytes is how much a bridge holds in each direction.
const bridgeBytes = 256 << 10

// bridge is two streams of bytes between a link, which never waits, and its tunnel, which does.
type bridge struct {
	mu      sync.Mutex
	moved   sync.Cond     // for the tunnel
	bell    chan struct{} // for the link, nil before its first wait
	out, in ring
}

// ring holds bytes on their way.
type ring struct {
	data     []byte
	from, n  int
	ended    bool // nothing more will be written
	unwanted bool // nothing more will be read
}

// put takes as many bytes as there is room for, and returns how many.
func (r *ring) put(p []byte) (n int) {
	if r.data == nil {
		r.data = make([]byte, bridgeBytes)
	}
	for len(p) > 0 && r.n < len(r.data) {
		at := (r.from + r.n) % len(r.data)
		k := copy(r.data[at:min(len(r.data), at+len(r.data)-r.n)], p)
		p, n, r.n = p[k:], n+k, r.n+k
	}
	return n
}

// get moves bytes to p, and returns how many.
func (r *ring) get(p []byte) (n int) {
	for len(p) > 0 && r.n > 0 {
		k := copy(p, r.data[r.from:min(len(r.data), r.from+r.n)])
		p, n, r.n, r.from = p[k:], n+k, r.n-k, (r.from+k)%len(r.data)
	}
	return n
}

// Read implements io.Reader for the tunnel.
func (s *bridge) Read(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.out.n == 0 && !s.out.ended && !s.out.unwanted {
		s.moved.Wait()
	}
	switch {
	case s.out.unwanted:
		return 0, net.ErrClosed
	case s.out.n == 0:
		return 0, io.EOF
	}
	s.ring()
	return s.out.get(p), nil
}

// Write implements io.Writer for the tunnel.
func (s *bridge) Write(p []byte) (n int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n < len(p) {
		for s.in.n == bridgeBytes && !s.in.unwanted && !s.in.ended {
			s.moved.Wait()
		}
		if s.in.unwanted || s.in.ended {
			return n, net.ErrClosed
		}
		n += s.in.put(p[n:])
		s.ring()
	}
	return n, nil
}

// CloseWrite ends the stream that the link reads.
func (s *bridge) CloseWrite() error { return s.endWays(&s.in.ended) }

// Close ends both directions for the link.
func (s *bridge) Close() error { return s.endWays(&s.in.ended, &s.out.unwanted) }

func (s *bridge) endWays(what ...*bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, is := range what {
		*is = true
	}
	s.moved.Broadcast()
	s.ring()
	return nil
}

// ring wakes the link. s.mu is held.
func (s *bridge) ring() {
	select {
	case s.bell <- struct{}{}:
	default: // nobody waits, or a wake-up is pending
	}
}

// socket is the link's end of a bridge.
type socket struct{ *bridge }

// send sends as much of the pieces, of total bytes, as there is room for. It returns how many
// bytes, or -1.
func (s *socket) send(pieces [][]byte, total int) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.out.unwanted {
		return 0, net.ErrClosed
	}
	return s.went(pieces, s.out.put)
}

// receive fills pieces of total bytes with data that has arrived, and returns how many bytes, or
// -1.
func (s *socket) receive(pieces [][]byte, total int) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.in.n == 0 && s.in.ended {
		return 0, nil
	}
	return s.went(pieces, s.in.get)
}

// went moves pieces, and tells the tunnel. s.mu is held.
func (s *socket) went(pieces [][]byte, move func([]byte) int) (n int, _ error) {
	for _, piece := range pieces {
		k := move(piece)
		if n += k; k < len(piece) {
			break
		}
	}
	if n == 0 {
		return -1, nil
	}
	s.moved.Broadcast()
	return n, nil
}

// close lets the tunnel send what is on its way.
func (s *socket) close() error { return s.endWays(&s.out.ended, &s.in.unwanted) }

// poller waits for any of several sockets.
type poller struct {
	bell  chan struct{}
	ready bool
}

func (p *poller) reset() { p.ready = false }

// add makes the next wait end when a socket can be read, or written.
func (p *poller) add(s *socket, read, write bool) {
	if p.bell == nil {
		p.bell = make(chan struct{}, 1)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bell = p.bell
	p.ready = p.ready || read && (s.in.n > 0 || s.in.ended) ||
		write && (s.out.n < bridgeBytes || s.out.unwanted)
}

func (p *poller) wait(limit time.Duration) error {
	if p.ready {
		return nil
	}
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case <-p.bell:
	case <-late.C:
	}
	return nil
}
