//go:build unix

package launch

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// family is a process with those that it starts: the process group that it leads.
type family struct{ cmd *exec.Cmd }

// start starts a command with a family of its own.
func start(cmd *exec.Cmd) (family, error) {
	cmd.SysProcAttr = attributes()
	return family{cmd}, cmd.Start()
}

// send sends a signal to the whole family.
func (f family) send(s syscall.Signal) { syscall.Kill(-f.cmd.Process.Pid, s) }

// goOn continues all stopped processes.
func (f family) goOn() { f.send(syscall.SIGCONT) }

// end kills the rest of the family after the process has ended.
func (f family) end() { f.send(syscall.SIGKILL) }

// wasEnded reports whether a signal has ended a process.
func wasEnded(status syscall.WaitStatus) bool { return status.Signaled() }

// inForeground reports whether this process may read a terminal.
func inForeground(terminal *os.File) bool {
	group, err := unix.IoctlGetInt(int(terminal.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// canInherit says that ranks can inherit open files.
const canInherit = true

func inodeOf(info os.FileInfo) uint64 { return info.Sys().(*syscall.Stat_t).Ino }

// lockDirectory locks a directory that only this user may write. The error is filelock.ErrHeld if
// another process holds the lock. The lock ends with the file, or with the process.
func lockDirectory(path string, lock func(*os.File) error) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	var stat unix.Stat_t
	err = unix.Fstat(int(f.Fd()), &stat)
	if err == nil && (int(stat.Uid) != os.Getuid() || stat.Mode&0o022 != 0) {
		err = fmt.Errorf("directory %s is not one that only user %d may write: remove it", path,
			os.Getuid())
	}
	if err == nil {
		err = lock(f)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
