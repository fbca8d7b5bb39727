package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// kept is what a training ends with on each rank.
type kept struct {
	weights [][]float32
	loss    float64
	resumed int
}

// keeps trains until there were so many epochs, and returns what the ranks end with.
func keeps(t *testing.T, cfg config, epochs int) []kept {
	t.Helper()
	all := make([]kept, 4)
	trainEach(t, len(all), cfg, func(tr *trainer) error {
		err := tr.train(epochs)
		mine := &all[tr.comm.Rank()]
		mine.loss, mine.resumed = tr.past.Loss, tr.resumed
		for _, p := range tr.net.params {
			mine.weights = append(mine.weights, slices.Clone(p.Value().Data().([]float32)))
		}
		return err
	})
	return all
}

// A training that was stopped after two epochs, and between the two renames of a third Save,
// ends with the bits of one that was not.
func TestAStoppedTrainingGoesOnToTheSameBits(t *testing.T) {
	for name, change := range map[string]func(*config){
		"dense":   func(*config) {},
		"top-k":   func(c *config) { c.compress = "topk=0.05" },
		"partial": func(c *config) { c.partial = true },
	} {
		t.Run(name, func(t *testing.T) {
			cfg := defaults(t, func(c *config) { c.solver, c.lr = "momentum", rates["momentum"]; change(c) })
			want := keeps(t, cfg, 4)

			cfg.checkpoint = filepath.Join(t.TempDir(), "state")
			keeps(t, cfg, 2)
			keeps(t, cfg, 3)
			if err := os.Rename(cfg.checkpoint, cfg.checkpoint+".old"); err != nil {
				t.Fatal(err)
			}
			for _, resumed := range []int{3, 4} { // the second time there is nothing left to do
				for r, got := range keeps(t, cfg, 4) {
					if got.resumed != resumed {
						t.Errorf("rank %d went on after epoch %d, want %d", r, got.resumed, resumed)
					}
					if got.loss != want[r].loss || !slices.EqualFunc(got.weights, want[r].weights, slices.Equal) {
						t.Errorf("rank %d ends with other bits than without a stop, and a loss of %v instead of %v", r, got.loss, want[r].loss)
					}
				}
			}
		})
	}
}

func TestWhereATrainingGoesOnIsSaid(t *testing.T) {
	cfg := defaults(t, func(c *config) { c.solver, c.lr, c.epochs = "momentum", rates["momentum"], 1 })
	cfg.checkpoint = t.TempDir() // empty: it begins anew
	first, err := train(2, cfg)
	if err != nil || strings.Contains(first, "went on") {
		t.Errorf("rank 0 printed %q (%v)", first, err)
	}
	cfg.epochs = 2
	second, err := train(2, cfg)
	if want := fmt.Sprintf("went on after epoch 1, from %s\n", cfg.checkpoint); err != nil || !strings.HasPrefix(second, want) || !strings.Contains(second, " epochs=2 ") {
		t.Errorf("rank 0 printed %q (%v), want %q", second, err, want)
	}
	for want, change := range map[string]func(*config){
		"--seed=1": func(c *config) { c.seed = 2 },
		"it is after 2 epochs, and --epochs is 1":                                func(c *config) { c.epochs = 1 },
		"in the checkpoint gradients are compressed by nothing, in this program": func(c *config) { c.compress = "topk=0.05" },
	} {
		other := cfg
		change(&other)
		if _, err := train(2, other); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

// A directory of something else is not replaced.
func TestOtherFilesAreLeftAlone(t *testing.T) {
	dir := t.TempDir()
	letter := filepath.Join(dir, "letter")
	if err := os.WriteFile(letter, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	for _, checkpoint := range []string{dir, letter} {
		cfg := defaults(t, func(c *config) { c.solver, c.epochs, c.checkpoint = "momentum", 1, checkpoint })
		if _, err := train(2, cfg); err == nil || !strings.Contains(err.Error(), "name another directory") {
			t.Errorf("the error is %v", err)
		}
		if _, err := os.Stat(letter); err != nil {
			t.Error(err)
		}
	}
}
