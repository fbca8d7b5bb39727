package main

import (
	"fmt"
	"math"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/exampletest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

// small are the flags of a training of a fraction of a second.
const small = "--experts 4 --hidden 8 --layers 1 --width 16 --context 2 --batch 8 --device cpu "

var (
	// epoch is the line of an epoch.
	epoch = regexp.MustCompile(`(?m)epoch (\d+)/\d+: loss=(\S+) balance=(\S+) dropped=(\S+)$`)
	// last is the line that is for programs.
	last = regexp.MustCompile(`loss=(\S+) best=(\S+) ranks=(\d+) layout=(\S+) backend=host ` +
		`params=([0-9a-f]{64}) seconds=\S+\n$`)
)

// numbers returns what the lines of the epochs say.
func numbers(t *testing.T, printed string) (all [][4]float64) {
	t.Helper()
	for _, line := range epoch.FindAllStringSubmatch(printed, -1) {
		all = append(all, [4]float64(exampletest.Numbers(t, line[1:]...)))
	}
	return all
}

// TestLayoutsAgree: on every layout of samples and experts the losses of the first 20 steps, and
// what is dropped, equal one rank's, where numbers have 64 bits.
func TestLayoutsAgree(t *testing.T) {
	const flags = "--dtype f64 --epochs 20 --steps 1 "
	want := numbers(t, exampletest.Train(t, 1, small+flags))
	require.That(t, len(want) == 20 && (want[19][1] < want[0][1]) && want[0][3] != 0,
		"one rank has %v", want)
	for _, c := range []struct {
		ranks         int
		flags, layout string
	}{
		{2, "", "dp2xsp1xtp1"}, {2, "--ep 2", "dp1xsp1xtp2"}, {4, "", "dp4xsp1xtp1"},
		{4, "--ep 2", "dp2xsp1xtp2"}, {4, "--ep 4", "dp1xsp1xtp4"},
	} {
		printed := exampletest.Train(t, c.ranks, small+flags+c.flags)
		got := numbers(t, printed)
		end := last.FindStringSubmatch(printed)
		if len(got) != len(want) || end == nil || end[3] != fmt.Sprint(c.ranks) ||
			end[4] != c.layout {
			t.Errorf("%s: it prints\n%s", c.layout, printed)
			continue
		}
		for i, w := range want {
			if math.Abs(got[i][1]-w[1]) > 1e-10 || got[i][2] != w[2] || got[i][3] != w[3] {
				t.Errorf("%s: step %d has %v, want %v", c.layout, i+1, got[i], w)
			}
		}
	}
}

// pairless is the loss of a model that knows marks from words, and not which words follow.
var pairless = (math.Log(languages) + 5*math.Log(words)) / sentence

// TestLearns: the model knows pairs of words, and what it has learnt is drawn.
func TestLearns(t *testing.T) {
	curve := filepath.Join(t.TempDir(), "curve.svg")
	printed := exampletest.Train(t, 2, small+"--ep 2 --hidden 16 --width 32 --layers 2 "+
		"--context 4 --batch 16 --epochs 4 --steps 60 --curve "+curve)
	x := exampletest.Numbers(t, exampletest.Ending(t, last, printed)[1:3]...)
	loss, least := x[0], x[1]
	require.Check(t, !(math.Abs(least-best()) > 1e-3) && !(loss < least) && !(loss > pairless-0.2),
		"it has not learnt:\n%s", printed)
	exampletest.HasCurve(t, curve)
}

// TestACheckpointIsOfTheWholeModel: a training goes on bitwise identically on another layout.
func TestACheckpointIsOfTheWholeModel(t *testing.T) {
	flags := small + "--epochs 2 --steps 20 --checkpoint " + filepath.Join(t.TempDir(), "state")
	want := exampletest.Ending(t, last, exampletest.Train(t, 2, flags+" --ep 2"))
	printed := exampletest.Train(t, 1, flags)
	if one := exampletest.Ending(t, last, printed); one[5] != want[5] ||
		!strings.Contains(printed, "going on after step 40") {
		t.Errorf("it should end with %q:\n%s", want, printed)
	}
}

func TestATrainingThatIsToldToEndIsNotFinished(t *testing.T) {
	exampletest.ToldToEnd(t, small+"--epochs 12 --steps 20", "epoch 2/", "going on after step ")
}

// TestBadArguments: what cannot be is said.
func TestBadArguments(t *testing.T) {
	for flags, want := range map[string]string{
		"--dtype f16": "--dtype f16: use f32 or f64", "--device tpu": "--device tpu: use cpu",
		"--steps 0": "--steps 0: use a number of at least 1", "--batch 3": "--batch 3: use a mul",
		"--ep 3": "--ep 3: use a divisor of 2 ranks", "--choices 9": "Choices:9",
	} {
		_ = exampletest.New(t, 2, small+flags).Refused(t, want)
	}
}
