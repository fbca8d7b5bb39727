//go:build mpi

package mpi_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/backend/mpi"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

// The tests of this file run this test binary as the processes of a job that an MPI launcher
// starts.

func TestMain(m *testing.M) { proctest.Main(m, rank) }

// launcher starts the ranks of one implementation.
type launcher struct {
	name    string
	command []string
	env     []string
	// flags by which it leaves the others alone when a rank is killed, nil if it has none
	keeps []string
}

// launchers returns those that this machine has. MPI_HOME names an MPI besides those on the path.
func launchers(t *testing.T) (found []launcher) {
	t.Helper()
	asRoot := []string{"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"}
	all := []launcher{
		{"Open MPI", []string{"mpirun.openmpi", "--oversubscribe"}, asRoot,
			[]string{"--mca", "orte_enable_recovery", "1"}},
		{"MPICH", []string{"mpiexec.hydra"}, nil, nil},
	}
	if home := os.Getenv("MPI_HOME"); home != "" {
		all = append(all, launcher{home, []string{filepath.Join(home, "bin/mpiexec.hydra")},
			[]string{"EURYALE_MPI=" + filepath.Join(home, "lib"), "LD_LIBRARY_PATH=" +
				filepath.Join(home, "lib")}, nil})
	}
	for _, l := range all {
		if _, err := exec.LookPath(l.command[0]); err == nil {
			found = append(found, l)
		}
	}
	if found == nil {
		t.Skip("this machine has no MPI: neither mpirun.openmpi nor mpiexec.hydra is on the " +
			"path, and MPI_HOME is not set")
	}
	return found
}

// run runs a scenario on n ranks.
func (l launcher) run(t *testing.T, scenario string, n int, flags ...string) (string, error) {
	t.Helper()
	command := append(append(append([]string{}, l.command...), flags...), "-n", fmt.Sprint(n))
	return proctest.Launched(t, scenario, append(l.env, "EURYALE_TIMEOUT=20s"), command...)
}

// rank is what a process of a scenario does.
func rank(name string) error {
	switch name {
	case "calls":
		return errors.Join(in(name, 0, false, func(c backend.Communicator) error {
			return errors.Join(calls(c), nothing(c), inRankOrder(c))
		}), mpi.Backend{}.Close())
	case "machines":
		return errors.Join(in(name, 0, true, func(c backend.Communicator) error {
			return errors.Join(calls(c), nothing(c), splits(c))
		}), mpi.Backend{}.Close())
	case "suite":
		return pass(func(size int) error {
			// the first one begins MPI
			return errors.Join(in("first", 0, false, splits), suite(size))
		})
	case "given up":
		return pass(func(int) error { return in(name, 0, true, givenUp) })
	case "life":
		return errors.Join(
			in("splits", 0, false, splits),
			in("mismatch", 0, false, mismatch),
			in("abort", 0, false, abort),
			in("close", 0, false, closes),
			in("timeout", time.Second, false, timeout),
			in("after", 0, false, splits), // MPI goes on
			mpi.Backend{}.Close(),
			mpi.Backend{}.Close(),
			again(),
		)
	case "killed":
		return in(name, 0, false, killed)
	case "foreign": // each rank is a job of Open MPI
		const base = "OMPI_MCA_orte_tmpdir_base"
		own := filepath.Join(os.Getenv(base), os.Getenv("RANK"))
		if err := errors.Join(os.Mkdir(own, 0o700), os.Setenv(base, own)); err != nil {
			return err
		}
	}
	return in(name, 0, false, splits)
}

// in runs a body in a group of its own, whose ranks wait for each other no longer than timeout once
// they have joined. As machines, ranks take turns between two.
func in(name string, timeout time.Duration, machines bool,
	body func(backend.Communicator) error) error {
	w, c, err := join(name, timeout, machines)
	if err != nil {
		return err
	}
	if err = body(c); err != nil {
		err = fmt.Errorf("%s: %w", name, err)
	}
	return errors.Join(err, c.Close(), w.Close())
}

// join makes a group.
func join(name string, timeout time.Duration, machines bool) (*rendezvous.World,
	backend.Communicator, error) {
	env, err := rendezvous.ReadEnv(os.Getenv)
	if err != nil {
		return nil, nil, err
	}
	env.Job += "-" + name
	w, err := rendezvous.Join(context.Background(), env)
	if err != nil {
		return nil, nil, err
	}
	w.Timeout = cmp.Or(timeout, w.Timeout)
	if machines {
		w.Node, w.LocalSize = w.Rank%2, (w.Size+1)/2
	}
	c, err := mpi.Backend{}.Connect(context.Background(), w)
	if err != nil {
		return nil, nil, errors.Join(err, w.Close())
	}
	return w, group.Compared(c), nil
}

// suite runs backendtest in separate groups, each in its own world.
func suite(size int) error {
	made := 0
	return backendtest.RunRank(backendtest.Options{OwnOrder: true,
		New: func(_ int, timeout time.Duration) (*backendtest.Group, error) {
			made++
			w, c, err := join(fmt.Sprint("suite-", made), timeout, false)
			if err != nil {
				return nil, err
			}
			lose := func(_ int, cause error) { w.Fail(cause) } // a rank loses itself
			return &backendtest.Group{Comms: []backend.Communicator{c}, Fail: lose, Close: w.Close},
				nil
		}}, size, os.Getenv(notes))
}

// pass notes that a body has passed, after which MPI does not end: a call waits in it for good. So
// the launcher ends all ranks when the first one ends.
func pass(body func(size int) error) error {
	env, err := rendezvous.ReadEnv(os.Getenv)
	if err != nil {
		return err
	}
	if err := body(env.Size); err != nil {
		return err
	}
	dir := os.Getenv(notes)
	if err := os.WriteFile(passed(dir, env.Rank), nil, 0o600); err != nil {
		return err
	}
	for allPassed(dir, env.Size) != nil {
		time.Sleep(time.Millisecond) // there is nothing else to wait for
	}
	return nil
}

// passed is the file of a rank that has passed.
func passed(dir string, rank int) string { return filepath.Join(dir, fmt.Sprint("passed ", rank)) }

// allPassed says which rank has not passed.
func allPassed(dir string, size int) error {
	for r := range size {
		if _, err := os.Stat(passed(dir, r)); err != nil {
			return fmt.Errorf("rank %d has not passed: %w", r, err)
		}
	}
	return nil
}

// calls runs every kind of call.
func calls(c backend.Communicator) error {
	q, err := c.Device().NewQueue()
	if err != nil {
		return err
	}
	defer q.Close()
	P, seed := c.Size(), uint64(0)
	for _, kind := range backend.Kinds() {
		for _, d := range backend.DTypes() {
			for _, op := range backend.ReduceOps() {
				if op != backend.Sum && !kind.Reduces() {
					continue
				}
				for _, n := range []int{0, 1, 257, 5000} {
					what := backend.Collective{Kind: kind, Op: op, Root: int(seed) % P}
					var at backend.Queue
					if seed++; seed%2 == 0 {
						at = q
					}
					if !kind.Rooted() {
						what.Root = 0
					}
					if err := backendtest.Call(c, at, what, d, n, seed); err != nil {
						return err
					}
					if what.Splits = uneven(kind, n, P); what.Splits == nil {
						continue
					}
					if err := backendtest.Call(c, at, what, d, n, seed); err != nil {
						return err
					}
				}
			}
		}
	}
	operand := backend.Of(make([]float32, 100))
	dst := operand
	if c.Rank() > 0 {
		dst = operand.Slice(0, 3) // does not matter
	}
	return backend.Run(c, backend.Collective{Kind: backend.Reduce}, dst, operand)
}

// nothing runs the calls in which ranks have no elements.
func nothing(c backend.Communicator) error {
	for i, what := range backendtest.Nothing(c.Size()) {
		if err := backendtest.Call(c, nil, what, backend.F32, 2, uint64(i)); err != nil {
			return fmt.Errorf("%v with splits %v: %w", what, what.Splits, err)
		}
	}
	return nil
}

// inRankOrder checks that the ranks of one machine add up floats in rank order, in one step and in
// two.
func inRankOrder(c backend.Communicator) error {
	for _, n := range []int{3, 1000, 3000, 1 << 15} {
		sums, operand, got := make([]float32, n), make([]float32, n), make([]float32, n)
		for r := range c.Size() {
			random := rand.New(rand.NewPCG(uint64(r), uint64(n)))
			for i := range sums {
				x := float32(random.NormFloat64())
				if sums[i] += x; r == c.Rank() {
					operand[i] = x
				}
			}
		}
		if err := backend.Run(c, backend.Collective{Kind: backend.AllReduce}, backend.Of(got),
			backend.Of(operand)); err != nil {
			return err
		}
		if !slices.Equal(got, sums) {
			return fmt.Errorf("sums of %d elements are not in rank order", n)
		}
	}
	return nil
}

// uneven returns splits of about n elements, nil where a kind has none.
func uneven(kind backend.Kind, n, P int) (splits []int) {
	switch kind {
	case backend.AllReduce, backend.Broadcast, backend.Reduce:
		return nil
	case backend.AllToAll:
		for i := range P * P {
			splits = append(splits, i*7%(P+1)*n/10)
		}
		return splits
	}
	for r := range P {
		splits = append(splits, r*n)
	}
	return splits
}

// splits uses parts, and the group beside them.
func splits(c backend.Communicator) error {
	for _, color := range []int{0, c.Rank() % 2, c.Rank(), -c.Rank()} {
		part, err := c.Split(color, -c.Rank())
		if err != nil {
			return err
		}
		if part != nil {
			sum := backend.Collective{Kind: backend.AllReduce}
			err = errors.Join(backendtest.Call(part, nil, sum, backend.F32, 1000, 1), part.Close())
		}
		if err := errors.Join(err, backend.Barrier(c)); err != nil {
			return fmt.Errorf("color %d: %w", color, err)
		}
	}
	return nil
}

// mismatch has the last of three ranks call something else.
func mismatch(c backend.Communicator) error {
	what := backend.Collective{Kind: backend.AllReduce}
	if c.Rank() == c.Size()-1 {
		what.Op = backend.Max
	}
	x := backend.Of(make([]float32, 8))
	err := backend.Run(c, what, x, x)
	var m *backend.MismatchError
	var e *backend.Error
	if !errors.As(err, &m) || m.Mine.Op == m.Theirs.Op || !errors.As(err, &e) || e.Peer != 2 {
		return fmt.Errorf("the error is %v, want one that names sum and max, because of rank 2",
			err)
	}
	return nil
}

// ends runs a call that the last rank ends instead, just before or after it begins, and checks the
// error of the others.
func ends(c backend.Communicator, last func(), want error, text string) error {
	err := backend.Barrier(c)
	if c.Rank() == c.Size()-1 {
		last()
		return err
	}
	if err == nil {
		err = backend.Barrier(c)
	}
	if !errors.Is(err, want) || !strings.Contains(err.Error(), text) {
		return fmt.Errorf("the error is %v, want one of %v with %q", err, want, text)
	}
	return nil
}

func abort(c backend.Communicator) error {
	return ends(c, func() { c.Abort(errors.New("the weather")) }, backend.ErrAborted, "the weather")
}

// givenUp aborts an all-reduce that waits in MPI.
func givenUp(c backend.Communicator) error {
	x := backend.Of(make([]float32, 1))
	if c.Rank() == c.Size()-1 {
		time.Sleep(50 * time.Millisecond) // the others wait by now, most likely
		c.Abort(errors.New("the weather"))
	} else if err := backend.Run(c, backend.Collective{Kind: backend.AllReduce}, x, x); !errors.Is(
		err, backend.ErrAborted) || !strings.Contains(err.Error(), "the weather") {
		return fmt.Errorf("the error is %v, want that of an abort for the weather", err)
	}
	return nil
}

func closes(c backend.Communicator) error {
	// its error comes again
	return ends(c, func() { _ = c.Close() }, backend.ErrClosed, fmt.Sprintf("rank %d", c.Size()-1))
}

func timeout(c backend.Communicator) error {
	return ends(c, func() { time.Sleep(2 * time.Second) }, backend.ErrTimeout,
		fmt.Sprintf("rank %d", c.Size()-1))
}

// again checks that MPI does not begin twice.
func again() error {
	err := in("again", 0, false, splits)
	if err == nil || !strings.Contains(err.Error(), "MPI has ended in this process") {
		return fmt.Errorf("MPI begins again, with the error %v", err)
	}
	return nil
}

// notes is the variable that names the directory where ranks leave what others, or the test, are to
// know.
const notes = "NOTES"

// killed loses rank 1 in the middle of calls.
func killed(c backend.Communicator) error {
	x := backend.Of(make([]float32, 1<<22)) // which takes milliseconds
	for i := 0; ; i++ {
		if i == 3 && c.Rank() == 1 {
			time.AfterFunc(2*time.Millisecond, func() {
				syscall.Kill(os.Getpid(), syscall.SIGKILL)
			})
		}
		if err := backend.Run(c, backend.Collective{Kind: backend.AllReduce}, x, x); err != nil {
			// To a file: Hydra may end before it has passed on what its ranks have written.
			verdict := filepath.Join(os.Getenv(notes), fmt.Sprint(c.Rank()))
			return errors.Join(err, os.WriteFile(verdict, []byte(err.Error()), 0o600))
		}
	}
}

func TestProcessesRunEveryCall(t *testing.T) {
	sizes := []int{1, 3}
	if os.Getenv("EURYALE_FULL") == "1" {
		sizes = append(sizes, 2, 4, 5, 8)
	}
	for _, l := range launchers(t) {
		for _, n := range sizes {
			t.Run(fmt.Sprintf("%s/P=%d", l.name, n), func(t *testing.T) {
				out, err := l.run(t, "calls", n)
				require.Check(t, err == nil, "%v:\n%s", err, out)
			})
		}
	}
}

// TestCommunicator runs backendtest among processes, a sample of the cases of each size.
func TestCommunicator(t *testing.T) {
	if os.Getenv("EURYALE_FULL") != "1" {
		t.Skip("its groups are many: set EURYALE_FULL=1")
	}
	for _, l := range launchers(t) {
		for _, n := range []int{1, 2, 3, 4} {
			t.Run(fmt.Sprintf("%s/P=%d", l.name, n), func(t *testing.T) { l.passes(t, "suite", n) })
		}
	}
}

// passes runs a scenario of pass on n ranks.
func (l launcher) passes(t *testing.T, scenario string, n int) {
	t.Helper()
	dir := t.TempDir()
	l.env = append(slices.Clone(l.env), "EURYALE_FULL=0", notes+"="+dir)
	out, _ := l.run(t, scenario, n) // the launcher's verdict is its own
	err := allPassed(dir, n)
	require.Check(t, err == nil, "%v:\n%s", err, out)
}

// Ranks on several machines wait for each other in MPI.
func TestAWaitInMPIEnds(t *testing.T) {
	for _, l := range launchers(t) {
		t.Run(l.name, func(t *testing.T) { l.passes(t, "given up", 2) })
	}
}

func TestProcessesOfTwoMachinesRunEveryCall(t *testing.T) {
	for _, l := range launchers(t) {
		t.Run(l.name, func(t *testing.T) {
			out, err := l.run(t, "machines", 3)
			require.Check(t, err == nil, "%v:\n%s", err, out)
		})
	}
}

func TestGroupsEndAndMPIGoesOn(t *testing.T) {
	for _, l := range launchers(t) {
		t.Run(l.name, func(t *testing.T) {
			out, err := l.run(t, "life", 3)
			require.Check(t, err == nil, "%v:\n%s", err, out)
		})
	}
}

// TestKilledRankIsNamedBeforeTheLauncherEndsTheRest: also by ranks with a core each, which wait in
// another way.
func TestKilledRankIsNamedBeforeTheLauncherEndsTheRest(t *testing.T) {
	for _, l := range launchers(t) {
		for _, n := range []int{2, 3} {
			t.Run(fmt.Sprintf("%s/P=%d", l.name, n), func(t *testing.T) {
				if l.keeps == nil {
					t.Skip("Hydra may end the rest within milliseconds, also with " +
						"-disable-auto-cleanup")
				}
				dir := t.TempDir()
				l.env = append(slices.Clone(l.env), notes+"="+dir)
				out, _ := l.run(t, "killed", n, l.keeps...) // the launcher's verdict is its own
				for r := range n {
					if r == 1 {
						continue
					}
					said, err := os.ReadFile(filepath.Join(dir, fmt.Sprint(r)))
					require.Check(t, err == nil && strings.Contains(string(said), "rank 1 is down"),
						"rank %d says %q (%v), the job:\n%s", r, said, err, out)
				}
			})
		}
	}
}

func TestForeignLauncherIsNamed(t *testing.T) {
	launchers(t)
	// Open MPI 4 fails if another job removes what it has just made in its directory.
	dir := require.Value(os.MkdirTemp("", "euryale-"))(t)
	// its daemons may outlive the ranks, and have files there
	t.Cleanup(func() { os.RemoveAll(dir) })
	for r, p := range proctest.Start(t, "foreign", 2, "EURYALE_TIMEOUT=20s",
		"OMPI_MCA_orte_tmpdir_base="+dir) {
		if said := p.End(); !strings.Contains(
			said, "MPI has rank 0 of 1 here, but this is rank ") ||
			!strings.Contains(said, " of 2 of the job") {
			t.Errorf("rank %d says %q", r, said)
		}
	}
}
