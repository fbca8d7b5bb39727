//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// The processes of jobs are this test binary.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == roleTrain {
		if err := train(context.Background(), os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func TestAJobWhoseProcessesAreKilledEndsAsOneWithout(t *testing.T) {
	root, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(root)
	c := config{minutes: 0.01, seed: 1, model: "digits", steps: 60, ranks: 2, spares: 1, least: 1,
		mean: 100 * time.Millisecond}
	if os.Getenv("EURYALE_FULL") != "" {
		c.minutes, c.stops, c.steps, c.mean = 1, 5, 1500, 400*time.Millisecond
		for _, c.model = range []string{"convnet", "gpt", "digits"} {
			killed(t, c)
		}
		c.args = "-after"
	}
	killed(t, c)
}

// killed runs jobs.
func killed(t *testing.T, c config) {
	v, err := immortal(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	if t.Log(v); v.kills == 0 {
		t.Error("nobody was killed")
	}
}
