package proctest

import (
	"errors"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// StderrToStdout has this process write its standard error to its standard output.
func StderrToStdout() { syscall.Dup3(1, 2, 0) }

func kill(pid int, s syscall.Signal) error { return syscall.Kill(pid, s) }

func mountMemory(dir string) error { return syscall.Mount("euryale", dir, "tmpfs", 0, "") }

func unmount(dir string) error { return syscall.Unmount(dir, syscall.MNT_DETACH) }

// newTap makes an interface, and a file of a name for its other end.
func newTap(made, name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	request, err := unix.NewIfreq(made)
	if err == nil {
		request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}
	return os.NewFile(uintptr(fd), name), err
}

// portLater has a port chosen when the peer's address is known. Without it a storm on a loaded
// machine spends its time in bind, which looks for a port that no connection of any peer has.
func portLater(_, _ string, socket syscall.RawConn) error {
	var failed error
	err := socket.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
	})
	return errors.Join(err, failed)
}
