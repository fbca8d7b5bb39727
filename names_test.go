package euryale_test

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
	"github.com/euryale-ml/euryale/internal/proctest"
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
		fmt.Println("blames", rank, "at", time.Now().UnixNano(), strings.ReplaceAll(err.Error(), "\n", " "))
		if !atOnce {
			time.Sleep(400 * time.Millisecond)
		}
		os.Exit(1)
	}
}

// deadline is the EURYALE_TIMEOUT of these jobs. A stopped rank is named one second after that.
const deadline = 2 * time.Second

// loss is what a trial of these tests does to a rank.
type loss struct {
	machines, perMachine int
	signal               syscall.Signal
	atOnce               bool
}

// tally counts what trials have found.
type tally struct{ stops, kills, wrong, late atomic.Int64 }

// happens starts a job, loses a rank, and judges what the others say.
func (l loss) happens(t *testing.T, machines []*proctest.Machine, count *tally) {
	name := "ends at once"
	if !l.atOnce {
		name = "ends a while after"
	}
	env := []string{"EURYALE_TIMEOUT=" + deadline.String(), "EURYALE_BACKEND="}
	var ps []proctest.Rank
	if machines != nil {
		ps = proctest.StartOn(t, name, machines[:l.machines], l.perMachine, env...)
	} else {
		dir, own := ownDirectory(t)
		_ = dir
		env = append(append(env, own...), fmt.Sprintf("EURYALE_TOPOLOGY=%dx%d", l.machines, l.perMachine))
		ps = proctest.Start(t, name, l.machines*l.perMachine, env...)
	}
	underWay(t, ps)
	keepNamespaces(t, ps)
	time.Sleep(rand.N(30 * time.Millisecond))
	victim := rand.N(len(ps))
	began := time.Now()
	if err := ps[victim].Process.Signal(l.signal); err != nil {
		t.Fatal(err)
	}
	within := time.Second
	if l.signal == syscall.SIGSTOP {
		count.stops.Add(1)
		within += deadline
	} else {
		count.kills.Add(1)
	}
	for r, p := range ps {
		if r == victim {
			continue
		}
		said := p.Next()
		words := strings.Fields(said)
		if len(words) < 4 || words[0] != "blames" || words[1] != strconv.Itoa(victim) {
			count.wrong.Add(1)
			t.Errorf("rank %d is lost, and rank %d says %q", victim, r, said)
			continue
		}
		at, _ := strconv.ParseInt(words[3], 10, 64)
		if took := time.Unix(0, at).Sub(began); took > within {
			count.late.Add(1)
			t.Errorf("rank %d is named by rank %d after %v: %s", victim, r, took, said)
		}
	}
}

// keepNamespaces has the namespaces of ranks outlive them: the kernel takes those of a process that ends
// down before it closes its connections, and that may take it seconds.
func keepNamespaces(t *testing.T, ps []proctest.Rank) {
	for _, p := range ps {
		f, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", p.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
	}
}

// loaded has processes take the cores until the end of the test.
func loaded(t *testing.T, n int) {
	for range n {
		cmd := exec.Command("sh", "-c", "while :; do :; done")
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	}
}

func TestTrialNames(t *testing.T) {
	n, _ := strconv.Atoi(os.Getenv("TRIALS"))
	var m, per int
	fmt.Sscanf(os.Getenv("SHAPE"), "%dx%d", &m, &per)
	burners, _ := strconv.Atoi(os.Getenv("BURN"))
	var machines []*proctest.Machine
	if os.Getenv("NETNS") != "" {
		machines = proctest.Machines(t, m, proctest.Wire{})
	}
	loaded(t, burners)
	var count tally
	t.Run("all", func(t *testing.T) {
		for i := range n {
			for _, s := range strings.Split(os.Getenv("SIGNALS"), ",") {
				sig := map[string]syscall.Signal{"stop": syscall.SIGSTOP, "kill": syscall.SIGKILL}[s]
				t.Run(fmt.Sprint(s, i), func(t *testing.T) {
					t.Parallel()
					loss{m, per, sig, os.Getenv("LATER") == ""}.happens(t, machines, &count)
				})
			}
		}
	})
	fmt.Printf("stops=%d kills=%d wrong=%d late=%d\n", count.stops.Load(), count.kills.Load(), count.wrong.Load(), count.late.Load())
}
