//go:build linux

package jobs_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/hierarchy"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

// The tests of this file start this test binary as the processes of a job, and
// lose some of them.

func TestMain(m *testing.M) { proctest.Main(m, rank) }

// rank is what a process of a scenario does. It prints its error as soon as it
// has one.
func rank(name string) error {
	if name == "one rank does not check" && os.Getenv("RANK") == "1" {
		os.Setenv("EURYALE_CHECK", "off")
	}
	if name == "says its place" {
		return saysItsPlace()
	}
	switch name {
	case "says when it is there":
		return saysWhenItIsThere()
	case "sums":
		return sums()
	case "trains elastic":
		return trainsElastic()
	}
	if name == "joins twice" {
		return joinsTwice()
	}
	comm, err := euryale.Init(context.Background())
	if err != nil {
		fmt.Println("error:", err)
		return err
	}
	if name == "panics in a call" || name == "panics on a queue" {
		proctest.StderrToStdout() // where the panic is printed
		defer comm.Close()
		err := panicsInACall(comm, name == "panics on a queue")
		fmt.Println("error:", err)
		return err
	}
	if name == "ends at once" || name == "ends a while after" {
		endsAtOnce(comm, name == "ends at once")
	}
	if err := work(comm, name); err != nil {
		fmt.Println("error:", err)
		if name == "hangs on after a failure" {
			select {}
		}
		comm.Close()
		return err
	}
	return comm.Close()
}

func joinsTwice() error {
	for range 2 {
		comm, err := euryale.Init(context.Background())
		if err != nil {
			return err
		}
		fmt.Println(comm.Name())
		if err := errors.Join(backend.Barrier(comm), comm.Close()); err != nil {
			return err
		}
	}
	return nil
}

// panicsInACall has an all-to-all of rank 1 panic: its operand is shorter than what was checked.
func panicsInACall(comm backend.Communicator, queued bool) (err error) {
	if err := backend.Barrier(comm); err != nil {
		return err
	}
	P := comm.Size()
	var q backend.Queue
	if queued {
		if q, err = comm.Device().NewQueue(); err != nil {
			return err
		}
	}
	x, y := backend.Of(make([]float32, P)), backend.Of(make([]float32, P))
	if comm.Rank() == 1 {
		x = x.Slice(0, 1)
	}
	checked := backend.Wrap(comm)
	w, err := checked.Pass(q, backend.Collective{Kind: backend.AllToAll}, 1, y, x)
	if err != nil {
		return err
	}
	return w.Join(context.Background())
}

// A program that panics in a call closes its communicator on the way out, as deferred.
func TestAPanicInACallIsPrintedAndEndsAllProcesses(t *testing.T) {
	for _, name := range []string{"host", "tcp"} {
		for _, scenario := range []string{"panics in a call", "panics on a queue"} {
			t.Run(name+"/"+scenario, func(t *testing.T) {
				const text = "backend: Buffer.Slice(1, 2) of 1 elements"
				for r, p := range proctest.Start(t, scenario, 3, "EURYALE_BACKEND="+name) {
					if r == 1 {
						p.Says(t, "panic: "+text)
					} else {
						p.Says(t, "because of rank 1", "panicked in alltoall: "+text)
					}
					if p.End(); p.ProcessState.ExitCode() == 0 {
						t.Errorf("rank %d ends with status 0", r)
					}
				}
			})
		}
	}
}

func work(comm backend.Communicator, name string) error {
	if name == "waits through another rank" {
		return waitThroughAnother(comm)
	}
	x := backend.Of(make([]float32, 1<<16))
	sum := backend.Collective{Kind: backend.AllReduce}
	for i := 0; ; i++ {
		if i == 10 {
			fmt.Println("under way")
		}
		if odd := comm.Rank() == 1; odd && i == 100 {
			switch name {
			case "stops calling":
				select {}
			case "calls something else":
				return backend.Run(comm, backend.Collective{Kind: backend.Broadcast}, x, x)
			case "calls with another length":
				return backend.Run(comm, sum, x.Slice(0, 7), x.Slice(0, 7))
			case "closes early":
				return nil
			}
		}
		if name == "ends well" && i == 1000 {
			return nil
		}
		if err := backend.Run(comm, sum, x, x); err != nil {
			return err
		}
	}
}

// waitThroughAnother lets rank 0 wait for rank 1, which waits for rank 2 in another group. Rank
// 2 is stopped, and rank 0 is the first whose time is up.
func waitThroughAnother(comm backend.Communicator) error {
	color := func(member bool) int {
		if member {
			return 0
		}
		return -1
	}
	first, err := comm.Split(color(comm.Rank() < 2), 0)
	if err != nil {
		return err
	}
	second, err := comm.Split(color(comm.Rank() > 0), 0)
	if err != nil {
		return err
	}
	switch comm.Rank() {
	case 0:
		return backend.Barrier(first)
	case 1:
		time.Sleep(300 * time.Millisecond) // so that rank 0 waits longer
		return errors.Join(backend.Barrier(second), backend.Barrier(first))
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGSTOP); err != nil {
		return err
	}
	select {} // the signal may take a moment
}

// underWay waits until every rank is in the middle of its work.
func underWay(t *testing.T, ps []proctest.Rank) {
	t.Helper()
	for r, p := range ps {
		said := p.Next()
		require.That(t, said == "under way", "rank %d said %q", r, said)
	}
}

// onHosts are the backends that need no device.
var onHosts = []string{"host", "tcp"}

func TestKilledRankIsNamedByEveryOtherRankWithinASecondEmulated(t *testing.T) {
	for victim, P := range []int{2, 4, 4, 4} {
		for _, backend := range onHosts {
			t.Run(fmt.Sprintf("rank %d of %d over %s", victim, P, backend), func(t *testing.T) {
				dir, env := ownDirectory(t)
				ps := proctest.Start(t, "works", P, append(env, "EURYALE_BACKEND="+backend)...)
				underWay(t, ps)
				ps[victim].Process.Kill()
				killed := time.Now()
				for r, p := range ps {
					if r == victim {
						continue
					}
					said := p.Next()
					if took := time.Since(killed); took > proctest.Within(time.Second) {
						t.Errorf("rank %d ended %v after the kill", r, took)
					}
					if !strings.Contains(said, fmt.Sprintf("rank %d is down", victim)) ||
						!strings.Contains(said, "allreduce(sum) of 65536 f32") {
						t.Errorf("rank %d said %q", r, said)
					}
				}
				for _, p := range ps {
					p.End()
				}
				leftNothing(t, dir)
			})
		}
	}
}

// ownDirectory makes a directory of shared memory, where jobs of other tests leave nothing,
// and returns what a job is told to use it.
func ownDirectory(t *testing.T) (dir string, env []string) {
	t.Helper()
	dir = require.Value(os.MkdirTemp("/dev/shm", "euryale-test-"))(t)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir, []string{"TMPDIR=" + dir, "EURYALE_SHM_DIR=" + dir}
}

// leftNothing checks that a job has left there neither shared memory nor files of its meeting.
func leftNothing(t *testing.T, dir string) {
	t.Helper()
	meetings := fmt.Sprintf("euryale-%d", os.Getuid())
	require.Report(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if name, _ := filepath.Rel(dir, path); err == nil && name != "." && name != meetings {
			t.Errorf("%s was left in %s", name, dir)
		}
		return err
	}))
}

// A stopped process is alive, so only the timeout can tell.
func TestStoppedRankIsNamedAfterTheTimeout(t *testing.T) {
	for _, backend := range onHosts {
		t.Run(backend, func(t *testing.T) {
			ps := proctest.Start(t, "works", 3, "EURYALE_TIMEOUT=1s", "EURYALE_BACKEND="+backend)
			underWay(t, ps)
			require.NoError(t, ps[1].Process.Signal(syscall.SIGSTOP))
			stopped := time.Now()
			for _, r := range []int{0, 2} {
				said := ps[r].Next()
				if took := time.Since(stopped); took > proctest.Within(1500*time.Millisecond) {
					t.Errorf("rank %d ended %v after the stop", r, took)
				}
				require.Check(t, strings.Contains(said, "rank 1") &&
					strings.Contains(said, "allreduce") && strings.Contains(said,
					"timeout"), "rank %d said %q", r, said)
			}
		})
	}
}

func TestFoundStoppedRankIsNamedByThoseThatWaitForOthers(t *testing.T) {
	ps := proctest.Start(t, "waits through another rank", 3, "EURYALE_TIMEOUT=1s")
	ps[0].Says(t, "Barrier", "timeout: no sign of rank 2 for 1s: its process", "is stopped")
	ps[1].Says(t, "rank 2")
}

func TestRankThatGoesItsOwnWayIsNamed(t *testing.T) {
	for name, want := range map[string]string{
		"stops calling":             "no sign of rank 1 for 1s",
		"calls something else":      "broadcast(root 0)",
		"calls with another length": "allreduce(sum) of 7 f32",
		"closes early":              "rank 1 has closed",
	} {
		for _, backend := range onHosts {
			t.Run(name+" over "+backend, func(t *testing.T) {
				ps := proctest.Start(t, name, 3, "EURYALE_TIMEOUT=1s", "EURYALE_BACKEND="+backend)
				underWay(t, ps)
				for _, r := range []int{0, 2} {
					if said := ps[r].Next(); !strings.Contains(said, want) ||
						!strings.Contains(said, "rank 1") {
						t.Errorf("rank %d said %q, which does not contain %q", r, said, want)
					}
				}
			})
		}
	}
}

func TestProcessesEndWellEmulated(t *testing.T) {
	for _, backend := range onHosts {
		dir, env := ownDirectory(t)
		for r, p := range proctest.Start(t, "ends well", 4,
			append(env, "EURYALE_BACKEND="+backend)...) {
			said := p.End()
			require.Check(t, p.ProcessState.Success(), "%s: rank %d: %v, said %q", backend, r,
				p.ProcessState, said)
		}
		leftNothing(t, dir)
	}
}

func TestRanksCheckAllOrNone(t *testing.T) {
	const want = "EURYALE_CHECK is off on ranks [1] of 3"
	for r, p := range proctest.Start(t, "one rank does not check", 3, "EURYALE_TIMEOUT=5s") {
		if said := p.Next(); !strings.Contains(said, want) ||
			!strings.Contains(said, "set it to the same on every rank") {
			t.Errorf("rank %d said %q, which does not contain %q", r, said, want)
		}
	}
	for r, p := range proctest.Start(t, "ends well", 2, "EURYALE_CHECK=off") {
		if said := p.End(); !p.ProcessState.Success() {
			t.Errorf("rank %d of those that do not check said %q", r, said)
		}
	}
}

func TestInitSaysWhatIsWrongWithTheEnvironment(t *testing.T) {
	for _, bad := range []struct{ name, env, want string }{
		{"unknown backend", "EURYALE_BACKEND=carrier-pigeon",
			`asks for "carrier-pigeon": the backends are nccl, host, tcp, mpi`},
		{"no shared memory", "EURYALE_BACKEND=host EURYALE_SHM_DIR=/proc",
			"name a writable tmpfs in EURYALE_SHM_DIR"},
		{"rank out of range", "RANK=7", "RANK"},
		{"size zero", "WORLD_SIZE=0", "WORLD_SIZE"},
		{"unknown check", "EURYALE_CHECK=no", "use on or off"},
		{"bad number of last calls", "EURYALE_LAST_CALLS=many", "EURYALE_LAST_CALLS"},
		{"bad timeout", "EURYALE_TIMEOUT=soon", "EURYALE_TIMEOUT"},
		{"bad topology", "EURYALE_TOPOLOGY=2x3", "EURYALE_TOPOLOGY"},
		{"bad hierarchy", "EURYALE_HIERARCHY=yes", "use auto, always or never"},
		{"bad exchange", "EURYALE_HIERARCHY=always,exchange=f32", "exchange=bf16 or exchange=f16"},
		{"unknown algorithm", "EURYALE_LOWLATENCY=fast", "two-shot push mesh copy-engines], " +
			"auto or off"},
	} {
		t.Run(bad.name, func(t *testing.T) {
			p := proctest.Start(t, "ends well", 1, strings.Fields(bad.env)...)[0]
			said := p.Next()
			p.End()
			require.Check(t, strings.Contains(said, bad.want) && !p.ProcessState.Success(),
				"said %q", said)
		})
	}
}

// pigeon is a backend from outside.
type pigeon struct{ backend.Backend }

func (pigeon) Name() string     { return "pigeon" }
func (pigeon) Available() error { return errors.New("the pigeon is asleep") }

func TestRanksVoteForABackendThatAllCanUseEmulated(t *testing.T) {
	backends := append([]backend.Backend{pigeon{}}, euryale.Backends()...)
	err := euryale.Run(context.Background(), 2, func(comm backend.Communicator,
		_ sync.Locker) error {
		return backend.Barrier(comm)
	}, backends...)
	require.Report(t, err)
	t.Setenv("EURYALE_BACKEND", "pigeon") // of the others nothing is said
	err = euryale.Run(context.Background(), 2, func(backend.Communicator, sync.Locker) error {
		return nil
	}, backends...)
	require.Check(t, err != nil && strings.HasSuffix(strings.Split(err.Error(), "\n")[0],
		"no backend works on every rank: pigeon on rank 0: the pigeon is asleep"), "got %v", err)
}

func TestDeclaredMachinesAreUsed(t *testing.T) {
	t.Setenv("EURYALE_TOPOLOGY", "2x2")
	const n = 1000
	require.NoError(t, euryale.Run(context.Background(), 4, func(comm backend.Communicator,
		_ sync.Locker) error {
		h, ok := backend.As[*hierarchy.Communicator](comm)
		if !ok {
			return errors.New("no hierarchy")
		}
		x := backend.Of(make([]float32, n))
		for i := range backend.View[float32](x) {
			backend.View[float32](x)[i] = float32(comm.Rank() + i)
		}
		if err := backend.Run(comm, backend.Collective{Kind: backend.AllReduce}, x, x); err != nil {
			return err
		}
		for i, got := range backend.View[float32](x) {
			if want := float32(4*i + 6); got != want {
				return fmt.Errorf("element %d is %v, want %v", i, got, want)
			}
		}
		if s := h.Stats(); s.Calls != 1 {
			return fmt.Errorf("the call went flat: %+v", s)
		}
		return nil
	}))
}

// crowded is a backend that is available, but not for so many ranks.
type crowded struct{ pigeon }

func (crowded) Available() error { return nil }
func (crowded) Connect(context.Context, *rendezvous.World) (backend.Communicator, error) {
	return nil, fmt.Errorf("%w: one pigeon for two ranks", backend.ErrUnsupported)
}

func TestBackendThatCannotCarryTheRanksIsPassedOver(t *testing.T) {
	backends := append([]backend.Backend{crowded{}}, euryale.Backends()...)
	err := euryale.Run(context.Background(), 2, func(comm backend.Communicator,
		_ sync.Locker) error {
		if name := comm.Capabilities().Backend; name != "host" {
			return fmt.Errorf("on %s", name)
		}
		return backend.Barrier(comm)
	}, backends...)
	require.Report(t, err)
	err = euryale.Run(context.Background(), 2, func(backend.Communicator, sync.Locker) error {
		return nil
	}, crowded{})
	require.Fails(t, "euryale.Run", err, backend.ErrUnsupported)
}

func TestErrorOfARankEndsTheOthers(t *testing.T) {
	broken := errors.New("out of data")
	began := time.Now()
	err := euryale.Run(context.Background(), 4, func(comm backend.Communicator,
		_ sync.Locker) error {
		if comm.Rank() == 2 {
			return broken
		}
		return backend.Barrier(comm)
	})
	require.Check(t, errors.Is(err, broken) && time.Since(began) <= proctest.Within(5*time.Second),
		"after %v: %v", time.Since(began), err)
}

func TestCancellingTheContextEndsEveryRank(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	err := euryale.Run(ctx, 3, func(comm backend.Communicator, _ sync.Locker) error {
		if comm.Rank() == 0 {
			cancel()
			<-ctx.Done()
			return ctx.Err()
		}
		return backend.Barrier(comm)
	})
	require.Fails(t, "no error", err)
}

func TestTraceIsWrittenOnClose(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run")
	t.Setenv("EURYALE_TRACE", path)
	require.NoError(t, euryale.Run(context.Background(), 2, func(comm backend.Communicator,
		_ sync.Locker) error {
		return backend.Barrier(comm)
	}))
	for r := range 2 {
		f := require.Value(os.Open(fmt.Sprintf("%s.%d.json", path, r)))(t)
		text, _ := io.ReadAll(f)
		f.Close()
		require.Check(t, strings.Contains(string(text), "allreduce"), "rank %d: %s", r, text)
	}
}

func TestFoundBadPlaceForTheTraceIsAnErrorBeforeTheWork(t *testing.T) {
	t.Setenv("EURYALE_TRACE", filepath.Join(t.TempDir(), "no", "such", "directory"))
	err := euryale.Run(context.Background(), 2, func(comm backend.Communicator,
		_ sync.Locker) error {
		t.Error("the work has begun")
		return nil
	})
	require.Fails(t, "euryale.Run", err, "EURYALE_TRACE", fs.ErrNotExist)
}

func TestFoundTraceThatCannotBeWrittenIsNoErrorOfTheWork(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Symlink("/dev/full", filepath.Join(dir, "run.0.json")))
	t.Setenv("EURYALE_TRACE", filepath.Join(dir, "run"))
	require.NoError(t, euryale.Run(context.Background(), 1, func(comm backend.Communicator,
		_ sync.Locker) error {
		return backend.Barrier(comm)
	}))
}

func TestTraceIsWrittenWhenARankIsLost(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run")
	ps := proctest.Start(t, "hangs on after a failure", 2, "EURYALE_TRACE="+path)
	underWay(t, ps)
	ps[1].Process.Kill()
	said := ps[0].Next()
	require.Check(t, strings.Contains(said, "rank 1 is down"), "said %q", said)
	require.Soon(t, "a trace with the call", func() bool {
		text, err := os.ReadFile(path + ".0.json") // of a process that has not ended
		return err == nil && json.Valid(text) && strings.Contains(string(text), "allreduce")
	})
}

func TestFoundSecondInitHasANameOfItsOwn(t *testing.T) {
	names := map[string]int{}
	for r, p := range proctest.Start(t, "joins twice", 2) {
		for range 2 {
			names[p.Next()]++
		}
		said := p.End()
		require.Check(t, p.ProcessState.Success(), "rank %d: %v, said %q", r, p.ProcessState, said)
	}
	require.Check(t, len(names) == 2, "the names are %v, want two, the same on both ranks", names)
}

func TestWorldsOfLocalRanksAreTheCallers(t *testing.T) {
	worlds := require.Value(rendezvous.Local(1, 0))(t)
	comm := require.Value(euryale.Connect(context.Background(), worlds[0]))(t)
	require.NoError(t, errors.Join(comm.Close(), comm.Close()))
}
