//go:build linux

package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestAJobWhoseProcessesAreKilledEndsAsOneWithout(t *testing.T) {
	root, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(root)
	c := config{minutes: 0.1, seed: 1, runs: 1, ranks: 2, spares: 1, least: 1}
	ways := []string{""}
	if os.Getenv("EURYALE_FULL") != "" {
		c.minutes, c.stops = 2, 5
		ways = append(ways, "-after")
	}
	for _, c.args = range ways {
		v, err := immortal(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		if t.Log(v); v.kills == 0 {
			t.Error("nobody was killed")
		}
	}
}
