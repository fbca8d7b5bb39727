package main

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/rendezvous/launch"
)

// actAsResNet is a variable that makes this test binary the example.
const actAsResNet = "RUN_AS_RESNET"

func TestMain(m *testing.M) {
	if os.Getenv(actAsResNet) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// job is the example on ranks that are processes.
func job(t *testing.T, ranks int, flags string) (j launch.Job, out, errs *bytes.Buffer) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	out, errs = new(bytes.Buffer), new(bytes.Buffer)
	return launch.Job{
		Program: self, Ranks: ranks, Args: strings.Fields(flags), Stdout: out, Stderr: errs,
		Env: append(os.Environ(), actAsResNet+"=1"),
	}, out, errs
}

// train trains on ranks, and returns what they print.
func train(t *testing.T, ranks int, flags string) string {
	t.Helper()
	j, out, errs := job(t, ranks, flags)
	if err := launch.Run(t.Context(), j); err != nil {
		t.Fatalf("%d ranks %s: %v: %s", ranks, flags, err, errs)
	}
	return out.String()
}

// small are the flags of a training of a fraction of a second.
const small = "--filters 4 --images 96 --batch 16 --epochs 3 --lr 0.05 "

// last is the line that is for programs.
var last = regexp.MustCompile(`accuracy=(\S+) loss=(\S+) ranks=\d+ backend=host ` +
	`params=([0-9a-f]{64}) seconds=\S+\n$`)

// ending returns what a training ends with.
func ending(t *testing.T, printed string) (accuracy, loss float64, params string) {
	t.Helper()
	end := last.FindStringSubmatch(printed)
	if end == nil {
		t.Fatalf("no last line in\n%s", printed)
	}
	accuracy, err := strconv.ParseFloat(end[1], 64)
	loss, err2 := strconv.ParseFloat(end[2], 64)
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	return accuracy, loss, end[3]
}

// TestRanksTrainTheNetworkOfOne: batch norms are over the pictures of all ranks.
func TestRanksTrainTheNetworkOfOne(t *testing.T) {
	epoch := regexp.MustCompile(`epoch \d/\d: loss=(\S+)`)
	var want [][]string
	for _, ranks := range []int{1, 2, 4} {
		losses := epoch.FindAllStringSubmatch(train(t, ranks, small), -1)
		if want == nil {
			want = losses
		}
		if len(losses) != 3 {
			t.Fatalf("%d ranks: %d epochs", ranks, len(losses))
		}
		for i := range losses {
			var x, of1 float64
			if _, err := fmt.Sscan(losses[i][1]+" "+want[i][1], &x, &of1); err != nil ||
				math.Abs(x-of1) > 1e-3*of1 {
				t.Errorf("%d ranks: loss %v in epoch %d, and %v of one: %v", ranks, x, i+1, of1,
					err)
			}
		}
	}
}

// TestRanksTellShapesApart: far better than by chance, which is 0.2.
func TestRanksTellShapesApart(t *testing.T) {
	curve := filepath.Join(t.TempDir(), "curve.svg")
	accuracy, _, _ := ending(t, train(t, 2, "--filters 8 --images 512 --batch 16 --epochs 6 "+
		"--lr 0.05 --ema 0.9 --curve "+curve))
	if accuracy < 0.5 {
		t.Errorf("accuracy %v", accuracy)
	}
	if svg, err := os.ReadFile(curve); err != nil || !bytes.Contains(svg, []byte("<svg")) {
		t.Errorf("the curve: %v, of %d bytes", err, len(svg))
	}
}

// TestASignalSaves: the training goes on to the bits of one that was not stopped.
func TestASignalSaves(t *testing.T) {
	flags := small + "--ema 0.9 "
	_, _, want := ending(t, train(t, 2, flags))
	flags += "--checkpoint " + filepath.Join(t.TempDir(), "state")
	j, _, errs := job(t, 2, flags)
	signals := make(chan os.Signal, 1)
	out := &proctest.Notice{Text: "epoch 1/", Then: func() { signals <- syscall.SIGINT }}
	j.Stdout, j.Signals, j.Grace = out, signals, time.Minute
	err := launch.Run(t.Context(), j)
	interrupted := (*launch.Interrupted)(nil)
	if !errors.As(err, &interrupted) || !strings.Contains(errs.String(), "(interrupt) after ") {
		t.Fatalf("%v:\n%s%s", err, out, errs)
	}
	if _, _, got := ending(t, train(t, 2, flags)); got != want {
		t.Error("it ends with other parameters than without a stop")
	}
}

// TestReadsCIFAR: the files that the data set has, of random pictures.
func TestReadsCIFAR(t *testing.T) {
	dir, r := t.TempDir(), rand.New(rand.NewPCG(1, 1))
	for _, name := range []string{"data_batch_1", "data_batch_2", "test_batch"} {
		records := make([]byte, 8*(1+3*side*side))
		for i := range records {
			records[i] = byte(r.IntN(10))
		}
		if err := os.WriteFile(filepath.Join(dir, name+".bin"), records, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	out := train(t, 1, "--filters 2 --batch 8 --epochs 1 --data "+dir)
	if !strings.Contains(out, " parameters; 16 pictures, and 8 held out\n") {
		t.Error(out)
	}
	ending(t, out)
}

// TestResNet18HasItsParameters: as many as implementations for CIFAR-10 elsewhere have.
func TestResNet18HasItsParameters(t *testing.T) {
	err := euryale.Run(t.Context(), 1, func(comm backend.Communicator, _ sync.Locker) error {
		layout, err := layers.NewLayout(comm, 0, 1, 1)
		if err != nil {
			return err
		}
		if n := (config{model: 18, batch: 1}).build(layout, 10).parameters; n != 11173962 {
			t.Errorf("it has %d parameters", n)
		}
		return layout.Close()
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestAugmentMovesPixels: a picture with one white pixel has that pixel still, or none.
func TestAugmentMovesPixels(t *testing.T) {
	r, places := rand.New(rand.NewPCG(1, 1)), map[int]bool{}
	for range 1000 {
		pixels := make([]float32, 3*side*side)
		pixels[side*side+10*side+20] = 1
		augment(r, []any{pixels})
		for i, x := range pixels {
			if x == 1 {
				places[i] = true
			}
		}
	}
	const all = 9 * (9 + 9) // rows around 10; columns around 20 and, mirrored, around 11
	for i := range places {
		x, y := i%side, i/side-side
		if y < 6 || y > 14 || x < 7 || x > 24 {
			t.Errorf("pixel (%d, %d)", x, y)
		}
	}
	if len(places) != all {
		t.Errorf("%d places, want %d", len(places), all)
	}
}

func TestWrongFlagsAreErrors(t *testing.T) {
	for flags, want := range map[string]string{
		"--model 34":    "use --model 8, 20 or 18",
		"--batch 7":     "a --batch that the ranks divide",
		"--device tpu":  "--device cpu or auto",
		"--data /no/it": "no such file",
	} {
		j, _, errs := job(t, 2, flags)
		if err := launch.Run(t.Context(), j); err == nil ||
			!strings.Contains(errs.String(), want) {
			t.Errorf("%s: %v, without %q in %s", flags, err, want, errs)
		}
	}
}
