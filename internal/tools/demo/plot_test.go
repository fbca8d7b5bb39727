package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestThePictureShowsEveryWay(t *testing.T) {
	unlessShort(t)
	file := filepath.Join(t.TempDir(), "loss.svg")
	cfg := config{model: "mlp", machine: "plan", device: "cpu", epochs: 2, batch: 48,
		solver: "adam", lr: 0.003, seed: 1, plot: file}
	if err := drawLosses(cfg); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(string(text), "<?xml") || strings.Contains(string(text), "<text") {
		t.Errorf("the picture is not SVG, or has text that depends on the fonts of the machine: "+
			"%.100s", text)
	}
}

// Seven trainings for nothing are not begun.
func TestPicturesThatCannotBe(t *testing.T) {
	for want, change := range map[string]func(*config){
		"must end in .svg or .png": func(c *config) { c.plot = "loss.gif" },
		"leave out --compress":     func(c *config) { c.compress = "bf16" },
		", --no-feedback":          func(c *config) { c.noFeedback = true },
		", --partial":              func(c *config) { c.partial = true },
		", --topology":             func(c *config) { c.topology = "2x2" },
		" and --checkpoint": func(c *config) {
			c.solver, c.checkpoint = "momentum", "state"
		},
		"no such file or directory": func(c *config) {
			c.plot = filepath.Join(t.TempDir(), "no", "loss.svg")
		},
	} {
		cfg := defaults(t, func(c *config) {
			c.plot = filepath.Join(t.TempDir(), "loss.svg")
			change(c)
		})
		err := cfg.check(nil)
		if err == nil {
			err = drawLosses(cfg)
		}
		if err == nil || !strings.Contains(err.Error(), "--plot") ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	t.Setenv("RANK", "1")
	t.Setenv("WORLD_SIZE", "2")
	t.Setenv("EURYALE_JOB", "by-hand")
	cfg := defaults(t, func(c *config) { c.plot = "loss.PNG" })
	if err := cfg.check(nil); err == nil || !strings.Contains(err.Error(), "not on 2 ranks") {
		t.Errorf("on one of two ranks: %v", err)
	}
}

func TestAPictureIsNotLostToAnError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "loss.svg")
	if err := os.WriteFile(file, []byte("old"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := drawLosses(defaults(t, func(c *config) { c.plot, c.batch = file, 47 })); err == nil {
		t.Error("a batch of 47 is no error")
	}
	if text, err := os.ReadFile(file); string(text) != "old" {
		t.Errorf("the file has %q (%v)", text, err)
	}
}

func TestFewerBytesAreCounted(t *testing.T) {
	cfg := config{model: "mlp", machine: "plan", device: "cpu", epochs: 2, batch: 48,
		solver: "adam", lr: 0.003, seed: 1, plot: "unused"}
	bytes := map[string]float64{}
	for _, compress := range []string{"none", "bf16", "topk=0.05"} {
		cfg.compress = compress
		history, err := historyOf(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if len(history) != 2 || history[1].bytes <= history[0].bytes ||
			history[1].loss >= history[0].loss {
			t.Errorf("%s: the history is %+v", compress, history)
		}
		bytes[compress] = history[1].bytes
	}
	if bytes["bf16"] != bytes["none"]/2 || bytes["topk=0.05"] > 0.21*bytes["none"] {
		t.Errorf("the bytes are %v", bytes)
	}
}
