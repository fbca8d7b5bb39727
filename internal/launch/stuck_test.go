//go:build linux

package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// beTraced is a rank whose number 1 SIGKILL does not end: as long as a process that traces it does
// not let it go, it stays. The other ranks fail after a line of input.
func beTraced() {
	rank := os.Getenv("RANK")
	if rank != "1" {
		fmt.Println("ready", rank)
		io.ReadAll(os.Stdin)
		if os.Getenv("LAUNCH_TEST_FAIL") == rank {
			fmt.Fprintln(os.Stderr, "because of rank 1: timeout: no sign of rank 1 for 1s")
			os.Exit(5)
		}
		select {}
	}
	if err := unix.Prctl(unix.PR_SET_PTRACER, unix.PR_SET_PTRACER_ANY, 0, 0, 0); err != nil {
		fmt.Fprintln(os.Stderr, err) // without that restriction there is nothing to permit
	}
	tracer := exec.Command(os.Args[0], strconv.Itoa(os.Getpid()))
	tracer.Env = append(os.Environ(), asHelper+"=tracer")
	tracer.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the launcher kills this rank's group
	out, err := tracer.StdoutPipe()
	if err == nil {
		err = tracer.Start()
	}
	if err != nil {
		panic(err)
	}
	io.ReadFull(out, make([]byte, 1)) // it traces this process now
	fmt.Println("tracer", tracer.Process.Pid, "of", os.Getpid())
	select {}
}

// beTracer traces the process that its argument names until it is killed.
func beTracer() {
	runtime.LockOSThread()
	pid, err := strconv.Atoi(os.Args[1])
	if err == nil {
		err = unix.PtraceSeize(pid)
	}
	if err != nil {
		panic(err)
	}
	fmt.Println()
	time.Sleep(time.Hour)
}

// traced is a job of two ranks of which SIGKILL does not end number 1, and the process that holds
// it. free lets it end.
func traced(t *testing.T, job *Job) (ended chan error, signals chan os.Signal, held, holder int) {
	t.Helper()
	out := newOutput()
	signals, ended = make(chan os.Signal, 4), make(chan error, 1)
	job.Program, job.Ranks, job.Signals = os.Args[0], 2, signals
	job.Stdout, job.Stderr, job.times.kill = out, out, 100*time.Millisecond
	job.Env = append(os.Environ(), append(job.Env, asHelper+"=traced")...)
	before := runtime.NumGoroutine()
	go func() { ended <- Run(context.Background(), *job) }()
	out.await(t, 1, "ready")
	line := out.await(t, 1, "tracer")[0]
	require.NoError(t, require.Err(fmt.Sscanf(line, "[1] tracer %d of %d", &holder, &held)))
	t.Cleanup(func() {
		syscall.Kill(holder, syscall.SIGKILL)
		gone(t, strconv.Itoa(held))
		require.Soon(t, fmt.Sprintf("no more than the %d goroutines of before", before),
			func() bool { return runtime.NumGoroutine() <= before })
	})
	return ended, signals, held, holder
}

func await(t *testing.T, ended chan error) error {
	t.Helper()
	select {
	case err := <-ended:
		return err
	case <-time.After(long):
		t.Fatal("the launcher waits for a rank that does not end")
		return nil
	}
}

func TestRankThatSIGKILLDoesNotEndIsNamedAndTheLauncherEndsUnemulated(t *testing.T) {
	in, fail, err := os.Pipe()
	require.NoError(t, err)
	defer in.Close()
	notices := make(chan string, 4)
	job := Job{Stdin: in, MaxRestarts: 3, Notice: func(text string) { notices <- text },
		Env: []string{"LAUNCH_TEST_FAIL=0"}}
	job.times.giveUp = 100 * time.Millisecond
	ended, _, held, holder := traced(t, &job)
	fail.Close()
	err = await(t, ended)
	var f *Failed
	require.That(t, errors.As(err, &f) && f.Rank == 1 && f.cause == causeStuck && f.ExitCode() == 1,
		"%v", err)
	for _, text := range []string{<-notices, err.Error()} {
		for _, want := range []string{
			"rank 1 has not ended", "SIGKILL", fmt.Sprintf("process %d", held), "state Z",
			fmt.Sprintf("process %d traces it", holder),
		} {
			require.Check(t, strings.Contains(text, want), "no %q in %q", want, text)
		}
	}
	if len(notices) > 0 {
		t.Errorf("a restart beside a rank that is still there: %s", <-notices)
	}
}

func TestSignalsEndTheLauncherOfARankThatDoesNotEndUnemulated(t *testing.T) {
	notices := make(chan string, 4)
	job := Job{Notice: func(text string) { notices <- text }}
	job.times.giveUp = time.Hour
	ended, signals, held, _ := traced(t, &job)
	signals <- syscall.SIGINT
	signals <- syscall.SIGINT
	<-notices
	signals <- syscall.SIGTERM
	err := await(t, ended)
	var i *Interrupted
	require.Check(t, errors.As(err, &i) && i.ExitCode() == 130 &&
		strings.Contains(err.Error(), fmt.Sprintf("process %d", held)), "%v", err)
}

func TestStateOfAProcessThatDoesNotEnd(t *testing.T) {
	files := fstest.MapFS{
		"proc/1/stat":   {Data: []byte("1 (a) b) D 0 1 1")},
		"proc/1/wchan":  {Data: []byte("rpc_wait_bit_killable")},
		"proc/1/status": {Data: []byte("Name:\ta\nTracerPid:\t0\n")},
		"proc/1/cgroup": {Data: []byte("9:name=systemd:/x\n6:cpu,freezer:/jobs/7\n0::/y\n")},
		"sys/fs/cgroup/freezer/jobs/7/freezer.state": {Data: []byte("FROZEN\n")},
		"proc/2/stat":                            {Data: []byte("2 (b) D 0 1 1")},
		"proc/2/wchan":                           {Data: []byte("0")},
		"proc/2/status":                          {Data: []byte("TracerPid:\t0\n")},
		"proc/2/cgroup":                          {Data: []byte("0::/slice/job\n")},
		"sys/fs/cgroup/slice/job/cgroup.freeze":  {Data: []byte("1\n")},
		"proc/3/stat":                            {Data: []byte("3 (c) S 0 1 1")},
		"proc/3/wchan":                           {Data: []byte("do_nanosleep")},
		"proc/3/cgroup":                          {Data: []byte("0::/slice/free\n")},
		"sys/fs/cgroup/slice/free/cgroup.freeze": {Data: []byte("0\n")},
	}
	for pid, want := range map[int]string{
		1: "process 1 is in state D (uninterruptible sleep), in rpc_wait_bit_killable; its " +
			"cgroup /sys/fs/cgroup/freezer/jobs/7 is frozen",
		2: "process 2 is in state D (uninterruptible sleep); its cgroup /sys/fs/cgroup/slice/job " +
			"is frozen",
		3: "process 3 is in state S, in do_nanosleep",
		4: "process 4 has no state in /proc",
	} {
		require.Equal(t, "state", state(files, pid), want)
	}
}

func TestRankThatIsStoppedWhileItsJobIsOnSeveralMachinesIsEnded(t *testing.T) {
	// Ranks on other machines give it up after EURYALE_TIMEOUT, and their launchers end them.
	job, out := elsewhere(`echo pid $$; kill -STOP $$; echo went on`)
	job.Env = append(os.Environ(), "EURYALE_TIMEOUT=100ms")
	job.times.look = 20 * time.Millisecond
	ended := make(chan error, 1)
	go func() { ended <- Run(context.Background(), job) }()
	pid := out.await(t, 1, "pid ")[0]
	err := await(t, ended)
	var f *Failed
	require.Check(t, errors.As(err, &f) && f.Rank == 1 && f.cause == causeStopped, "%v", err)
	gone(t, pid[strings.LastIndex(pid, " ")+1:])
}

func TestRankThatGoesOnInTimeIsNotEnded(t *testing.T) {
	job, out := elsewhere(`echo pid $$; kill -STOP $$; echo went on`)
	job.Env, job.times.look = append(os.Environ(), "EURYALE_TIMEOUT=1h"), time.Millisecond
	ended := make(chan error, 1)
	go func() { ended <- Run(context.Background(), job) }()
	line := out.await(t, 1, "pid ")[0]
	pid := require.Value(strconv.Atoi(line[strings.LastIndex(line, " ")+1:]))(t)
	require.Soon(t, "it is stopped", func() bool {
		return strings.Contains(state(os.DirFS("/"), pid), "state T")
	})
	syscall.Kill(pid, syscall.SIGCONT)
	require.NoError(t, await(t, ended))
}

// elsewhere is a job of one rank on machine 1 of two. Its program is a script.
func elsewhere(script string) (Job, *output) {
	job, out, _ := shell(1, script)
	job.Machines = &Machines{Count: 2, Number: 1, Rendezvous: "127.0.0.1:1",
		Token: "0123456789abcdef"}
	job.Env = append(os.Environ(), "EURYALE_TIMEOUT=300ms")
	return job, out
}

func TestLauncherEndsAfterAJobThatHasFailedElsewhere(t *testing.T) {
	job, out := elsewhere(
		`echo pid $$; echo "rank 0 is down: it was killed" >&${EURYALE_REPORT%%:*}
		while :; do sleep 0.01; done`)
	ended := make(chan error, 1)
	go func() { ended <- Run(context.Background(), job) }()
	err := await(t, ended)
	var f *Failed
	require.Check(t, errors.As(err, &f) && f.Rank == 1 && f.cause == causeAbsent &&
		f.Seen == "the job: rank 0 is down: it was killed", "%v", err)
	pid := out.await(t, 1, "pid ")[0]
	gone(t, pid[strings.LastIndex(pid, " ")+1:])
}

func TestRankMayEndByItselfAfterAJobThatHasFailedElsewhere(t *testing.T) {
	job, _ := elsewhere(`echo "rank 0 is down" >&${EURYALE_REPORT%%:*}; exit 5`)
	var f *Failed
	err := Run(t.Context(), job)
	require.Check(t, errors.As(err, &f) && f.cause == causeEnded && f.ExitCode() == 5, "%v", err)
	job, _ = elsewhere(`echo "rank 0 is down" >&${EURYALE_REPORT%%:*}; exit 0`)
	err = Run(t.Context(), job)
	require.Check(t, err == nil, "%v", err)
}

// TestAJobWhoseProcessesAreAllStoppedGoesOn: a freeze of the machine is no fault of a process. One
// that is stopped while another one has the state is killed, on this machine and on hosts.
func TestAJobWhoseProcessesAreAllStoppedGoesOn(t *testing.T) {
	for _, there := range []host{{ranks: MaxRanks}, {Host: Host{"a", 3}, ranks: 3}} {
		s := elasticJob(3, 0, there)
		// process 3 has no state yet
		view := elastic.First(1, 2, 3)
		view.At[2] = elastic.Position{}
		s.pool.job = elastic.NewObserver(view, nil)
		look := func(states ...string) (killed []int) {
			event := looked{}
			for n, state := range states {
				if there.Name != "" {
					pass(s, halted{n, state == "T"})
				} else {
					event[n] = state
				}
			}
			for range 2 * stoppedLooks {
				for _, a := range pass(s, event) {
					if k, ok := a.(kill); ok {
						killed = append(killed, k.number)
					}
				}
			}
			return killed
		}
		if killed := append(look("T", "T", "T"), look("T", "T", "S")...); killed != nil {
			t.Fatalf("%d are killed, though all that have the state are stopped", killed)
		}
		if killed := look("S", "T", "S"); !slices.Equal(killed, []int{1}) {
			t.Errorf("%d are killed, though process 1 is stopped", killed)
		}
	}
}

// TestAHostSaysWhichOfItsProcessesAreStopped: and which go on.
func TestAHostSaysWhichOfItsProcessesAreStopped(t *testing.T) {
	var said []news
	w := newWatch(Job{Program: "/bin/sleep", Args: []string{"100"}, Elastic: &Elastic{}}, nil)
	w.supervisor.above, w.heard = true, func(n news) { said = append(said, n) }
	w.step(order{Start: &member{Number: 7}})
	c := w.child(7)
	for _, s := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGCONT} {
		c.family.send(s)
		require.Soon(t, s, func() bool { return (c.state() == "T") == (s == syscall.SIGSTOP) })
		w.step(w.look())
		w.step(w.look())
	}
	c.signal(syscall.SIGKILL)
	<-w.events
	require.Check(t, len(said) == 2 && said[0].Stops && said[1].Goes && said[0].Number == 7,
		"it says %+v", said)
}

// TestAStoppedStandbyIsNotWaitedForAfterTheLastStep: nobody has the state any more.
func TestAStoppedStandbyIsNotWaitedForAfterTheLastStep(t *testing.T) {
	s := elasticJob(1, 1, host{ranks: MaxRanks})
	pass(s, heard{0, elastic.Posted{ID: 1, Position: elastic.Position{Leaving: true}}})
	pass(s, ended{})
	killed := false
	for range 2 * stoppedLooks {
		for _, a := range pass(s, looked{1: "T"}) {
			k, ok := a.(kill)
			killed = killed || ok && k.number == 1
		}
	}
	require.Check(t, killed, "it is not killed, though it is stopped")
}
