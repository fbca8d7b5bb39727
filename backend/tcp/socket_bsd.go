//go:build unix && (!linux || portable) && !netconn

package tcp

import (
	"errors"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// socket is a socket that never blocks.
type socket struct{ fd int }

// send sends pieces of total bytes as far as it can without waiting, and returns how many bytes,
// or -1. The runtime ignores SIGPIPE.
func (s *socket) send(pieces [][]byte, total int) (int, error) {
	return moved(func() (int, error) {
		return unix.SendmsgBuffers(s.fd, pieces, nil, nil, 0)
	})
}

// receive fills pieces of total bytes with data that has arrived, and returns how many bytes, or
// -1.
func (s *socket) receive(pieces [][]byte, total int) (int, error) {
	return moved(func() (int, error) {
		n, _, _, _, err := unix.RecvmsgBuffers(s.fd, pieces, nil, 0)
		return n, err
	})
}

// moved repeats a call interrupted by a signal, and returns -1 if the call would have to wait.
func moved(call func() (int, error)) (int, error) {
	for {
		switch n, err := call(); err {
		case unix.EAGAIN:
			return -1, nil
		case unix.EINTR:
		default:
			return max(0, n), err
		}
	}
}

func socketPair() (ends [2]int, err error) {
	syscall.ForkLock.RLock() // no process may start before they are set to close in it
	defer syscall.ForkLock.RUnlock()
	if ends, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0); err != nil {
		return ends, err
	}
	for _, fd := range ends {
		unix.CloseOnExec(fd)
		err = errors.Join(err, unix.SetNonblock(fd, true))
	}
	return ends, err
}

func poll(sockets []unix.PollFd, limit time.Duration) error {
	_, err := unix.Poll(sockets, int((limit+time.Millisecond-1)/time.Millisecond))
	return err
}

// nearby has no meaning here: see avoidBBR of Linux.
const nearby = 0

func avoidBBR(int, time.Duration) error { return nil }
