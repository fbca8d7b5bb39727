package main

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/exampletest"
	"github.com/euryale-ml/euryale/rendezvous/launch"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

// last is what the example ends with.
var last = regexp.MustCompile(
	`is a \d\n.*accuracy=(\S+) ranks=(\d+) backend=host params=\w{64}\n$`)

// TestRanksLearn: with any number of ranks, and started again with what a checkpoint has.
func TestRanksLearn(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	for _, run := range []struct {
		ranks                int
		flags, first, absent string
	}{
		{1, "-epochs 10", "epoch 1/10: ", "epoch 11/"},
		{2, "-epochs 8 -checkpoint " + dir, "epoch 1/8: ", "epoch 9/"},
		{4, "-epochs 10 -checkpoint " + dir, "epoch 9/10: ", "epoch 8/"},
	} {
		said := exampletest.Train(t, run.ranks, run.flags)
		if !strings.Contains(said, run.first) || strings.Contains(said, run.absent) {
			t.Errorf("%d ranks %s: no %q, or a %q, in\n%s",
				run.ranks, run.flags, run.first, run.absent, said)
		}
		end := exampletest.Numbers(t, exampletest.Ending(t, last, said)[1:]...)
		if end[0] < 0.9 || end[1] != float64(run.ranks) {
			t.Errorf("%d ranks: %v", run.ranks, end)
		}
	}
}

// TestTwoRunsPrintTheSame: neither a clock nor a race decides a digit of a loss.
func TestTwoRunsPrintTheSame(t *testing.T) {
	for ranks := 1; ranks <= 2; ranks++ {
		var said [2]string
		for i := range said {
			said[i] = exampletest.Train(t, ranks, "-epochs 3")
		}
		if said[0] != said[1] || !strings.Contains(said[0], "epoch 3/3: loss=") {
			t.Errorf("%d ranks: one run prints\n%s\nand the other\n%s", ranks, said[0], said[1])
		}
	}
}

// TestAnInterruptSaves: ranks end together after an epoch, and the next start goes on behind it.
func TestAnInterruptSaves(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	signals := make(chan os.Signal, 1)
	running := exampletest.New(t, 2, "-epochs 1000000 -checkpoint "+dir)
	running.Signals, running.Grace = signals, time.Minute
	running.Out.Text, running.Out.Then = "epoch 2/", func() { signals <- syscall.SIGINT }
	err := running.Refused(t, "digits: fit: stopped by a signal (interrupt) after ")
	interrupted := (*launch.Interrupted)(nil)
	if !errors.As(err, &interrupted) || strings.Contains(running.Out.String(), "accuracy=") {
		t.Fatalf("it ends with %v\n%s", err, &running.Out)
	}
	if said := exampletest.Train(t, 2, "-epochs 1 -checkpoint "+dir); strings.Contains(said,
		"epoch ") {
		t.Errorf("it does not go on behind the epochs of before:\n%s", said)
	}
}

func TestUnknownDeviceIsAnError(t *testing.T) {
	_ = exampletest.New(t, 1, "-device tpu").Refused(t, "use -device auto or cpu")
}
