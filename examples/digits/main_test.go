package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/internal/launch"
	"github.com/euryale-ml/euryale/internal/testing/exampletest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

// last is what the example ends with.
var last = regexp.MustCompile(
	`is a \d\n.*accuracy=(\S+) ranks=(\d+) backend=host params=(\w{64})\n$`)

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
		end := exampletest.Numbers(t, exampletest.Ending(t, last, said)[1:3]...)
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

// TestARankThatIsToldToEndIsStartedAgain: by the launcher, unless that was told to end, too, or
// there are no restarts. All ranks end together, and the next start goes on behind their epochs.
func TestARankThatIsToldToEndIsStartedAgain(t *testing.T) {
	whole := exampletest.Train(t, 2, "-epochs 8")
	for _, test := range []struct {
		launcher                   syscall.Signal // that it gets, in place of rank 1
		restarts, status, attempts int
	}{
		{0, 1, 0, 2}, {0, 0, exampletest.Told, 1}, {syscall.SIGTERM, 1, exampletest.Told, 1},
		{syscall.SIGINT, 1, exit.Signal + int(syscall.SIGINT), 1},
	} {
		t.Run(fmt.Sprintf("%+v", test), func(t *testing.T) {
			dir, signals := t.TempDir(), make(chan os.Signal, 1)
			checkpoint := " -checkpoint " + filepath.Join(dir, "state")
			j, attempts := exampletest.New(t, 2, "-epochs 8"+checkpoint), 1
			j.Program, j.Args = "/bin/sh", append([]string{"-c", `echo $$ >"$0/$RANK"; exec "$@"`,
				dir, j.Program}, j.Args...)
			j.Grace, j.MaxRestarts, j.Signals = time.Minute, test.restarts, signals
			j.Notice = func(string) { attempts++ }
			j.Out.Text, j.Out.Then = "epoch 2/", func() {
				if test.launcher != 0 {
					signals <- test.launcher
					return
				}
				text, err := os.ReadFile(filepath.Join(dir, "1"))
				pid, wrong := strconv.Atoi(strings.TrimSpace(string(text)))
				p, failed := os.FindProcess(pid)
				require.Report(t, errors.Join(err, wrong, failed))
				exampletest.End(t, p)
			}
			err := launch.Run(t.Context(), j.Job)
			require.Equal(t, "the exit status", euryale.ExitStatus(err), test.status)
			require.Equal(t, "attempts", attempts, test.attempts)
			interrupted := (*launch.Interrupted)(nil)
			require.Equal(t, "the launcher was told to end", errors.As(err, &interrupted),
				test.launcher != 0)
			said := j.Out.String()
			if err == nil {
				require.Equal(t, "the end", exampletest.Outcome.FindString(said),
					exampletest.Outcome.FindString(whole))
				return
			}
			require.Check(t, !strings.Contains(said, "accuracy=") &&
				strings.Contains(j.Errs.String(), "digits: fit: stopped by a signal ("),
				"it says\n%s%s", said, &j.Errs)
			said = exampletest.Train(t, 2, "-epochs 1"+checkpoint)
			require.Check(t, !strings.Contains(said, "] epoch "),
				"it does not go on behind the epochs of before:\n%s", said)
		})
	}
}

func TestATrainingThatIsToldToEndIsNotFinished(t *testing.T) {
	exampletest.ToldToEnd(t, "-epochs 8", "epoch 2/", "")
}

func TestUnknownDeviceIsAnError(t *testing.T) {
	_ = exampletest.New(t, 1, "-device tpu").Refused(t, "--device tpu: use auto or cpu")
}

// TestElasticRanksEndWithTheParametersOfOthers: one is killed, then all are told to end and save,
// and the next start, on another number of ranks, goes on and ends as a single rank does.
func TestElasticRanksEndWithTheParametersOfOthers(t *testing.T) {
	elastic := func(ranks int, flags string, environ ...string) *exampletest.Job {
		j := exampletest.New(t, ranks, "-elastic "+flags, environ...)
		j.Elastic, j.Grace = &launch.Elastic{Least: 1, Standby: 1}, time.Minute
		return j
	}
	want := exampletest.Ending(t, last, elastic(1, "-epochs 60").Run(t))
	dir := filepath.Join(t.TempDir(), "state")
	signals := make(chan os.Signal, 1)
	running := elastic(3, "-epochs 1000000 -checkpoint "+dir, "EURYALE_FAULT=kill,rank=1,call=150")
	running.Signals = signals
	running.Out.Text, running.Out.Then = "epoch 4/", func() { signals <- syscall.SIGTERM }
	err := running.Refused(t, "after step ")
	interrupted := (*launch.Interrupted)(nil)
	require.That(t, errors.As(err, &interrupted) && strings.Contains(running.Errs.String(), "[3] "),
		"it ends with %v, or the standby takes no part:\n%s", err, &running.Errs)
	said := elastic(2, "-epochs 60 -checkpoint "+dir).Run(t)
	got := exampletest.Ending(t, last, said)
	if strings.Contains(said, "epoch 1/") || got[1] != want[1] || got[3] != want[3] {
		t.Errorf("it ends with %q, want %q, or begins anew:\n%s", got[1:], want[1:], said)
	}
}
