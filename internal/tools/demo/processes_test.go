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
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/rendezvous/launch"
)

// actAsDemo is a variable that makes this test binary the program.
const actAsDemo = "RUN_AS_DEMO"

func TestMain(m *testing.M) {
	if os.Getenv(actAsDemo) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// program returns the program as users run it: this binary, in this test.
func program(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(actAsDemo, "1")
	return self
}

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
	var out, errs bytes.Buffer
	job := launch.Job{Program: program(t), Args: []string{"--epochs", "10"}, Ranks: 4, Stdout: &out,
		Stderr: &errs}
	if err := launch.Run(t.Context(), job); err != nil {
		t.Fatalf("%v: %s", err, errs.String())
	}
	learned(t, out.String(), "4")
}

// With --topology each bucket of each step is reduced inside machines and between them, and
// parameters are broadcast so.
func TestFourProcessesOfTwoMachinesLearn(t *testing.T) {
	const epochs = 10
	var out, errs bytes.Buffer
	job := launch.Job{Program: program(t), Args: []string{"--epochs", fmt.Sprint(epochs),
		"--topology", "2x2"}, Ranks: 4, Stdout: &out, Stderr: &errs}
	if err := launch.Run(t.Context(), job); err != nil {
		t.Fatalf("%v: %s", err, errs.String())
	}
	learned(t, out.String(), "4")
	var hierarchical, flat int
	rest := withoutEpochs(strings.ReplaceAll(out.String(), "[0] ", ""))
	if _, err := fmt.Sscanf(rest, "%d collectives inside and between machines, %d among all",
		&hierarchical, &flat); err != nil {
		t.Fatalf("rank 0 printed %q: %v", out.String(), err)
	}
	const steps = (1797 - 359) / 48 // of an epoch
	if hierarchical < epochs*steps || flat != 0 {
		t.Errorf("rank 0 printed %q, want %d or more inside and between machines", out.String(),
			epochs*steps)
	}
}

// A topology of other ranks is an error that says so, and no training.
func TestATopologyOfOtherRanksIsAnError(t *testing.T) {
	var out, errs bytes.Buffer
	job := launch.Job{Program: program(t), Args: []string{"--epochs", "1", "--topology", "3x2"},
		Ranks: 4, Stdout: &out, Stderr: &errs}
	err := launch.Run(t.Context(), job)
	if said := errs.String(); err == nil || !strings.Contains(said, "3x2") ||
		!strings.Contains(said, "there are 4") {
		t.Errorf("error %v: %s", err, said)
	}
	if strings.Contains(out.String(), "accuracy") {
		t.Errorf("rank 0 printed %q", out.String())
	}
}

func TestFourProcessesOfMpirunLearn(t *testing.T) {
	if _, err := exec.LookPath("mpirun"); err != nil {
		t.Skip("needs mpirun (Debian: openmpi-bin)")
	}
	cmd := exec.Command("mpirun", "--oversubscribe", "-n", "4", program(t), "--epochs", "10")
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
	out := proctest.Notice{Text: "epoch 2/", Then: func() { signals <- syscall.SIGTERM }}
	var errs bytes.Buffer
	job := launch.Job{Program: program(t), Args: []string{"--epochs", "100000", "--checkpoint",
		dir}, Ranks: 2, Stdout: &out, Stderr: &errs, Signals: signals, Grace: time.Minute}
	err := launch.Run(t.Context(), job)
	var stopped *launch.Interrupted
	if !errors.As(err, &stopped) ||
		!strings.Contains(out.String(), "saved in "+dir+" after epoch ") || errs.Len() > 0 {
		t.Errorf("it ends with %v: %q %q", err, out.String(), errs.String())
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
	self := program(t)
	end := func(flags string, ranks, cores int) string {
		var out, errs bytes.Buffer
		job := launch.Job{Program: self, Ranks: ranks,
			Args: strings.Fields("--batch 64 --steps 30 " + flags), Stdout: &out, Stderr: &errs}
		job.Env = append(os.Environ(), fmt.Sprint("GOMAXPROCS=", cores))
		if ranks%2 == 1 {
			job.Env = append(job.Env, "EURYALE_BACKEND=tcp")
		}
		if err := launch.Run(t.Context(), job); err != nil {
			t.Fatalf("%v: %s", err, errs.String())
		}
		_, loss, _ := strings.Cut(lastLine(out.String()), " loss=")
		loss, _, _ = strings.Cut(loss, " ")
		return loss + " " + params(t, out.String())
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
		var out, errs bytes.Buffer
		job := launch.Job{
			Program: program(t), Ranks: 2, MaxRestarts: 1, Env: append(os.Environ(), environ...),
			Stdout: &out, Stderr: &errs,
			Args: []string{"--solver", "adam", "--epochs", "4", "--checkpoint",
				filepath.Join(t.TempDir(), "state"), "--save-every", "10"},
		}
		if err := launch.Run(t.Context(), job); err != nil {
			t.Fatalf("%v: %s", err, errs.String())
		}
		return out.String()
	}
	want, got := run(), run("EURYALE_FAULT=kill,rank=1,call=200")
	if !strings.Contains(got, "going on after epoch ") || params(t, got) != params(t, want) {
		t.Errorf("it ends with\n%swithout a fault\n%s", got, want)
	}
}

func TestFoundUsageErrorsEndWithTwo(t *testing.T) {
	demo := program(t)
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
	demo := program(t)
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
