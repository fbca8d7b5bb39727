//go:build gpu

package bench_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/gpu"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/rendezvous"
)

// needNCCL returns backend nccl and how many ranks there can be, 4 at most. It
// skips the test without a GPU, or fails it where REQUIRE_GPU=1.
func needNCCL(t *testing.T) (b backend.Backend, ranks int) {
	t.Helper()
	b = gpu.New(gpu.Open)
	if err := errors.Join(cuda.Available(), b.Available()); err != nil {
		require.That(t, os.Getenv("REQUIRE_GPU") != "1", "REQUIRE_GPU=1: %v", err)
		t.Skip(err)
	}
	all := require.Value(cuda.Devices())(t)
	for _, d := range all {
		require.Report(t, d.Close())
	}
	return b, min(len(all), 4)
}

// measureOnGPUs measures each configuration on the same communicator and gives
// check the results of rank 0.
func measureOnGPUs(t *testing.T, b backend.Backend, P int, configs []bench.Config,
	check func(bench.Config, bench.Result)) {
	t.Helper()
	errs := testranks.Run(P, func(w *rendezvous.World) (backend.Communicator, error) {
		return b.Connect(context.Background(), w)
	}, func(comm backend.Communicator) error { return measureAll(comm, configs, check) })
	require.NoError(t, testranks.Join(errs))
}

func measureAll(comm backend.Communicator, configs []bench.Config,
	check func(bench.Config, bench.Result)) error {
	for _, c := range configs {
		testranks.NoError(bench.Measure(comm, c, func(r bench.Result) error {
			if comm.Rank() == 0 {
				check(c, r)
			}
			return nil
		}))
	}
	return nil
}

func TestEveryCollectiveIsRightOnGPU(t *testing.T) {
	b, ranks := needNCCL(t)
	for _, P := range []int{1, ranks} {
		var configs []bench.Config
		for _, k := range backend.Kinds() {
			for _, inPlace := range []bool{false, true} {
				c := config(k)
				c.Max, c.InPlace, c.Alloc = 4<<20, inPlace, inPlace
				c.Collective.Root = P - 1
				if c.Check(P) == nil {
					configs = append(configs, c)
				}
			}
		}
		measureOnGPUs(t, b, P, configs, func(c bench.Config, r bench.Result) {
			if wrong := implausible(r, true); wrong != "" {
				t.Errorf("%v on %d GPUs, in place %v: %s: %+v", c.Collective, P, c.InPlace,
					wrong, r)
			}
		})
	}
}

func TestEveryTypeAndReductionIsRightOnGPU(t *testing.T) {
	b, P := needNCCL(t)
	var configs []bench.Config
	for _, d := range backend.DTypes() {
		for _, op := range backend.ReduceOps() {
			c := config(backend.AllReduce)
			c.Collective.Op, c.DType, c.Max = op, d, 64
			configs = append(configs, c)
		}
	}
	measureOnGPUs(t, b, P, configs, func(c bench.Config, r bench.Result) {
		require.Check(t, r.Wrong == 0, "%v of %v on %d GPUs: %d wrong of %d bytes", c.Collective,
			c.DType, P, r.Wrong, r.Bytes)
	})
}

// A join costs the host more than a call that nobody waits for.
func TestBatchesAreFasterThanJoinedCallsOnGPU(t *testing.T) {
	b, P := needNCCL(t)
	c := config(backend.AllReduce)
	c.Min, c.Max, c.Iters, c.Budget = 1024, 1024, 0, 200*time.Millisecond
	measureOnGPUs(t, b, P, []bench.Config{c}, func(_ bench.Config, r bench.Result) {
		t.Logf("%d GPUs: stream %.2f us, host %.2f us, p50 %.2f us", P, r.StreamMicros,
			r.HostMicros, r.P50Micros)
		require.Check(t, !(r.StreamMicros >= r.MeanMicros), "%+v", r)
	})
}
