package main

import (
	"fmt"
	"strings"
	"testing"
)

// score is what training ends with, a mean over seeds.
type score struct{ accuracy, loss, percent float64 }

// scored trains on four ranks, with several seeds: one says little, for a held-out
// image is 0.28 % of accuracy. The same command gives the same score each time.
func scored(t *testing.T, seeds int, change func(*config)) (mean score) {
	t.Helper()
	for seed := range uint64(seeds) {
		cfg := config{model: "mlp", epochs: 15, batch: 48, lr: 0.003, seed: 1 + seed, compress: "none"}
		change(&cfg)
		printed, err := train(4, cfg)
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSpace(printed), "\n")
		var s score
		if _, err := fmt.Sscanf(lines[len(lines)-1], "accuracy=%f loss=%f", &s.accuracy, &s.loss); err != nil {
			t.Fatalf("rank 0 printed %q: %v", printed, err)
		}
		if len(lines) > 1 {
			var sent, dense int
			if _, err := fmt.Sscanf(lines[0], "gradients took %d bytes instead of %d, %f", &sent, &dense, &s.percent); err != nil {
				t.Fatalf("rank 0 printed %q: %v", printed, err)
			}
		}
		mean.accuracy += s.accuracy / float64(seeds)
		mean.loss += s.loss / float64(seeds)
		mean.percent += s.percent / float64(seeds)
	}
	return mean
}

func TestHalfOfTheBytesTrainsAsWell(t *testing.T) {
	dense := scored(t, 1, func(*config) {})
	for _, half := range []string{"f16", "bf16"} {
		s := scored(t, 1, func(c *config) { c.compress = half })
		t.Logf("%s: %+v, dense %+v", half, s, dense)
		if s.accuracy < dense.accuracy-0.003 || s.percent != 50 {
			t.Errorf("%s ends with %+v, dense with %+v", half, s, dense)
		}
	}
}

func TestFivePercentWithFeedbackTrainAsWell(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes nine trainings to see the difference")
	}
	dense := scored(t, 3, func(*config) {})
	topK := scored(t, 3, func(c *config) { c.compress = "topk=0.05" })
	careless := scored(t, 3, func(c *config) { c.compress, c.noFeedback = "topk=0.05", true })
	t.Logf("dense %+v, topk %+v, without feedback %+v", dense, topK, careless)
	if topK.accuracy < dense.accuracy-0.01 || topK.percent > 21 {
		t.Errorf("top-k ends with %+v, dense with %+v", topK, dense)
	}
	if careless.accuracy > topK.accuracy-0.003 || careless.loss < 1.5*topK.loss {
		t.Errorf("without feedback it ends with %+v, with it with %+v", careless, topK)
	}
}

func TestAveragedWeightsTrainToo(t *testing.T) {
	if s := scored(t, 1, func(c *config) { c.partial = true }); s.accuracy < 0.95 {
		t.Errorf("it ends with %+v", s)
	}
}

func TestThresholdTrains(t *testing.T) {
	if s := scored(t, 1, func(c *config) { c.compress = "threshold=0.003" }); s.accuracy < 0.95 || s.percent == 0 {
		t.Errorf("it ends with %+v", s)
	}
}

func TestWrongCompressions(t *testing.T) {
	for want, change := range map[string]func(*config){
		"--compress gzip: use none":        func(c *config) { c.compress = "gzip" },
		"a number is needed, as in topk=0": func(c *config) { c.compress = "topk=" },
		"a top-k of density 2":             func(c *config) { c.compress = "topk=2" },
		"takes no number and no --no-feed": func(c *config) { c.compress, c.noFeedback = "f16", true },
		"leave out WithCompression":        func(c *config) { c.compress, c.partial = "bf16", true },
	} {
		cfg := config{model: "mlp", epochs: 1, batch: 48, lr: 0.003, seed: 1, compress: "none"}
		change(&cfg)
		if _, err := train(2, cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}
