//go:build !portable

package launch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// attributes makes a process lead a group, and end with the launcher.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// wait returns when the process has ended, without reaping it. So the process keeps its number, and
// the rest of its group can still be killed.
func (f family) wait() *os.ProcessState {
	pid := f.cmd.Process.Pid
	for errors.Is(unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil), unix.EINTR) {
	}
	return nil
}

// pathOf returns a path that leads to an open directory while this process lives, wherever it is.
func pathOf(f *os.File) (string, error) {
	path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd())
	mine, err1 := f.Stat()
	there, err2 := os.Stat(path)
	if errors.Join(err1, err2) != nil || !os.SameFile(mine, there) { // without a /proc of its own
		return filepath.Abs(f.Name())
	}
	return path, nil
}

// stopped reports whether the process is stopped.
func (f family) stopped() bool {
	var info unix.Siginfo // stays zero if there is nothing to report
	err := unix.Waitid(unix.P_PID, f.cmd.Process.Pid, &info,
		unix.WSTOPPED|unix.WNOHANG|unix.WNOWAIT, nil)
	return err == nil && info.Signo == int32(unix.SIGCHLD)
}
