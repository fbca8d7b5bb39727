package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/exampletest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

// small are the flags of a world of which a training takes a second.
const small = "--users 500 --items 200 --width 8 --batch 64 --negatives 10 --device cpu "

var (
	// epoch is the line of an epoch.
	epoch = regexp.MustCompile(`(?m)epoch \d+/\d+: loss=(\S+) recall@10=(\S+) steps/s=\d+$`)
	// last is the line that is for programs.
	last = regexp.MustCompile(`recall@10=(\S+) popularity=(\S+) best=(\S+) ranks=(\d+) ` +
		`backend=host params=[0-9a-f]{64} seconds=\S+\n$`)
)

// numbers returns the loss and the recall of each epoch.
func numbers(t *testing.T, printed string) (all [][2]float64) {
	t.Helper()
	for _, line := range epoch.FindAllStringSubmatch(printed, -1) {
		all = append(all, [2]float64(exampletest.Numbers(t, line[1:]...)))
	}
	return all
}

// TestRanksAgree: on 2 and 4 ranks the losses of the first 20 steps, and what is recommended after
// each, equal one rank's.
func TestRanksAgree(t *testing.T) {
	const flags = "--epochs 20 --steps 1 --digits 12"
	want := numbers(t, exampletest.Train(t, 1, small+flags))
	require.That(t, len(want) == 20 && (want[19][0] < want[0][0]), "one rank has %v", want)
	for _, ranks := range []int{2, 4} {
		printed := exampletest.Train(t, ranks, small+flags)
		got := numbers(t, printed)
		if end := last.FindStringSubmatch(printed); len(got) != len(want) || end == nil ||
			end[4] != fmt.Sprint(ranks) {
			t.Fatalf("%d ranks print\n%s", ranks, printed)
		}
		for i, w := range want {
			if math.Abs(got[i][0]-w[0]) > 1e-10 || got[i][1] != w[1] {
				t.Errorf("%d ranks: step %d has %v, want %v", ranks, i+1, got[i], w)
			}
		}
	}
}

// TestRecommends: what it recommends is closer to the best possible than to what is popular, and
// what it has learnt is drawn.
func TestRecommends(t *testing.T) {
	curve := filepath.Join(t.TempDir(), "curve.svg")
	printed := exampletest.Train(t, 2, small+"--epochs 2 --steps 600 --curve "+curve)
	x := exampletest.Numbers(t, exampletest.Ending(t, last, printed)[1:4]...)
	model, popularity, best := x[0], x[1], x[2]
	require.Check(t, !(model < (popularity+best)/2) && !(model > best+0.05) &&
		!(best < 2*popularity), "it has not learnt:\n%s", printed)
	exampletest.HasCurve(t, curve)
}

// TestWorld: shares of what is drawn are the chances by which the best possible is found.
func TestWorld(t *testing.T) {
	w, n := world{1000, 40}, 200_000
	who, what := w.interactions(1, n, 0)
	drawn, total := map[[2]int]float64{}, map[int]float64{}
	for i, user := range who {
		taste := w.taste(user)
		drawn[[2]int{taste, what[i]}]++
		total[taste]++
	}
	for taste, of := range total {
		sum := 0.0
		for item := range w.items {
			sum += w.chance(taste, item)
		}
		for item := range w.items {
			p := w.chance(taste, item) / sum
			got := drawn[[2]int{taste, item}] / of
			if math.Abs(got-p) > 5*math.Sqrt(p*(1-p)/of)+1e-9 {
				t.Errorf("of taste %d, item %d has a share of %v, and a chance of %v", taste, item,
					got, p)
			}
		}
	}
	r := rand.New(rand.NewPCG(1, 1))
	for range 1000 {
		if i := skewed(r, 7, 2); i < 0 || i > 6 {
			t.Fatalf("skewed draws %d of 7", i)
		}
	}
}

// TestBadArguments: what cannot be is said.
func TestBadArguments(t *testing.T) {
	for flags, want := range map[string]string{
		"--items 30": "--items 30: use a multiple of ", "--users 1": "a number of at least 2",
		"--batch 3": "--batch 3: use a multiple of 2 ranks", "--device tpu": "use cpu or auto",
		"--epochs 0": "--epochs 0: use a number of at least 1",
	} {
		_ = exampletest.New(t, 2, small+flags).Refused(t, want)
	}
}
