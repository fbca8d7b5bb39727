//go:build gpu

package jobs_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/testing/require"
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
		require.NoError(t, d.Close())
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
	ways := elasticWays
	if testing.Short() {
		ways = ways[:1]
	}
	for _, way := range ways {
		want := elasticAlone(t, steps, way)
		if m, err := newElasticModel(6, 10, way); err != nil || m.state() == want {
			t.Fatalf("%+v: the training has changed nothing: %v", way, err)
		}
		for _, dies := range []elastic.ID{0, 1, 2} { // process 0 is none
			r := newElasticRun(t, "two", 2, steps, elastic.Limits{Least: 1, Most: 2},
				func(id elastic.ID) func(step, micro int) bool {
					return func(step, micro int) bool { return id == dies && step == recorded }
				}, way.of)
			require.Check(t, r.end() == want, "%+v: process %d has died: the training has other "+
				"parameters", way, dies)
		}
	}
}

// TestARankMayBeCutOffInAnyCallOnGPU: in a step, and again while the ranks recover.
func TestARankMayBeCutOffInAnyCallOnGPU(t *testing.T) {
	onGPUs(t)
	const steps, calls = 5, 22
	stride := 7
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
	cutOffTwice(t, planned, steps, 15, stride/2+1)
}

func TestReplacementsTakeTheStateOfTheOthersAndGoOnOnGPU(t *testing.T) {
	onGPUs(t)
	ways := elasticWays
	if testing.Short() {
		ways = ways[1:]
	}
	heals(t, ways...)
}

// TestAKilledProcessIsReplacedOnGPU: it is killed while the other one waits for it in a graph.
func TestAKilledProcessIsReplacedOnGPU(t *testing.T) {
	onGPUs(t)
	devices := killedAndReplaced(t, 1500*time.Millisecond, 3*time.Second)
	if slices.Sort(devices); len(devices) != 2 || len(slices.Compact(devices)) != 2 {
		t.Errorf("the processes end on %v", devices)
	}
}

// TestGenerationsLeaveNothingBehindOnGPU: a generation has the memory of those before it, and what
// a rank that is alone trains stays on its GPU.
func TestGenerationsLeaveNothingBehindOnGPU(t *testing.T) {
	onGPUs(t)
	const every, steps = 14, 40
	m, e := oneElastic(t, planned, func(call int) bool { return call%every == every-1 })
	var inUse []int
	// on the host, where the first element is marked
	second := func() float32 { return m.weights[0].Value().Data().([]float32)[1] }
	began := second()
	for generation := e.DataParallel(); e.Next() < steps; {
		if _, err := e.Step(func(micro int) (float64, error) {
			first := m.weights[0].Value().Data().([]float32)[0]
			if marked := first != first; marked != (e.Next() > 0) { // also in a new generation
				t.Errorf("in step %d the host's old values are marked: %t", e.Next(), marked)
			}
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
	trained := second() != began
	if err := e.Close(); err != nil || trained || second() == began {
		t.Errorf("the host has new parameters before the end: %t, and after it: %t, %v", trained,
			second() != began, err)
	}
}
