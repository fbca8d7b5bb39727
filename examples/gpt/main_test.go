package main

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/examples/cli"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/layers"
)

const smallFlags = "--data synthetic --layers 1 --width 32 --heads 4 --context 11 --batch 12 --lr 1e-2 --warmup 10 --steps 10 --sample 8 --eval-every 10"

// small is a training of a fraction of a second, with flags besides.
func small(t *testing.T, flags string) config {
	t.Helper()
	cfg, err := parseFlags(append(strings.Fields(smallFlags), strings.Fields(flags)...))
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// train runs the example on ranks of this process and returns what they print.
func train(ranks int, cfg config) (string, error) {
	out := make([]bytes.Buffer, ranks)
	err := euryale.Run(context.Background(), ranks, func(comm backend.Communicator, build sync.Locker) error {
		return run(context.Background(), comm, build, cfg, &out[comm.Rank()])
	})
	for r := 1; r < ranks; r++ {
		if out[r].Len() > 0 {
			return "", fmt.Errorf("rank %d printed %q", r, out[r].String())
		}
	}
	return out[0].String(), err
}

// last is the line that is for programs.
var last = regexp.MustCompile(`loss=(\S+) eval=(\S+) tokens_per_second=\d+ ranks=(\d+) layout=(\S+) device=\S+ params=([0-9a-f]{64}) seconds=\S+\n$`)

// ending returns what a training ends with.
func ending(t *testing.T, printed string) (loss, eval float64, layout, params string) {
	t.Helper()
	end := last.FindStringSubmatch(printed)
	if end == nil {
		t.Fatalf("no last line in\n%s", printed)
	}
	loss, err := strconv.ParseFloat(end[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	if eval, err = strconv.ParseFloat(end[2], 64); err != nil {
		t.Fatal(err)
	}
	return loss, eval, end[4], end[5]
}

// TestLayoutsAgree: every layout has the losses of one rank, with the same dropouts, also where ranks have unequal parts of a
// sequence.
func TestLayoutsAgree(t *testing.T) {
	const flags = "--steps 7 --dropout 0.2"
	printed, err := train(1, small(t, flags))
	if err != nil {
		t.Fatal(err)
	}
	loss, eval, _, _ := ending(t, printed)
	if printed, err = train(1, small(t, "--steps 7")); err != nil {
		t.Fatal(err)
	}
	if without, _, _, _ := ending(t, printed); without >= loss {
		t.Errorf("the loss is %v with dropouts, and %v without", loss, without)
	}
	for _, s := range []layers.Sizes{{DP: 4, SP: 1, TP: 1}, {DP: 2, SP: 2, TP: 1}, {DP: 1, SP: 2, TP: 2}, {DP: 1, SP: 1, TP: 4}, {DP: 2, SP: 1, TP: 2}} {
		cfg := small(t, flags)
		cfg.sizes = s
		cfg.sizes.DP = 0 // found by itself
		printed, err := train(s.DP*s.SP*s.TP, cfg)
		if err != nil {
			t.Fatalf("%v: %v", s, err)
		}
		got, gotEval, layout, _ := ending(t, printed)
		if math.Abs(got-loss) > 1e-3 || math.Abs(gotEval-eval) > 1e-3 || layout != s.String() {
			t.Errorf("%v: loss %v, eval %v; on one rank %v and %v", layout, got, gotEval, loss, eval)
		}
	}
}

// TestDevicesAgree: on devices whose memory the host cannot touch, in both precisions of products, the losses are those
// of the host.
func TestDevicesAgree(t *testing.T) {
	const flags = "--steps 7 --sample 4 "
	printed, err := train(1, small(t, flags))
	if err != nil {
		t.Fatal(err)
	}
	loss, eval, _, _ := ending(t, printed)
	for layout, tolerance := range map[string]float64{"--sp 2 --tp 2": 1e-3, "--dp 2 --tp 2 --precision bf16": 1e-2} {
		const ranks = 4
		cfg := small(t, flags+"--device gpu "+layout)
		var build sync.Mutex
		var out [ranks]bytes.Buffer
		if err := testranks.Join(testranks.Run(ranks, testenv.Devices.Connect(t, ranks), func(r *testenv.Rank) error {
			return run(t.Context(), r.Comm, &build, cfg, &out[r.Comm.Rank()])
		})); err != nil {
			t.Fatalf("%s: %v", layout, err)
		}
		got, gotEval, _, _ := ending(t, out[0].String())
		if math.Abs(got-loss) > tolerance || math.Abs(gotEval-eval) > tolerance {
			t.Errorf("%s: loss %v, eval %v; on the host %v and %v", layout, got, gotEval, loss, eval)
		}
	}
}

// TestLearns: the model knows what a bigram model of the same text cannot, and draws its losses.
func TestLearns(t *testing.T) {
	plot := filepath.Join(t.TempDir(), "loss.svg")
	printed, err := train(2, small(t, "--steps 80 --eval-every 40 --plot "+plot))
	if err != nil {
		t.Fatal(err)
	}
	_, eval, _, _ := ending(t, printed)
	var parameters, characters, training, heldOut int
	var bigram float64
	if _, err := fmt.Sscanf(printed, "%d parameters, %d characters, %d bytes to train on, %d held out: a bigram model of them has a loss of %f", &parameters, &characters, &training, &heldOut, &bigram); err != nil {
		t.Fatalf("%v:\n%s", err, printed)
	}
	if eval > bigram-1 || math.Abs(bigram-math.Log(32)) > 0.02 || characters != 32 || heldOut*9 < training-9 || !strings.Contains(printed, "\nstep 40/80: loss=") {
		t.Errorf("it has not learnt:\n%s", printed)
	}
	if svg, err := os.ReadFile(plot); err != nil || !bytes.Contains(svg, []byte("<svg")) {
		t.Errorf("--plot: %v", err)
	}
}

// TestOperations: the formula of the package comment, of GPT-2's shape with a vocabulary of 50,257:
// 124 million parameters.
func TestOperations(t *testing.T) {
	cfg := config{layers: 12, width: 768, heads: 12, context: 1024, positions: learned}
	if got := cfg.operations(124_439_808); math.Abs(got-855.2e6) > 0.1e6 {
		t.Errorf("%v operations for each token", got)
	}
}

// TestCorpus: one file in twenty is held out, and the bigram model knows what it was trained on.
func TestCorpus(t *testing.T) {
	dir := t.TempDir()
	for i := range 40 {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%02d.txt", i)), []byte(strings.Repeat("ab", 10*(1+i/39))), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, ".hidden"), []byte("z"), 0o666); err != nil {
		t.Fatal(err)
	}
	c, err := loadCorpus(dir, 1)
	if err != nil || string(c.characters) != "ab" || len(c.training) != 38*20 || len(c.heldOut) != 60 {
		t.Fatalf("%d and %d bytes of %q: %v", len(c.training), len(c.heldOut), c.characters, err)
	}
	w := c.evaluation(7, 12)
	if last := w.starts[6] + 12 + 1; w.starts[0] != 0 || last != len(c.heldOut) {
		t.Errorf("windows begin at %v", w.starts)
	}
	// Each letter follows the other one, 380 and 379 times; one is added for each of two.
	if got, want := c.bigram(w), -(math.Log(381.0/382)+math.Log(380.0/381))/2; math.Abs(got-want) > 1e-12 {
		t.Errorf("the bigram model has a loss of %v, want %v", got, want)
	}
	tokens, targets := w.part(2, 3).tokens()
	if c.text(tokens[1:]) != c.text(targets[:11]) {
		t.Errorf("%v is not before %v", tokens, targets)
	}
	if one, err := loadCorpus(filepath.Join(dir, "39.txt"), 1); err != nil || len(one.heldOut) != 4 || one.hash() == c.hash() {
		t.Errorf("a file: %d held out, %v", len(one.heldOut), err)
	}
}

// TestStandardLibrary: its sources are found, without tests. It has too many files to read them all here.
func TestStandardLibrary(t *testing.T) {
	src, err := standardLibrary()
	if err != nil {
		t.Fatal(err)
	}
	files, err := readFiles(filepath.Join(src, "fmt"), isSource)
	if err != nil {
		t.Fatal(err)
	}
	all := bytes.Join(files, nil)
	if len(files) < 5 || !bytes.Contains(all, []byte("func Println(a ...any) (n int, err error) {")) || bytes.Contains(all, []byte("*testing.T")) || isSource("/go/src/cmd") {
		t.Errorf("%d files of %d bytes", len(files), len(all))
	}
}

// TestBadArguments: what cannot be is said before any rank trains, with the exit code of usage errors.
func TestBadArguments(t *testing.T) {
	for flags, want := range map[string]string{
		"--tp 3":                             "use numbers whose product is 2",
		"--batch 3":                          "does not divide into 2 micro-batches",
		"--sp 2 --heads 1":                   "each needs a part",
		"--heads 5":                          "use a divisor of the width",
		"--device gpu":                       "backend host has no GPU",
		"--data /nothing":                    "no such file",
		"--context 200000":                   "a context of 200000 needs",
		"--dp 2 --sp 2":                      "use numbers whose product is 2",
		"--sp 2 --context 1":                 "use fewer ranks",
		"--tp 2 --heads 1 --sp 1":            "divided among 2 ranks",
		"--micro-batches 3":                  "do not divide among 2 replicas",
		"--reduction tree --micro-batches 6": "which is no power of two",
		"--data /dev/null --sp 1":            "0 characters to train on",
		"--precision bf16 --tp 257":          "use numbers whose product is 2",
	} {
		if _, err := train(2, small(t, flags)); err == nil || !strings.Contains(err.Error(), want) || cli.ExitCode(err) != cli.UsageCode {
			t.Errorf("%s: error %v, exit code %d, want %q", flags, err, cli.ExitCode(err), want)
		}
	}
	for flags, want := range map[string]string{
		"--reduction tree":                                   "needs a number of --micro-batches",
		"--reduction tree --micro-batches 4 --sp 2":          "--reduction tree with --sp 2",
		"--reduction tree --micro-batches 4 --compress bf16": "--reduction tree with --compress bf16",
		"--reduction ring":                                   "use rank or tree",
		"--positions rotary":                                 "use learned or sinusoidal",
		"--compress topk=0.1 --tp 2 --checkpoint C":          "use f16 or bf16 with --tp",
		"--steps 0":       "--steps is 0: at least 1 is needed",
		"--plot loss.gif": "must end in .svg or .png",
		"--dropout 1":     "--dropout is 1",
		"--lr -1":         "--lr is -1",
		"--compress lz4":  "--compress lz4: use none",
		"--device tpu":    "--device tpu: use cpu",
		"text":            "no arguments are taken",
		"--precision f64": "use f32, tf32 or bf16",
	} {
		if _, err := parseFlags(strings.Fields(flags)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", flags, err, want)
		}
	}
}
