//go:build gpu

package vm_test

import (
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

func TestPairsOfFeaturesOnGPU(t *testing.T) { pairsOfFeatures(t, 6, testenv.GPUs) }

func TestManyFeaturesOnGPU(t *testing.T) {
	seeds := 6
	if full() {
		seeds = 300
	}
	manyFeatures(t, seeds, testenv.GPUs)
}
