package tcp

import (
	"errors"
	"io"
	"net"
	"sync/atomic"
	"time"
)

const (
	// tunnelBytes is how much a tunnel moves at a time: several TLS records, of 16 KiB each.
	tunnelBytes = 128 << 10
	// drainTime bounds how long a closing link waits for sent data to leave.
	drainTime = time.Second
)

// wire is a stream of bytes in both directions. One direction can be ended alone.
type wire interface {
	io.ReadWriteCloser
	CloseWrite() error
}

// tunnel connects a link's socket, one end of a pair, with a TLS connection. One goroutine encrypts
// what the link sends, another decrypts and checks what arrives. So a link is the same stream of
// bytes with TLS as without. On systems whose sockets always wait, links without TLS have a tunnel,
// too.
type tunnel struct {
	conn     wire
	raw      net.Conn // below conn
	inner    wire     // the other end of the pair
	sent     chan struct{}
	received chan struct{}
	broken   atomic.Pointer[error] // why nothing comes through any more
}

// newTunnel starts a tunnel between a connection and the other end of a link's socket. Closing raw
// ends the connection without a word.
func newTunnel(conn wire, raw net.Conn, inner wire) *tunnel {
	t := &tunnel{conn: conn, raw: raw, inner: inner, sent: make(chan struct{}),
		received: make(chan struct{})}
	go t.send()
	go t.receive()
	return t
}

// send encrypts what the link sends, until it closes.
func (t *tunnel) send() {
	defer close(t.sent)
	err := pour(t.conn, t.inner)
	if err == nil {
		err = t.conn.CloseWrite()
	}
	if err != nil {
		t.collapse(err)
	}
}

// receive decrypts what arrives for the link, until the other rank closes.
func (t *tunnel) receive() {
	defer close(t.received)
	if err := pour(t.inner, t.conn); err != nil {
		t.collapse(err)
		return
	}
	// The link reads to the end, and may still send.
	t.inner.CloseWrite() // fails if the link has closed
}

// pour copies until the end of from.
func pour(to io.Writer, from io.Reader) error {
	room := make([]byte, tunnelBytes)
	for {
		n, err := from.Read(room)
		if n > 0 {
			if _, err := to.Write(room[:n]); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// collapse ends both directions: the link sees the end of its stream, and finds the reason here.
func (t *tunnel) collapse(err error) {
	t.broken.CompareAndSwap(nil, &err)
	t.inner.Close()
}

// reason returns why a link lost its connection, after the link has seen the end of its stream.
func (t *tunnel) reason(err error) error {
	if first := t.broken.Load(); first != nil {
		return *first
	}
	return err
}

// close ends the tunnel after the link's socket was closed.
func (t *tunnel) close() error {
	late := time.AfterFunc(drainTime, func() { t.raw.Close() })
	<-t.sent
	late.Stop()
	err := ignoreClosed(t.raw.Close())
	<-t.received
	return errors.Join(err, ignoreClosed(t.inner.Close()))
}

// ignoreClosed returns nil for the error of a connection that was already closed.
func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
