//go:build gpu

package models_test

import (
	"testing"

	"github.com/euryale-ml/euryale/backend/cuda"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

// TestGreedyTokensOnGPU: every folder continues texts as transformers does.
func TestGreedyTokensOnGPU(t *testing.T) {
	d, err := cuda.Open(0)
	if err != nil {
		testenv.Lacking(t, err.Error())
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	greedyTokens(t, d, 8) // an emulated GPU takes long
}
