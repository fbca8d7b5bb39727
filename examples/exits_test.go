package examples_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous/launch"
)

// trainings are the examples that save a training: the flags of one of some seconds, a sign that it
// is under way, and what it says of being stopped. DATA is a file of text, and OUT a folder.
var trainings = map[string]struct{ flags, sign, says string }{
	"charlstm": {"--characters 6000 --hidden 16 --steps 20 --epochs 15", "epoch 2/", ""},
	"digits":   {"-epochs 100", "epoch 2/", ""},
	"finetune": {"--data DATA --out OUT --context 15 --batch 4 --steps 900 --every 20 " +
		"../models/testdata/llama3", "step 40/", savedAndGoingOn},
	"gpt": {"--data DATA --layers 1 --width 32 --heads 4 --context 11 --steps 900 --every 20",
		"step 40/", savedAndGoingOn},
	"moe": {"--experts 4 --hidden 8 --layers 1 --width 16 --context 2 --batch 8 --epochs 40 " +
		"--steps 20", "epoch 2/", "going on after step "},
	"resnet": {"--filters 4 --images 96 --batch 16 --epochs 16 --ema 0.9", "epoch 2/", ""},
}

const savedAndGoingOn = "saved in (?s:.*)going on after step "

// others save nothing: a signal ends them.
var others = []string{"allreduce", "convnet", "elastic", "generate", "gradient", "recommender"}

// job is an example on two pods of a Job, without a launcher.
type job struct {
	program string
	args    []string
	sign    string // that it is under way
	env     []string
}

// run runs the two ranks, and each of them again while its exit status is not 0, as a Job does. If
// told, rank 1 is told to end once the first training is under way. It returns the exit statuses,
// what the first runs have said is wrong, and what rank 0 prints in all.
func (j job) run(t *testing.T, told bool) (statuses [2][]int, wrong [2]bytes.Buffer,
	said string) {
	t.Helper()
	var pods sync.WaitGroup
	first := make(chan *os.Process, 1) // of rank 1
	for rank := range 2 {
		pods.Go(func() {
			for again := range 5 {
				cmd, out := exec.Command(j.program, j.args...), proctest.Notice{Text: j.sign}
				cmd.Env = append(slices.Clone(j.env), fmt.Sprint("JOB_COMPLETION_INDEX=", rank))
				cmd.Stdout, cmd.Stderr = struct{ io.Writer }{&out}, os.Stderr // no ReadFrom
				if again == 0 {
					cmd.Stderr = &wrong[rank]
				}
				if told && again == 0 && rank == 0 {
					out.Then = func() { end(t, <-first) }
				}
				require.Report(t, cmd.Start())
				if again == 0 && rank == 1 {
					first <- cmd.Process
				}
				cmd.Wait() // its state has everything
				status := cmd.ProcessState.ExitCode()
				statuses[rank] = append(statuses[rank], status)
				if rank == 0 {
					said += out.String()
				}
				if status == 0 {
					return
				}
			}
		})
	}
	pods.Wait()
	return statuses, wrong, said
}

// end tells a process to end, as whoever tells all processes of a job does with those that
// launchers tell, too.
func end(t *testing.T, p *os.Process) {
	for range 2 {
		require.Report(t, p.Signal(syscall.SIGTERM))
	}
}

// build builds an example for two pods of a Job.
func build(t *testing.T, name string) job {
	t.Helper()
	dir := t.TempDir()
	program := filepath.Join(dir, name)
	if said, err := exec.Command("go", "build", "-buildvcs=false", "-o", program,
		"./"+name).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	data := filepath.Join(dir, "text")
	text := strings.Repeat("the quick brown fox jumps over the lazy dog.\n", 60)
	require.NoError(t, os.WriteFile(data, []byte(text), 0o600))
	flags := strings.NewReplacer("DATA", data, "OUT", filepath.Join(dir, "out")).Replace(
		trainings[name].flags)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return job{program, strings.Fields(flags), trainings[name].sign, append(os.Environ(),
		"WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port,
		"EURYALE_TOKEN="+strings.Repeat("secret", 4))}
}

// outcome is what a training has learnt, in its last line.
var outcome = regexp.MustCompile(`\w+=\S+ .*backend=host(?: params=\S+)?`)

// TestATrainingThatIsToldToEndIsNotFinished: on either rank, and started again while it is not
// finished, it ends with the bits of one that was not stopped.
func TestATrainingThatIsToldToEndIsNotFinished(t *testing.T) {
	for name := range trainings {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := build(t, name)
			statuses, _, whole := j.run(t, false)
			if want := [2][]int{{0}, {0}}; !reflect.DeepEqual(statuses, want) {
				t.Fatalf("not told to end, it ends with %v", statuses)
			}
			j.args = append(j.args, "--checkpoint", filepath.Join(t.TempDir(), "state"))
			statuses, wrong, said := j.run(t, true)
			const told = exit.Signal + int(syscall.SIGTERM)
			if want := [2][]int{{told, 0}, {told, 0}}; !reflect.DeepEqual(statuses, want) {
				t.Errorf("told to end, and started again, it ends with %v, want %v\n%s%s", statuses,
					want, &wrong[0], &wrong[1])
			}
			for rank := range wrong {
				if said := wrong[rank].String(); strings.Count(said, "stopped by a signal "+
					"(terminated)") != 1 || strings.Count(said, name+": ") != 1 {
					t.Errorf("rank %d says %q", rank, said)
				}
			}
			if got, want := outcome.FindString(said), outcome.FindString(whole); got != want ||
				got == "" {
				t.Errorf("it ends with %q, want %q", got, want)
			}
			if says := trainings[name].says; !regexp.MustCompile(says).MatchString(said) {
				t.Errorf("%s is not in\n%s", says, said)
			}
		})
	}
}

// TestEveryExampleIsListed: in trainings, if it has a checkpoint, or in others.
func TestEveryExampleIsListed(t *testing.T) {
	programs, err := filepath.Glob("*/main.go")
	require.NoError(t, err)
	for _, file := range programs {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		_, listed := trainings[filepath.Dir(file)]
		if saves := bytes.Contains(text, []byte(`"checkpoint", ""`)); saves != listed ||
			!saves && !slices.Contains(others, filepath.Dir(file)) {
			t.Errorf("%s saves: %v", file, saves)
		}
	}
}

// TestARankThatIsToldToEndIsStartedAgain: by the launcher, unless that was told to end, too, or
// there are no restarts.
func TestARankThatIsToldToEndIsStartedAgain(t *testing.T) {
	j := build(t, "digits")
	_, _, whole := j.run(t, false)
	const told = exit.Signal + int(syscall.SIGTERM)
	for _, test := range []struct {
		launcher                   bool
		restarts, status, attempts int
	}{
		{false, 1, 0, 2}, {false, 0, told, 1}, {true, 1, told, 1},
	} {
		t.Run(fmt.Sprintf("%+v", test), func(t *testing.T) {
			dir, signals := t.TempDir(), make(chan os.Signal, 1)
			out, attempts := &proctest.Notice{Text: j.sign}, 1
			out.Then = func() {
				if test.launcher {
					signals <- syscall.SIGTERM
					return
				}
				text, err := os.ReadFile(filepath.Join(dir, "1"))
				pid, wrong := strconv.Atoi(strings.TrimSpace(string(text)))
				p, failed := os.FindProcess(pid)
				if err := errors.Join(err, wrong, failed); err != nil {
					t.Error(err)
				}
				end(t, p)
			}
			err := launch.Run(t.Context(), launch.Job{Program: "/bin/sh", Ranks: 2,
				Args: append([]string{"-c", `echo $$ >"$0/$RANK"; exec "$@"`, dir, j.program},
					append(j.args, "-checkpoint", filepath.Join(dir, "state"))...),
				Stdout: out, Stderr: os.Stderr, Grace: time.Minute, MaxRestarts: test.restarts,
				Signals: signals, Notice: func(string) { attempts++ }})
			if got := euryale.ExitStatus(err); got != test.status || attempts != test.attempts {
				t.Errorf("after %d attempts the exit status is %d: %v", attempts, got, err)
			}
			if got := outcome.FindString(out.String()); err == nil && got !=
				outcome.FindString(whole) {
				t.Errorf("it ends with %q, want that of %q", got, whole)
			}
		})
	}
}
