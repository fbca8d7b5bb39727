package main

import (
	"os"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/examples/handwritten"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// lossWith trains on four ranks, with gradients that travel in a way, and returns the last epoch's
// loss.
func lossWith(t *testing.T, seed uint64, ways ...autograd.Option) (loss float64) {
	t.Helper()
	const ranks, batch = 4, 48
	require.NoError(t, euryale.Run(t.Context(), ranks, func(comm backend.Communicator,
		build sync.Locker) error {
		images, _, err := handwritten.Load(seed, []int{handwritten.Pixels})
		if err != nil {
			return err
		}
		build.Lock()
		m := newModel(batch / ranks)
		build.Unlock()
		machine, err := vm.New(m.x.Graph(), nil, vm.WithSolver(&solver.Adam{Rate: 0.003},
			m.weights...), vm.WithDataParallel(comm, ways...))
		if err != nil {
			return err
		}
		defer machine.Close()
		end, err := fit.Run(t.Context(), machine, m.data(images, m.loss), fit.Epochs(15),
			fit.Seed(seed))
		if err == nil && comm.Rank() == 0 {
			loss = end.Epochs[len(end.Epochs)-1].Loss
		}
		return err
	}))
	return loss
}

// TestCompressedGradientsTrainAsWell: 16 bits, and 5 % of the gradients if what was left out is
// kept for the next step. By the loss of whole gradients, those of seeds 1 to 6 on amd64 were 0.99
// to 1.00 in 16 bits, 0.95 to 1.05 with a threshold, and of 5 % 1.07 to 1.32 with feedback and 2.2
// to 2.6 without. EURYALE_FULL=1 tries all six.
func TestCompressedGradientsTrainAsWell(t *testing.T) {
	if testing.Short() {
		t.Skip("it trains to the end")
	}
	seeds := uint64(1)
	if os.Getenv("EURYALE_FULL") == "1" {
		seeds = 6
	}
	few := sparse.TopK(0.05)
	for seed := uint64(1); seed <= seeds; seed++ {
		dense := lossWith(t, seed)
		for _, way := range []struct {
			name        string
			wrap        autograd.Option
			least, most float64 // times the loss of whole gradients
		}{
			{"f16", autograd.WithCompression(half.Wrap(backend.F16)), 0, 1.02},
			{"bf16", autograd.WithCompression(half.Wrap(backend.BF16)), 0, 1.02},
			{"top-k", autograd.WithCompression(sparse.Wrap(few)), 0, 1.6},
			{"top-k without feedback", autograd.WithCompression(sparse.Wrap(few,
				sparse.WithoutFeedback())), 1.4, 1e3},
			{"threshold", autograd.WithCompression(sparse.Wrap(sparse.Threshold(0.003))), 0, 1.2},
		} {
			ratio := lossWith(t, seed, way.wrap) / dense
			t.Logf("seed %d, %s: %.3f times the loss %.4f", seed, way.name, ratio, dense)
			if !(ratio >= way.least && ratio <= way.most) {
				t.Errorf("seed %d: %s ends with %.3f times the loss, want %v to %v", seed, way.name,
					ratio, way.least, way.most)
			}
		}
	}
}
