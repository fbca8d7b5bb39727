package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/exampletest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// feature is what flags ask for.
type feature struct {
	flags string
	ranks int  // that divide the work
	other bool // another model or other samples, so that losses are others
}

var features = []feature{
	{"--sp 2", 2, false}, {"--tp 2", 2, false}, {"--batch 4", 1, false}, // data ranks
	{"--shards 1", 1, false}, {"--shards 2", 1, false}, {"--shards 3", 1, false},
	{"--memory 4e-4", 1, false}, {"--accumulate 2", 1, false}, {"--best", 1, false},
	{"--checkpoint DIR/state", 1, false}, {"--peak 1", 1, false}, {"--device cpu", 1, false},
	{"--pack", 1, true}, {"--lora 2", 1, true}, {"--eval DIR/held", 1, true},
	{"--lora 3 --alpha 7 --targets all-linear", 1, true}, {"--dropout=false", 1, true},
	{"--data DIR/chats.jsonl --context 24", 1, true}, {"--precision bf16", 1, true},
}

// conversing returns a folder with a text, conversations and held-out ones, and a model with a
// chat template.
func conversing(t *testing.T) (dir string) {
	t.Helper()
	dir = withText(t)
	model := filepath.Join(dir, "model")
	require.NoError(t, os.CopyFS(model, os.DirFS(folder)))
	var chats []string
	words := strings.Fields(sentence)
	for i := range 40 {
		said := func(role string, n int) string {
			return fmt.Sprintf(`{"role": %q, "content": %q}`, role,
				strings.Join(words[i%9:i%9+n], " "))
		}
		chats = append(chats, fmt.Sprintf(`{"messages": [%s, %s, %s, %s]}`, said("user", 1),
			said("assistant", 1+i%3), said("user", 2), said("assistant", 1)))
	}
	for name, text := range map[string]string{
		"chats.jsonl": strings.Join(chats, "\n"),
		"held":        strings.Repeat("over the lazy dog, the quick brown fox jumps. ", 20),
		"model/chat_template.jinja": "{% for m in messages %}{{ m.role[0] + m.content }}. " +
			"{% endfor %}{% if add_generation_prompt %}a{% endif %}",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666))
	}
	return dir
}

// TestEveryPairOfFlagsTrainsAsOneRankDoes: with flags that change the model or the samples alone.
// EURYALE_FULL tests all pairs.
func TestEveryPairOfFlagsTrainsAsOneRankDoes(t *testing.T) {
	var pairs [][2]feature
	for i, f := range features {
		for _, g := range features[:i] {
			if strings.Fields(f.flags)[0] != strings.Fields(g.flags)[0] {
				pairs = append(pairs, [2]feature{g, f})
			}
		}
	}
	r := rand.New(rand.NewPCG(3, 4))
	r.Shuffle(len(pairs), func(i, j int) { pairs[i], pairs[j] = pairs[j], pairs[i] })
	if os.Getenv("EURYALE_FULL") != "1" {
		pairs = pairs[:8]
	}
	trained := map[string][2]float64{}
	for _, pair := range pairs {
		plain, flags, ranks := "", "", max(2, pair[0].ranks*pair[1].ranks)
		for _, f := range pair {
			if flags += " " + f.flags; f.other {
				plain += " " + f.flags
			}
		}
		loss, eval := trainedWith(t, ranks, flags)
		want, known := trained[plain]
		if !known {
			want[0], want[1] = trainedWith(t, 1, plain)
			trained[plain] = want
		}
		within := 1e-3
		if strings.Contains(flags, "bf16") {
			within = 2e-2
		}
		if strings.Contains(flags, "best") { // which says the least, and not the last
			want[1] = min(want[1], eval)
		}
		require.Check(t, math.Abs(loss-want[0]) < within && math.Abs(eval-want[1]) < within,
			"%s on %d ranks: loss %v and eval %v, with%s on one %v", flags, ranks, loss, eval,
			plain, want)
	}
}

func trainedWith(t *testing.T, ranks int, flags string) (loss, eval float64) {
	t.Helper()
	dir := conversing(t)
	flags = strings.Replace(small(dir), folder, filepath.Join(dir, "model"), 1) + " --every 4" +
		strings.ReplaceAll(flags, "DIR", dir)
	loss, eval, _, _ = ending(t, exampletest.Train(t, ranks, flags))
	left := require.Value(filepath.Glob(filepath.Join(dir, "out", ".*")))(t)
	require.Check(t, left == nil, "%s leaves %v", flags, left)
	return loss, eval
}

// evaluated matches the lines of a training.
var evaluated = regexp.MustCompile(`step (\d+)/\d+: loss=\S+ eval=(\S+) tokens/s=\d+ ` +
	`tflops=\S+ mfu=\S+ left=(\S+)\n`)

// TestTheBestWeightsAreWritten: with --best, and the checkpoint that has them is kept.
func TestTheBestWeightsAreWritten(t *testing.T) {
	for _, flags := range []string{" --tp 2", " --shards 3 --checkpoint DIR/state"} {
		dir := withText(t)
		held := filepath.Join(dir, "held") // on which a model that has learnt the text is wrong
		words := "sun dog fox sleeps jumps it then quick lazy over brown in and the "
		require.NoError(t, os.WriteFile(held, []byte(strings.Repeat(words, 20)), 0o666))
		overfits := " --every 8 --steps 40 --lr 3e-2 --eval " + held
		printed := exampletest.Train(t, 2, small(dir)+overfits+" --peak 1 --best "+
			strings.ReplaceAll(flags, "DIR", dir))
		_, eval, _, params := ending(t, printed)
		var evals []float64
		lines := evaluated.FindAllStringSubmatch(printed, -1)
		for _, line := range lines {
			evals = append(evals, exampletest.Numbers(t, line[2])[0])
		}
		require.That(t, len(evals) == 5 && evals[4] > slices.Min(evals) && lines[4][3] == "0s",
			"the last evaluation is the best one, so nothing is tested:\n%s", printed)
		require.Equal(t, "the loss of the last line", eval, slices.Min(evals))
		again := strings.NewReplacer(folder, filepath.Join(dir, "out"), "/out", "/other")
		printed = exampletest.Train(t, 1, again.Replace(small(dir))+overfits+
			" --steps 1 --lr 1e-30")
		_, eval, _, same := ending(t, printed)
		require.Check(t, eval == slices.Min(evals) && same == params, "what was written has the "+
			"loss %v and the hash %s, want %v and %s", eval, same, slices.Min(evals), params)
	}
}

// TestOnlyAnswersAreLearnt: conversations are learnt as far as answers go.
func TestOnlyAnswersAreLearnt(t *testing.T) {
	dir := conversing(t)
	flags := strings.NewReplacer(folder, filepath.Join(dir, "model"), "/text", "/chats.jsonl").
		Replace(small(dir)) + " --context 60 --steps 40 --batch 8 --lr 3e-2"
	printed := exampletest.Train(t, 2, flags+" --pack")
	_, eval, _, _ := ending(t, printed)
	require.Check(t, eval < 1.5 && strings.Contains(printed, "0 conversations lose their end"),
		"the answers were not learnt:\n%s", printed)
	_ = exampletest.New(t, 1, strings.Replace(flags, "/model", "/model/../../"+
		filepath.Base(dir)+"/none", 1)).Refused(t, "no such file")
	require.NoError(t, os.Remove(filepath.Join(dir, "model", "chat_template.jinja")))
	_ = exampletest.New(t, 1, flags).Refused(t, "line 1: the folder has no chat template")
}
