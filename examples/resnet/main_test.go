package main

import (
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/exampletest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/layers"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

// small are the flags of a training of a fraction of a second.
const small = "--filters 4 --images 96 --batch 16 --epochs 3 --lr 0.05 "

// last is the line that is for programs.
var last = regexp.MustCompile(`accuracy=(\S+) loss=(\S+) ranks=\d+ backend=host ` +
	`params=([0-9a-f]{64}) seconds=\S+\n$`)

// TestRanksTrainTheNetworkOfOne: batch norms are over the pictures of all ranks.
func TestRanksTrainTheNetworkOfOne(t *testing.T) {
	epoch := regexp.MustCompile(`epoch \d/\d: loss=(\S+)`)
	var want [][]string
	for _, ranks := range []int{1, 2, 4} {
		losses := epoch.FindAllStringSubmatch(exampletest.Train(t, ranks, small), -1)
		if want == nil {
			want = losses
		}
		require.That(t, len(losses) == 3, "%d ranks: %d epochs", ranks, len(losses))
		for i := range losses {
			x := exampletest.Numbers(t, losses[i][1], want[i][1])
			if math.Abs(x[0]-x[1]) > 1e-3*x[1] {
				t.Errorf("%d ranks: loss %v in epoch %d, and %v of one", ranks, x[0], i+1, x[1])
			}
		}
	}
}

// TestRanksTellShapesApart: far better than by chance, which is 0.2.
func TestRanksTellShapesApart(t *testing.T) {
	curve := filepath.Join(t.TempDir(), "curve.svg")
	end := exampletest.Ending(t, last, exampletest.Train(t, 2, "--filters 8 --images 512 "+
		"--batch 16 --epochs 6 --lr 0.05 --ema 0.9 --curve "+curve))
	accuracy := exampletest.Numbers(t, end[1])[0]
	require.Check(t, !(accuracy < 0.5), "accuracy %v", accuracy)
	exampletest.HasCurve(t, curve)
}

// TestReadsCIFAR: the files that the data set has, of random pictures.
func TestReadsCIFAR(t *testing.T) {
	dir, r := t.TempDir(), rand.New(rand.NewPCG(1, 1))
	for _, name := range []string{"data_batch_1", "data_batch_2", "test_batch"} {
		records := make([]byte, 8*(1+3*side*side))
		for i := range records {
			records[i] = byte(r.IntN(10))
		}
		require.NoError(t, os.WriteFile(filepath.Join(dir, name+".bin"), records, 0o600))
	}
	out := exampletest.Train(t, 1, "--filters 2 --batch 8 --epochs 1 --data "+dir)
	if !strings.Contains(out, " parameters; 16 pictures, and 8 held out\n") {
		t.Error(out)
	}
	exampletest.Ending(t, last, out)
}

// TestResNet18HasItsParameters: as many as implementations for CIFAR-10 elsewhere have.
func TestResNet18HasItsParameters(t *testing.T) {
	require.NoError(t, euryale.Run(t.Context(), 1, func(comm backend.Communicator,
		_ sync.Locker) error {
		layout, err := layers.NewLayout(comm, 0, 1, 1)
		if err != nil {
			return err
		}
		n := (config{model: 18, batch: 1}).build(layout, 10).parameters
		require.Check(t, n == 11173962, "it has %d parameters", n)
		return layout.Close()
	}))
}

// TestAugmentMovesPixels: a picture with one white pixel has that pixel still, or none.
func TestAugmentMovesPixels(t *testing.T) {
	r, places := rand.New(rand.NewPCG(1, 1)), map[int]bool{}
	for range 1000 {
		pixels := make([]float32, 3*side*side)
		pixels[side*side+10*side+20] = 1
		augment(r, []any{pixels})
		for i, x := range pixels {
			if x == 1 {
				places[i] = true
			}
		}
	}
	const all = 9 * (9 + 9) // rows around 10; columns around 20 and, mirrored, around 11
	for i := range places {
		x, y := i%side, i/side-side
		require.Check(t, y >= 6 && y <= 14 && x >= 7 && x <= 24, "pixel (%d, %d)", x, y)
	}
	require.Check(t, len(places) == all, "%d places, want %d", len(places), all)
}

func TestATrainingThatIsToldToEndIsNotFinished(t *testing.T) {
	exampletest.ToldToEnd(t, small+"--epochs 5 --ema 0.9", "epoch 2/", "")
}

func TestWrongFlagsAreErrors(t *testing.T) {
	for flags, want := range map[string]string{
		"--model 34":    "--model 34: use 8, 18 or 20",
		"--batch 7":     "--batch 7: use a multiple of 2 ranks",
		"--device tpu":  "--device tpu: use cpu or auto",
		"--data /no/it": "no such file",
	} {
		_ = exampletest.New(t, 2, flags).Refused(t, want)
	}
}
