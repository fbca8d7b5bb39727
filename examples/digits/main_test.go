package main

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/rendezvous/launch"
)

// actAsDigits is a variable that makes this test binary the example.
const actAsDigits = "RUN_AS_DIGITS"

func TestMain(m *testing.M) {
	if os.Getenv(actAsDigits) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// job runs the example on ranks that are processes.
func job(t *testing.T, ranks int, flags string) (launch.Job, *proctest.Notice) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out proctest.Notice
	return launch.Job{
		Program: self, Ranks: ranks, Args: strings.Fields(flags), Stdout: &out, Stderr: &out,
		Env: append(os.Environ(), actAsDigits+"=1"),
	}, &out
}

// last is what the example ends with.
var last = regexp.MustCompile(`is a \d\n.*accuracy=(\S+) ranks=(\d+) backend=host\n$`)

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
		job, out := job(t, run.ranks, run.flags)
		if err := launch.Run(t.Context(), job); err != nil {
			t.Fatalf("%d ranks: %v\n%s", run.ranks, err, out)
		}
		said := out.String()
		if !strings.Contains(said, run.first) || strings.Contains(said, run.absent) {
			t.Errorf("%d ranks %s: no %q, or a %q, in\n%s",
				run.ranks, run.flags, run.first, run.absent, said)
		}
		end := last.FindStringSubmatch(said)
		if end == nil || end[2] != strconv.Itoa(run.ranks) {
			t.Fatalf("%d ranks: no accuracy in\n%s", run.ranks, said)
		}
		if accuracy, err := strconv.ParseFloat(end[1], 64); err != nil || accuracy < 0.9 {
			t.Errorf("%d ranks: accuracy %s, %v", run.ranks, end[1], err)
		}
	}
}

// TestTwoRunsPrintTheSame: neither a clock nor a race decides a digit of a loss.
func TestTwoRunsPrintTheSame(t *testing.T) {
	for ranks := 1; ranks <= 2; ranks++ {
		var said [2]string
		for i := range said {
			job, out := job(t, ranks, "-epochs 3")
			if err := launch.Run(t.Context(), job); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			said[i] = out.String()
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
	running, out := job(t, 2, "-epochs 1000000 -checkpoint "+dir)
	running.Signals, running.Grace = signals, time.Minute
	out.Text, out.Then = "epoch 2/", func() { signals <- syscall.SIGINT }
	err := launch.Run(t.Context(), running)
	interrupted := (*launch.Interrupted)(nil)
	if !errors.As(err, &interrupted) || strings.Contains(out.String(), "accuracy=") ||
		!strings.Contains(out.String(), "digits: fit: stopped by a signal (interrupt) after ") {
		t.Fatalf("it ends with %v\n%s", err, out)
	}
	again, said := job(t, 2, "-epochs 1 -checkpoint "+dir)
	if err := launch.Run(t.Context(), again); err != nil ||
		strings.Contains(said.String(), "epoch ") {
		t.Errorf("it does not go on behind the epochs of before: %v\n%s", err, said)
	}
}

func TestUnknownDeviceIsAnError(t *testing.T) {
	job, out := job(t, 1, "-device tpu")
	err := launch.Run(t.Context(), job)
	if err == nil || !strings.Contains(out.String(), "use -device auto or cpu") {
		t.Errorf("%v\n%s", err, out)
	}
}
