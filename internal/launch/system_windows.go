package launch

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"unsafe"

	"golang.org/x/sys/windows"
)

// family is a process with those that it starts: a job object, which ends with the launcher.
type family struct {
	cmd *exec.Cmd
	job windows.Handle
}

// endedCode is the exit status of processes that the launcher ends, and breakCode of those that
// Ctrl-Break ends.
const (
	endedCode = 137
	breakCode = uint32(windows.STATUS_CONTROL_C_EXIT)
)

// start starts a command in a new family. Processes that it starts in its first moments do not
// belong to the family.
func start(cmd *exec.Cmd) (family, error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{CreationFlags: windows.CREATE_NEW_PROCESS_GROUP}
	f := family{cmd: cmd}
	if err := cmd.Start(); err != nil {
		return f, err
	}
	var err error
	if f.job, err = windows.CreateJobObject(nil, nil); err == nil {
		err = f.adopt()
	}
	if err != nil {
		f.release()
		return f, errors.Join(fmt.Errorf("make a job object: %w", err), cmd.Process.Kill(),
			cmd.Wait())
	}
	return f, nil
}

// adopt makes the process and the job object end together.
func (f family) adopt() error {
	limits := windows.JOBOBJECT_EXTENDED_LIMIT_INFORMATION{
		BasicLimitInformation: windows.JOBOBJECT_BASIC_LIMIT_INFORMATION{
			LimitFlags: windows.JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE}}
	_, err := windows.SetInformationJobObject(f.job, windows.JobObjectExtendedLimitInformation,
		uintptr(unsafe.Pointer(&limits)), uint32(unsafe.Sizeof(limits)))
	if err != nil {
		return err
	}
	var failed error
	err = f.cmd.Process.WithHandle(func(process uintptr) {
		failed = windows.AssignProcessToJobObject(f.job, windows.Handle(process))
	})
	return errors.Join(err, failed)
}

// send ends the whole family for SIGKILL. It sends other signals as Ctrl-Break, which a Go program
// receives as os.Interrupt.
func (f family) send(s syscall.Signal) {
	if s == syscall.SIGKILL {
		windows.TerminateJobObject(f.job, endedCode)
		return
	}
	windows.GenerateConsoleCtrlEvent(windows.CTRL_BREAK_EVENT, uint32(f.cmd.Process.Pid))
}

// goOn does nothing: no process is stopped.
func (f family) goOn() {}

// wait waits for the process to end.
func (f family) wait() *os.ProcessState {
	state, err := f.cmd.Process.Wait()
	if err != nil {
		return nil
	}
	return state
}

// stopped returns false: no process is stopped.
func (f family) stopped() bool { return false }

// end kills the rest of the family after the process has ended.
func (f family) end() { f.release() }

// release frees the family's resources.
func (f family) release() { windows.CloseHandle(f.job) }

// guard does nothing: the job objects of a killed launcher end with it.
type guard struct{}

func newGuard() *guard            { return nil }
func (g *guard) tell(string, any) {}
func (g *guard) close()           {}

// pathOf returns the path of an open directory's lock, without the lock.
func pathOf(f *os.File) (string, error) { return filepath.Abs(filepath.Dir(f.Name())) }

// wasEnded reports whether a process was ended from outside.
func wasEnded(status syscall.WaitStatus) bool {
	return status.ExitCode == endedCode || status.ExitCode == breakCode
}

// inForeground returns true: all processes of a console may read it.
func inForeground(*os.File) bool { return true }

// canInherit says that ranks cannot inherit open files: they do not report what they know of other
// machines.
const canInherit = false

func inodeOf(os.FileInfo) uint64 { return 0 }

// lockDirectory locks a directory through a file in it. The error is filelock.ErrHeld if another
// process holds the lock. The lock ends with the file, or with the process.
func lockDirectory(path string, lock func(*os.File) error) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(path, ".lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := lock(f); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
