package session

import (
	"net"

	"golang.org/x/sys/unix"
)

// acked reports whether a machine has acknowledged all that a connection sent to it, as its kernel
// does for a process that is stopped, too.
func acked(conn *net.TCPConn) bool {
	left := 0
	raw, err := conn.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { left, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
	}
	return left == 0 && err == nil
}
