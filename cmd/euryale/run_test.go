//go:build unix

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/observe/metrics"
	"github.com/euryale-ml/euryale/rendezvous"
)

// long bounds what should never take that long.
const long = time.Minute

// brokenRank is an argument that makes this test binary a rank, whose number 1
// fails in the way that the next argument names.
const brokenRank = "broken-rank"

// beBroken is such a rank.
func beBroken(way string) {
	if way == "exit 0 before Init" && os.Getenv("RANK") == "1" {
		os.Exit(0)
	}
	if way == "hang as goroutines" {
		hangAsGoroutines()
	}
	comm, err := euryale.Init(context.Background())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	defer comm.Close()
	if way == "hang" {
		for range 300 {
			go func() { select {} }()
		}
	}
	if way == "serve metrics" {
		if _, err := metrics.Serve(comm); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		time.Sleep(long) // until the launcher ends it
	}
	x := backend.Of([]float32{1, 2, 3})
	for i := range 50 {
		if comm.Rank() == 1 && i == 20 {
			fail(comm, way)
		}
		if comm.Rank() == 0 && i == 20 && way == "hang" {
			fmt.Println("under way")
		}
		if err := backend.Run(comm, backend.Collective{Kind: backend.AllReduce}, x, x); err != nil {
			fmt.Fprintln(os.Stderr, "step", i, err)
			os.Exit(1)
		}
	}
}

// hangAsGoroutines hangs with three ranks in this process.
func hangAsGoroutines() {
	euryale.Run(context.Background(), 3, func(comm backend.Communicator, _ sync.Locker) error {
		if err := backend.Barrier(comm); err != nil {
			return err
		}
		if comm.Rank() == 0 {
			fmt.Println("under way")
		}
		select {}
	})
}

// fail fails in a way.
func fail(comm backend.Communicator, way string) {
	switch way {
	case "panic":
		panic("I am broken")
	case "panic in a goroutine":
		go func() { panic("I am broken") }()
		select {}
	case "Abort":
		comm.Abort(errors.New("I do not like it"))
	case "SIGSTOP":
		syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		select {} // the signal may take a moment
	case "exit 0":
		os.Exit(0)
	case "exit 3":
		fmt.Fprintln(os.Stderr, "out of data")
		os.Exit(3)
	case "kill -9":
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case "hang":
		select {}
	}
}

func TestEveryLauncherOfAJobEndsWhenARankHangs(t *testing.T) {
	self := require.Value(os.Executable())(t)
	port := require.Value(freePort())(t)
	var launchers []*exec.Cmd
	outputs := make([]strings.Builder, 2)
	for n := range 2 {
		cmd := command(t, "run", "--nnodes=2", fmt.Sprint("--node-rank=", n), "-n", "1",
			fmt.Sprint("--rendezvous=127.0.0.1:", port), self, brokenRank, "hang")
		cmd.Env = append(cmd.Env, "EURYALE_TIMEOUT=1s", "EURYALE_TOKEN=0123456789abcdef")
		cmd.Stdout, cmd.Stderr = &outputs[n], &outputs[n]
		require.NoError(t, cmd.Start())
		timer := time.AfterFunc(time.Minute, func() { cmd.Process.Kill() })
		defer timer.Stop()
		launchers = append(launchers, cmd)
	}
	for n, cmd := range launchers {
		cmd.Wait() // the exit code says it
		code, text := cmd.ProcessState.ExitCode(), outputs[n].String()
		want := []string{"because of rank 1", "euryale: rank 1 failed: it took no part any more"}[n]
		require.Check(t, code == 1 && strings.Contains(text, want),
			"machine %d: exit code %d, no %q in %s", n, code, want, text)
	}
}

// Two commands without --nnodes, as a launcher starts them on two machines, are one job.
func TestRunTakesItsPositionFromTheLauncher(t *testing.T) {
	self := require.Value(os.Executable())(t)
	outputs := make([]bytes.Buffer, 2)
	var launchers []*exec.Cmd
	for n := range outputs {
		cmd := command(t, append([]string{"run", "-n", "2", self}, small()...)...)
		cmd.Env = append(cmd.Env, fmt.Sprint("SKYPILOT_NODE_RANK=", n), "SKYPILOT_NUM_NODES=2",
			"SKYPILOT_NODE_IPS=127.0.0.1\n127.0.0.2", fmt.Sprint("SKYPILOT_TASK_ID=", os.Getpid()),
			"EURYALE_TOKEN=0123456789abcdef")
		cmd.Stdout, cmd.Stderr = &outputs[n], &outputs[n]
		require.NoError(t, cmd.Start())
		launchers = append(launchers, cmd)
	}
	for n, cmd := range launchers {
		err := cmd.Wait()
		require.Check(t, err == nil, "machine %d: %v\n%s", n, err, &outputs[n])
	}
	if out := outputs[0].String(); !strings.Contains(out, "# ranks: 4 processes") ||
		!strings.Contains(out, "SkyPilot has started this command 2 times: it is number 0") {
		t.Errorf("machine 0 printed\n%s", out)
	}
}

func TestRunUnderALauncherJoinsOrSaysWhyNot(t *testing.T) {
	for _, c := range []struct{ vars, args, want string }{
		{"SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_NODES=4", "", "SkyPilot says no such address"},
		{"PET_NNODES=4 PET_NODE_RANK=1 PET_MASTER_ADDR=a PET_MASTER_PORT=1", "",
			"set EURYALE_TOKEN"},
		{"PET_NNODES=1:4 PET_NODE_RANK=1", "", "takes one number"},
		{"JOB_COMPLETION_INDEX=1", "", "WORLD_SIZE is not set"},
		{"JOB_COMPLETION_INDEX=1", "--nnodes 2 --rendezvous a:1", "set EURYALE_TOKEN"},
		{"JOB_COMPLETION_INDEX=3", "--nnodes 2 --rendezvous a:1",
			"--node-rank=3 of --nnodes=2, by flags or Kubernetes"},
		{"SLURM_PROCID=1 SLURM_NTASKS=2", "-H a:1", "this one as number 1"},
		{"JAX_PROCESS_ID=5 JAX_NUM_PROCESSES=4 JAX_COORDINATOR_ADDRESS=a:1", "",
			"--nnodes=4, by flags or JAX"},
		{"JAX_PROCESS_ID=1 JAX_NUM_PROCESSES=4 JAX_COORDINATOR_ADDRESS=a:1 NNODES=2 NODE_RANK=0",
			"", "by JAX this is number 1 of 4"},
		{"JOB_COMPLETION_INDEX=1", "--nnodes 1", ""},
		{"JOB_COMPLETION_INDEX=1 EURYALE_ALONE=1", "", ""},
		{"SLURM_NTASKS=4 SLURM_PROCID=0 ENVIRONMENT=BATCH SLURM_JOB_ID=1", "", ""},
	} {
		cmd := command(t, strings.Fields("run -n 2 "+c.args+" /bin/true")...)
		cmd.Env = append(append(cmd.Env, "EURYALE_TOKEN="), strings.Fields(c.vars)...)
		out, err := cmd.CombinedOutput()
		require.Check(t, (c.want == "") == (err == nil) && strings.Contains(string(out), c.want),
			"%s %s: %v, want %q\n%s", c.vars, c.args, err, c.want, out)
	}
}

// freePort returns a port that nobody listens on.
func freePort() (int, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return ln.Addr().(*net.TCPAddr).Port, ln.Close()
}

// broken returns euryale run of ranks of which one fails.
func broken(t *testing.T, way string, env ...string) *exec.Cmd {
	t.Helper()
	self := require.Value(os.Executable())(t)
	cmd := command(t, "run", "-n", "3", self, brokenRank, way)
	cmd.Env = append(cmd.Env, append(env, "EURYALE_BACKEND=host")...)
	return cmd
}

// summary returns what euryale run says at the end.
func summary(stderr string) string {
	_, text, _ := strings.Cut("\n"+stderr, "\neuryale: ")
	return text
}

func TestFoundLauncherBlamesTheRankThatFailedFirst(t *testing.T) {
	for _, c := range []struct {
		way   string
		times int // fewer of those that wait for EURYALE_TIMEOUT
		code  int
		how   string // on the line that names the rank
		last  string // in its last lines
	}{
		{"panic", 5, 2, "exit status 2", "panic: I am broken"},
		{"panic in a goroutine", 5, 2, "exit status 2", "panic: I am broken"},
		{"Abort", 5, 1, "exit status 1", "I do not like it"},
		{"SIGSTOP", 2, 1, "stopped by a signal such as SIGSTOP", "no sign of rank 1"},
		{"exit 0", 5, 1, "exit status 0 while other ranks still needed it", "as seen by rank "},
		{"exit 0 before Init", 2, 1, "exit status 0 while other ranks still needed it",
			"as seen by rank "},
		{"exit 3", 5, 3, "exit status 3", "out of data"},
		{"kill -9", 5, 137, "signal: killed", ""},
	} {
		t.Run(c.way, func(t *testing.T) {
			t.Parallel()
			for range c.times {
				cmd := broken(t, c.way, "EURYALE_TIMEOUT=1s")
				var stderr strings.Builder
				cmd.Stderr = &stderr
				err := cmd.Run()
				said := summary(stderr.String())
				first, rest, _ := strings.Cut(said, "\n")
				if cmd.ProcessState.ExitCode() != c.code ||
					!strings.HasPrefix(first, "rank 1 failed first: ") ||
					!strings.Contains(first, c.how) {
					t.Fatalf("%v: %s", err, stderr.String())
				}
				require.Check(t, strings.Contains(rest, c.last), "no %q in %q", c.last, said)
			}
		})
	}
}

func TestFoundQuitPrintsCallsAndStacksOfEveryRank(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "logs")
	self := require.Value(os.Executable())(t)
	cmd := command(t, "run", "-n", "3", "--log-dir", dir, self, brokenRank, "hang")
	cmd.Env = append(cmd.Env, "EURYALE_BACKEND=host")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "[0] under way" {
		t.Fatalf("it says %q", lines.Text())
	}
	require.NoError(t, cmd.Process.Signal(syscall.SIGQUIT))
	err = cmd.Wait()
	code := cmd.ProcessState.ExitCode()
	require.Check(t, code == 128+int(syscall.SIGQUIT), "exit code %d (%v)", code, err)
	printed := map[string]bool{}
	for line := range strings.Lines(stderr.String()) {
		printed[line] = true
	}
	for r := range 3 {
		log, err := os.ReadFile(filepath.Join(dir, "attempt_0", fmt.Sprintf("rank_%d.log", r)))
		require.NoError(t, err)
		for _, want := range []string{
			fmt.Sprintf("rank %d: the last 10 of 2", r),
			"allreduce(sum) of 3 f32 (call 20) on run-", "SIGQUIT: quit", "goroutine 1 ",
			"euryale.beBroken",
		} {
			require.Check(t, strings.Contains(string(log), want), "rank %d: no %q in %.200s", r,
				want, log)
		}
		n := len(regexp.MustCompile(`(?m)^goroutine \d+`).FindAll(log, -1))
		require.Check(t, n >= 300, "rank %d: %d stacks", r, n)
		for line := range strings.Lines(string(log)) {
			if line != "under way\n" && !printed[fmt.Sprintf("[%d] %s", r, line)] {
				t.Fatalf("rank %d: %q is not among the prefixed lines", r, line)
			}
		}
	}
}

func TestQuitPrintsTheCallsOfGoroutinesToo(t *testing.T) {
	self := require.Value(os.Executable())(t)
	cmd := command(t, "run", "-n", "1", self, brokenRank, "hang as goroutines")
	cmd.Env = append(cmd.Env, "EURYALE_BACKEND=host", "EURYALE_LAST_CALLS=1")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out := require.Value(cmd.StdoutPipe())(t)
	require.NoError(t, cmd.Start())
	bufio.NewScanner(out).Scan()
	require.NoError(t, cmd.Process.Signal(syscall.SIGQUIT))
	cmd.Wait() // the exit code says it
	code := cmd.ProcessState.ExitCode()
	require.Check(t, code == 128+int(syscall.SIGQUIT), "exit code %d", code)
	for _, want := range []string{"rank 0: the last 1 of", "rank 1: the last 1 of",
		"rank 2: the last 1 of", "SIGQUIT: quit", "hangAsGoroutines"} {
		require.Check(t, strings.Contains(stderr.String(), want), "no %q in %.1000s", want,
			stderr.String())
	}
}

func TestFoundSignalsAreExitCodes(t *testing.T) {
	// Tests under nohup ignore SIGHUP, and so would the command. A signal that is caught here has
	// its default action there.
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGHUP)
	defer signal.Stop(caught)
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		cmd := broken(t, "hang")
		out := require.Value(cmd.StdoutPipe())(t)
		require.NoError(t, cmd.Start())
		bufio.NewScanner(out).Scan()
		require.NoError(t, cmd.Process.Signal(s))
		cmd.Wait() // the exit code says it
		code := cmd.ProcessState.ExitCode()
		require.Check(t, code == 128+int(s), "%v: exit code %d", s, code)
	}
}

func TestFoundOutputThatNobodyReadsIsNamed(t *testing.T) {
	cmd := command(t, "run", "-n", "2", "/bin/sh", "-c", "while :; do echo something; done")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out := require.Value(cmd.StdoutPipe())(t)
	require.NoError(t, cmd.Start())
	require.NoError(t, require.Err(out.Read(make([]byte, 1))))
	out.Close()
	timer := time.AfterFunc(20*time.Second, func() { cmd.Process.Kill() })
	defer timer.Stop()
	cmd.Wait() // the exit code says it
	if code := cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(stderr.String(),
		"the output of the ranks cannot be written") {
		t.Errorf("exit code %d, %s", code, stderr.String())
	}
}

func TestFoundVariablesOfTheLauncherAreKnown(t *testing.T) {
	out := require.Value(command(t, "run", "-n", "1", "/usr/bin/env").Output())(t)
	d := doctor{getenv: func(string) string {
		return ""
	}, environ: append(strings.Split(string(out), "\n"), "EURYALE_TERMINAL=1")}
	for _, f := range d.environment() {
		require.Check(t, f.err == nil, "%s: %v", f.about, f.err)
	}
}

func TestFoundRankZeroLearnsOfTheTerminal(t *testing.T) {
	for value, want := range map[string]bool{"1": true, "": false} {
		got := rendezvous.Terminal(func(name string) string {
			if name == "EURYALE_TERMINAL" {
				return value
			}
			return ""
		})
		if got != want && !(value == "" && got) { // a test may be run on a terminal
			t.Errorf("EURYALE_TERMINAL=%q: %v", value, got)
		}
	}
}
