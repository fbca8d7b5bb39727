//go:build linux

package group

import (
	"fmt"
	"os/exec"
	"path"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/euryale-ml/euryale/internal/shm"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// teardowns returns the parts of ranks whose processes are given.
func teardowns(t *testing.T, processes ...string) []*Teardown {
	share := require.Value(shm.New("/dev/shm", MemoryBytes(len(processes))))(t)
	var all []*Teardown
	for r := range processes {
		all = append(all, NewMemory(share, r, len(processes)).NewTeardown(processes))
	}
	t.Cleanup(func() {
		for _, one := range all {
			one.Close()
		}
		share.Unmap()
	})
	return all
}

func TestTeardownWaitsForThoseWhoReachARank(t *testing.T) {
	all := teardowns(t, Process(), Process(), Process())
	reached := make(chan uint32, 2)
	var ranks sync.WaitGroup
	ranks.Go(func() {
		for stage := range uint32(2) {
			all[0].Reach(stage+1, func(r int) bool { return r != 2 })
			reached <- stage + 1
		}
	})
	for stage := range uint32(2) {
		select {
		case s := <-reached:
			t.Fatalf("rank 0 is past stage %d before rank 1", s)
		case <-time.After(20 * time.Millisecond):
		}
		ranks.Go(func() { all[1].Reach(stage+1, func(int) bool { return false }) })
		require.Equal(t, "rank 0 is past stage", <-reached, stage+1)
	}
	ranks.Wait() // their parts are closed next
}

func TestTeardownDoesNotWaitForTheDead(t *testing.T) {
	other := exec.Command("sleep", "60")
	if err := other.Start(); err != nil {
		t.Skip(err)
	}
	fd, err := unix.PidfdOpen(other.Process.Pid, 0)
	if err != nil {
		t.Skip(err)
	}
	unix.Close(fd)
	namespace, _ := path.Split(Process())
	name := fmt.Sprint(namespace, other.Process.Pid)
	require.Equal(t, "a process of another namespace is taken for one of this",
		lifeOf(fmt.Sprint("pid:[0]/", other.Process.Pid)), living)
	one := teardowns(t, Process(), name)[0]
	done := make(chan struct{})
	go func() {
		defer close(done)
		one.Reach(1, func(int) bool { return true })
	}()
	select {
	case <-done:
		t.Error("nobody waits for a rank whose process lives")
	case <-time.After(20 * time.Millisecond):
	}
	require.NoError(t, other.Process.Kill())
	<-done
	other.Wait() // it was killed
	life := lifeOf(name)
	require.Check(t, dead(life), "a process that has ended passes for alive")
}
