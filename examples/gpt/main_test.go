package main

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/launch"
	"github.com/euryale-ml/euryale/internal/testing/exampletest"
	"github.com/euryale-ml/euryale/internal/testing/objectstore"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

// characters is how many the random text has.
const characters = 32

// repeating writes a random text, of which three in four characters repeat the one two places
// before: attention finds it, and a model of pairs cannot.
func repeating(t *testing.T) (file string) {
	t.Helper()
	const n = 1 << 15
	r := rand.New(rand.NewPCG(1, n))
	text := make([]byte, n)
	for i := range text {
		text[i] = '@' + byte(r.IntN(characters))
		if i >= 2 && r.IntN(4) > 0 {
			text[i] = text[i-2]
		}
	}
	file = filepath.Join(t.TempDir(), "text")
	require.NoError(t, os.WriteFile(file, text, 0o666))
	return file
}

// small are the flags of a training of a fraction of a second on a text.
func small(text string) string {
	return "--data " + text + " --layers 1 --width 32 --heads 4 --context 11 --lr 1e-2 --steps 10"
}

// last is the line that is for programs.
var last = regexp.MustCompile(`loss=(\S+) eval=(\S+) ranks=\d+ layout=(\S+) backend=host ` +
	`params=([0-9a-f]{64}) seconds=\S+\n$`)

// ending returns what a training ends with.
func ending(t *testing.T, printed string) (loss, eval float64, layout, params string) {
	t.Helper()
	end := exampletest.Ending(t, last, printed)
	x := exampletest.Numbers(t, end[1:3]...)
	return x[0], x[1], end[3], end[4]
}

// full reports whether all cases are tested, and not a sample of them.
func full() bool { return os.Getenv("EURYALE_FULL") == "1" }

// TestLayoutsAgree: every layout has the losses of one rank, also where ranks have unequal parts of
// a sequence. In full, so have 100 steps of the default model.
func TestLayoutsAgree(t *testing.T) {
	layouts := map[string]int{
		"dp4xsp1xtp1 ": 4, "dp2xsp2xtp1 --sp 2": 4, "dp1xsp2xtp2 --sp 2 --tp 2": 4,
		"dp1xsp1xtp4 --tp 4": 4, "dp2xsp1xtp2 --tp 2": 4, "dp1xsp2xtp1 --sp 2": 2,
	}
	models := []string{small(repeating(t))}
	if full() {
		models = append(models, "--steps 100", "--steps 100 --context 33")
	}
	for _, model := range models {
		loss, eval, _, _ := ending(t, exampletest.Train(t, 1, model))
		for layout, ranks := range layouts {
			want, flags, _ := strings.Cut(layout, " ")
			gotLoss, gotEval, got, _ := ending(t, exampletest.Train(t, ranks, model+" "+flags))
			if math.Abs(gotLoss-loss) > 1e-3 || math.Abs(gotEval-eval) > 1e-3 || got != want {
				t.Errorf("%s: %s: loss %v, eval %v; on one rank %v and %v",
					model, got, gotLoss, gotEval, loss, eval)
			}
		}
	}
}

// TestLearns: the model knows what one of pairs of characters cannot, and says how it gets there.
func TestLearns(t *testing.T) {
	printed := exampletest.Train(t, 2, small(repeating(t))+" --steps 80 --every 40")
	_, eval, _, _ := ending(t, printed)
	require.Check(t, !(eval > math.Log(characters)-1) &&
		strings.Contains(printed, "step 40/80: loss="), "it has not learnt:\n%s", printed)
}

// TestCorpus: one file in twenty is held out, of one file the last tenth; hidden ones are not read.
func TestCorpus(t *testing.T) {
	dir := t.TempDir()
	for i := range 40 {
		text, name := strings.Repeat("ab", 10*(1+i/39)), fmt.Sprintf("%02d.txt", i)
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666))
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, ".hidden"), []byte("z"), 0o666))
	c := loadCorpus(dir)
	if string(c.characters) != "ab" || len(c.training) != 38*20 || len(c.heldOut) != 60 {
		t.Errorf("%d and %d bytes of %q", len(c.training), len(c.heldOut), c.characters)
	}
	one := loadCorpus(filepath.Join(dir, "39.txt"))
	require.Check(t, len(one.training) == 36 && len(one.heldOut) == 4, "of a file: %d and %d bytes",
		len(one.training), len(one.heldOut))
}

// TestStandardLibrary: its sources are found, without commands and tests.
func TestStandardLibrary(t *testing.T) {
	c := loadCorpus("")
	var text []byte
	for _, token := range append(c.training, c.heldOut...) {
		text = append(text, c.characters[token])
	}
	require.Check(t, bytes.Contains(text, []byte("func Println(a ...any) (n int, err error) {")) &&
		!bytes.Contains(text, []byte("\nfunc TestSprintf(t *testing.T)")), "%d bytes are others "+
		"than expected", len(text))
	for name, want := range map[string]bool{
		"print.go": true, "fmt": true, "cmd": false, "print_test.go": false, "asm.s": false,
	} {
		require.Check(t, isSource(name) == want, "isSource(%s) is %v", name, !want)
	}
}

func TestATrainingThatIsToldToEndIsNotFinished(t *testing.T) {
	exampletest.ToldToEnd(t, small(repeating(t))+" --steps 200 --every 20", "step 40/",
		"to go on from (?s:.*)going on after step ")
}

// TestBadArguments: what cannot be is said, with the exit code of a wrong command line where no
// rank is needed to see it.
func TestBadArguments(t *testing.T) {
	text := repeating(t)
	for flags, want := range map[string]string{
		"--tp 3":            "2:use an --sp and a --tp whose product divides 2 ranks",
		"--batch 3":         "2:--batch 3: use a multiple of 2",
		"--sp 2 --heads 1":  "each needs a part",
		"--heads 5":         "2:--heads 5: use a divisor of --width",
		"--data /nothing":   "no such file",
		"--context 200000":  "200002 characters are needed",
		"--tree 1":          "1 micro-batches for rank 0 of 2",
		"--tree 4 --sp 2":   "2:--sp 2: use 1 with --tree",
		"--steps 0":         "2:--steps 0: use a number of at least 1",
		"--lr nan":          "2:--lr NaN: use a number of at least 0",
		"--device tpu":      "2:--device tpu: use cpu or auto",
		"text":              `2:"text"]: the program takes flags alone`,
		"--precision f64":   "2:--precision f64: use f32, tf32 or bf16",
		"--dropout 0.1":     "2:flag provided but not defined",
		"--tp 2 --heads 1 ": "sharded among 2 ranks",
		"--elastic":         "2:--tree 0: use a number of micro-batches with --elastic",
	} {
		code := 1
		if rest, usage := strings.CutPrefix(want, "2:"); usage {
			code, want = 2, rest
		}
		err := exampletest.New(t, 2, small(text)+" "+flags).Refused(t, want)
		failed := (*launch.Failed)(nil)
		require.Check(t, !errors.As(err, &failed) || failed.ExitCode() == code,
			"%s: %v, want code %d", flags, err, code)
	}
}

// TestALostRankChangesNothing: a rank is killed, all are started anew, and the parameters equal
// those of a training that nothing has disturbed, also where each rank has a part of them.
func TestALostRankChangesNothing(t *testing.T) {
	text := repeating(t)
	for layout, call := range map[string]int{"": 60, "--tp 2": 200} { // between steps 3 and 9
		var params []string
		for _, fault := range []string{"", fmt.Sprint("EURYALE_FAULT=kill,rank=1,call=", call)} {
			dir := filepath.Join(t.TempDir(), "state")
			j := exampletest.New(t, 2, small(text)+" "+layout+" --every 3 --checkpoint "+dir, fault)
			j.MaxRestarts = 1
			printed := j.Run(t)
			resumed := strings.Contains(printed, "going on after step ")
			require.Check(t, resumed == (fault != ""), "%s %s: resumed %v:\n%s", layout, fault,
				resumed, printed)
			_, _, _, hash := ending(t, printed)
			params = append(params, hash)
		}
		require.Check(t, params[0] == params[1], "%s: it ends with other parameters than without "+
			"a fault", layout)
	}
}

// elastic returns a job of elastic ranks.
func elastic(t *testing.T, ranks int, flags string, environ ...string) *exampletest.Job {
	j := exampletest.New(t, ranks, flags+" --elastic", environ...)
	j.Elastic, j.Grace = &launch.Elastic{Least: 1, Standby: 1}, time.Minute
	return j
}

// TestElasticRanksWithoutACheckpointSayThatNothingIsSaved: all are told to end.
func TestElasticRanksWithoutACheckpointSayThatNothingIsSaved(t *testing.T) {
	j := elastic(t, 2, small(repeating(t))+"00 --every 20 --tree 4")
	signals := make(chan os.Signal, 1)
	j.Signals = signals
	j.Out.Text, j.Out.Then = "step 20/", func() { signals <- syscall.SIGTERM }
	err := j.Refused(t, "")
	require.That(t, errors.As(err, new(*launch.Interrupted)) &&
		strings.Contains(j.Out.String(), "nothing is saved without --checkpoint") &&
		!strings.Contains(j.Out.String(), "go on from :"), "it ends with %v:\n%s%s", err, &j.Out,
		&j.Errs)
}

// TestElasticRanksHaveTheBitsOfATree: one is killed, then all are told to end and save. The next
// start goes on, elastic or not, and ends as a tree on one rank does.
func TestElasticRanksHaveTheBitsOfATree(t *testing.T) {
	flags := small(repeating(t)) + "0 --every 20 --tree 4" // 100 steps
	loss, eval, _, params := ending(t, exampletest.Train(t, 1, flags))
	for name, next := range map[string]*exampletest.Job{
		"elastic": elastic(t, 2, flags), "not elastic": exampletest.New(t, 2, flags),
		"with shards": elastic(t, 4, flags+" --shards 3"),
	} {
		dir := filepath.Join(t.TempDir(), "state")
		signals := make(chan os.Signal, 1)
		ranks, shards := 3, ""
		if name == "with shards" {
			ranks, shards = 4, " --shards 3"
		}
		first := elastic(t, ranks, flags+shards+" --checkpoint "+dir,
			"EURYALE_FAULT=kill,rank=1,call=150")
		first.Signals = signals
		first.Out.Text, first.Out.Then = "step 40/", func() { signals <- syscall.SIGTERM }
		err := first.Refused(t, "")
		require.That(t, errors.As(err, new(*launch.Interrupted)) &&
			strings.Contains(first.Out.String(), "to go on from "+dir), "it ends with %v:\n%s%s",
			err, &first.Out, &first.Errs)
		next.Args = append(next.Args, "--checkpoint", dir)
		printed := next.Run(t)
		gotLoss, gotEval, _, got := ending(t, printed)
		require.Check(t, strings.Contains(printed, "going on after step ") && gotLoss == loss &&
			gotEval == eval && got == params, "%s: it ends with other numbers than %v, %v and "+
			"%s:\n%s", name, loss, eval, params, printed)
	}
}

// TestElasticTensorRanksHaveTheBitsOfATree: processes are killed, one of the first ones and some of
// their replacements, and each replica's rank has its shard from another replica.
func TestElasticTensorRanksHaveTheBitsOfATree(t *testing.T) {
	flags := small(repeating(t)) + "0 --every 20 --tree 4 --tp 2" // 100 steps
	loss, eval, _, params := ending(t, exampletest.Train(t, 2, flags))
	for _, fault := range []string{"", "kill,rank=1,call=400", "kill,rank=2,call=900"} {
		printed := elastic(t, 4, flags, "EURYALE_FAULT="+fault).Run(t)
		gotLoss, gotEval, layout, got := ending(t, printed)
		require.Check(t, gotLoss == loss && gotEval == eval && got == params &&
			layout == "dp1xsp1xtp2", "%q: it ends with other numbers than %v, %v and %s:\n%s",
			fault, loss, eval, params, printed)
	}
	dir := filepath.Join(t.TempDir(), "state")
	signals := make(chan os.Signal, 1)
	first := elastic(t, 4, flags+" --checkpoint "+dir)
	first.Signals = signals
	first.Out.Text, first.Out.Then = "step 40/", func() { signals <- syscall.SIGTERM }
	err := first.Refused(t, "")
	require.That(t, errors.As(err, new(*launch.Interrupted)), "it ends with %v:\n%s%s", err,
		&first.Out, &first.Errs)
	printed := exampletest.Train(t, 2, flags+" --checkpoint "+dir)
	_, _, _, got := ending(t, printed)
	require.Check(t, strings.Contains(printed, "going on after step ") && got == params, "it ends "+
		"with other numbers than %s:\n%s", params, printed)
}

// TestAReplacementThatHasAnotherTextEndsAlone: tensor ranks that form a replica without it go on.
func TestAReplacementThatHasAnotherTextEndsAlone(t *testing.T) {
	text := repeating(t)
	flags := small(text) + "0 --every 20 --tree 4 --tp 2" // 100 steps
	_, _, _, want := ending(t, exampletest.Train(t, 2, flags))
	j := elastic(t, 4, flags, "EURYALE_FAULT=kill,rank=1,call=900")
	j.Elastic.Standby = 0
	j.Out.Text, j.Out.Then = "step 20/", func() {
		other := require.Value(os.ReadFile(text))(t)
		slices.Reverse(other) // so that the model is the same
		require.NoError(t, os.WriteFile(text, other, 0o666))
	}
	_, _, _, got := ending(t, j.Run(t))
	require.Check(t, got == want && strings.Contains(j.Errs.String(), "the other ranks have"),
		"it ends with other numbers than %s, or nobody has another text:\n%s%s", want, &j.Out,
		&j.Errs)
}

// TestTheSameBitsOnAnyCoresAndRanks: in a tree the order of additions depends on neither; and by
// rank the loss is the same except for rounding.
func TestTheSameBitsOnAnyCoresAndRanks(t *testing.T) {
	flags, tree := small(repeating(t))+" --steps 6", " --tree 4"
	runs := [][2]int{{1, 1}, {1, 2}, {2, 2}, {3, 1}, {4, 1}} // ranks and cores
	if full() {
		flags, tree, runs = "--steps 30 --batch 16", " --tree 8", nil // the default model
		for _, cores := range []int{1, 2, 4} {
			runs = append(runs, [2]int{1, cores}, [2]int{2, cores}, [2]int{4, cores},
				[2]int{5, cores}, [2]int{8, cores})
		}
	}
	ends, inTree := map[string][2]int{}, 0.0
	for _, r := range runs {
		loss, eval, _, params := ending(t, exampletest.New(t, r[0], flags+tree,
			fmt.Sprint("GOMAXPROCS=", r[1])).Run(t))
		ends[fmt.Sprint(loss, eval, params)], inTree = r, loss
	}
	require.Check(t, len(ends) == 1, "numbers of ranks and cores end differently: %v", ends)
	byRank, _, _, _ := ending(t, exampletest.Train(t, 2, flags))
	require.Check(t, !(math.Abs(byRank-inTree) > 1e-3), "the loss is %v by rank, and %v in a tree",
		byRank, inTree)
}

// TestResumesOnOtherLayouts: a checkpoint has the whole model, whatever the layout.
func TestResumesOnOtherLayouts(t *testing.T) {
	text, dir := repeating(t), filepath.Join(t.TempDir(), "state")
	first := exampletest.Train(t, 4, small(text)+" --tp 2 --checkpoint "+dir)
	loss, eval, _, want := ending(t, first)
	for flags, ranks := range map[string]int{"": 1, "--sp 2": 2} {
		printed := exampletest.Train(t, ranks, small(text)+" --checkpoint "+dir+" "+flags)
		gotLoss, gotEval, _, got := ending(t, printed)
		require.Check(t, strings.Contains(printed, "going on after step 10, from "+dir) &&
			got == want && gotLoss == loss &&
			gotEval == eval, "%d ranks %s:\n%s", ranks, flags, printed)
	}
	_ = exampletest.New(t, 1, small(text)+" --lr 1e-3 --checkpoint "+dir).Refused(t, "lr:0.01")
}

// TestCheckpointsMayBeInABucket: a training there goes on on other ranks, elastic or not.
func TestCheckpointsMayBeInABucket(t *testing.T) {
	objectstore.Start(t)
	flags := small(repeating(t)) + " --tree 4 --checkpoint " + objectstore.URL + "/run1"
	_, _, _, want := ending(t, exampletest.Train(t, 2, flags))
	again := exampletest.New(t, 2, flags+" --elastic")
	again.Elastic = &launch.Elastic{Least: 1}
	for _, j := range []*exampletest.Job{exampletest.New(t, 1, flags), again} {
		printed := j.Run(t)
		_, _, _, got := ending(t, printed)
		require.Check(t, got == want && strings.Contains(printed,
			"going on after step 10, from s3://bucket/run1"), "%q:\n%s", j.Args, printed)
	}
}

// TestPythonReadsTheCheckpoint: the safetensors library of Python reads what a model sharded among
// ranks has written.
func TestPythonReadsTheCheckpoint(t *testing.T) {
	out, err := exec.Command("python3", "-c", "import safetensors.numpy").CombinedOutput()
	if err != nil {
		t.Skipf("needs safetensors and numpy (pip install safetensors numpy): %s",
			bytes.TrimSpace(out))
	}
	dir := filepath.Join(t.TempDir(), "state")
	exampletest.Train(t, 2, small(repeating(t))+" --tp 2 --checkpoint "+dir)
	const read = `
import sys, safetensors.numpy
for name, x in sorted(safetensors.numpy.load_file(sys.argv[1]).items()):
    print(name, x.dtype, list(x.shape), bool((x == x).all()))`
	file := filepath.Join(dir, "step-00000010", "model.safetensors")
	out, err = exec.Command("python3", "-c", read, file).CombinedOutput()
	require.That(t, err == nil, "%v: %s", err, out)
	for _, line := range []string{
		"\nwords float32 [32, 32] True",
		"\nblock0.attention.qkv.weight float32 [32, 3, 4, 8] True",
		"solver.adam.m/words float32 [1024] True", "solver.adam.steps int64 [1] True",
	} {
		require.Check(t, strings.Contains("\n"+string(out), line+"\n"), "it has no %s:\n%s", line,
			out)
	}
}
