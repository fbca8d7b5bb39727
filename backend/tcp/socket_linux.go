//go:build !portable && !netconn

package tcp

import (
	"runtime"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// socket is a socket that never blocks.
type socket struct {
	fd      int
	iov     [8]unix.Iovec
	message unix.Msghdr
}

// large is the number of bytes from which on a system call tells the runtime that it may take long.
// For fewer bytes, that would cost more than it helps.
const large = 64 << 10

// send sends as much of the pieces, of total bytes, as it can without waiting. It returns how many
// bytes, or -1.
func (s *socket) send(pieces [][]byte, total int) (int, error) {
	return s.transfer(unix.SYS_SENDTO, unix.SYS_SENDMSG, pieces, total,
		unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
}

// receive fills pieces of total bytes with data that has arrived, and returns how many bytes, or
// -1.
func (s *socket) receive(pieces [][]byte, total int) (int, error) {
	return s.transfer(unix.SYS_RECVFROM, unix.SYS_RECVMSG, pieces, total, unix.MSG_DONTWAIT)
}

// transfer moves bytes between pieces of memory and the socket by one system call. one and several
// are its numbers for a single piece and for several. It returns -1 if it would have to wait.
func (s *socket) transfer(one, several uintptr, pieces [][]byte, total int, flags uintptr) (int,
	error) {
	call, at, length := one, unsafe.Pointer(unsafe.SliceData(pieces[0])), uintptr(total)
	if len(pieces) > 1 {
		for i, piece := range pieces {
			s.iov[i].Base = unsafe.SliceData(piece)
			s.iov[i].SetLen(len(piece))
		}
		s.message = unix.Msghdr{Iov: &s.iov[0]}
		s.message.SetIovlen(len(pieces))
		call, at, length, flags = several, unsafe.Pointer(&s.message), flags, 0
	}
	invoke := syscall.RawSyscall6
	if total >= large {
		invoke = syscall.Syscall6
	}
	for {
		n, _, errno := invoke(call, uintptr(s.fd), uintptr(at), length, flags, 0, 0)
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

func socketPair() ([2]int, error) {
	return unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
}

func poll(sockets []unix.PollFd, limit time.Duration) error {
	ts := unix.NsecToTimespec(int64(limit))
	_, err := unix.Ppoll(sockets, &ts, nil)
	return err
}

// nearby is the longest round trip at which two ends are taken to be in one room: a datagram
// crosses a room in tens of microseconds, and a city in more than a millisecond.
const nearby = time.Millisecond

// avoidBBR replaces the congestion control BBR on a connection whose round trip is short. BBR paces
// data at the rate that it has seen, which in the bursts of collectives is far below what the link
// can do: without it calls from 256 KiB on take half of the time (2026-11-23-epyc2-tcp.md). Reno is
// in every kernel. Any other choice of the administrator stays.
func avoidBBR(fd int, short time.Duration) error {
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
