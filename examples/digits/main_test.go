package main

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
)

// train runs the example on ranks of this process and returns what they print.
func train(ranks int, cfg config) (string, error) {
	out := make([]bytes.Buffer, ranks)
	err := euryale.Run(context.Background(), ranks, func(comm backend.Communicator, build sync.Locker) error {
		return run(comm, build, cfg, &out[comm.Rank()])
	})
	for r := 1; r < ranks; r++ {
		if out[r].Len() > 0 {
			return "", fmt.Errorf("rank %d printed %q", r, out[r].String())
		}
	}
	return out[0].String(), err
}

func TestTwoRanksLearn(t *testing.T) {
	for _, tt := range []struct {
		model  string
		epochs int
		want   float64 // accuracy
	}{{"mlp", 15, 0.96}, {"cnn", 6, 0.9}} {
		t.Run(tt.model, func(t *testing.T) {
			printed, err := train(2, config{model: tt.model, epochs: tt.epochs, batch: 48, solver: "adam", lr: 0.003, seed: 1, compress: "none"})
			if err != nil {
				t.Fatal(err)
			}
			var accuracy, loss, seconds float64
			var epochs, ranks int
			var backend string
			line := strings.NewReplacer("backend=", "backend= ").Replace(printed)
			if _, err := fmt.Sscanf(line, "accuracy=%f loss=%f epochs=%d ranks=%d backend= %s seconds=%f\n", &accuracy, &loss, &epochs, &ranks, &backend, &seconds); err != nil {
				t.Fatalf("rank 0 printed %q: %v", printed, err)
			}
			if accuracy < tt.want || epochs != tt.epochs || ranks != 2 || backend != "host" {
				t.Errorf("rank 0 printed %q, want an accuracy of %v", printed, tt.want)
			}
		})
	}
}

func TestBadArguments(t *testing.T) {
	good := config{model: "mlp", epochs: 1, batch: 48, solver: "adam", lr: 0.003, seed: 1, compress: "none"}
	for want, change := range map[string]func(*config){
		"unknown model \"rnn\": use mlp or cnn": func(c *config) { c.model = "rnn" },
		"does not divide among 2 ranks":         func(c *config) { c.batch = 47 },
		"do not make a batch of 2000":           func(c *config) { c.batch = 2000 },
	} {
		cfg := good
		change(&cfg)
		if _, err := train(2, cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

// defaults returns what digits does without flags, with a change.
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
		"--solver sgd: use adam or":         func(c *config) { c.solver = "sgd" },
		"--compress gzip: use none":         func(c *config) { c.compress = "gzip" },
		"--partial sends weights and no gr": func(c *config) { c.partial, c.compress = true, "f16" },
		"--checkpoint: the state of Gorgon": func(c *config) { c.checkpoint = "state" },
	} {
		if err := defaults(t, change).check(nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	if err := defaults(t, func(*config) {}).check([]string{"4"}); err == nil || !strings.Contains(err.Error(), "no arguments are taken") {
		t.Errorf("an argument gives the error %v", err)
	}
}

func TestMomentumLearns(t *testing.T) {
	unlessShort(t)
	cfg, err := parseFlags([]string{"--solver", "momentum"})
	if err != nil {
		t.Fatal(err)
	}
	printed, err := train(2, cfg)
	if err != nil || !strings.HasPrefix(printed, "accuracy=0.98") {
		t.Errorf("rank 0 printed %q (%v)", printed, err)
	}
}

func TestHeldOutImagesAreNotTrainedOn(t *testing.T) {
	train, heldOut, err := load(3)
	if err != nil {
		t.Fatal(err)
	}
	if len(heldOut) != 359 || len(train) != 1797-359 {
		t.Fatalf("%d and %d images", len(train), len(heldOut))
	}
	for i, im := range heldOut {
		if slices.Contains(train, im) {
			t.Errorf("held-out image %d, a %d, is also trained on", i, im.label)
		}
	}
	again, _, err := load(3)
	if err != nil || !slices.Equal(again, train) {
		t.Errorf("the same seed gives other images (%v)", err)
	}
}
