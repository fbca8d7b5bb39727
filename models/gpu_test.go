//go:build gpu

package models_test

import (
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/vm"
)

// TestGreedyTokensOnGPU: every folder continues texts as transformers does.
func TestGreedyTokensOnGPU(t *testing.T) {
	greedyTokens(t, gpu(t), 8) // an emulated GPU takes long
}

func TestDeviceChoosesWhatTheHostWouldChooseOnGPU(t *testing.T) {
	choosesAsTheHost(t, gpu(t), "gpt2")
}

func TestAMixIsWhatItsPromptsAreAloneOnGPU(t *testing.T) {
	seeds, context := uint64(16), 1200
	if testenv.GPUs.Sampled() {
		seeds, context = 2, 40
	}
	mixes(t, gpu(t), seeds, context)
}

// TestRanksThatShareTheWeightsOnGPU: two GPUs generate what one rank on the host does.
func TestRanksThatShareTheWeightsOnGPU(t *testing.T) {
	folders := []string{"gpt2", "llama3", "mistral"}
	if testenv.GPUs.Sampled() {
		folders = folders[1:2]
	}
	shareOnDevices(t, testenv.GPUs, folders...)
}

// BenchmarkGenerateOnGPU is what bench/peers/generate_torch.py measures of transformers.
func BenchmarkGenerateOnGPU(b *testing.B) { generates(b, gpu(b), vm.BF16) }

// gpu opens a GPU.
func gpu(t testing.TB) backend.Device {
	d, err := cuda.Open(0)
	if err != nil {
		testenv.Lacking(t, err.Error())
	}
	t.Cleanup(func() {
		require.NoError(t, d.Close())
	})
	return d
}
