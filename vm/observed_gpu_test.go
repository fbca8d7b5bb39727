//go:build gpu

package vm_test

import (
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

// TestALateRankOfRecordedStepsIsNamedOnGPU is TestALateRankOfRecordedStepsIsNamed on two GPUs, of
// which one computes for some 20 ms more.
func TestALateRankOfRecordedStepsIsNamedOnGPU(t *testing.T) {
	rows := 4096
	if testenv.GPUs.Sampled() { // by the host
		rows = 256
	}
	lateRankIsNamed(t, testenv.GPUs, rows)
}

// TestWhatGoesWrongInRecordedStepsIsNamedInThreeOnGPU is its namesake on two GPUs.
func TestWhatGoesWrongInRecordedStepsIsNamedInThreeOnGPU(t *testing.T) {
	rows := 4096
	if testenv.GPUs.Sampled() { // by the host
		rows = 256
	}
	wrongIsNamed(t, testenv.GPUs, rows)
}
