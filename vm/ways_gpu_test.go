//go:build gpu

package vm_test

import (
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

func TestWaysOfTrainingOnGPU(t *testing.T) {
	seeds := uint64(6)
	if full() {
		seeds = 300
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { waysOfTraining(t, seed, testenv.GPUs) })
	}
}
