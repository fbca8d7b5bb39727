package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/examples/cli"
	"github.com/euryale-ml/euryale/rendezvous/launch"
)

// actAsGPT is a variable that makes this test binary the example.
const actAsGPT = "RUN_AS_GPT"

func TestMain(m *testing.M) {
	if os.Getenv(actAsGPT) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// processes runs the example as processes, which are started anew once.
func processes(t *testing.T, ranks int, flags, environ string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	job := launch.Job{Program: self, Ranks: ranks, MaxRestarts: 1, Args: strings.Fields(flags), Stdout: &out, Stderr: &errs}
	job.Env = append(os.Environ(), actAsGPT+"=1", environ)
	if err := launch.Run(t.Context(), job); err != nil {
		t.Fatalf("%v: %s", err, errs.String())
	}
	return out.String()
}

// TestALostRankChangesNothing: a rank is killed, all are started anew, and the parameters are those of a
// training that nothing has disturbed, also where each rank has a part of them.
func TestALostRankChangesNothing(t *testing.T) {
	for layout, call := range map[string]int{"--dp 2": 40, "--tp 2": 200} { // in about step 6
		var params []string
		for _, fault := range []string{"", fmt.Sprint("EURYALE_FAULT=kill,rank=1,call=", call)} {
			printed := processes(t, 2, smallFlags+" "+layout+" --save-every 3 --checkpoint "+filepath.Join(t.TempDir(), "state"), fault)
			if resumed := strings.Contains(printed, "going on after step "); resumed != (fault != "") {
				t.Errorf("%s %s: resumed %v:\n%s", layout, fault, resumed, printed)
			}
			_, _, _, hash := ending(t, printed)
			params = append(params, hash)
		}
		if params[0] != params[1] {
			t.Errorf("%s: it ends with other parameters than without a fault", layout)
		}
	}
}

// TestTheSameBitsOnAnyCoresAndRanks: in a tree the order of additions depends on neither; and micro-batches that are
// added by rank give the loss of the whole batch.
func TestTheSameBitsOnAnyCoresAndRanks(t *testing.T) {
	flags := smallFlags + " --steps 6 --eval-every 6 --sample 0 --micro-batches 4 --dropout 0.2"
	runs := [][2]int{{1, 1}, {1, 2}, {2, 2}, {4, 1}} // ranks and cores
	if os.Getenv("EURYALE_FULL") == "1" {
		flags, runs = "--data synthetic --steps 30 --eval-every 30 --batch 16 --sample 0 --micro-batches 8", nil // the default model
		for _, cores := range []int{1, 2, 4} {
			runs = append(runs, [2]int{1, cores}, [2]int{2, cores}, [2]int{4, cores}, [2]int{8, cores})
		}
	}
	ends, inTree := map[string][2]int{}, 0.0
	for _, r := range runs {
		loss, eval, _, params := ending(t, processes(t, r[0], flags+" --reduction tree", fmt.Sprint("GOMAXPROCS=", r[1])))
		ends[fmt.Sprint(loss, eval, params)], inTree = r, loss
	}
	if len(ends) != 1 {
		t.Errorf("numbers of ranks and cores end differently: %v", ends)
	}
	if byRank, _, _, _ := ending(t, processes(t, 2, flags, "")); math.Abs(byRank-inTree) > 1e-3 {
		t.Errorf("the loss is %v by rank, and %v in a tree", byRank, inTree)
	}
}

// TestResumesOnOtherLayouts: a checkpoint has the whole model, whatever the layout.
func TestResumesOnOtherLayouts(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	cfg := small(t, "--tp 2 --checkpoint "+dir)
	printed, err := train(4, cfg)
	if err != nil {
		t.Fatal(err)
	}
	loss, eval, _, want := ending(t, printed)
	for flags, ranks := range map[string]int{"": 1, "--sp 2": 2} {
		printed, err := train(ranks, small(t, flags+" --checkpoint "+dir))
		if err != nil {
			t.Fatal(err)
		}
		gotLoss, gotEval, _, got := ending(t, printed)
		if !strings.Contains(printed, "going on after step 10, from "+dir) || got != want || gotLoss != loss || gotEval != eval {
			t.Errorf("%d ranks %s:\n%s", ranks, flags, printed)
		}
	}
	if _, err := train(1, small(t, "--warmup 9 --checkpoint "+dir)); err == nil || !strings.Contains(err.Error(), "with --warmup=10, and this one is with --warmup=9") || cli.ExitCode(err) != cli.UsageCode {
		t.Errorf("with another schedule: %v", err)
	}
}

// TestASignalSaves: a training that one rank is told to end is saved on all, and goes on from there to the
// bits of one that was not stopped.
func TestASignalSaves(t *testing.T) {
	undisturbed, err := train(2, small(t, ""))
	if err != nil {
		t.Fatal(err)
	}
	cfg := small(t, "--checkpoint "+filepath.Join(t.TempDir(), "state"))
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cli.Interrupted{Signal: syscall.SIGINT})
	var out [2]bytes.Buffer
	err = euryale.Run(t.Context(), 2, func(comm backend.Communicator, build sync.Locker) error {
		mine := t.Context()
		if comm.Rank() == 1 {
			mine = ctx
		}
		if err := run(mine, comm, build, cfg, &out[comm.Rank()]); !errors.As(err, new(cli.Interrupted)) {
			return fmt.Errorf("it ends with %w", err)
		}
		return nil
	})
	if err != nil || !strings.Contains(out[0].String(), "saved in "+cfg.checkpoint+" after step 1: ") {
		t.Fatalf("%v:\n%s", err, out[0].String())
	}
	printed, err := train(2, cfg)
	if err != nil {
		t.Fatal(err)
	}
	_, _, _, want := ending(t, undisturbed)
	if _, _, _, got := ending(t, printed); got != want || !strings.Contains(printed, "going on after step 1,") {
		t.Errorf("it ends with other parameters than without a stop:\n%s", printed)
	}
}

// TestPythonReadsTheCheckpoint: the safetensors library of Python reads what a model divided among ranks has
// written.
func TestPythonReadsTheCheckpoint(t *testing.T) {
	if out, err := exec.Command("python3", "-c", "import safetensors.numpy").CombinedOutput(); err != nil {
		t.Skipf("needs safetensors and numpy (pip install safetensors numpy): %s", bytes.TrimSpace(out))
	}
	dir := filepath.Join(t.TempDir(), "state")
	if _, err := train(2, small(t, "--tp 2 --checkpoint "+dir)); err != nil {
		t.Fatal(err)
	}
	const read = `
import sys, safetensors.numpy
for name, x in sorted(safetensors.numpy.load_file(sys.argv[1]).items()):
    print(name, x.dtype, list(x.shape), bool((x == x).all()))`
	out, err := exec.Command("python3", "-c", read, filepath.Join(dir, "step-00000010", "model.safetensors")).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, line := range []string{
		"\nwords float32 [32, 32] True",
		"\nblock0.attention.qkv.weight float32 [32, 3, 4, 8] True",
		"solver.adam.m/words float32 [1024] True", "solver.adam.steps int64 [1] True",
	} {
		if !strings.Contains("\n"+string(out), line+"\n") {
			t.Errorf("it has no %s:\n%s", line, out)
		}
	}
}

// TestProcessesOfEveryLayoutAgree: the losses of 100 steps of the default model are those of one rank, on layouts of four
// processes, and with sequences of 33 on two.
func TestProcessesOfEveryLayoutAgree(t *testing.T) {
	if os.Getenv("EURYALE_FULL") != "1" {
		t.Skip("TestLayoutsAgree is the sample: set EURYALE_FULL=1")
	}
	for flags, layouts := range map[string][]string{
		"--steps 100 --sample 0":              {"--dp 4", "--sp 2 --dp 2", "--tp 2 --sp 2", "--tp 4"},
		"--steps 100 --sample 0 --context 33": {"--sp 2"},
	} {
		want, wantEval, _, _ := ending(t, processes(t, 1, flags, ""))
		for _, layout := range layouts {
			ranks := 4
			if layout == "--sp 2" {
				ranks = 2
			}
			loss, eval, of, _ := ending(t, processes(t, ranks, flags+" "+layout, ""))
			t.Logf("%s: loss %v, eval %v; on one rank %v and %v", of, loss, eval, want, wantEval)
			if math.Abs(loss-want) > 1e-3 || math.Abs(eval-wantEval) > 1e-3 {
				t.Errorf("%s: loss %v, eval %v; on one rank %v and %v", of, loss, eval, want, wantEval)
			}
		}
	}
}
