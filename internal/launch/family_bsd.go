//go:build unix && (!linux || portable)

package launch

import (
	"os"
	"path/filepath"
	"syscall"
)

// attributes makes a process lead a group. It goes on if the launcher is killed.
func attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// wait waits for the process to end, and reaps it. While others of its group are left, the group
// keeps its number.
func (f family) wait() *os.ProcessState {
	state, err := f.cmd.Process.Wait()
	if err != nil {
		return nil
	}
	return state
}

// pathOf returns the path that an open directory had.
func pathOf(f *os.File) (string, error) { return filepath.Abs(f.Name()) }

// stopped returns false: there is no way to ask without reaping the process.
func (f family) stopped() bool { return false }
