package tcp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// lane is what travels in one direction of a connection in a call: pieces of memory, in order.
type lane struct {
	pieces [][]byte
	next   int // the first piece that has not travelled in full
	moved  int // bytes of the call that have travelled
}

func (l *lane) add(piece []byte) {
	if len(piece) > 0 {
		l.pieces = append(l.pieces, piece)
	}
}

func (l *lane) pending() bool { return l.next < len(l.pieces) }

// reset begins a call.
func (l *lane) reset() {
	clear(l.pieces)
	l.pieces, l.next, l.moved = l.pieces[:0], 0, 0
}

// advance notes that n bytes more have travelled.
func (l *lane) advance(n int) {
	l.moved += n
	for n > 0 {
		piece := l.pieces[l.next]
		if n < len(piece) {
			l.pieces[l.next] = piece[n:]
			return
		}
		n -= len(piece)
		l.next++
	}
}

// link is the connection to another rank: a socket that never blocks.
type link struct {
	fd      int
	out, in lane
	iov     [8]unix.Iovec
	lost    error     // why nothing travels any more
	since   time.Time // when that was seen
}

// take makes a link of a connection, which it closes: the socket stays.
func take(conn net.Conn) (*link, error) {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return nil, fmt.Errorf("a connection between ranks is a %T", conn)
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil, err
	}
	l := &link{fd: -1}
	var failed error
	if err := raw.Control(func(fd uintptr) { l.fd, failed = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return nil, err
	}
	if failed != nil {
		return nil, fmt.Errorf("keep a connection: %w", failed)
	}
	if err := unix.SetNonblock(l.fd, true); err != nil {
		return nil, errors.Join(err, l.close())
	}
	return l, conn.Close()
}

func (l *link) close() error { return unix.Close(l.fd) }

// turnBytes bounds what one system call moves, so that both directions of all links go on.
const turnBytes = 512 << 10

// large is from how many bytes on a system call tells the runtime that it may take long. Below,
// that would cost more than it helps.
const large = 64 << 10

// send sends what it can without waiting, and returns how many bytes.
func (l *link) send() int {
	n, err := l.transfer(unix.SYS_SENDMSG, &l.out, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	if err != nil {
		l.lose(fmt.Errorf("send: %w", err))
	}
	return n
}

// receive takes what has arrived of the call, and returns how many bytes.
func (l *link) receive() int {
	n, err := l.transfer(unix.SYS_RECVMSG, &l.in, unix.MSG_DONTWAIT)
	switch {
	case err != nil:
		l.lose(fmt.Errorf("receive: %w", err))
	case n == 0:
		l.lose(fmt.Errorf("receive: %w", io.ErrUnexpectedEOF))
	}
	return n
}

// lose notes that the connection has ended. Why is known better elsewhere, in most cases and
// soon: the other rank is lost, has closed, or has learned that the group has ended.
func (l *link) lose(err error) { l.lost, l.since = err, time.Now() }

// transfer returns -1 bytes if it would have to wait.
func (l *link) transfer(call uintptr, way *lane, flags uintptr) (int, error) {
	total, pieces := 0, way.pieces[way.next:]
	if len(pieces) > len(l.iov) {
		pieces = pieces[:len(l.iov)]
	}
	used := 0
	for used < len(pieces) && total < turnBytes {
		piece := pieces[used][:min(len(pieces[used]), turnBytes-total)]
		l.iov[used].Base = unsafe.SliceData(piece)
		l.iov[used].SetLen(len(piece))
		total, used = total+len(piece), used+1
	}
	message := unix.Msghdr{Iov: &l.iov[0]}
	message.SetIovlen(used)
	invoke := unix.RawSyscall
	if total >= large {
		invoke = unix.Syscall
	}
	for {
		n, _, errno := invoke(call, uintptr(l.fd), uintptr(unsafe.Pointer(&message)), flags)
		switch errno {
		case 0:
			runtime.KeepAlive(way)
			way.advance(int(n))
			return int(n), nil
		case unix.EAGAIN:
			return -1, nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
