package proctest

import (
	"context"
	"os"
	"os/exec"
	"testing"
	"time"
)

// launchedTime bounds a job of Launched, which may share its cores with much else. A job that is
// stuck has said so before, if it can.
const launchedTime = 3 * time.Minute

// Launched runs the processes of a job to their end by a launcher, such as mpirun -n 4, with env
// besides its own, and returns what they have written.
func Launched(t *testing.T, name string, env []string, launcher ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), launchedTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, launcher[0], append(launcher[1:], os.Args[0])...)
	cmd.Env = append(append(os.Environ(), env...), scenario+"="+name)
	// for the launcher to end the ranks
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	return string(out), err
}
