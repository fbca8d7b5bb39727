//go:build gpu

package vm_test

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	gpus "github.com/euryale-ml/euryale/internal/gpu"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/vm"
)

// TestDataParallelOnGPU is TestDataParallelRaced on GPUs, where exchanges are part of CUDA graphs.
func TestDataParallelOnGPU(t *testing.T) {
	for P := 1; P <= 2; P++ {
		for name, build := range map[string]func(testing.TB, tensor.Dtype) *model{
			"mlp": mlp, "convnet": convnet} {
			for _, solver := range []string{"sgd", "momentum", "adam"} {
				t.Run(fmt.Sprint(P, " ", name, " ", solver), func(t *testing.T) {
					trainsTogether(t, testenv.GPUs, P, solvers[solver], build)
				})
			}
		}
	}
}

// TestLookupsOnGPU is TestLookupsAreExchangedAsRows on GPUs.
func TestLookupsOnGPU(t *testing.T) { lookupsAsRows(t, testenv.GPUs) }

// TestShardsOnGPU is TestShards and TestShardsWithSettings on GPUs, on each stage.
func TestShardsOnGPU(t *testing.T) {
	all := maps.Clone(settings)
	for _, solver := range []string{"sgd", "momentum", "adam", "adamw"} {
		all[solver] = training{solver: solvers[solver], build: mlp}
	}
	for i, name := range slices.Sorted(maps.Keys(all)) {
		for j, stage := range stages {
			if testenv.GPUs.Sampled() && (i+j)%len(stages) > 0 {
				continue // a stage of each
			}
			t.Run(fmt.Sprint(name, " ", stage), func(t *testing.T) {
				onRanks(t, testenv.GPUs, 2, func(r ranked) error {
					return r.shardsLikeReplicas(stage, all[name])
				})
			})
		}
	}
}

// TestShardsGatherInBF16OnGPU is TestShardsGatherInBF16 on GPUs.
func TestShardsGatherInBF16OnGPU(t *testing.T) { shardsGatherInBF16(t, testenv.GPUs) }

// TestBucketsAreGivenBackOnGPU: with shards of gradients the device has the planned memory, and not
// that by which New has sent the learnables. Workspaces of libraries are there on each stage.
func TestBucketsAreGivenBackOnGPU(t *testing.T) {
	as := training{solver: solvers["adam"], build: layers(2, 512, 512, 512, 512, 512)}
	beyond := make([]int, len(stages)) // what is planned, on rank 0
	for i, stage := range stages {
		require.Report(t, testranks.Join(together(t, testenv.GPUs, 2, func(r ranked) error {
			before := held(r.device)
			_, machine, err := r.start(as, vm.WithShards(stage))
			testranks.NoError(err)
			if r.Comm.Rank() == 0 {
				beyond[i] = held(r.device) - before - int(machine.Summary().Memory.Total())
			}
			return machine.Close()
		})))
		if beyond[i] > beyond[0]+1<<20 {
			t.Errorf("stage %b: %d bytes more than planned are in use, on stage 1 %d", stage,
				beyond[i], beyond[0])
		}
	}
}

// TestShardsByCopyEnginesOnGPU is TestShards where copy engines run all exchanges of a graph, also
// beside products: of buckets in windows (SolverState) and in the arena. They need links like those
// of NVLink, which emulated devices are taken for.
func TestShardsByCopyEnginesOnGPU(t *testing.T) {
	options := require.Value(gpus.Asked("copy-engines"))(t)
	if os.Getenv("EMULATED_DEVICES") != "" {
		options.Link = gpus.FullyConnected
	}
	for P := 2; P <= 3; P++ {
		as := training{solver: solvers["adam"], build: mlp}
		if P == 3 {
			as = settings["bf16"] // with all-gathers of two precisions
		}
		for _, stage := range stages {
			t.Run(fmt.Sprint(P, " ", stage), func(t *testing.T) {
				connect := testenv.ConnectGPUs(t, P, &options)
				require.NoError(t, testranks.Join(connected(t, testenv.GPUs, P, connect, func(
					r ranked) error {
					comm, _ := backend.As[*gpus.Communicator](r.Comm)
					if comm.Link() != gpus.FullyConnected {
						return nil // not on this machine
					}
					before := comm.Usage().CopyEngines
					err := r.shardsLikeReplicas(stage, as)
					if comm.Usage().CopyEngines == before {
						err = errors.Join(err, errors.New("no call went by copy engines"))
					}
					return err
				})))
			})
		}
	}
}

// TestExposedOnGPU is TestExposed by the clocks of GPUs: the late exchange ends behind fills.
func TestExposedOnGPU(t *testing.T) {
	const fills, nbytes = 256, 64 << 10
	onRanks(t, testenv.GPUs, 2, func(r ranked) error {
		b := testranks.Must(r.device.Alloc(nbytes))
		hold := func(q backend.Queue) (err error) {
			for i := 0; i < fills && q != nil && err == nil; i++ {
				err = q.Zero(b)
			}
			return err
		}
		return errors.Join(r.exposes(0, hold), r.device.Free(b))
	})
}

// TestLengthsOfZeroOfCollectivesOnGPU is TestLengthsOfZeroOfCollectives on GPUs.
func TestLengthsOfZeroOfCollectivesOnGPU(t *testing.T) { lengthsOfZero(t, testenv.GPUs) }

// TestRandomGraphsOfRanksOnGPU: the collectives of graphs are steps on the device.
func TestRandomGraphsOfRanksOnGPU(t *testing.T) { randomGraphsOfRanks(t, testenv.GPUs, 100) }

// TestValuesLieWhereGradientsWillBeOnGPU is TestValuesLieWhereGradientsWillBe on GPUs.
func TestValuesLieWhereGradientsWillBeOnGPU(t *testing.T) {
	valuesWhereGradientsWillBe(t, testenv.GPUs)
}

// TestDataParallelIsRecordedOnGPU is TestDataParallelIsRecordedRaced on GPUs.
func TestDataParallelIsRecordedOnGPU(t *testing.T) { dataParallelIsRecorded(t, testenv.GPUs) }

// TestDataParallelEndsOnGPU: a rank is lost while the others wait for it in a CUDA graph.
func TestDataParallelEndsOnGPU(t *testing.T) { dataParallelEnds(t, testenv.GPUs) }

// TestClipNormOnGPU is TestClipNorm on a GPU.
func TestClipNormOnGPU(t *testing.T) {
	clipNorm(t, map[string]func(testing.TB) backend.Device{"gpu": sharing(gpu(t))})
}

// TestAccumulateOnGPU is TestAccumulateRaced on GPUs.
func TestAccumulateOnGPU(t *testing.T) {
	for P := 1; P <= 2; P++ {
		t.Run(fmt.Sprint(P), func(t *testing.T) { accumulates(t, testenv.GPUs, P, mlp) })
	}
}

// TestBatchNormOverAllRanksOnGPU is TestBatchNormOverAllRanks on GPUs, where its collectives are
// part of CUDA graphs.
func TestBatchNormOverAllRanksOnGPU(t *testing.T) { normsOverAllRanks(t, testenv.GPUs, 1, 2) }

// TestAveragesAreThoseOfAllRanksOnGPU is TestAveragesAreThoseOfAllRanks on GPUs.
func TestAveragesAreThoseOfAllRanksOnGPU(t *testing.T) { averagesOfAllRanks(t, testenv.GPUs, 2) }

// TestSeveralWithSolverAreGroupsOnGPU is TestSeveralWithSolverAreGroups on GPUs.
func TestSeveralWithSolverAreGroupsOnGPU(t *testing.T) { severalSolvers(t, testenv.GPUs) }

// TestAStepInProgressIsNotDisturbedOnGPU is TestAStepInProgressIsNotDisturbed on GPUs.
func TestAStepInProgressIsNotDisturbedOnGPU(t *testing.T) { stepsInProgress(t, testenv.GPUs) }

// BenchmarkDataParallelOnGPU measures steps of a multi-layer perceptron on one GPU and on two, each
// with a batch of 1,024 samples. The efficiency is the time on one over the time on two.
func BenchmarkDataParallelOnGPU(b *testing.B) {
	for _, precision := range []vm.Precision{vm.F32, vm.TF32} {
		var alone time.Duration
		for P := 1; P <= 2; P++ {
			b.Run(fmt.Sprint(precision, "/", P), func(b *testing.B) {
				took := stepsTogether(b, P, layers(1024, 784, 4096, 4096, 4096, 4096, 10),
					vm.WithPrecision(precision))
				b.ReportMetric(took.Seconds()*1e3, "ms/step")
				if P == 1 {
					alone = took
				} else if alone > 0 {
					b.ReportMetric(alone.Seconds()/took.Seconds(), "efficiency")
				}
			})
		}
	}
}

// stepsTogether runs b.N steps on P GPUs, and returns the time of one.
func stepsTogether(b *testing.B, P int, build func(testing.TB, tensor.Dtype) *model,
	options ...vm.Option) time.Duration {
	const warmUp = 5 // steps, of which the second one records the graph
	var lock sync.Mutex
	var took time.Duration
	connect := testenv.GPUs.Connect(b, P)
	require.NoError(b, testranks.Join(testranks.Run(P, connect, func(r *testenv.Rank) error {
		lock.Lock()
		m := build(b, tensor.Float32)
		lock.Unlock()
		for _, p := range m.params {
			for i, x := range p.Value().Data().([]float32) {
				p.Value().Data().([]float32)[i] = x / 64
			}
		}
		machine := testranks.Must(vm.New(m.g, r.Comm.Device(), append(options,
			vm.WithSolver(&solver.Adam{Rate: 1e-4}, m.params...), vm.WithDataParallel(r.Comm))...))
		defer machine.Close()
		for range warmUp {
			testranks.NoError(machine.RunAll())
		}
		testranks.NoError(backend.Barrier(r.Comm))
		if r.Comm.Rank() == 0 {
			b.ResetTimer()
		}
		began := time.Now()
		for range b.N {
			testranks.NoError(machine.RunAll())
		}
		if r.Comm.Rank() == 0 {
			b.StopTimer()
			took = time.Since(began) / time.Duration(b.N)
		}
		return nil
	})))
	return took
}
