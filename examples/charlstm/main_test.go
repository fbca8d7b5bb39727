package main

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/rendezvous/launch"
)

// actAsCharLSTM is a variable that makes this test binary the example.
const actAsCharLSTM = "RUN_AS_CHARLSTM"

func TestMain(m *testing.M) {
	if os.Getenv(actAsCharLSTM) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// job is the example on ranks that are processes.
func job(t *testing.T, ranks int, flags string) (j launch.Job, out, errs *bytes.Buffer) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	out, errs = new(bytes.Buffer), new(bytes.Buffer)
	return launch.Job{
		Program: self, Ranks: ranks, Args: strings.Fields(flags), Stdout: out, Stderr: errs,
		Env: append(os.Environ(), actAsCharLSTM+"=1"),
	}, out, errs
}

// train trains on ranks, and returns what they print.
func train(t *testing.T, ranks int, flags string) string {
	t.Helper()
	j, out, errs := job(t, ranks, flags)
	if err := launch.Run(t.Context(), j); err != nil {
		t.Fatalf("%d ranks %s: %v: %s", ranks, flags, err, errs)
	}
	return out.String()
}

// small are the flags of a training of a fraction of a second, whose last batches are not full.
const small = "--characters 6000 --hidden 16 --steps 20 --epochs 3 "

// last is the line that is for programs.
var last = regexp.MustCompile(`perplexity=(\S+) loss=(\S+) ranks=\d+ backend=host ` +
	`params=([0-9a-f]{64}) seconds=\S+\n$`)

// ending returns what a training ends with.
func ending(t *testing.T, printed string) (perplexity float64, params string) {
	t.Helper()
	end := last.FindStringSubmatch(printed)
	if end == nil {
		t.Fatalf("no last line in\n%s", printed)
	}
	perplexity, err := strconv.ParseFloat(end[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	return perplexity, end[3]
}

func TestRanksTrainTheModelOfOne(t *testing.T) {
	epoch := regexp.MustCompile(`epoch \d/\d: loss=(\S+) val_loss=(\S+)`)
	for _, cell := range []string{"lstm", "gru"} {
		var want [][]string
		for _, ranks := range []int{1, 2, 4} {
			losses := epoch.FindAllStringSubmatch(train(t, ranks, small+"--cell "+cell), -1)
			if want == nil {
				want = losses
			}
			if len(losses) != 3 {
				t.Fatalf("%s on %d ranks: %d epochs", cell, ranks, len(losses))
			}
			for i := range losses {
				var x, held, of1, held1 float64
				if _, err := fmt.Sscan(strings.Join(append(losses[i][1:], want[i][1:]...), " "),
					&x, &held, &of1, &held1); err != nil || math.Abs(x-of1) > 5e-4 ||
					math.Abs(held-held1) > 5e-4 {
					t.Errorf("%s on %d ranks: losses %v in epoch %d, and %v of one: %v", cell,
						ranks, losses[i][1:], i+1, want[i][1:], err)
				}
			}
		}
	}
}

// TestRanksLearnTheGrammar: the perplexity is near the least that there is, and the model writes
// words.
func TestRanksLearnTheGrammar(t *testing.T) {
	curve := filepath.Join(t.TempDir(), "curve.svg")
	out := train(t, 2, "--characters 40000 --hidden 48 --steps 48 --epochs 4 --lr 0.015 --curve "+
		curve)
	perplexity, _ := ending(t, out)
	printed := regexp.MustCompile(`grammar=(\S+)`).FindStringSubmatch(out)
	if printed == nil {
		t.Fatalf("no grammar= in\n%s", out)
	}
	least, err := strconv.ParseFloat(printed[1], 64)
	if err != nil || perplexity < least || perplexity > 1.3*least {
		t.Errorf("perplexity %v, at least %v: %v", perplexity, least, err)
	}
	if !strings.Contains(out, " the ") || !strings.Contains(out, ".\n") {
		t.Errorf("it has not written sentences:\n%s", out)
	}
	if svg, err := os.ReadFile(curve); err != nil || !bytes.Contains(svg, []byte("<svg")) {
		t.Errorf("the curve: %v, of %d bytes", err, len(svg))
	}
}

// TestASignalSaves: the training goes on to the bits of one that was not stopped.
func TestASignalSaves(t *testing.T) {
	_, want := ending(t, train(t, 2, small))
	flags := small + "--checkpoint " + filepath.Join(t.TempDir(), "state")
	j, _, errs := job(t, 2, flags)
	signals := make(chan os.Signal, 1)
	out := &proctest.Notice{Text: "epoch 1/", Then: func() { signals <- syscall.SIGINT }}
	j.Stdout, j.Signals, j.Grace = out, signals, time.Minute
	err := launch.Run(t.Context(), j)
	interrupted := (*launch.Interrupted)(nil)
	if !errors.As(err, &interrupted) || !strings.Contains(errs.String(), "(interrupt) after ") {
		t.Fatalf("%v:\n%s%s", err, out, errs)
	}
	if _, got := ending(t, train(t, 2, flags)); got != want {
		t.Error("it ends with other parameters than without a stop")
	}
}

// TestTheGrammarsInformation: a grammar with as many nats of information as the mean of its
// sentences has by hand.
func TestTheGrammarsInformation(t *testing.T) {
	_, information := sentences(400000)
	text, _ := sentences(400000)
	noun := 2*math.Log(2) + math.Log(float64(len(adjectives)))/2 + math.Log(float64(len(nouns)))
	of := 2*noun + math.Log(2) + (math.Log(float64(len(places)))+noun)/2 +
		math.Log(float64(len(verbs)))
	if mean := information / float64(strings.Count(text, "\n")); math.Abs(mean-of) > 0.02*of {
		t.Errorf("%v nats in a sentence, want %v", mean, of)
	}
}

// TestReadsAFile: with characters of several bytes, without a grammar.
func TestReadsAFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(file, bytes.Repeat([]byte("äöü€\n"), 200), 0o600); err != nil {
		t.Fatal(err)
	}
	out := train(t, 1, "--hidden 8 --steps 9 --batch 4 --data "+file)
	if !strings.Contains(out, " held out, of 5 characters\n") || strings.Contains(out, "grammar=") {
		t.Error(out)
	}
	if perplexity, _ := ending(t, out); perplexity > 2 {
		t.Errorf("perplexity %v", perplexity)
	}
}

func TestWrongFlagsAreErrors(t *testing.T) {
	for flags, want := range map[string]string{
		"--cell rnn":    "use --cell lstm or gru",
		"--batch 7":     "a --batch that the ranks divide",
		"--device tpu":  "--device cpu or auto",
		"--steps 0":     "other numbers from 1 on",
		"--data /no/it": "no such file",
	} {
		j, _, errs := job(t, 2, flags)
		if err := launch.Run(t.Context(), j); err == nil ||
			!strings.Contains(errs.String(), want) {
			t.Errorf("%s: %v, without %q in %s", flags, err, want, errs)
		}
	}
}
