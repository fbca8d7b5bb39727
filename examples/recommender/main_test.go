package main

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/rendezvous/launch"
)

// actAsRecommender is a variable that makes this test binary the example.
const actAsRecommender = "RUN_AS_RECOMMENDER"

func TestMain(m *testing.M) {
	if os.Getenv(actAsRecommender) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// small are the flags of a world of which a training takes a second.
const small = "--users 500 --items 200 --width 8 --batch 64 --negatives 10 --device cpu "

// job is the example on ranks that are processes.
func job(t *testing.T, ranks int, flags string) (launch.Job, *proctest.Notice) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out proctest.Notice
	return launch.Job{
		Program: self, Ranks: ranks, Args: strings.Fields(small + flags), Stdout: &out,
		Stderr: &out, Env: append(os.Environ(), actAsRecommender+"=1"),
	}, &out
}

// train trains on ranks, and returns what they print.
func train(t *testing.T, ranks int, flags string) string {
	t.Helper()
	j, out := job(t, ranks, flags)
	if err := launch.Run(t.Context(), j); err != nil {
		t.Fatalf("%d ranks %s: %v\n%s", ranks, flags, err, out)
	}
	return out.String()
}

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
		var n [2]float64
		if _, err := fmt.Sscan(line[1]+" "+line[2], &n[0], &n[1]); err != nil {
			t.Fatal(err)
		}
		all = append(all, n)
	}
	return all
}

// TestRanksAgree: on 2 and 4 ranks the losses of the first 20 steps, and what is recommended after
// each, equal one rank's.
func TestRanksAgree(t *testing.T) {
	const flags = "--epochs 20 --steps 1 --digits 12"
	want := numbers(t, train(t, 1, flags))
	if len(want) != 20 || !(want[19][0] < want[0][0]) {
		t.Fatalf("one rank has %v", want)
	}
	for _, ranks := range []int{2, 4} {
		printed := train(t, ranks, flags)
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
	printed := train(t, 2, "--epochs 2 --steps 600 --curve "+curve)
	end := last.FindStringSubmatch(printed)
	if end == nil {
		t.Fatalf("no last line in\n%s", printed)
	}
	var model, popularity, best float64
	if _, err := fmt.Sscan(strings.Join(end[1:4], " "), &model, &popularity, &best); err != nil ||
		model < (popularity+best)/2 || model > best+0.05 || best < 2*popularity {
		t.Errorf("it has not learnt: %v\n%s", err, printed)
	}
	svg, err := os.ReadFile(curve)
	if err != nil || !bytes.Contains(svg, []byte("</svg>")) {
		t.Errorf("the curve is %q, %v", svg, err)
	}
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
	for _, flags := range []string{"--items 30", "--users 1", "--batch 3", "--epochs 0",
		"--device tpu"} {
		j, out := job(t, 2, flags)
		if err := launch.Run(t.Context(), j); err == nil ||
			!strings.Contains(out.String(), "use --device cpu or auto, sizes of at least 1, a") {
			t.Errorf("%s: %v\n%s", flags, err, out)
		}
	}
}
