//go:build gpu

package gpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

// The tests of this file start this test binary as the processes of a job.

func TestMain(m *testing.M) { proctest.Main(m, rankOf) }

// twoMachines has the ranks of a job pass for those of two machines.
const twoMachines = "EURYALE_TEST_TWO_MACHINES"

// inGraph begins the name of a scenario whose processes replay a graph.
const inGraph = "graph of "

// rankOf is a process of a scenario.
func rankOf(name string) error {
	o := Options{Off: true}
	algorithm, graph := strings.CutPrefix(name, inGraph)
	force, err := parseAlgorithm(algorithm)
	if err == nil {
		o = forced(force)
	}
	env, err := rendezvous.ReadEnv(os.Getenv)
	if err != nil {
		return err
	}
	w, err := rendezvous.Join(context.Background(), env)
	if err != nil {
		return err
	}
	defer w.Close()
	b := New(func(ordinal int) (Device, error) { return cuda.Open(ordinal) })
	b.Options = &o
	var ranks backend.Backend = b
	if os.Getenv(twoMachines) != "" {
		ranks = machines{b}
		if w.Size > 2 {
			w.LocalRank = w.Rank / 2 // among those of its machine
		}
		if err := os.Setenv("NCCL_HOSTID", fmt.Sprintf("machine %d", w.Rank%2)); err != nil {
			return err
		}
	}
	c, err := ranks.Connect(context.Background(), w)
	if err != nil {
		return err
	}
	if !o.Off {
		return reduceByKernels(c.(*Communicator), graph)
	}
	err = reduceUntil(c, name)
	if err != nil {
		fmt.Println("error:", strings.ReplaceAll(err.Error(), "\n", " "))
		if err := stillUsable(c); err != nil {
			return err
		}
		fmt.Println("device usable")
	}
	return c.Close()
}

func reduceUntil(c backend.Communicator, name string) error {
	return with(c, 1<<20, func(x backend.Buffer) error {
		for i := 0; ; i++ {
			if i == 10 {
				fmt.Println("under way")
			}
			what := allReduce
			if i == 100 {
				switch {
				case name == "ends well":
					return nil
				case name == "calls something else" && c.Rank() == 1:
					what.Op = backend.Prod
				case name == "closes early" && c.Rank() == 1:
					return nil
				}
			}
			if err := backend.Run(c, what, x, x); err != nil {
				return err
			}
		}
	})
}

// stillUsable computes on the device of a communicator that has failed.
func stillUsable(c backend.Communicator) error {
	host := []float32{1, 2, 3}
	return with(c, len(host), func(x backend.Buffer) error {
		a := c.Device().Default()
		err := errors.Join(a.Move(x, backend.Of(host)), a.Reduce(backend.Sum, x, x, x),
			a.Move(backend.Of(host), x))
		if err == nil && host[2] != 6 {
			err = fmt.Errorf("the device computes %v", host)
		}
		return err
	})
}

// start starts the ranks of a scenario, and waits until they are under way.
func start(t *testing.T, name string, P int, env ...string) []proctest.Rank {
	t.Helper()
	ranks := proctest.Start(t, name, P, env...)
	for _, p := range ranks {
		p.Says(t, "under way")
	}
	if t.Failed() {
		t.FailNow()
	}
	return ranks
}

// howMany counts the GPUs without using them: the processes do.
func howMany(t *testing.T, atLeast int) int {
	t.Helper()
	b := New(nil)
	if err := b.Available(); err != nil {
		lacking(t, err.Error())
	}
	n := require.Value(b.lib.devices())(t)
	if n < atLeast {
		t.Skipf("%d GPU, the test needs %d", n, atLeast)
	}
	return min(n, 4)
}

func TestNCCLProcessesNameAKilledOneOnGPU(t *testing.T) {
	P := howMany(t, 2)
	for _, victim := range []int{0, P - 1} {
		t.Run(fmt.Sprint(victim), func(t *testing.T) {
			ps := start(t, "works", P)
			began := time.Now()
			require.NoError(t, ps[victim].Process.Kill())
			for r, p := range ps {
				if r == victim {
					continue
				}
				p.Says(t, "error:", fmt.Sprintf("rank %d is down", victim), "allreduce")
				took := time.Since(began)
				require.Check(t, took <= proctest.Within(2*time.Second), "rank %d took %v", r, took)
				p.Says(t, "device usable")
			}
		})
	}
}

// Four processes on two GPUs, as two machines of two, or two on one: NCCL goes over sockets between
// machines, and so does what ranks show each other: encrypted, where NCCL can.
func TestKilledRankOfAnotherMachineIsNamed(t *testing.T) {
	P := 2 * min(howMany(t, 1), 2)
	victim := P - 1
	ps := start(t, "works", P, twoMachines+"=1", "EURYALE_TLS=1")
	require.NoError(t, ps[victim].Process.Kill())
	for _, p := range ps[:victim] {
		p.Says(t, "error:", fmt.Sprintf("rank %d is down", victim), "allreduce")
		p.Says(t, "device usable")
	}
}

func TestProcessesEndWell(t *testing.T) {
	for _, p := range start(t, "ends well", howMany(t, 2)) {
		require.Report(t, p.Wait())
	}
}

func TestProcessesThatDisagreeNameBothSides(t *testing.T) {
	for _, env := range []string{"", "1"} {
		for _, p := range start(t, "calls something else", howMany(t, 2), twoMachines+"="+env) {
			p.Says(t, "error:", "ranks disagree", "allreduce(sum)", "allreduce(prod)")
			p.Says(t, "device usable")
		}
	}
}

func TestNCCLProcessesNameOneThatClosesOnGPU(t *testing.T) {
	for r, p := range start(t, "closes early", howMany(t, 2)) {
		if r != 1 {
			p.Says(t, "error:", "rank 1 has closed")
		}
	}
}
