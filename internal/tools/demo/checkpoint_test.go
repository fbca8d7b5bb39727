package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/euryale-ml/euryale/internal/exit"
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
		err := tr.train(t.Context(), epochs)
		mine := &all[tr.comm.Rank()]
		mine.loss, mine.resumed = tr.past.Loss, tr.resumed.Epochs
		for _, p := range tr.net.params {
			mine.weights = append(mine.weights, slices.Clone(p.Value().Data().([]float32)))
		}
		return err
	})
	return all
}

// A training that was stopped after two epochs, and in the middle of a Save, ends with the bits of
// one that was not.
func TestAStoppedTrainingGoesOnToTheSameBits(t *testing.T) {
	for name, change := range map[string]func(*config){
		"dense":   func(*config) {},
		"top-k":   func(c *config) { c.compress = "topk=0.05" },
		"partial": func(c *config) { c.partial = true },
	} {
		t.Run(name, func(t *testing.T) {
			cfg := defaults(t, func(c *config) {
				c.solver, c.lr = "momentum", rates["momentum"]
				change(c)
			})
			want := keeps(t, cfg, 4)

			cfg.checkpoint = filepath.Join(t.TempDir(), "state")
			keeps(t, cfg, 2)
			keeps(t, cfg, 3)
			left := filepath.Join(cfg.checkpoint,
				".euryale-saving-0123456789abcdef0123456789abcdef")
			if err := errors.Join(os.Mkdir(left, 0o777),
				os.WriteFile(filepath.Join(left, "made-by-save"), nil, 0o666)); err != nil {
				t.Fatal(err)
			}
			for _, resumed := range []int{3, 4} { // the second time there is nothing left to do
				for r, got := range keeps(t, cfg, 4) {
					if got.resumed != resumed {
						t.Errorf("rank %d going on after epoch %d, want %d", r, got.resumed,
							resumed)
					}
					if got.loss != want[r].loss || !slices.EqualFunc(got.weights, want[r].weights,
						slices.Equal) {
						t.Errorf("rank %d ends with other bits than without a stop, and a loss "+
							"of %v instead of %v", r, got.loss, want[r].loss)
					}
				}
			}
			if _, err := os.Stat(left); err == nil {
				t.Error("what an interrupted Save has left is still there")
			}
		})
	}
}

// A training that one rank is told to end in the middle of an epoch is saved on all of them
// after the same step, and goes on from there to the bits of one that was not stopped.
func TestFoundASignalLosesTheEpoch(t *testing.T) {
	const stopAt = 40 // of 29 steps an epoch
	for _, solver := range []string{"sgd", "momentum", "adam", "adamw"} {
		t.Run(solver, func(t *testing.T) {
			cfg := defaults(t, func(c *config) {
				c.solver, c.lr, c.epochs, c.schedule = solver, rates[solver], 2, "cosine"
			})
			want := keeps(t, cfg, 2)

			cfg.checkpoint = filepath.Join(t.TempDir(), "state")
			ctx, cancel := context.WithCancelCause(t.Context())
			trainEach(t, 4, cfg, func(tr *trainer) error {
				mine, rate := t.Context(), tr.rate
				if tr.comm.Rank() == 2 {
					mine = ctx
					tr.rate = func(step int) float64 {
						if step == stopAt {
							cancel(exit.Stopped(exit.Signal + int(syscall.SIGINT)))
						}
						return rate(step)
					}
				}
				err := tr.train(mine, 2)
				if exit.Of(err) != exit.Signal+int(syscall.SIGINT) {
					return fmt.Errorf("it ends with %v", err)
				}
				if got := tr.past.Epochs*tr.sampler.Steps() + tr.past.Step; got != stopAt+1 {
					return fmt.Errorf("it ends after %d steps, want %d", got, stopAt+1)
				}
				return nil
			})
			for r, got := range keeps(t, cfg, 2) {
				if got.resumed != 1 || math.Abs(got.loss-want[r].loss) > 1e-12 ||
					!slices.EqualFunc(got.weights, want[r].weights, slices.Equal) {
					t.Errorf("rank %d ends with other bits than without a stop, or a loss of %v "+
						"instead of %v", r, got.loss, want[r].loss)
				}
			}
		})
	}
}

// The checkpoint of every few steps is one that a training goes on from.
func TestFoundACheckpointIsSavedOnlyByEpoch(t *testing.T) {
	cfg := defaults(t, func(c *config) { c.epochs, c.saveEvery = 2, 7 })
	want := keeps(t, cfg, 2)
	cfg.checkpoint = filepath.Join(t.TempDir(), "state")
	lost := errors.New("as if the process had been killed")
	trainEach(t, 4, cfg, func(tr *trainer) error {
		rate := tr.rate
		tr.rate = func(step int) float64 {
			if step == 40 {
				panic(lost)
			}
			return rate(step)
		}
		defer func() {
			if got := recover(); got != lost {
				panic(got)
			}
		}()
		return tr.train(t.Context(), 2)
	})
	var kept past
	trainEach(t, 4, cfg, func(tr *trainer) error {
		err := tr.resume(2)
		if tr.comm.Rank() == 0 {
			kept = tr.resumed
		}
		return err
	})
	if kept.Epochs != 1 || kept.Step != 7 {
		t.Errorf("it goes on after %v, want epoch 2, step 7", kept)
	}
	for r, got := range keeps(t, cfg, 2) {
		if !slices.EqualFunc(got.weights, want[r].weights, slices.Equal) {
			t.Errorf("rank %d ends with other bits than without a stop", r)
		}
	}
}

func TestWhereATrainingGoesOnIsSaid(t *testing.T) {
	cfg := defaults(t, func(c *config) {
		c.solver, c.lr, c.epochs = "momentum", rates["momentum"], 1
	})
	cfg.checkpoint = t.TempDir() // empty: it begins anew
	first, err := train(2, cfg)
	if err != nil || strings.Contains(first, "going on") {
		t.Errorf("rank 0 printed %q (%v)", first, err)
	}
	cfg.epochs = 2
	second, err := train(2, cfg)
	if want := fmt.Sprintf("going on after epoch 1, from %s\n", cfg.checkpoint); err != nil ||
		!strings.HasPrefix(withoutEpochs(second), want) || !strings.Contains(second, " epochs=2 ") {
		t.Errorf("rank 0 printed %q (%v), want %q", second, err, want)
	}
	for want, change := range map[string]func(*config){
		"of a training with --seed=1, and this one is with --seed=2: ": func(c *config) {
			c.seed = 2
		},
		"it is after epoch 2, and --epochs is 1": func(c *config) {
			c.epochs = 1
		},
		"in the checkpoint gradients are compressed by nothing, in this program": func(c *config) {
			c.compress = "topk=0.05"
		},
	} {
		other := cfg
		change(&other)
		if _, err := train(2, other); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

// A directory may hold other files, such as the logs of the job; a file is no directory.
func TestOtherFilesAreLeftAlone(t *testing.T) {
	dir := t.TempDir()
	letter := filepath.Join(dir, "logs", "letter")
	if err := errors.Join(os.Mkdir(filepath.Dir(letter), 0o777),
		os.WriteFile(letter, []byte("mine"), 0o666)); err != nil {
		t.Fatal(err)
	}
	cfg := defaults(t, func(c *config) { c.solver, c.epochs, c.checkpoint = "momentum", 3, dir })
	for range 2 { // it begins, and goes on
		if _, err := train(2, cfg); err != nil {
			t.Error(err)
		}
		cfg.epochs++
	}
	cfg.checkpoint = letter
	want := "cannot go on from " + letter + " (to begin anew, name another directory): "
	if _, err := train(2, cfg); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("the error is %v", err)
	}
	if text, err := os.ReadFile(letter); err != nil || string(text) != "mine" {
		t.Errorf("the user's file is %q: %v", text, err)
	}
}

// Whoever moves a checkpoint away begins anew.
func TestAMovedCheckpointBeginsAnew(t *testing.T) {
	cfg := defaults(t, func(c *config) {
		c.solver, c.epochs, c.checkpoint = "momentum", 1, filepath.Join(t.TempDir(), "state")
	})
	if _, err := train(2, cfg); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(cfg.checkpoint, cfg.checkpoint+".old"); err != nil {
		t.Fatal(err)
	}
	if said, err := train(2, cfg); err != nil || strings.Contains(said, "going on") {
		t.Errorf("rank 0 printed %q: %v", said, err)
	}
	cfg.checkpoint, cfg.epochs = cfg.checkpoint+".old", 2
	if said, err := train(2, cfg); err != nil || !strings.Contains(said, "going on after epoch 1") {
		t.Errorf("from what was moved rank 0 printed %q: %v", said, err)
	}
}
