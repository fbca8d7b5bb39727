package vm_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/rendezvous"
	"github.com/euryale-ml/euryale/vm"
)

// The tests of this file start this test binary as the processes of a job.

func TestMain(m *testing.M) {
	proctest.Main(m, func(name string) error {
		if what, ok := strings.CutPrefix(name, "checkpoint "); ok {
			return checkpointed(what, os.Getenv("EURYALE_TEST_CHECKPOINT"))
		}
		return process(testenv.Kind(name))
	})
}

// process is one rank of a job, which trains until another one is lost, and then alone.
func process(k testenv.Kind) error {
	env, err := rendezvous.ReadEnv(os.Getenv)
	if err != nil {
		return err
	}
	connect := testenv.Host
	if k.OnGPU() {
		var lacks error
		if connect, lacks = testenv.OwnGPU(env.LocalRank); lacks != nil {
			fmt.Println("lacks:", lacks)
			return nil
		}
	}
	fmt.Println("ready")
	w, err := rendezvous.Join(context.Background(), env)
	if err != nil {
		return err
	}
	var ended *backend.Error
	if err := trainUntil(k, connect, w, func(int) bool { return false }); !errors.As(err, &ended) {
		return fmt.Errorf("no error of the communicator: %w", err)
	}
	fmt.Println("ended:", strings.ReplaceAll(ended.Error(), "\n", " "))
	alone, err := rendezvous.Local(1, time.Minute)
	if err != nil {
		return err
	}
	if err := trainUntil(k, connect, alone[0], func(step int) bool {
		return step == 5
	}); err != nil {
		return err
	}
	fmt.Println("trained again")
	return nil
}

// trainUntil connects and trains.
func trainUntil(k testenv.Kind, connect testenv.Connect, w *rendezvous.World,
	enough func(step int) bool) error {
	r, err := connect(w)
	if err != nil {
		return err
	}
	var device backend.Device
	if k.OnDevice() {
		device = r.Comm.Device()
	}
	m := mlp(new(testing.T), tensor.Float32)
	machine, err := vm.New(m.g, device, vm.WithSolver(&solver.Adam{Rate: 0.01}, m.params...),
		vm.WithDataParallel(r.Comm))
	for step := 0; err == nil && !enough(step); step++ {
		if step == 5 {
			fmt.Println("under way") // on a device in graphs
		}
		err = machine.RunAll()
	}
	return err
}

// TestKilledProcess: when a process is killed, the machine of the other one ends with its rank
// within two seconds, and that process can train again.
func TestKilledProcess(t *testing.T) {
	kinds := []testenv.Kind{testenv.Hosts, testenv.GPUs}
	testenv.Each(t, kinds, func(t *testing.T, k testenv.Kind) {
		ranks := proctest.Start(t, string(k), 2)
		for _, rank := range ranks {
			if lacks, ok := strings.CutPrefix(rank.Next(), "lacks: "); ok {
				t.Skip(lacks)
			}
		}
		for _, rank := range ranks {
			rank.Says(t, "under way")
		}
		ranks[1].Process.Kill()
		killed := time.Now()
		ranks[0].Says(t, "ended: ", "rank 1")
		took := time.Since(killed)
		require.Check(t, took <= proctest.Within(2*time.Second), "rank 0 ended after %v", took)
		ranks[0].Says(t, "trained again")
	})
}
