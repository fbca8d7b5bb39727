//go:build linux

package main

import (
	"errors"
	"fmt"
	"net"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// elasticHash returns what an elastic training by digits ends with.
func elasticHash(t *testing.T, program string, flags ...string) string {
	t.Helper()
	out, err := command(t, append([]string{"run", "--elastic", "-n", "1", program, "-elastic"},
		flags...)...).CombinedOutput()
	want := hash.FindString(string(out))
	require.That(t, err == nil && want != "", "%v\n%s", err, out)
	return want
}

// TestLaunchersOfMachinesShareAnElasticJob: each runs two processes, as srun starts them; one is
// told to end and leaves, comes back, is killed, and comes back again. All end with the status of
// the job.
func TestLaunchersOfMachinesShareAnElasticJob(t *testing.T) {
	program := built(t, digits)
	const epochs = "-epochs=300"
	want := elasticHash(t, program, epochs)
	ln := require.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	meeting := ln.Addr().String()
	ln.Close()
	start := func(machine int, flags ...string) *proctest.Program {
		args := append([]string{"run", "--elastic", "--nnodes=2",
			fmt.Sprint("--node-rank=", machine), "--rendezvous", meeting, "-n", "2", "--grace=20s",
			program, "-elastic", epochs}, flags...)
		cmd := command(t, args...)
		cmd.Env = append(cmd.Env, "EURYALE_TOKEN="+secret)
		return proctest.Launch(t, cmd)
	}
	first, second := start(0), start(1)
	await := func(times int, what string) {
		t.Helper()
		many := regexp.MustCompile(`(?s)` + strings.Repeat(what+".*", times))
		require.That(t, first.Says(many, long), "it does not say %q %d times:\n%s", what, times,
			first.Output())
	}
	await(1, `epoch 9/`)
	require.NoError(t, second.Cmd.Process.Signal(syscall.SIGTERM))
	status := new(exec.ExitError)
	if err := second.Ends(t, long); !errors.As(err, &status) || status.ExitCode() != 143 {
		t.Errorf("it was told to end, and ends with %v:\n%s", err, second.Output())
	}
	await(1, "host 1 at 127.0.0.1 was told to end: its processes leave")
	await(2, "exit status 143")
	second = start(1)
	await(1, "takes part")
	await(1, fmt.Sprintf("epoch %d/", 99+strings.Count(first.Output(), "epoch")))
	require.NoError(t, second.Cmd.Process.Kill())
	await(1, "host 1 at 127.0.0.1 is lost")
	second = start(1)
	await(2, "takes part")
	for i, l := range []*proctest.Program{first, second} {
		err := l.Ends(t, long)
		require.Check(t, err == nil, "machine %d: %v\n%s", i, err, l.Output())
	}
	require.Equal(t, "it", hash.FindString(first.Output()), want)
}

// TestLaunchersOfMachinesEndAsTheirElasticJob: its status is theirs, also that of a launcher whose
// processes have not failed; without its first machine the job is to be started again.
func TestLaunchersOfMachinesEndAsTheirElasticJob(t *testing.T) {
	ln := require.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	meeting := ln.Addr().String()
	ln.Close()
	for says, c := range map[string]struct {
		machines []int
		status   int
		program  string
	}{
		"machine 0 says why":                 {[]int{0, 1}, 7, "exit 7"},
		"have not connected within 3s":       {[]int{0}, 1, "exit 0"},
		"connect to the launcher of the job": {[]int{1}, 1, "exit 0"},
	} {
		out := ""
		var all []*proctest.Program
		for _, m := range c.machines {
			cmd := command(t, "run", "--elastic", "--nnodes=2", fmt.Sprint("--node-rank=", m),
				"--rendezvous", meeting, "-n", "1", "sh", "-c", c.program)
			cmd.Env = append(cmd.Env, "EURYALE_TOKEN="+secret, "EURYALE_TIMEOUT=3")
			all = append(all, proctest.Launch(t, cmd))
		}
		for i, l := range all {
			status := new(exec.ExitError)
			if err := l.Ends(t, long); !errors.As(err, &status) || status.ExitCode() != c.status {
				t.Errorf("machine %d: %v, want status %d\n%s", i, err, c.status, l.Output())
			}
			out += l.Output()
		}
		require.Check(t, strings.Contains(out, says), "it does not say %q:\n%s", says, out)
	}
}
