//go:build linux

package jobs_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// Programs often end as soon as they have an error, without Close: the ranks that end so must not
// take the blame.

// endsAtOnce is the rank of such a program. It prints which rank its error blames, and when.
func endsAtOnce(comm backend.Communicator, atOnce bool) {
	x := backend.Of(make([]float32, 1<<14))
	for i := 0; ; i++ {
		if i == 10 {
			fmt.Println("under way")
		}
		what := backend.Collective{Kind: backend.AllReduce}
		if i%4 == 3 {
			what = backend.Collective{Kind: backend.Broadcast, Root: i / 4 % comm.Size()}
		}
		err := backend.Run(comm, what, x, x)
		if err == nil {
			continue
		}
		rank := -1
		var of interface{ Blames() int }
		if errors.As(err, &of) {
			rank = of.Blames()
		}
		text := strings.ReplaceAll(err.Error(), "\n", " ")
		fmt.Println("blames", rank, "at", time.Now().UnixNano(), text)
		if !atOnce {
			time.Sleep(400 * time.Millisecond)
		}
		os.Exit(1)
	}
}

const (
	// deadline is the EURYALE_TIMEOUT of these jobs.
	deadline = 4 * time.Second
	// atOnce is how soon all ranks must name one that is killed, and how soon after the timeout one
	// that is stopped, or not heard.
	atOnce = time.Second
)

// The ways to lose a rank, or a machine.
const (
	stopped = "stop"
	killed  = "kill"
	cut     = "cut"  // nothing goes between a machine and the others
	muted   = "mute" // nothing of a machine reaches the others
)

// loss is one trial of these tests.
type loss struct {
	how                  string
	machines, perMachine int
	lingers              bool // ranks do not end at once
}

func (l loss) String() string {
	text := fmt.Sprintf("%s of %d machines with %d ranks each", l.how, l.machines, l.perMachine)
	if l.lingers {
		text += ", which end a while after"
	}
	return text
}

// tally counts what trials have found.
type tally struct{ stops, kills, cuts, wrong, late atomic.Int64 }

func (c *tally) String() string {
	return fmt.Sprintf("stops=%d kills=%d cuts=%d wrong=%d late=%d",
		c.stops.Load(), c.kills.Load(), c.cuts.Load(), c.wrong.Load(), c.late.Load())
}

// start starts the job: on machines of its own, or on this one, which is declared to be several.
func (l loss) start(t *testing.T, machines []*proctest.Namespace) []proctest.Rank {
	name := "ends at once"
	if l.lingers {
		name = "ends a while after"
	}
	env := []string{"EURYALE_TIMEOUT=" + deadline.String()}
	if machines != nil {
		return proctest.StartOn(t, name, machines[:l.machines], l.perMachine, env...)
	}
	_, own := ownDirectory(t)
	env = append(append(env, own...), fmt.Sprintf("EURYALE_TOPOLOGY=%dx%d", l.machines,
		l.perMachine))
	return proctest.Start(t, name, l.machines*l.perMachine, env...)
}

// happens starts a job, loses a rank, and judges what the others say.
func (l loss) happens(t *testing.T, machines []*proctest.Namespace, count *tally) {
	ps := l.start(t, machines)
	for try := 1; !areUnderWay(ps); try++ {
		if try == 3 { // Init has the same timeout, which other programs may use up
			t.Fatal("no job has begun")
		}
		ps = l.start(t, machines)
	}
	keepNamespaces(t, ps)
	time.Sleep(rand.N(30 * time.Millisecond)) // it happens anywhere in the program's step
	victim, within := rand.N(len(ps)), atOnce
	if l.how != killed {
		within += deadline
	}
	began := time.Now()
	l.lose(t, ps, victim, machines, count)
	for r, p := range ps {
		if r == victim && (l.how == stopped || l.how == killed) {
			continue
		}
		said := p.Next()
		words := strings.Fields(said)
		if len(words) < 4 || !l.named(words[1], r, victim) {
			count.wrong.Add(1)
			t.Errorf("rank %d is lost, and rank %d says %q", victim, r, said)
			continue
		}
		at, err := strconv.ParseInt(words[3], 10, 64)
		if took := time.Unix(0, at).Sub(began); err != nil || took > proctest.Within(within) {
			count.late.Add(1)
			t.Errorf("rank %d is named by rank %d after %v: %s", victim, r, took, said)
		}
	}
}

// areUnderWay reports whether every rank is in the middle of its work. Ask once.
func areUnderWay(ps []proctest.Rank) bool {
	for _, p := range ps {
		if p.Next() != "under way" {
			return false
		}
	}
	return true
}

// lose does it.
func (l loss) lose(
	t *testing.T, ps []proctest.Rank, victim int, machines []*proctest.Namespace, count *tally,
) {
	switch l.how {
	case stopped, killed:
		signal, counter := syscall.SIGSTOP, &count.stops
		if l.how == killed {
			signal, counter = syscall.SIGKILL, &count.kills
		}
		counter.Add(1)
		require.NoError(t, ps[victim].Process.Signal(signal))
	case cut:
		count.cuts.Add(1)
		machines[victim/l.perMachine].Cut(t)
	case muted:
		count.cuts.Add(1)
		machines[victim/l.perMachine].Mute(t)
	}
}

// named reports whether an observer blames the right rank. Ranks of a machine that is cut off blame
// one elsewhere; those of one that is not heard may hear that they are missed.
func (l loss) named(blamed string, observer, victim int) bool {
	rank, err := strconv.Atoi(blamed)
	if err != nil || rank < 0 {
		return false
	}
	lost := rank/l.perMachine == victim/l.perMachine
	inside := observer/l.perMachine == victim/l.perMachine
	switch l.how {
	case cut:
		return lost != inside
	case muted:
		return lost || inside
	}
	return rank == victim
}

// keepNamespaces has the namespaces of ranks outlive them: the kernel takes those of a process that
// ends down before it closes its connections, and that may take it seconds.
func keepNamespaces(t *testing.T, ps []proctest.Rank) {
	for _, p := range ps {
		f := require.Value(os.Open(fmt.Sprintf("/proc/%d/ns/mnt", p.Process.Pid)))(t)
		t.Cleanup(func() { f.Close() })
	}
}

// loaded has processes take the cores until the end of the test.
func loaded(t *testing.T, n int) {
	for range n {
		cmd := exec.Command("sh", "-c", "while :; do :; done")
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		require.NoError(t, cmd.Start())
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	}
}

// trials runs each of some losses at the same time as others.
func trials(t *testing.T, losses []loss, times int, machines []*proctest.Namespace, count *tally) {
	t.Run("trials", func(t *testing.T) {
		for i := range times {
			for _, l := range losses {
				t.Run(fmt.Sprintf("%v/%d", l, i), func(t *testing.T) {
					t.Parallel()
					l.happens(t, machines, count)
				})
			}
		}
	})
	t.Log(count)
}

// isFull reports whether all cases are tested, and not a sample of them.
func isFull() bool { return os.Getenv("EURYALE_FULL") == "1" }

// TestTheLostRankIsNamedByProgramsThatEndAtOnceUnraced: stops and kills, on one machine that is
// declared to be several, quiet and loaded.
func TestTheLostRankIsNamedByProgramsThatEndAtOnceUnraced(t *testing.T) {
	losses := []loss{
		{stopped, 2, 2, false}, {killed, 2, 2, false}, {stopped, 2, 2, true}, {stopped, 3, 1,
			false},
	}
	burners, times := []int{0}, 1
	if isFull() {
		losses, burners, times = nil, []int{0, 2}, 3
		for shape := range 9 {
			for _, lingers := range []bool{false, true} {
				for _, how := range []string{stopped, killed} {
					losses = append(losses, loss{how, 2 + shape/3, 1 + shape%3, lingers})
				}
			}
		}
	}
	for _, n := range burners {
		t.Run(fmt.Sprintf("%d busy", n), func(t *testing.T) {
			loaded(t, n)
			trials(t, losses, times, nil, new(tally))
		})
	}
}

// TestTheLostRankIsNamedOnMachinesUnderLoadUnraced: stops and kills of three machines with two
// ranks each, while other programs want the cores. NAMES is how many of both (make names).
func TestTheLostRankIsNamedOnMachinesUnderLoadUnraced(t *testing.T) {
	times := 1
	if isFull() {
		times = 20
	}
	if n, err := strconv.Atoi(os.Getenv("NAMES")); err == nil {
		times = n
	}
	machines := proctest.Machines(t, 3, proctest.Wire{})
	loaded(t, 2)
	var count tally
	trials(t, []loss{{stopped, 3, 2, false}, {killed, 3, 2, false}}, times, machines, &count)
	if times > 1 && (count.wrong.Load() != 0 || count.late.Load() != 0) {
		t.Errorf("of %d ranks stopped and %d killed, %d judged wrong and %d late",
			count.stops.Load(), count.kills.Load(), count.wrong.Load(), count.late.Load())
	}
}

// TestLostMachinesAreNamedByProgramsThatEndAtOnceUnraced: connections are cut one way and both
// ways.
func TestLostMachinesAreNamedByProgramsThatEndAtOnceUnraced(t *testing.T) {
	losses := []loss{{cut, 2, 1, false}, {muted, 3, 2, false}}
	if isFull() {
		losses = nil
		for shape := range 9 {
			for _, how := range []string{cut, muted} {
				losses = append(losses, loss{how, 2 + shape/3, 1 + shape%3, false})
			}
		}
	}
	var count tally
	for _, l := range losses {
		t.Run(l.String(), func(t *testing.T) {
			l.happens(t, proctest.Machines(t, l.machines, proctest.Wire{}), &count)
		})
	}
	t.Log(&count)
}
