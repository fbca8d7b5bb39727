package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/internal/testing/exampletest"
	"github.com/euryale-ml/euryale/rendezvous/launch"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

// learned looks for the last line of rank 0, which other ranks may have written behind.
func learned(t *testing.T, printed, ranks string) {
	t.Helper()
	want := regexp.MustCompile(`(?m)^(\[0\] )?accuracy=0\.9\d+ loss=\S+ epochs=\d+ ranks=` + ranks +
		` backend=host params=[0-9a-f]{64} seconds=\S+$`)
	if !want.MatchString(printed) {
		t.Errorf("there is no line %v in %q", want, printed)
	}
}

func TestFourProcessesLearn(t *testing.T) {
	learned(t, exampletest.Train(t, 4, "--epochs 10"), "4")
}

// With --topology each bucket of each step is reduced inside machines and between them, and
// parameters are broadcast so.
func TestFourProcessesOfTwoMachinesLearn(t *testing.T) {
	const epochs = 10
	printed := exampletest.Train(t, 4, fmt.Sprint("--topology 2x2 --epochs ", epochs))
	learned(t, printed, "4")
	var hierarchical, flat int
	rest := withoutEpochs(strings.ReplaceAll(printed, "[0] ", ""))
	if _, err := fmt.Sscanf(rest, "%d collectives inside and between machines, %d among all",
		&hierarchical, &flat); err != nil {
		t.Fatalf("rank 0 printed %q: %v", printed, err)
	}
	const steps = (1797 - 359) / 48 // of an epoch
	if hierarchical < epochs*steps || flat != 0 {
		t.Errorf("rank 0 printed %q, want %d or more inside and between machines", printed,
			epochs*steps)
	}
}

// A topology of other ranks is an error that says so, and no training.
func TestATopologyOfOtherRanksIsAnError(t *testing.T) {
	j := exampletest.New(t, 4, "--epochs 1 --topology 3x2")
	_ = j.Refused(t, "there are 4")
	if said := j.Errs.String(); !strings.Contains(said, "3x2") ||
		strings.Contains(j.Out.String(), "accuracy") {
		t.Errorf("it prints %q and %s", j.Out.String(), said)
	}
}

func TestFourProcessesOfMpirunLearn(t *testing.T) {
	if _, err := exec.LookPath("mpirun"); err != nil {
		t.Skip("needs mpirun (Debian: openmpi-bin)")
	}
	cmd := exec.Command("mpirun", "--oversubscribe", "-n", "4", exampletest.Program(t),
		"--epochs", "10")
	cmd.Env = append(os.Environ(), "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	learned(t, string(out), "4")
}

func TestFoundSIGTERMSavesTheTraining(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	signals := make(chan os.Signal, 1)
	j := exampletest.New(t, 2, "--epochs 100000 --checkpoint "+dir)
	j.Out.Text, j.Out.Then = "epoch 2/", func() { signals <- syscall.SIGTERM }
	j.Signals, j.Grace = signals, time.Minute
	err := j.Refused(t, "")
	var stopped *launch.Interrupted
	if said := j.Out.String(); !errors.As(err, &stopped) || j.Errs.Len() > 0 ||
		!strings.Contains(said, "saved in "+dir+" after epoch ") {
		t.Errorf("it ends with %v: %q %q", err, said, j.Errs.String())
	}
	if saved, _ := filepath.Glob(filepath.Join(dir, "step-*", "checkpoint.json")); len(saved) == 0 {
		t.Error("there is no checkpoint")
	}
}

// params returns the hash in the last line.
func params(t *testing.T, printed string) string {
	t.Helper()
	_, rest, ok := strings.Cut(lastLine(printed), " params=")
	hash, _, _ := strings.Cut(rest, " ")
	if !ok || len(hash) != 64 {
		t.Fatalf("there is no hash in %q", lastLine(printed))
	}
	return hash
}

// Loss and parameters have the same bits on any number of cores, and with --reduction tree on any
// number of ranks; by rank, another number of ranks has others.
func TestTheSameBitsOnAnyCoresAndRanks(t *testing.T) {
	end := func(flags string, ranks, cores int) string {
		j := exampletest.New(t, ranks, "--batch 64 --steps 30 "+flags,
			fmt.Sprint("GOMAXPROCS=", cores))
		if ranks%2 == 1 {
			j.Env = append(j.Env, "EURYALE_BACKEND=tcp")
		}
		printed := j.Run(t)
		_, loss, _ := strings.Cut(lastLine(printed), " loss=")
		loss, _, _ = strings.Cut(loss, " ")
		return loss + " " + params(t, printed)
	}
	type run struct{ ranks, cores int }
	byRank := [][]run{{{1, 1}, {1, 2}}, {{2, 1}, {2, 2}}}
	inTree := []run{{1, 1}, {1, 2}, {2, 2}, {3, 1}, {4, 1}, {7, 1}}
	steps := ""
	if os.Getenv("EURYALE_FULL") == "1" {
		steps = " --steps 200"
		for _, cores := range []int{1, 2, 4} {
			inTree = append(inTree, run{1, cores}, run{2, cores}, run{4, cores}, run{5, cores},
				run{6, cores}, run{8, cores})
		}
	}
	for flags, groups := range map[string][][]run{
		"--model cnn --steps 5":        byRank,
		"--reduction tree" + steps:     {inTree},
		"--reduction tree --model cnn": {inTree[2:]},
	} {
		first := map[string]bool{}
		for _, runs := range groups {
			want := end(flags, runs[0].ranks, runs[0].cores)
			first[want] = true
			for _, r := range runs[1:] {
				if got := end(flags, r.ranks, r.cores); got != want {
					t.Errorf("%s: %+v ends with %s, %+v with %s", flags, r, got, runs[0], want)
				}
			}
		}
		if len(first) < len(groups) {
			t.Errorf("%s: 1 and 2 ranks end with the same bits: this test shows nothing", flags)
		}
	}
}

// A rank is killed, all are started anew, and the parameters equal those of a training that
// nothing has disturbed.
func TestFoundATrainingDoesNotOutliveARank(t *testing.T) {
	run := func(environ ...string) string {
		j := exampletest.New(t, 2, "--solver adam --epochs 4 --save-every 10 --checkpoint "+
			filepath.Join(t.TempDir(), "state"), environ...)
		j.MaxRestarts = 1
		return j.Run(t)
	}
	want, got := run(), run("EURYALE_FAULT=kill,rank=1,call=200")
	if !strings.Contains(got, "going on after epoch ") || params(t, got) != params(t, want) {
		t.Errorf("it ends with\n%swithout a fault\n%s", got, want)
	}
}

func TestFoundUsageErrorsEndWithTwo(t *testing.T) {
	demo := exampletest.Program(t)
	for _, args := range []string{"--solver lion", "--compress topk=2", "--batch 1e3", "extra",
		"--batch 2000"} {
		cmd := exec.Command(demo, strings.Fields(args)...)
		said, err := cmd.CombinedOutput()
		if cmd.ProcessState.ExitCode() != exit.Usage {
			t.Errorf("%s: %v: %s", args, err, said)
		}
	}
}

// Under euryale run, standard error is no terminal of rank 0, but shown on one.
func TestFoundTheProgressBarNeverShowsUnderTheLauncher(t *testing.T) {
	demo := exampletest.Program(t)
	for terminal, want := range map[string]bool{"1": true, "": false} {
		cmd := exec.Command(demo, "--epochs", "1")
		cmd.Env = append(os.Environ(), "EURYALE_TERMINAL="+terminal)
		var errs bytes.Buffer
		cmd.Stderr = &errs
		if err := cmd.Run(); err != nil || strings.Contains(errs.String(), "\rtraining") != want {
			t.Errorf("EURYALE_TERMINAL=%q: %q (%v)", terminal, errs.String(), err)
		}
	}
}
