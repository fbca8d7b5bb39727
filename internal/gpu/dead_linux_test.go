package gpu

import (
	"fmt"
	"os/exec"
	"path"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// A rank whose process has died writes no more.
func TestMemoryIsNotKeptForTheDead(t *testing.T) {
	other := exec.Command("sleep", "60")
	if err := other.Start(); err != nil {
		t.Skip(err)
	}
	fd, err := unix.PidfdOpen(other.Process.Pid, 0)
	if err != nil {
		t.Skip(err)
	}
	unix.Close(fd)
	g := newRig(t)
	namespace, _ := path.Split(group.Process())
	g.process = func(rank int) string {
		if rank == 1 {
			return fmt.Sprint(namespace, other.Process.Pid)
		}
		return group.Process()
	}
	comms := g.group(t, 2, same(options()))
	require.Report(t, comms[0].Close())
	require.Check(t, comms[0].Kept() != 0, "the memory is given back while the process lives")
	require.NoError(t, other.Process.Kill())
	for deadline := time.Now().Add(10 * time.Second); comms[0].Kept() != 0; time.Sleep(
		time.Millisecond) {
		require.That(t, !time.Now().After(deadline),
			"the memory is kept though the process is dead")
	}
	other.Wait() // it was killed
}
