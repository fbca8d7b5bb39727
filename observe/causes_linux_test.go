package observe_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/observe/internal/straggler"
	"github.com/euryale-ml/euryale/rendezvous"
)

func TestMain(m *testing.M) { proctest.Main(m, trainLate) }

const (
	delay  = 20 * time.Millisecond
	theOne = 1 // the straggler
	// After so many quiet steps, the delay is named within so many.
	quiet, within = 3, 3
)

// trainLate is a rank of a job of which one rank is late, by a cause. It ends when the cause is
// named, and says after how many steps.
func trainLate(cause string) error {
	comm, err := euryale.Init(context.Background())
	if err != nil {
		return err
	}
	defer comm.Close()
	w, err := observe.Start(comm)
	if err != nil {
		return err
	}
	inject := func() error { return nil }
	if comm.Rank() == theOne {
		var end func()
		if inject, end, err = injection(cause, w); err != nil {
			return err
		}
		defer end()
	}
	if err := backend.Barrier(comm); err != nil {
		return err
	}
	w.Begin()
	named := ""
	for n := 1; n <= quiet+within; n++ {
		time.Sleep(5 * time.Millisecond)
		if n > quiet {
			if err := inject(); err != nil {
				return err
			}
		}
		x := backend.Of([]float32{1})
		if err := backend.Run(comm, backend.Collective{Kind: backend.AllReduce}, x,
			x); err != nil {
			return err
		}
		told, err := autograd.Gather(comm, w.Sample()...)
		if err != nil {
			return err
		}
		w.Step(observe.StepInfo{Number: n}, told)
		all := w.Verdicts() // the same on all ranks
		named = fmt.Sprintf("after %d steps: %+v", n-quiet, all)
		if n > quiet && len(all) > 0 && all[0].Rank == theOne && all[0].Cause.String() == cause {
			fmt.Println("named", named)
			return nil
		}
	}
	return fmt.Errorf("not named: %s", named)
}

// injection returns what makes a rank late by a cause, at least by delay, and its end.
func injection(cause string, w *observe.Watch) (inject func() error, end func(), err error) {
	end = func() {}
	switch cause {
	case straggler.GarbageCollection.String():
		pointers := make([]*[]byte, 1<<20)
		for i := range pointers {
			pointers[i] = new([]byte)
		}
		inject = func() error {
			for began := time.Now(); time.Since(began) < delay; {
				runtime.GC()
			}
			runtime.KeepAlive(pointers)
			return nil
		}
	case straggler.Loader.String():
		inject = func() error { return w.During(straggler.Loader, sleep) }
	case straggler.HostOperation.String():
		inject = func() error {
			began := time.Now()
			spin(delay)
			w.Note(straggler.HostOperation, time.Since(began))
			return nil
		}
	case straggler.PageFaults.String():
		inject = fault
	case straggler.Computation.String(), straggler.CgroupThrottling.String():
		inject = func() error { spin(delay); return nil }
	case straggler.Waiting.String():
		inject = sleep
	case straggler.Stopped.String():
		inject = func() error {
			return exec.Command("sh", "-c", "kill -STOP $PPID; sleep 0.02; kill -CONT $PPID").Run()
		}
	case straggler.CPUContention.String():
		inject = func() error { spin(delay); return nil }
		end, err = crowd(3)
	}
	return inject, end, err
}

func sleep() error {
	time.Sleep(delay)
	return nil
}

// spin uses a core for some time of the process's own.
func spin(d time.Duration) {
	used := func() time.Duration {
		var r syscall.Rusage
		syscall.Getrusage(syscall.RUSAGE_SELF, &r)
		return time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	for began := used(); used()-began < d; {
	}
}

// fault touches new memory.
func fault() error {
	const size = 32 << 20
	memory, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return err
	}
	defer unix.Munmap(memory)
	if err := unix.Madvise(memory, unix.MADV_NOHUGEPAGE); err != nil {
		return err
	}
	for i := 0; i < size; i += 4096 {
		memory[i] = 1
	}
	return nil
}

// crowd has n programs use the core of this process.
func crowd(n int) (end func(), err error) {
	var core unix.CPUSet
	core.Set(0)
	threads, err := filepath.Glob("/proc/self/task/*")
	if err != nil {
		return nil, err
	}
	for _, t := range threads {
		var id int
		if _, err := fmt.Sscan(filepath.Base(t), &id); err != nil {
			return nil, err
		}
		if err := unix.SchedSetaffinity(id, &core); err != nil && err != unix.ESRCH {
			return nil, err
		}
	}
	var hogs []*exec.Cmd
	end = func() {
		for _, h := range hogs {
			h.Process.Kill()
			h.Wait()
		}
	}
	for range n {
		h := exec.Command("sh", "-c", "while :; do :; done") // on the cores of its parent
		h.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := h.Start(); err != nil {
			end()
			return nil, err
		}
		hogs = append(hogs, h)
	}
	return end, nil
}

// limited moves a process to a cgroup that has a tenth of a core, where there are rights to make
// one.
func limited(t *testing.T, pid int) {
	t.Helper()
	dir := fmt.Sprintf("/sys/fs/cgroup/cpu/euryale-test-%d", pid)
	settings := []struct{ name, value string }{{"cpu.cfs_period_us", "20000"},
		{"cpu.cfs_quota_us", "4000"}, {"cgroup.procs", fmt.Sprint(pid)}}
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		dir = fmt.Sprintf("/sys/fs/cgroup/euryale-test-%d", pid)
		settings = []struct{ name, value string }{{"cpu.max", "4000 20000"},
			{"cgroup.procs", fmt.Sprint(pid)}}
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { os.Remove(dir) })
	for _, s := range settings {
		if err := os.WriteFile(filepath.Join(dir, s.name), []byte(s.value), 0o600); err != nil {
			t.Skip(err)
		}
	}
}

// Delays of all kinds but one, which no test can make, are named with their cause; on a machine
// with other work, whatever that does comes first now and then.
func TestInjectedDelaysAreNamedWithTheirCause(t *testing.T) {
	wrong := 0
	for cause := range straggler.Causes {
		if cause == straggler.ClockThrottling || os.Getenv("EURYALE_FULL") != "1" &&
			cause != straggler.Loader && cause != straggler.Stopped { // which no load can hide
			continue
		}
		t.Run(cause.String(), func(t *testing.T) {
			said := ""
			for range 3 {
				ranks := proctest.Start(t, cause.String(), 8)
				if cause == straggler.CgroupThrottling {
					limited(t, ranks[theOne].Process.Pid)
				}
				if said = ranks[0].End(); strings.HasPrefix(said, "named") {
					break
				}
				for _, r := range ranks {
					r.End()
				}
			}
			t.Log(said)
			if !strings.HasPrefix(said, "named") && cause != straggler.CPUContention &&
				strings.Contains(said, "waited for a core") {
				t.Skip("the machine is busy, and that is what is named")
			}
			if !strings.HasPrefix(said, "named") {
				wrong++
			}
		})
	}
	require.Check(t, wrong <= 1, "%d causes are not named", wrong)
}

func TestSIGUSR1HasRank0Report(t *testing.T) {
	var out [2]proctest.Notice
	said := make(chan struct{})
	out[0].Text, out[0].Then = "no steps", func() { close(said) }
	for rank := range out {
		w := observe.NewWatch(&rendezvous.World{Rank: rank, Size: 2}, observe.New(rank, 1),
			&out[rank])
		w.Start(nil)
		defer w.Close()
	}
	require.NoError(t, syscall.Kill(syscall.Getpid(), syscall.SIGUSR1))
	select {
	case <-said:
	case <-time.After(10 * time.Second):
		t.Error("rank 0 says nothing")
	}
	if out[1].Len() > 0 {
		t.Errorf("rank 1 says %q", out[1].String())
	}
}

func TestGroupsHaveNoWatch(t *testing.T) {
	err := euryale.Run(t.Context(), 2, func(comm backend.Communicator, _ sync.Locker) error {
		require.Check(t, observe.WatchOf(comm) == nil, "a watch has started that nobody wants")
		w, err := observe.Start(comm)
		if err != nil {
			return err
		}
		alone, err := comm.Split(comm.Rank(), 0)
		if err != nil {
			return err
		}
		require.Check(t, observe.WatchOf(comm) == w && observe.WatchOf(alone) == nil,
			"the watch is not of the communicator of all ranks")
		return alone.Close()
	})
	require.NoError(t, err)
}
