package main

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/examples/handwritten"
	"github.com/euryale-ml/euryale/internal/exit"
)

// train runs the program on ranks of this process and returns what they print.
func train(ranks int, cfg config) (string, error) {
	out := make([]bytes.Buffer, ranks)
	err := euryale.Run(context.Background(), ranks, func(comm backend.Communicator,
		build sync.Locker) error {
		return run(context.Background(), comm, build, cfg, &out[comm.Rank()])
	})
	for r := 1; r < ranks; r++ {
		if out[r].Len() > 0 {
			return "", fmt.Errorf("rank %d printed %q", r, out[r].String())
		}
	}
	return out[0].String(), err
}

// lastLine returns the line that is for programs.
func lastLine(printed string) string {
	lines := strings.Split(strings.TrimSpace(printed), "\n")
	return lines[len(lines)-1]
}

// withoutEpochs returns what is printed, without the lines of epochs.
func withoutEpochs(printed string) string {
	var rest strings.Builder
	for line := range strings.Lines(printed) {
		if !strings.HasPrefix(line, "epoch ") {
			rest.WriteString(line)
		}
	}
	return rest.String()
}

func TestFoundNothingIsSeenWhileItTrains(t *testing.T) {
	printed, err := train(2, defaults(t, func(c *config) { c.epochs, c.machine = 3, "tape" }))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(printed), "\n")
	if len(lines) != 4 {
		t.Fatalf("rank 0 printed %q, want a line for each of 3 epochs and one more", printed)
	}
	before := 10.0
	for i, line := range lines[:3] {
		var epoch, of int
		var loss, accuracy, speed, share float64
		if _, err := fmt.Sscanf(line, "epoch %d/%d: loss=%f accuracy=%f images/s=%f "+
			"communication=%f%%", &epoch, &of, &loss, &accuracy, &speed, &share); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if epoch != i+1 || of != 3 || loss >= before || accuracy <= 0.1 || speed <= 0 ||
			share < 0 || share > 100 {
			t.Errorf("%q after a loss of %v", line, before)
		}
		before = loss
	}
	if want := fmt.Sprintf(" loss=%.4f ", before); !strings.Contains(lines[3], want) {
		t.Errorf("the last line is %q, want%s", lines[3], want)
	}
}

// The loss is the mean over all ranks. Batches do not depend on the number of ranks, so the
// loss does not either, except by rounding.
func TestFoundTheLossIsTheRanksOwn(t *testing.T) {
	var losses []float64
	for _, ranks := range []int{1, 2, 4} {
		printed, err := train(ranks, defaults(t, func(c *config) { c.epochs = 1 }))
		if err != nil {
			t.Fatal(err)
		}
		var accuracy, loss float64
		if _, err := fmt.Sscanf(lastLine(printed), "accuracy=%f loss=%f", &accuracy,
			&loss); err != nil {
			t.Fatal(err)
		}
		losses = append(losses, loss)
	}
	for _, loss := range losses {
		if math.Abs(loss-losses[0]) > 0.0002 {
			t.Errorf("losses on 1, 2 and 4 ranks are %v", losses)
		}
	}
}

func TestTwoRanksLearn(t *testing.T) {
	for _, tt := range []struct {
		model  string
		epochs int
		want   float64 // accuracy
	}{{"mlp", 15, 0.96}, {"cnn", 6, 0.9}} {
		t.Run(tt.model, func(t *testing.T) {
			printed, err := train(2, config{model: tt.model, machine: "plan", device: "cpu",
				epochs: tt.epochs, batch: 48, solver: "adam", lr: 0.003, seed: 1, compress: "none"})
			if err != nil {
				t.Fatal(err)
			}
			var accuracy, loss, seconds float64
			var epochs, ranks int
			var backend, params string
			line := strings.NewReplacer("backend=", "backend= ", "params=", "params= ").Replace(
				lastLine(printed))
			if _, err := fmt.Sscanf(line, "accuracy=%f loss=%f epochs=%d ranks=%d backend= %s "+
				"params= %s seconds=%f", &accuracy, &loss, &epochs, &ranks, &backend, &params,
				&seconds); err != nil {
				t.Fatalf("rank 0 printed %q: %v", printed, err)
			}
			if accuracy < tt.want || epochs != tt.epochs || ranks != 2 || backend != "host" ||
				len(params) != 64 {
				t.Errorf("rank 0 printed %q, want an accuracy of %v", printed, tt.want)
			}
		})
	}
}

func TestBadArguments(t *testing.T) {
	good := config{model: "mlp", machine: "plan", device: "cpu", epochs: 1, batch: 48,
		solver: "adam", lr: 0.003, seed: 1, compress: "none"}
	for want, change := range map[string]func(*config){
		"unknown model \"rnn\": use mlp or cnn": func(c *config) { c.model = "rnn" },
		"does not divide into 2 parts":          func(c *config) { c.batch = 47 },
		"1 micro-batches for rank": func(c *config) {
			c.reduction, c.microBatches = "tree", 1
		},
		"--device gpu: backend host has no GPU": func(c *config) { c.device = "gpu" },
		"do not make a batch of 2000":           func(c *config) { c.batch = 2000 },
	} {
		cfg := good
		change(&cfg)
		_, err := train(2, cfg)
		if err == nil || !strings.Contains(err.Error(), want) || exit.Of(err) != exit.Usage {
			t.Errorf("error %v, exit status %d, want %q", err, exit.Of(err), want)
		}
	}
}

// defaults returns what demo does without flags, with a change.
func defaults(t *testing.T, change func(*config)) config {
	t.Helper()
	cfg, err := parseFlags(nil)
	if err != nil {
		t.Fatal(err)
	}
	change(&cfg)
	return cfg
}

// What could be known from the command line alone is said before any rank waits for another.
func TestFlagsThatCannotBe(t *testing.T) {
	for want, change := range map[string]func(*config){
		"--epochs is 0":                     func(c *config) { c.epochs = 0 },
		"--lr is -1":                        func(c *config) { c.lr = -1 },
		"--solver lion: use sgd, momen":     func(c *config) { c.solver = "lion" },
		"--epochs is 9223372036854775807":   func(c *config) { c.epochs = math.MaxInt },
		"--batch is 0":                      func(c *config) { c.batch = 0 },
		"--schedule linear: use constant":   func(c *config) { c.schedule = "linear" },
		"--save-every is 3: it must be":     func(c *config) { c.saveEvery = 3 },
		"--model: unknown model \"rnn\"":    func(c *config) { c.model = "rnn" },
		"a top-k of density 2":              func(c *config) { c.compress = "topk=2" },
		"--compress gzip: use none":         func(c *config) { c.compress = "gzip" },
		"--reduction sum: use rank or tree": func(c *config) { c.reduction = "sum" },
		"--micro-batches is 7: a batch of": func(c *config) {
			c.reduction, c.microBatches = "tree", 7
		},
		"tree is for plans: leave out --machine tape": func(c *config) {
			c.reduction, c.machine = "tree", "tape"
		},
		"sends whole gradients: leave out": func(c *config) {
			c.reduction, c.partial = "tree", true
		},
		"--steps is -1: it must be 1 to": func(c *config) { c.steps = -1 },
		"--partial sends weights and no gr": func(c *config) {
			c.partial, c.compress = true, "f16"
		},
	} {
		if err := defaults(t, change).check(nil); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	if err := defaults(t, func(*config) {}).check([]string{"4"}); err == nil ||
		!strings.Contains(err.Error(), "no arguments are taken") {
		t.Errorf("an argument gives the error %v", err)
	}
}

func TestADivergedTrainingIsAnError(t *testing.T) {
	printed, err := train(2, defaults(t, func(c *config) { c.epochs, c.lr = 3, 1e30 }))
	if err == nil ||
		!strings.Contains(err.Error(), "the training has diverged: use a smaller --lr") ||
		strings.Contains(printed, "accuracy") {
		t.Errorf("%v, and rank 0 printed %q", err, printed)
	}
}

func TestSolversLearn(t *testing.T) {
	unlessShort(t)
	for _, solver := range []string{"sgd", "momentum", "adamw", "adam --schedule cosine"} {
		cfg, err := parseFlags(append([]string{"--epochs", "10", "--solver"},
			strings.Fields(solver)...))
		if err != nil {
			t.Fatal(err)
		}
		printed, err := train(2, cfg)
		if err != nil || !strings.HasPrefix(lastLine(printed), "accuracy=0.9") {
			t.Errorf("%s: rank 0 printed %q (%v)", solver, lastLine(printed), err)
		}
		t.Log(solver, lastLine(printed))
	}
}

func TestHeldOutImagesAreNotTrainedOn(t *testing.T) {
	train, heldOut, err := handwritten.Load(3, []int{pixels})
	if err != nil {
		t.Fatal(err)
	}
	if heldOut.Count() != 359 || train.Count() != 1797-359 {
		t.Fatalf("%d and %d images", train.Count(), heldOut.Count())
	}
	seen := map[string]bool{}
	for row := range slices.Chunk(train.Images.Data().([]float32), pixels) {
		seen[fmt.Sprint(row)] = true
	}
	for row := range slices.Chunk(heldOut.Images.Data().([]float32), pixels) {
		if seen[fmt.Sprint(row)] {
			t.Errorf("a held-out image is also trained on: %v", row)
		}
	}
	again, _, err := handwritten.Load(3, []int{pixels})
	if err != nil || !slices.Equal(again.Classes, train.Classes) ||
		!slices.Equal(again.Images.Data().([]float32), train.Images.Data().([]float32)) {
		t.Errorf("the same seed gives other images (%v)", err)
	}
}

// A limit of steps may end in the middle of an epoch, from where a training goes on.
func TestStepsEndInTheMiddleOfAnEpoch(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	run := func(steps int, dir string) string {
		printed, err := train(2, defaults(t, func(c *config) {
			c.batch, c.steps, c.checkpoint, c.reduction = 64, steps, dir, "tree"
		}))
		if err != nil {
			t.Fatal(err)
		}
		return printed
	}
	if printed := run(25, dir); !strings.Contains(printed, "epoch 2/2, step 3 of 22: ") ||
		!strings.Contains(lastLine(printed), " epochs=1 ") {
		t.Errorf("25 steps of 22 in an epoch print %q", printed)
	}
	if got, want := params(t, run(40, dir)), params(t, run(40, "")); got != want {
		t.Errorf("25 and then 15 steps end with %s, 40 with %s", got, want)
	}
}
