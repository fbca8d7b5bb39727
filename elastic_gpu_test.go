//go:build gpu

package euryale_test

import (
	"testing"

	"github.com/euryale-ml/euryale/backend/cuda"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/session"
	"github.com/euryale-ml/euryale/internal/testing/testenv"

	"github.com/euryale-ml/euryale/autograd"
)

// onGPUs makes the jobs of a test run on two GPUs.
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
		t.Skip("the test needs 2 GPUs")
	}
	t.Setenv("EURYALE_BACKEND", "nccl")
}

func TestTrainingGoesOnWithTheSameBitsWhenRanksDieOnGPU(t *testing.T) {
	onGPUs(t)
	const steps = 12
	for _, way := range elasticWays {
		want := elasticAlone(t, steps, way)
		t.Logf("%+v alone", way)
		for _, dies := range []elastic.ID{0, 1, 2} { // process 0 is none
			r := newElasticRun(t, "two", 2, steps, elastic.Limits{Least: 1, Most: 2},
				func(id elastic.ID) func(step, micro int) bool {
					return func(step, micro int) bool { return id == dies && step == 5 }
				}, way.of)
			if got := r.end(); got != want {
				t.Errorf("%+v: after the death of process %d the training has other parameters",
					way, dies)
			}
			t.Logf("%+v %d", way, dies)
		}
	}
}

// TestARankMayBeCutOffInAnyCallOnGPU is TestARankMayBeCutOffInAnyCall on GPUs.
func TestARankMayBeCutOffInAnyCallOnGPU(t *testing.T) {
	onGPUs(t)
	const steps, calls = 5, 60
	want := elasticAlone(t, steps, planned)
	for call := 3; call < calls; call += 7 {
		for _, unnoticed := range []bool{false, true} {
			r := newElasticRun(t, "cut", 2, steps, elastic.Limits{Least: 1, Most: 2}, nobody,
				planned.of, func(r *elasticRun) {
					r.job = func(id elastic.ID, job *session.Elastic) autograd.Job {
						if id == 1 {
							return job
						}
						return &lossy{job, call, unnoticed, 0}
					}
				})
			if r.end() != want {
				t.Errorf("call %d, unnoticed %t: the training has other parameters", call,
					unnoticed)
			}
		}
	}
}
