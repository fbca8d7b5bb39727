//go:build unix

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// actAsEuryale is a variable that makes this test binary the command.
const actAsEuryale = "RUN_AS_EURYALE"

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == brokenRank {
		beBroken(os.Args[2])
		return
	}
	if os.Getenv(actAsEuryale) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// command returns this command as a program, to be started.
func command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	self := require.Value(os.Executable())(t)
	cmd := exec.Command(self, args...)
	cmd.Env = append(os.Environ(), actAsEuryale+"=1")
	return cmd
}

// small is a benchmark that takes no time worth mentioning.
func small(args ...string) []string {
	return append([]string{"bench", "--backend=host", "--min=1K", "--max=4K", "--factor=4",
		"--iters=5"}, args...)
}

func TestBenchOfOneRank(t *testing.T) {
	out, err := command(t, small("-n", "1")...).CombinedOutput()
	require.Check(t, err == nil && strings.Contains(string(out), "ranks: 1 process;"), "%v\n%s",
		err, out)
}

func TestBenchOverTLS(t *testing.T) {
	cmd := command(t, "bench", "-n", "2", "--backend", "tcp", "--min=1K", "--max=4M", "--factor=64",
		"--iters=3")
	cmd.Env = append(cmd.Env, "EURYALE_TLS=1")
	out, err := cmd.CombinedOutput()
	require.Check(t, err == nil && strings.Count(string(out), "\n") >= 8, "%v\n%s", err, out)
}

func TestDoctorTriesProcesses(t *testing.T) {
	out, err := command(t, "doctor").CombinedOutput()
	require.Check(t, err == nil && strings.Contains(string(out), "host processes  ok  2 ranks "+
		"all-reduce "+"right on backend host"), "%v\n%s", err, out)
}

func TestBenchStartsItself(t *testing.T) {
	var out, notes bytes.Buffer
	cmd := command(t, small("-n", "3", "--json", "--alloc")...)
	cmd.Stdout, cmd.Stderr = &out, &notes
	err := cmd.Run()
	require.That(t, err == nil, "%v\n%s", err, notes.String())
	for line := range strings.Lines(out.String()) {
		var r bench.Result
		err := json.Unmarshal([]byte(line), &r)
		require.That(t, err == nil, "%v in %q", err, line)
		require.Check(t, r.Ranks == 3 && !r.InProc && r.Alloc && r.Wrong == 0 && r.Iters == 5,
			"line is %+v", r)
	}
	n := strings.Count(out.String(), "\n")
	require.Check(t, n == 2, "%d lines, want 2:\n%s", n, out.String())
	require.Check(t, strings.HasPrefix(notes.String(), "# euryale bench"),
		"notes are not plain: %q", notes.String())
}

func TestBenchIsARankUnderALauncher(t *testing.T) {
	self := require.Value(os.Executable())(t)
	out, err := command(t, append([]string{"run", "-n", "2", self}, small("--json")...)...).Output()
	require.NoError(t, err)
	n := strings.Count(string(out), `"ranks":2`)
	require.Check(t, n == 2 && strings.HasPrefix(string(out), "[0] {"),
		"rank 0 should write 2 lines:\n%s", out)
}

func TestFoundBenchEndsWithTheCodeOfItsSignal(t *testing.T) {
	for _, ranks := range []string{"1", "2"} {
		for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
			t.Run(ranks+" "+signal.String(), func(t *testing.T) { endedBy(t, ranks, signal) })
		}
	}
}

// endedBy starts a long benchmark and ends it.
func endedBy(t *testing.T, ranks string, signal syscall.Signal) {
	cmd := command(t, "bench", "-n", ranks, "--backend", "host", "--time", "1h")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	timer := time.AfterFunc(20*time.Second, func() { cmd.Process.Kill() })
	defer timer.Stop()
	if _, err := out.Read(make([]byte, 1)); err != nil { // the title: ranks are up
		t.Fatal(err)
	}
	began := time.Now()
	require.NoError(t, cmd.Process.Signal(signal))
	go func() { // what is not read would keep it alive
		for b := make([]byte, 1024); err == nil; {
			_, err = out.Read(b)
		}
	}()
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 128+int(signal) {
		t.Errorf("it ended with %v after %v", err, time.Since(began))
	}
	if took := time.Since(began); took > 10*time.Second { // of an hour
		t.Errorf("it took %v to end", took)
	}
}
