//go:build unix && !netconn

package tcp

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// alwaysTunnels says whether links have tunnels even without TLS.
const alwaysTunnels = false

// newLink makes a link from a connection, which it then owns: it keeps the socket, or the TLS
// connection.
func newLink(conn net.Conn) (*link, error) {
	if encrypted, ok := conn.(*tls.Conn); ok {
		return dig(encrypted)
	}
	fd, err := socketOf(conn)
	if err = errors.Join(err, conn.Close()); err != nil {
		return nil, fmt.Errorf("keep a connection: %w", err)
	}
	return &link{sock: socket{fd: fd}}, nil
}

// socketOf returns another descriptor of a connection's socket, one that does not block.
func socketOf(conn net.Conn) (fd int, err error) {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return -1, fmt.Errorf("a connection between ranks is a %T", conn)
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return -1, err
	}
	var failed error
	if err := raw.Control(func(of uintptr) {
		fd, failed = unix.FcntlInt(of, unix.F_DUPFD_CLOEXEC, 0)
	}); err != nil {
		return -1, err
	}
	if failed != nil {
		return -1, failed
	}
	err = unix.SetNonblock(fd, true)
	if err == nil {
		err = avoidBBR(fd, nearby)
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// dig makes a link from a TLS connection, which it then owns.
func dig(conn *tls.Conn) (*link, error) {
	ends, err := socketPair()
	if err != nil {
		return nil, fmt.Errorf("make a pair of sockets: %w", errors.Join(err, conn.Close()))
	}
	file := os.NewFile(uintptr(ends[1]), "tunnel")
	inner, err := net.FileConn(file) // a copy
	if err = errors.Join(err, file.Close()); err != nil {
		return nil, errors.Join(err, unix.Close(ends[0]), conn.Close())
	}
	t := newTunnel(conn, conn.NetConn(), inner.(*net.UnixConn))
	return &link{sock: socket{fd: ends[0]}, tunnel: t}, nil
}

func (s *socket) close() error { return unix.Close(s.fd) }

// poller waits for any of several sockets.
type poller []unix.PollFd

func (p *poller) reset() { *p = (*p)[:0] }

// add makes the next wait end when a socket can be read, or written.
func (p *poller) add(s *socket, read, write bool) {
	var events int16
	if read {
		events |= unix.POLLIN
	}
	if write {
		events |= unix.POLLOUT
	}
	if events != 0 {
		*p = append(*p, unix.PollFd{Fd: int32(s.fd), Events: events})
	}
}

func (p *poller) wait(limit time.Duration) error {
	if err := poll(*p, limit); err != unix.EINTR {
		return err
	}
	return nil
}
