package main

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/launch"
	"github.com/euryale-ml/euryale/internal/testing/exampletest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/models/tokenizer"
)

const (
	folder   = "../../models/testdata/llama3"
	sentence = "the quick brown fox jumps over the lazy dog, and then it sleeps in the sun.\n"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

// small are the flags of a training of a fraction of a second, whose text and output are in a
// folder.
func small(dir string) string {
	return fmt.Sprintf("%s --data %s --out %s --context 15 --batch 4 --steps 12 --lr 1e-2",
		folder, filepath.Join(dir, "text"), filepath.Join(dir, "out"))
}

// withText returns a folder with a text.
func withText(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	text := strings.Repeat(sentence, 60)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "text"), []byte(text), 0o666))
	return dir
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

// TestLayoutsAgree: every layout has the losses of one rank, and writes its weights.
func TestLayoutsAgree(t *testing.T) {
	layouts := map[string]int{"dp2xsp1xtp1 ": 2, "dp1xsp2xtp1 --sp 2": 2, "dp1xsp1xtp2 --tp 2": 2,
		"dp1xsp2xtp2 --sp 2 --tp 2": 4}
	for _, lora := range []string{"", " --lora 2"} {
		dir := withText(t)
		loss, eval, _, _ := ending(t, exampletest.Train(t, 1, small(dir)+lora))
		want := continued(t, dir, lora)
		for layout, ranks := range layouts {
			name, flags, _ := strings.Cut(layout, " ")
			if lora != "" && ranks == 2 && flags != "" {
				continue // the four ranks have both divisions
			}
			dir := withText(t)
			printed := exampletest.Train(t, ranks, small(dir)+lora+" "+flags)
			gotLoss, gotEval, got, _ := ending(t, printed)
			if math.Abs(gotLoss-loss) > 1e-3 || math.Abs(gotEval-eval) > 1e-3 || got != name {
				t.Errorf("%s%s: loss %v, eval %v; on one rank %v and %v",
					got, lora, gotLoss, gotEval, loss, eval)
			}
			text := continued(t, dir, lora)
			require.Check(t, text == want, "%s%s writes %q, one rank %q", got, lora, text, want)
			if files, err := os.ReadDir(dir); err != nil || len(files) != 2 {
				t.Errorf("%s%s leaves %v, %v", got, lora, files, err)
			}
			left, err := filepath.Glob(filepath.Join(dir, "out", ".*"))
			require.Check(t, err == nil && left == nil, "%s%s leaves %v, %v", got, lora, left, err)
		}
	}
}

// continued returns what examples/generate writes with what a training has put into a folder.
func continued(t *testing.T, dir, lora string) string {
	t.Helper()
	model, adapter := filepath.Join(dir, "out"), ""
	if lora != "" {
		model, adapter = folder, model
	}
	return written(t, model, adapter)
}

// written returns how a model, with an adapter if there is one, continues a text by 8 tokens.
func written(t *testing.T, model, adapter string) string {
	t.Helper()
	m := require.Value(models.Load(model))(t)
	defer m.Close()
	if adapter != "" {
		require.NoError(t, m.LoadAdapter(adapter))
	}
	words := require.Value(tokenizer.Load(model))(t)
	g := require.Value(models.NewGenerator(m, nil, models.GenerateOptions{Context: 24}))(t)
	defer g.Close()
	sampling := require.Value(m.Sampling(models.Sampling{}))(t)
	sampling.Max = 8
	var text strings.Builder
	stream := words.Stream(true)
	require.NoError(t, g.Generate(t.Context(), [][]int{words.Encode("the quick", true)}, sampling,
		func(_, token int) error {
			text.WriteString(stream.Next(token))
			return nil
		}))
	return text.String() + stream.End()
}

// TestLearns: the model that is written continues the text that it has learnt, and an adapter
// changes what its model writes.
func TestLearns(t *testing.T) {
	untrained := written(t, folder, "")
	for lora, most := range map[string]float64{"": 0.5, " --lora 4": 3.5} {
		dir := withText(t)
		printed := exampletest.Train(t, 2, small(dir)+" --every 30 --steps 60 --lr 3e-2"+lora)
		_, eval, _, _ := ending(t, printed)
		text := continued(t, dir, lora)
		known := strings.Contains(sentence+sentence, text)
		require.Check(t, !(eval > most) && strings.Contains(printed, "step 30/60: loss=") &&
			(lora != "" || known) && text+"\n" != string(untrained), "%s: it writes %q, "+
			"untrained %q:\n%s", lora, text, untrained, printed)
	}
}

// TestALostRankChangesNothing: a rank is killed, all are started anew, and the parameters equal
// those of a training that nothing has disturbed.
func TestALostRankChangesNothing(t *testing.T) {
	for flags, call := range map[string]int{"": 60, " --tp 2": 500, " --lora 2": 60} {
		var params []string
		for _, fault := range []string{"", fmt.Sprint("EURYALE_FAULT=kill,rank=1,call=", call)} {
			dir := withText(t)
			checkpoint := " --checkpoint " + filepath.Join(dir, "state")
			j := exampletest.New(t, 2, small(dir)+flags+" --every 3"+checkpoint, fault)
			j.MaxRestarts = 1
			printed := j.Run(t)
			_ = exampletest.New(t, 2, small(dir)+flags+" --lr 1e-3"+checkpoint).Refused(t,
				"lr 0.01, f32, model and samples")
			if other := strings.Replace(small(dir), folder, retrained(t), 1); fault == "" {
				_ = exampletest.New(t, 2, other+flags+" --every 3"+checkpoint).Refused(t,
					"lr 0.01, f32, model and samples")
			}
			resumed := strings.Contains(printed, "going on after step ")
			require.Check(t, resumed == (fault != ""), "%s %s: resumed %v:\n%s", flags, fault,
				resumed, printed)
			_, _, _, hash := ending(t, printed)
			params = append(params, hash)
		}
		require.Check(t, params[0] == params[1], "%s: it ends with other parameters than without "+
			"a fault", flags)
	}
}

// TestACheckpointFitsAnyLayout: what ranks of a layout have saved, those of any other load.
func TestACheckpointFitsAnyLayout(t *testing.T) {
	layouts := []string{"", " --accumulate 2", " --sp 2", " --tp 2", " --shards 3"}
	for i, saved := range layouts {
		dir := withText(t)
		flags := small(dir) + " --steps 2 --checkpoint " + filepath.Join(dir, "state")
		_, _, _, want := ending(t, exampletest.Train(t, 1+min(i, 1), flags+saved))
		for ranks, loaded := range []string{"", layouts[(i+1)%len(layouts)]} {
			_, _, _, got := ending(t, exampletest.Train(t, 1+ranks, flags+loaded))
			require.Equal(t, "the parameters of"+saved+" with"+loaded, got, want)
		}
	}
}

// retrained returns a copy of the folder with another last weight.
func retrained(t *testing.T) (model string) {
	t.Helper()
	model = filepath.Join(t.TempDir(), "llama")
	weights := filepath.Join(model, "model.safetensors")
	err := os.CopyFS(model, os.DirFS(folder))
	text, wrong := os.ReadFile(weights)
	if err = errors.Join(err, wrong); err != nil {
		t.Fatal(err)
	}
	text[len(text)-1] ^= 1
	require.NoError(t, os.WriteFile(weights, text, 0o666))
	return model
}

// TestAFailedWriteLosesNothing: what was in the folder of --out stays, and the training goes on
// from where the error says.
func TestAFailedWriteLosesNothing(t *testing.T) {
	dir := withText(t)
	out, flags := filepath.Join(dir, "out"), small(dir)
	_, _, _, want := ending(t, exampletest.Train(t, 2, flags))
	before := require.Value(os.ReadFile(filepath.Join(out, "model.safetensors")))(t)
	moved, inTheWay := filepath.Join(dir, "moved"), filepath.Join(out, "model.safetensors")
	require.NoError(t, errors.Join(os.Rename(inTheWay, moved), os.Mkdir(inTheWay, 0o777)))
	j := exampletest.New(t, 2, flags)
	_ = j.Refused(t, "start again with ")
	hint := exampletest.Ending(t, regexp.MustCompile(`start again with (--checkpoint \S+), where`),
		j.Errs.String())
	require.NoError(t, errors.Join(os.Remove(inTheWay), os.Rename(moved, inTheWay)))
	_, _, _, got := ending(t, exampletest.Train(t, 2, flags+" "+hint[1]))
	after, err := os.ReadFile(inTheWay)
	require.Check(t, err == nil && got == want && bytes.Equal(before, after),
		"%v: it ends with %s, want %s", err, got, want)
}

func TestATrainingThatIsToldToEndIsNotFinished(t *testing.T) {
	exampletest.ToldToEnd(t, small(withText(t))+" --steps 200 --every 20", "step 40/",
		"saved in (?s:.*)going on after step ")
}

func TestBadArguments(t *testing.T) {
	dir, model := withText(t), t.TempDir()
	file := filepath.Join(dir, "text", "x") // where no folder can be
	require.NoError(t, os.WriteFile(filepath.Join(model, "config.json"), nil, 0o666))
	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink(require.Value(filepath.Abs(folder))(t), link))
	for flags, want := range map[string]string{
		small(dir) + " --tp 3":                   "an --sp and a --tp whose product divides 2",
		small(dir) + " --batch 3":                "--batch 3: use a multiple of 2: of --acc",
		small(dir) + " --batch 4 --accumulate 4": "--batch 4: use a multiple of 8: of --acc",
		small(dir) + " --context 2000":           "samples of a context of 2000: at least 10 are",
		small(dir) + " --alpha 2":                "--alpha 2: use it with --lora",
		small(dir) + " --targets q_proj":         "--targets q_proj: use it with --lora",
		small(dir) + " --lora 2 --targets x":     `has no layers "x": use some of q_proj`,
		small(dir) + " --shards 4":               "--shards 4: use 0 to 3",
		small(dir) + " --memory 1e-4":            "too little memory: 107374 bytes",
		small(dir) + " --precision f64":          "--precision f64: use f32, tf32 or bf16",
		small(dir) + " --device tpu":             "--device tpu: use cpu or auto",
		small(dir) + " --lr nan":                 "--lr NaN: use a number of at least 0",
		small(dir) + " --data /nothing":          "no such file",
		small(dir) + " --steps 0":                "--steps 0: use a number of at least 1",
		small(dir) + " --lora -1":                "--lora -1: use a number of at least 0",
		small(dir) + " text":                     `["text"]: the program takes flags alone`,
		small(dir) + " --out " + folder:          ": use another folder",
		small(dir) + " --out " + folder + "/":    ": use another folder",
		small(dir) + " --out " + link:            ": use another folder",
		small(dir) + " --out /proc/none":         "finetune: mkdir /proc/none:",
		small(dir) + " --lora 2 --out " + model:  "has a model, and an adapter would be",
		small(dir) + " --lora 2 --out " + file:   "finetune: stat ",
		folder + " --out x":                      "--data: use the path of a file",
		"/nothing" + " --data x --out y":         "no such file",
	} {
		_ = exampletest.New(t, 2, flags).Refused(t, want)
	}
	for flags, want := range map[string]string{"--every 0": "--every 0: ",
		"--batch 3": "--batch 3: "} { // may be started anew
		j := exampletest.New(t, 2, small(dir)+" "+flags)
		j.MaxRestarts = 1
		err, failed := j.Refused(t, want), (*launch.Failed)(nil)
		require.Check(t, errors.As(err, &failed) && failed.ExitCode() == 2 &&
			strings.Count(j.Errs.String(), want) == 1, "a wrong command line was "+
			"started anew: %v, %s", err, &j.Errs)
	}
}
