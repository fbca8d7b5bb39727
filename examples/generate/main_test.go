package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/exampletest"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

const folder = "../../models/testdata/llama3"

func TestMain(m *testing.M) { exampletest.Main(m, main) }

// generate is the example with a standard input.
func generate(t *testing.T, input string, args ...string) (c *exec.Cmd, errs *bytes.Buffer) {
	t.Helper()
	c = exec.CommandContext(t.Context(), exampletest.Program(t), args...)
	errs = new(bytes.Buffer)
	c.Stdin, c.Stderr = strings.NewReader(input), errs
	return c, errs
}

// last is the line that is for programs, behind the one of the folder.
var last = regexp.MustCompile(
	`(?m)^generate: from the folder: .*\n` +
		`tokens=(\d+) tokens/s=\d+\.\d prompt=\d+ backend=host seconds=\d+\.\d$`)

// continuation returns what is printed.
func continuation(t *testing.T, input string, args ...string) string {
	t.Helper()
	c, errs := generate(t, input, args...)
	out, err := c.Output()
	require.That(t, err == nil && last.MatchString(errs.String()), "%q: %v\n%s", args, err, errs)
	return string(out)
}

// TestTheTextOfTransformers: Hugging Face's generate writes the same text without sampling, until a
// stop token or --max, wherever the prompt comes from.
func TestTheTextOfTransformers(t *testing.T) {
	const prompt, want = "the quick brown", "the jumpthe jumptheoxthel l l \n l\n"
	for _, args := range [][]string{
		{folder, "--prompt", prompt}, {"--prompt", prompt, folder}, {folder},
		{folder, "--context", "40", "--max", "30", "--device", "cpu"},
		{folder, "--temperature", "1", "--top-k", "1"},
	} {
		got := continuation(t, prompt, args...)
		require.Check(t, got == want, "%q: %q", args, got)
	}
	got := continuation(t, prompt, folder, "--max", "2")
	require.Check(t, got == "the\n", "of 2 tokens: %q", got)
}

// TestRanksThatShardTheWeightsPrintTheTextOnce: that of one rank, whose standard input all have.
func TestRanksThatShardTheWeightsPrintTheTextOnce(t *testing.T) {
	const prompt, want = "the quick brown", "the jumpthe jumptheoxthel l l \n l\n"
	path := filepath.Join(t.TempDir(), "prompt")
	require.NoError(t, os.WriteFile(path, []byte(prompt), 0o600))
	for _, device := range []string{"auto", "cpu"} {
		j := exampletest.New(t, 2, folder+" --tp 2 --device "+device)
		j.Stdin = require.Value(os.Open(path))(t)
		got := strings.ReplaceAll(j.Run(t), "[0] ", "")
		require.Check(t, got == want && strings.Count(j.Errs.String(), "tokens/s") == 1,
			"%s: %q\n%s", device, got, &j.Errs)
		require.NoError(t, j.Stdin.Close())
	}
	_ = exampletest.New(t, 2, folder+" --tp 3 --prompt dog").Refused(t,
		"--tp 3, of 2 ranks: start as many, by euryale run -n 3")
}

// TestTheFolderSaysWhatFlagsDoNot: one line tells what generation_config.json said. A flag that is
// given wins, with a value of 0 or the default, too.
func TestTheFolderSaysWhatFlagsDoNot(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS(folder)))
	for _, c := range []struct{ file, flags, says, text string }{
		{`{}`, "", "stop tokens []", ""},
		{`{"eos_token_id": [2, 7]}`, "", "stop tokens [2 7]", ""},
		{`{"max_new_tokens": 2}`, "", "stop tokens [], max 2", "the\n"},
		{`{"max_length": 12}`, "--max 2", "stop tokens []", "the\n"},
		{`{"max_length": 12}`, "--prompt the", "stop tokens [], max 10", ""},
		{`{"do_sample": true, "temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty":
		  1.5}`, "", "stop tokens [], temperature 0.7, top-k 50, top-p 0.9, min-p 0.1, " +
			"repetition penalty 1.5", ""},
		{`{"do_sample": true, "top_k": 4, "typical_p": 0.9}`, "--temperature 0 --max 2",
			"stop tokens [], but not how it draws (--temperature 0)", "the\n"},
		{`{"top_k": 4}`, "--temperature 0 --max 2", "stop tokens []", "the\n"},
		{`{"do_sample": true}`, "--temperature 1 --top-k 1 --max 2", "stop tokens []", "the\n"},
		{`{"do_sample": true}`, "--top-k 0 --top-p 0.5 --max 2", "[], temperature 1", ""},
		{`{"top_k": 1, "top_p": 0.5}`, "--temperature 2 --max 2", ", top-k 1, top-p 0.5", "the\n"},
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "generation_config.json"),
			[]byte(c.file), 0o600))
		args := append([]string{dir, "--context", "40"}, strings.Fields(c.flags)...)
		run, errs := generate(t, "the quick brown", args...)
		out, err := run.Output()
		lines := strings.SplitN(errs.String(), "\n", 3)
		line := strings.Join(lines[1:2], "")
		if err != nil || lines[0] != "generate: loading "+dir || !strings.HasSuffix(line, c.says) ||
			c.text != "" && string(out) != c.text {
			t.Errorf("%s %s: %q, %v\n%s", c.file, c.flags, out, err, errs)
		}
	}
}

func TestSeedsAndAdaptersChangeTheText(t *testing.T) {
	all := map[string]bool{}
	adapter := "--adapter " + folder + "/adapter"
	for _, flags := range []string{"", "--seed 2", "--temperature 2", adapter} {
		args := append([]string{folder, "--temperature", "1"}, strings.Fields(flags)...)
		text := continuation(t, "dog", args...)
		again := continuation(t, "dog", args...)
		require.Check(t, again == text, "%q: %q and %q", args, text, again)
		all[text] = true
	}
	require.Check(t, len(all) == 4, "texts are equal: %v", all)
}

// TestASignalEndsTheText: what is written so far stays, and the exit status says by which one.
func TestASignalEndsTheText(t *testing.T) {
	for signal, status := range map[os.Signal]int{os.Interrupt: 130, syscall.SIGTERM: 143} {
		c, errs := generate(t, "dog", folder, "--context", "200000", "--max", "100000")
		var failure error
		out := &proctest.Notice{Text: "veve", Then: func() { failure = c.Process.Signal(signal) }}
		c.Stdout = struct{ io.Writer }{out} // which has no ReadFrom
		err := c.Run()
		end := last.FindStringSubmatch(errs.String())
		require.Check(t, c.ProcessState.ExitCode() == status && failure == nil && end != nil &&
			end[1] != "100000" && strings.HasSuffix(out.String(),
			"\n"), "%v: %v, %v: %.100q\n%s", signal, err, failure, out, errs)
	}
}

func TestBadArguments(t *testing.T) {
	for args, want := range map[string]string{
		"":                             "2:give one folder",
		folder + " another":            "2:give one folder",
		folder + " --max 0":            "2:--max 0",
		folder + " --device tpu":       "2:--device tpu --precision f32: use cpu",
		folder + " --precision f64":    "2:and f32, tf32 or bf16",
		folder + " --beams 2":          "2:flag provided but not defined",
		"/nothing":                     "1:no such file",
		folder + "/adapter":            "1:by LoadAdapter or --adapter",
		folder + " --top-p 2":          "2:--top-p 2 --temperature 0: use 0 to 1",
		folder + " --temperature NaN":  "2:--temperature NaN: use 0 to 1, and 0 or more",
		folder + " --top-k -1":         "2:--top-k -1: use",
		folder + " --context 2":        "1:has 4 tokens, want 1 to 2",
		folder + " --context 4":        "1:has 4 tokens, for which the context has room",
		folder + " --adapter /nothing": "1:no such file",
	} {
		c, errs := generate(t, "the dog", strings.Fields(args)...)
		err := c.Run()
		code, want, _ := strings.Cut(want, ":")
		require.Check(t, err != nil && err.Error() == "exit status "+code &&
			strings.Contains(errs.String(),
				want), "%s: %v, want %s, and %q in %s", args, err, code, want, errs)
	}
}
