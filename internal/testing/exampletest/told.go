package exampletest

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// Told is the exit status of whom SIGTERM has ended.
const Told = exit.Signal + int(syscall.SIGTERM)

// Outcome is what a training has learnt, in its last line.
var Outcome = regexp.MustCompile(`\w+=\S+ .*backend=host(?: params=\S+)?`)

// pods are the two pods of a Job, without a launcher, on each of which a program runs.
type pods struct {
	program string
	args    []string
	env     []string
	sign    string // that a training is under way
}

// run runs the two ranks, and each of them again while its exit status is not 0, as a Job does. If
// told, rank 1 is told to end once the first training is under way. It returns the exit statuses,
// what the first runs have said is wrong, and what rank 0 prints in all.
func (j pods) run(t *testing.T, told bool) (statuses [2][]int, wrong [2]bytes.Buffer, said string) {
	t.Helper()
	var all sync.WaitGroup
	first := make(chan *os.Process, 1) // of rank 1
	for rank := range 2 {
		all.Go(func() {
			for again := range 5 {
				cmd, out := exec.Command(j.program, j.args...), proctest.Notice{Text: j.sign}
				cmd.Env = append(j.env[:len(j.env):len(j.env)],
					fmt.Sprint("JOB_COMPLETION_INDEX=", rank))
				cmd.Stdout, cmd.Stderr = struct{ io.Writer }{&out}, os.Stderr // no ReadFrom
				if again == 0 {
					cmd.Stderr = &wrong[rank]
				}
				if told && again == 0 && rank == 0 {
					out.Then = func() { End(t, <-first) }
				}
				require.Report(t, cmd.Start())
				if again == 0 && rank == 1 {
					first <- cmd.Process
				}
				cmd.Wait() // its state has everything
				status := cmd.ProcessState.ExitCode()
				statuses[rank] = append(statuses[rank], status)
				if rank == 0 {
					said += out.String()
				}
				if status == 0 {
					return
				}
			}
		})
	}
	all.Wait()
	return statuses, wrong, said
}

// End tells a process to end, as whoever tells all processes of a job does with those that
// launchers tell, too.
func End(t *testing.T, p *os.Process) {
	for range 2 {
		require.Report(t, p.Signal(syscall.SIGTERM))
	}
}

// ToldToEnd checks that a training that is told to end is not finished, on either rank, and that
// one started again while it is not ends with the bits of one that was not stopped. A sign says
// that it is under way, which is some steps before its end, and a pattern matches what is printed.
func ToldToEnd(t *testing.T, flags, sign, says string) {
	t.Helper()
	l := require.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	_, port, _ := net.SplitHostPort(l.Addr().String())
	require.NoError(t, l.Close())
	here := require.Value(os.Getwd())(t)
	j := pods{Program(t), strings.Fields(flags), append(os.Environ(), "WORLD_SIZE=2",
		"MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port, "EURYALE_TOKEN="+strings.Repeat("secret", 4)),
		sign}
	statuses, _, whole := j.run(t, false)
	require.That(t, statuses[0][0] == 0 && statuses[1][0] == 0, "not told to end, it ends with %v",
		statuses)
	j.args = append(j.args, "--checkpoint", filepath.Join(t.TempDir(), "state"))
	statuses, wrong, said := j.run(t, true)
	want := [2][]int{{Told, 0}, {Told, 0}}
	require.Check(t, reflect.DeepEqual(statuses, want), "told to end, and started again, it ends "+
		"with %v, want %v\n%s%s", statuses, want, &wrong[0], &wrong[1])
	for rank := range wrong {
		said := wrong[rank].String()
		require.Check(t, strings.Count(said, "stopped by a signal (terminated)") == 1 &&
			strings.Count(said, filepath.Base(here)+": ") == 1, "rank %d says %q", rank, said)
	}
	got, end := Outcome.FindString(said), Outcome.FindString(whole)
	require.Check(t, got == end && got != "", "it ends with %q, want %q", got, end)
	require.Check(t, regexp.MustCompile(says).MatchString(said), "%s is not in\n%s", says, said)
}
