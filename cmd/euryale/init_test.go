//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// zombies returns the children of a process that have ended and were not reaped.
func zombies(parent int) (found []string) {
	all, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range all {
		text, _ := os.ReadFile(path)
		_, rest, _ := strings.Cut(string(text), ") ")
		if strings.HasPrefix(rest, fmt.Sprintf("Z %d ", parent)) {
			found = append(found, string(text))
		}
	}
	return found
}

// TestProcess1OfAContainerReapsOrphansAndPassesSignalsOn: where there can be namespaces of
// processes.
func TestProcess1OfAContainerReapsOrphansAndPassesSignalsOn(t *testing.T) {
	args := []string{"run", "-n", "1", "sh", "-c", `
		for n in 1 2 3; do sh -c 'sleep 0.1 &'; done; sleep 0.3
		trap "echo told; exit 7" TERM; echo up; while :; do sleep 0.01; done`}
	read, write, err := os.Pipe()
	require.NoError(t, err)
	defer read.Close()
	var stderr bytes.Buffer
	var cmd *exec.Cmd
	for _, more := range []uintptr{0, syscall.CLONE_NEWUSER} { // a user may have the right in one
		cmd = command(t, args...)
		cmd.Stdout, cmd.Stderr = write, &stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | more}
		if err = cmd.Start(); err == nil {
			break
		}
	}
	write.Close()
	if err != nil {
		t.Skipf("needs the right to make a namespace of processes: %v", err)
	}
	text := make([]byte, 100)
	n, err := read.Read(text)
	require.Check(t, string(text[:n]) == "up\n", "it says %q, %v, %s", text[:n], err, &stderr)
	require.Soon(t, "all are reaped", func() bool { return len(zombies(cmd.Process.Pid)) == 0 })
	cmd.Process.Signal(syscall.SIGTERM)
	n, _ = read.Read(text)
	cmd.Wait() // the code says how it has ended
	if code := cmd.ProcessState.ExitCode(); string(text[:n]) != "told\n" || code != 128+15 {
		t.Errorf("it says %q, and ends with %d, %s", text[:n], code, &stderr)
	}
}
