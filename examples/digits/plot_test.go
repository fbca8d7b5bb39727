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
	cfg := config{model: "mlp", epochs: 2, batch: 48, lr: 0.003, seed: 1, plot: file}
	if err := drawLosses(cfg); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, way := range ways {
		if !strings.Contains(string(text), way.compress) {
			t.Errorf("%s is not in the picture", way.compress)
		}
	}
}

func TestFewerBytesAreCounted(t *testing.T) {
	cfg := config{model: "mlp", epochs: 2, batch: 48, lr: 0.003, seed: 1, plot: "unused"}
	bytes := map[string]float64{}
	for _, compress := range []string{"none", "bf16", "topk=0.05"} {
		cfg.compress = compress
		history, err := historyOf(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if len(history) != 2 || history[1].bytes <= history[0].bytes || history[1].loss >= history[0].loss {
			t.Errorf("%s: the history is %+v", compress, history)
		}
		bytes[compress] = history[1].bytes
	}
	if bytes["bf16"] != bytes["none"]/2 || bytes["topk=0.05"] > 0.21*bytes["none"] {
		t.Errorf("the bytes are %v", bytes)
	}
}
