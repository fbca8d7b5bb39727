package main

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/rendezvous/launch"
)

// actAsMoE is a variable that makes this test binary the example.
const actAsMoE = "RUN_AS_MOE"

func TestMain(m *testing.M) {
	if os.Getenv(actAsMoE) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// small are the flags of a training of a fraction of a second.
const small = "--experts 4 --hidden 8 --layers 1 --width 16 --context 2 --batch 8 --device cpu "

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
		Stderr: &out, Env: append(os.Environ(), actAsMoE+"=1"),
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
	epoch = regexp.MustCompile(`(?m)epoch (\d+)/\d+: loss=(\S+) balance=(\S+) dropped=(\S+)$`)
	// last is the line that is for programs.
	last = regexp.MustCompile(`loss=(\S+) best=(\S+) ranks=(\d+) layout=(\S+) backend=host ` +
		`params=([0-9a-f]{64}) seconds=\S+\n$`)
)

// numbers returns what the lines of the epochs say.
func numbers(t *testing.T, printed string) (all [][4]float64) {
	t.Helper()
	for _, line := range epoch.FindAllStringSubmatch(printed, -1) {
		var n [4]float64
		_, err := fmt.Sscan(strings.Join(line[1:], " "), &n[0], &n[1], &n[2], &n[3])
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, n)
	}
	return all
}

// TestLayoutsAgree: on every layout of samples and experts the losses of the first 20 steps, and
// what is dropped, equal one rank's, where numbers have 64 bits.
func TestLayoutsAgree(t *testing.T) {
	const flags = "--dtype f64 --epochs 20 --steps 1 "
	want := numbers(t, train(t, 1, flags))
	if len(want) != 20 || !(want[19][1] < want[0][1]) || want[0][3] == 0 {
		t.Fatalf("one rank has %v", want)
	}
	for _, c := range []struct {
		ranks         int
		flags, layout string
	}{
		{2, "", "dp2xsp1xtp1"}, {2, "--ep 2", "dp1xsp1xtp2"}, {4, "", "dp4xsp1xtp1"},
		{4, "--ep 2", "dp2xsp1xtp2"}, {4, "--ep 4", "dp1xsp1xtp4"},
	} {
		printed := train(t, c.ranks, flags+c.flags)
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
	printed := train(t, 2, "--ep 2 --hidden 16 --width 32 --layers 2 --context 4 --batch 16 "+
		"--epochs 4 --steps 60 --curve "+curve)
	var loss, least float64
	end := last.FindStringSubmatch(printed)
	if end == nil {
		t.Fatalf("no last line in\n%s", printed)
	}
	if _, err := fmt.Sscan(end[1]+" "+end[2], &loss, &least); err != nil ||
		math.Abs(least-best()) > 1e-3 || loss < least || loss > pairless-0.2 {
		t.Errorf("it has not learnt: %v\n%s", err, printed)
	}
	svg, err := os.ReadFile(curve)
	if err != nil || !bytes.Contains(svg, []byte("</svg>")) {
		t.Errorf("the curve is %q, %v", svg, err)
	}
}

// TestResumes: a training that an interrupt has ended goes on with the same bits, and a checkpoint
// is of the whole model, whatever the layout.
func TestResumes(t *testing.T) {
	const flags = "--epochs 3 --steps 200 "
	whole := last.FindStringSubmatch(train(t, 2, flags+"--ep 2"))
	state := " --checkpoint " + filepath.Join(t.TempDir(), "state")
	signals := make(chan os.Signal, 1)
	running, out := job(t, 2, flags+"--ep 2"+state)
	running.Signals, running.Grace = signals, time.Minute
	out.Text, out.Then = "epoch 1/", func() { signals <- syscall.SIGINT }
	err := launch.Run(t.Context(), running)
	if interrupted := (*launch.Interrupted)(nil); !errors.As(err, &interrupted) ||
		!strings.Contains(out.String(), "(interrupt) after step ") {
		t.Fatalf("it ends with %v\n%s", err, out)
	}
	printed := train(t, 2, flags+"--ep 2"+state)
	again := last.FindStringSubmatch(printed)
	if whole == nil || again == nil || again[5] != whole[5] ||
		!strings.Contains(printed, "going on after step ") {
		t.Errorf("it resumes with\n%sand should end with %q", printed, whole)
	}
	if one := last.FindStringSubmatch(train(t, 1, flags+state)); one == nil || one[5] != whole[5] {
		t.Errorf("on one rank it is %q, want %q", one, whole)
	}
}

// TestBadArguments: what cannot be is said.
func TestBadArguments(t *testing.T) {
	for flags, want := range map[string]string{
		"--dtype f16": "use --dtype f32 or f64", "--device tpu": "--device cpu or auto",
		"--steps 0": "sizes of at least 1", "--batch 3": "of which others divide --batch",
		"--ep 3": "an --ep that divides the ranks", "--choices 9": "Choices:9",
	} {
		j, out := job(t, 2, flags)
		if err := launch.Run(t.Context(), j); err == nil || !strings.Contains(out.String(), want) {
			t.Errorf("%s: %v, want %q in\n%s", flags, err, want, out)
		}
	}
}
