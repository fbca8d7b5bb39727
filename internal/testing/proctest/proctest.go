// Package proctest starts a test binary again, as the processes of a job.
//
//	func TestMain(m *testing.M) { proctest.Main(m, rank) }
//
//	ranks := proctest.Start(t, "works", 4)
//	ranks[0].Says(t, "under way")
//
// What a process does is a function of the scenario's name. Ranks report to the test by
// lines on their standard output.
package proctest

import (
	"bufio"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// scenario is the variable that makes a test binary a rank; its value is the name.
const scenario = "EURYALE_TEST_SCENARIO"

// Main is the TestMain of a package: it runs the tests, or rank in a process of a job,
// whose error becomes its last line.
func Main(m *testing.M, rank func(scenario string) error) {
	name := os.Getenv(scenario)
	if name == "" {
		os.Exit(m.Run())
	}
	if err := rank(name); err != nil {
		fmt.Println("failed:", strings.ReplaceAll(err.Error(), "\n", " "))
		os.Exit(3)
	}
	os.Exit(0)
}

// Rank is a process of a job.
type Rank struct {
	*exec.Cmd
	lines *bufio.Scanner
}

// Start starts the P ranks of a job on this machine, with env besides what a launcher
// gives them. Ranks that still run are killed at the end of the test.
func Start(t *testing.T, name string, P int, env ...string) []Rank {
	t.Helper()
	return start(t, name, nil, P, env)
}

// StartOn is Start for a job of perMachine ranks on each of several machines.
func StartOn(t *testing.T, name string, machines []*Namespace, perMachine int,
	env ...string) []Rank {
	t.Helper()
	return start(t, name, machines, perMachine, env)
}

// start starts the ranks of a job: perMachine of them on each machine, or all on this one.
func start(t *testing.T, name string, machines []*Namespace, perMachine int, env []string) []Rank {
	t.Helper()
	secret := make([]byte, 16)
	rand.Read(secret)
	addr, port := "127.0.0.1", freePort(t)
	// what is free there is not known here, but no connection gets such a number
	if machines != nil {
		addr, port = machines[0].Addr, 20000+mathrand.IntN(12000)
	}
	ranks := make([]Rank, perMachine*max(1, len(machines)))
	for r := range ranks {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), scenario+"="+name,
			fmt.Sprintf("RANK=%d", r), fmt.Sprintf("WORLD_SIZE=%d", len(ranks)),
			fmt.Sprintf("LOCAL_RANK=%d", r%perMachine), fmt.Sprintf("LOCAL_WORLD_SIZE=%d",
				perMachine),
			fmt.Sprintf("GROUP_RANK=%d", r/perMachine),
			"MASTER_ADDR="+addr, fmt.Sprintf("MASTER_PORT=%d", port),
			"EURYALE_JOB="+hex.EncodeToString(secret), "EURYALE_TOKEN="+hex.EncodeToString(secret))
		cmd.Env = append(cmd.Env, env...)
		if machines != nil {
			cmd = machines[r/perMachine].Command(cmd)
		}
		cmd.Stderr = os.Stderr
		out := require.Value(cmd.StdoutPipe())(t)
		require.NoError(t, cmd.Start())
		t.Cleanup(func() {
			cmd.Process.Kill()
			io.Copy(io.Discard, out)
			cmd.Wait()
		})
		ranks[r] = Rank{cmd, bufio.NewScanner(out)}
	}
	return ranks
}

// freePort returns a port on which nobody listens now.
func freePort(t *testing.T) int {
	t.Helper()
	l := require.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// Next returns the next line of the rank, "" once it has ended.
func (r Rank) Next() string {
	if !r.lines.Scan() {
		return ""
	}
	return r.lines.Text()
}

// Says checks that the next line has some parts.
func (r Rank) Says(t *testing.T, parts ...string) {
	t.Helper()
	said := r.Next()
	for _, part := range parts {
		require.Check(t, strings.Contains(said, part), "it says %q, want %q in it", said, part)
	}
}

// End waits for the rank to end, and returns its last line.
func (r Rank) End() (last string) {
	for r.lines.Scan() {
		last = r.lines.Text()
	}
	r.Wait()
	return last
}

// Within returns how long a test may take for what is promised within a time: that time in full
// runs (EURYALE_FULL=1) and on a machine with GPUs. Elsewhere it is at least 20 s, since other
// tests may have the cores for seconds, and so may emulated kernels, which spin. That still
// excludes waiting for the limit of a call, a minute where tests do not set it.
func Within(promise time.Duration) time.Duration {
	if env.Full.Set(os.Getenv) || os.Getenv("REQUIRE_GPU") == "1" &&
		os.Getenv("EMULATED_DEVICES") == "" {
		return promise
	}
	return max(promise, 20*time.Second)
}
