package main

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/exampletest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

// small are the flags of a training of a fraction of a second, whose last batches are not full.
const small = "--characters 6000 --hidden 16 --steps 20 --epochs 3 "

// last is the line that is for programs.
var last = regexp.MustCompile(`perplexity=(\S+) loss=(\S+) ranks=\d+ backend=host ` +
	`params=([0-9a-f]{64}) seconds=\S+\n$`)

func TestRanksTrainTheModelOfOne(t *testing.T) {
	epoch := regexp.MustCompile(`epoch \d/\d: loss=(\S+) val_loss=(\S+)`)
	for _, cell := range []string{"lstm", "gru"} {
		var want [][]string
		for _, ranks := range []int{1, 2, 4} {
			printed := exampletest.Train(t, ranks, small+"--cell "+cell)
			losses := epoch.FindAllStringSubmatch(printed, -1)
			if want == nil {
				want = losses
			}
			require.That(t, len(losses) == 3, "%s on %d ranks: %d epochs", cell, ranks, len(losses))
			for i := range losses {
				x, one := exampletest.Numbers(t, losses[i][1:]...),
					exampletest.Numbers(t, want[i][1:]...)
				if math.Abs(x[0]-one[0]) > 5e-4 || math.Abs(x[1]-one[1]) > 5e-4 {
					t.Errorf("%s on %d ranks: losses %v in epoch %d, and %v of one", cell, ranks, x,
						i+1, one)
				}
			}
		}
	}
}

// TestRanksLearnTheGrammar: the perplexity is near the least that there is, and the model writes
// words.
func TestRanksLearnTheGrammar(t *testing.T) {
	curve := filepath.Join(t.TempDir(), "curve.svg")
	out := exampletest.Train(t, 2, "--characters 40000 --hidden 48 --steps 48 --epochs 4 "+
		"--lr 0.015 --curve "+curve)
	perplexity := exampletest.Numbers(t, exampletest.Ending(t, last, out)[1])[0]
	printed := regexp.MustCompile(`grammar=(\S+)`).FindStringSubmatch(out)
	require.That(t, printed != nil, "no grammar= in\n%s", out)
	least := exampletest.Numbers(t, printed[1])[0]
	require.Check(t, !(perplexity < least) && !(perplexity > 1.3*least),
		"perplexity %v, at least %v", perplexity, least)
	require.Check(t, strings.Contains(out, " the ") && strings.Contains(out, ".\n"),
		"it has not written sentences:\n%s", out)
	exampletest.HasCurve(t, curve)
}

// TestTheGrammarsInformation: a grammar with as many nats of information as the mean of its
// sentences has by hand.
func TestTheGrammarsInformation(t *testing.T) {
	_, information := sentences(400000)
	text, _ := sentences(400000)
	noun := 2*math.Log(2) + math.Log(float64(len(adjectives)))/2 + math.Log(float64(len(nouns)))
	of := 2*noun + math.Log(2) + (math.Log(float64(len(places)))+noun)/2 +
		math.Log(float64(len(verbs)))
	mean := information / float64(strings.Count(text, "\n"))
	require.Check(t, !(math.Abs(mean-of) > 0.02*of), "%v nats in a sentence, want %v", mean, of)
}

// TestReadsAFile: with characters of several bytes, without a grammar.
func TestReadsAFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "text")
	require.NoError(t, os.WriteFile(file, bytes.Repeat([]byte("äöü€\n"), 200), 0o600))
	out := exampletest.Train(t, 1, "--hidden 8 --steps 9 --batch 4 --data "+file)
	if !strings.Contains(out, " held out, of 5 characters\n") || strings.Contains(out, "grammar=") {
		t.Error(out)
	}
	end := exampletest.Ending(t, last, out)
	perplexity := exampletest.Numbers(t, end[1])[0]
	require.Check(t, !(perplexity > 2), "perplexity %v", perplexity)
}

func TestATrainingThatIsToldToEndIsNotFinished(t *testing.T) {
	exampletest.ToldToEnd(t, small+"--epochs 6", "epoch 2/", "")
}

func TestWrongFlagsAreErrors(t *testing.T) {
	for flags, want := range map[string]string{
		"--cell rnn":    "--cell rnn: use lstm or gru",
		"--batch 7":     "--batch 7: use a multiple of 2 ranks",
		"--device tpu":  "--device tpu: use cpu or auto",
		"--steps 0":     "--steps 0: use a number of at least 1",
		"--data /no/it": "no such file",
	} {
		_ = exampletest.New(t, 2, flags).Refused(t, want)
	}
}
