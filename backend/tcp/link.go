package tcp

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// lane is what travels in one direction of a connection in a call: pieces of memory, in order.
type lane struct {
	pieces [][]byte
	next   int // the first piece that has not travelled in full
	moved  int // bytes of the call that have travelled
	most   int // bytes that one system call moves
	turn   [8][]byte
}

func (l *lane) add(piece []byte) {
	if len(piece) > 0 {
		l.pieces = append(l.pieces, piece)
	}
}

func (l *lane) pending() bool { return l.next < len(l.pieces) }

// reset begins a call with operands of nbytes.
func (l *lane) reset(nbytes int) {
	clear(l.pieces)
	l.pieces, l.next, l.moved, l.most = l.pieces[:0], 0, 0, turnBytes
	if nbytes <= wholeBytes {
		l.most = wholeBytes
	}
}

// front returns what one system call can move next, and how many bytes that is.
func (l *lane) front() (pieces [][]byte, total int) {
	pieces = l.turn[:0]
	for _, piece := range l.pieces[l.next:] {
		if len(pieces) == cap(pieces) || total == l.most {
			break
		}
		piece = piece[:min(len(piece), l.most-total)]
		pieces, total = append(pieces, piece), total+len(piece)
	}
	return pieces, total
}

// fill copies bytes to where the next ones belong.
func (l *lane) fill(from []byte) {
	for _, piece := range l.pieces[l.next:] {
		from = from[copy(piece, from):]
	}
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
	tunnel  *tunnel // nil without TLS
	out, in lane
	packed  [packedBytes]byte // short pieces, side by side
	iov     [8]unix.Iovec
	message unix.Msghdr
	lost    error     // why nothing travels any more
	since   time.Time // when that was seen
}

// take makes a link of a connection, which it owns: it keeps the socket, or what encrypts.
func take(conn net.Conn) (*link, error) {
	if encrypted, ok := conn.(*tls.Conn); ok {
		fd, t, err := dig(encrypted)
		if err != nil {
			return nil, err
		}
		return &link{fd: fd, tunnel: t}, nil
	}
	fd, err := socketOf(conn)
	if err = errors.Join(err, conn.Close()); err != nil {
		return nil, fmt.Errorf("keep a connection: %w", err)
	}
	return &link{fd: fd}, nil
}

// socketOf returns another descriptor of a connection's socket, which does not block.
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
		err = unpace(fd, nearby)
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// nearby is the round trip up to which two ends are taken to be in one room: a datagram crosses a
// room in tens of microseconds, and a city in more than a millisecond.
const nearby = time.Millisecond

// unpace takes the congestion control BBR from a connection whose round trip is short. It paces
// what is sent by the rate that it has seen, which in the bursts of collectives is far from what
// the link can do: without it calls from 256 KiB on take half of the time
// (2026-11-23-epyc2-tcp.md). Reno is in every kernel. Any other choice of the administrator's
// stays.
func unpace(fd int, short time.Duration) error {
	control, err := unix.GetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION)
	if err != nil || !strings.HasPrefix(control, "bbr") {
		return err
	}
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil || time.Duration(info.Min_rtt)*time.Microsecond > short {
		return err
	}
	return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, "reno")
}

func (l *link) close() error {
	err := unix.Close(l.fd)
	if l.tunnel != nil {
		err = errors.Join(err, l.tunnel.close())
	}
	return err
}

const (
	// turnBytes bounds what one system call moves, so that both directions of all links go on.
	turnBytes = 512 << 10
	// wholeBytes is that bound where the operand is no larger: two ranks then send at the same
	// time and receive at the same time, and do not contend for sockets that one reads and the
	// other fills. That takes 0.8 of the time at 1 MiB, but more at 16 MiB, which leave the
	// caches (bench/results/2026-11/2026-11-23-epyc2-tcp.md).
	wholeBytes = 2 << 20
	// large is from how many bytes on a system call tells the runtime that it may take long.
	// Below, that would cost more than it helps.
	large = 64 << 10
	// packedBytes is up to how many bytes pieces travel by way of one buffer: to copy them costs
	// less than a vector of pieces costs the kernel, which is 0.3 us of 5
	// (bench/results/2026-11/2026-11-23-epyc2-tcp.md).
	packedBytes = 4 << 10
)

// send sends what it can without waiting, and returns how many bytes, or -1.
func (l *link) send() int {
	pieces, total := l.out.front()
	if len(pieces) > 1 && total <= packedBytes {
		packed := l.packed[:0]
		for _, piece := range pieces {
			packed = append(packed, piece...)
		}
		pieces = [][]byte{packed}
	}
	n, err := l.transfer(unix.SYS_SENDTO, unix.SYS_SENDMSG, pieces, total,
		unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	if err != nil {
		l.lose(fmt.Errorf("send: %w", err))
	}
	l.out.advance(max(0, n))
	return n
}

// receive takes what has arrived of the call, and returns how many bytes, or -1.
func (l *link) receive() int {
	pieces, total := l.in.front()
	apart := len(pieces) > 1 && total <= packedBytes
	if apart {
		pieces = [][]byte{l.packed[:total]}
	}
	n, err := l.transfer(unix.SYS_RECVFROM, unix.SYS_RECVMSG, pieces, total, unix.MSG_DONTWAIT)
	switch {
	case err != nil:
		l.lose(fmt.Errorf("receive: %w", err))
	case n == 0:
		l.lose(fmt.Errorf("receive: %w", io.ErrUnexpectedEOF))
	case apart:
		l.in.fill(l.packed[:max(0, n)])
	}
	l.in.advance(max(0, n))
	return n
}

// lose notes that the connection has ended. Why is known better elsewhere, in most cases and
// soon: the other rank is lost, has closed, or has learned that the group has ended.
func (l *link) lose(err error) {
	if l.tunnel != nil {
		err = l.tunnel.reason(err)
	}
	l.lost, l.since = err, time.Now()
}

// transfer moves bytes between pieces of memory and the socket by one system call: for one piece
// or for several. It returns -1 if it would have to wait.
func (l *link) transfer(one, several uintptr, pieces [][]byte, total int, flags uintptr) (int,
	error) {
	call, at, length := one, unsafe.Pointer(unsafe.SliceData(pieces[0])), uintptr(total)
	if len(pieces) > 1 {
		for i, piece := range pieces {
			l.iov[i].Base = unsafe.SliceData(piece)
			l.iov[i].SetLen(len(piece))
		}
		l.message = unix.Msghdr{Iov: &l.iov[0]}
		l.message.SetIovlen(len(pieces))
		call, at, length, flags = several, unsafe.Pointer(&l.message), flags, 0
	}
	invoke := syscall.RawSyscall6
	if total >= large {
		invoke = syscall.Syscall6
	}
	for {
		n, _, errno := invoke(call, uintptr(l.fd), uintptr(at), length, flags, 0, 0)
		switch errno {
		case 0:
			runtime.KeepAlive(pieces)
			return int(n), nil
		case unix.EAGAIN:
			return -1, nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
