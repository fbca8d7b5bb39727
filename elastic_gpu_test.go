//go:build gpu

package euryale_test

import (
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend/cuda"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

// onGPUs makes the processes of a test's jobs train on a GPU each, of which it needs two.
func onGPUs(t *testing.T) {
	t.Helper()
	devices, err := cuda.Devices()
	if err != nil {
		testenv.Lacking(t, err.Error())
	}
	for _, d := range devices {
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if len(devices) < 2 {
		t.Skipf("the test needs 2 GPUs, the machine has %d", len(devices))
	}
	t.Setenv("EURYALE_BACKEND", "nccl")
}

// TestTrainingGoesOnWithTheSameBitsWhenRanksDieOnGPU: also in a step that is a graph, in which the
// other rank waits.
func TestTrainingGoesOnWithTheSameBitsWhenRanksDieOnGPU(t *testing.T) {
	onGPUs(t)
	const steps, recorded = 8, 5
	for _, way := range elasticWays {
		want := elasticAlone(t, steps, way)
		if m, err := newElasticModel(6, 10, way.normed); err != nil || m.state() == want {
			t.Fatalf("%+v: the training has changed nothing: %v", way, err)
		}
		for _, dies := range []elastic.ID{0, 1, 2} { // process 0 is none
			r := newElasticRun(t, "two", 2, steps, elastic.Limits{Least: 1, Most: 2},
				func(id elastic.ID) func(step, micro int) bool {
					return func(step, micro int) bool { return id == dies && step == recorded }
				}, way.of)
			if r.end() != want {
				t.Errorf("%+v: process %d has died: the training has other parameters", way, dies)
			}
		}
	}
}

// TestARankMayBeCutOffInAnyCallOnGPU: in a step, and again while the ranks recover.
func TestARankMayBeCutOffInAnyCallOnGPU(t *testing.T) {
	onGPUs(t)
	const steps, calls, commit, recovery = 5, 22, 15, 9
	stride := 5
	if !testing.Short() {
		stride = 1
	}
	want := elasticAlone(t, steps, planned)
	for call := 0; call < calls; call += stride {
		for _, unnoticed := range []bool{false, true} {
			cutOff(t, planned, steps, want, unnoticed, func(n int) bool { return n == call },
				fmt.Sprint("call ", call))
		}
	}
	for again := 1; again < recovery; again += stride/2 + 1 {
		cutOff(t, planned, steps, want, again%2 == 0, func(n int) bool {
			return n == commit || n == commit+again
		}, fmt.Sprintf("calls %d and %d later", commit, again))
	}
}

func TestNewcomersTakeTheStateOfTheOthersAndGoOnOnGPU(t *testing.T) {
	onGPUs(t)
	heals(t)
}

// TestGenerationsLeaveNothingBehindOnGPU: a generation has the memory of those before it.
func TestGenerationsLeaveNothingBehindOnGPU(t *testing.T) {
	onGPUs(t)
	const every, steps = 14, 40
	m, e := oneElastic(t, planned, func(call int) bool { return call%every == every-1 })
	var inUse []int
	for generation := e.DataParallel(); e.Next() < steps; {
		if _, err := e.Step(func(micro int) (float64, error) {
			return m.run(e.Next(), micro)
		}); err != nil {
			t.Fatal(err)
		}
		if e.DataParallel() != generation {
			generation = e.DataParallel()
			inUse = append(inUse, e.Comm().Device().(*cuda.Device).MemoryStats().InUse)
		}
	}
	if n := len(inUse); n < 3 || inUse[n-1] != inUse[0] {
		t.Errorf("the bytes in use of generations are %v", inUse)
	}
}
