package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
)

const (
	// actAsGenerate is a variable that makes this test binary the example.
	actAsGenerate = "RUN_AS_GENERATE"
	folder        = "../../models/testdata/llama3"
)

func TestMain(m *testing.M) {
	if os.Getenv(actAsGenerate) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// generate is the example with a standard input.
func generate(t *testing.T, input string, args ...string) (c *exec.Cmd, errs *bytes.Buffer) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c, errs = exec.CommandContext(t.Context(), self, args...), new(bytes.Buffer)
	c.Stdin, c.Stderr = strings.NewReader(input), errs
	c.Env = append(os.Environ(), actAsGenerate+"=1")
	return c, errs
}

// last is the line that is for programs.
var last = regexp.MustCompile(
	`^tokens=(\d+) tokens/s=\d+\.\d prompt=\d+ backend=host seconds=\d+\.\d\n$`)

// continuation returns what is printed.
func continuation(t *testing.T, input string, args ...string) string {
	t.Helper()
	c, errs := generate(t, input, args...)
	out, err := c.Output()
	if err != nil || !last.MatchString(errs.String()) {
		t.Fatalf("%q: %v\n%s", args, err, errs)
	}
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
		if got := continuation(t, prompt, args...); got != want {
			t.Errorf("%q: %q", args, got)
		}
	}
	if got := continuation(t, prompt, folder, "--max", "2"); got != "the\n" {
		t.Errorf("of 2 tokens: %q", got)
	}
}

func TestSeedsAndAdaptersChangeTheText(t *testing.T) {
	all := map[string]bool{}
	adapter := "--adapter " + folder + "/adapter"
	for _, flags := range []string{"", "--seed 2", "--temperature 2", adapter} {
		args := append([]string{folder, "--temperature", "1"}, strings.Fields(flags)...)
		text := continuation(t, "dog", args...)
		if again := continuation(t, "dog", args...); again != text {
			t.Errorf("%q: %q and %q", args, text, again)
		}
		all[text] = true
	}
	if len(all) != 4 {
		t.Errorf("texts are equal: %v", all)
	}
}

// TestASignalEndsTheText: what is written so far stays, and the exit code is 0.
func TestASignalEndsTheText(t *testing.T) {
	for _, signal := range []os.Signal{os.Interrupt, syscall.SIGTERM} {
		c, errs := generate(t, "dog", folder, "--context", "200000", "--max", "100000")
		var failure error
		out := &proctest.Notice{Text: "veve", Then: func() { failure = c.Process.Signal(signal) }}
		c.Stdout = struct{ io.Writer }{out} // which has no ReadFrom
		err := c.Run()
		end := last.FindStringSubmatch(errs.String())
		if err != nil || failure != nil || end == nil || end[1] == "100000" ||
			!strings.HasSuffix(out.String(), "\n") {
			t.Errorf("%v: %v, %v: %.100q\n%s", signal, err, failure, out, errs)
		}
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
		if err == nil || err.Error() != "exit status "+code ||
			!strings.Contains(errs.String(), want) {
			t.Errorf("%s: %v, want %s, and %q in %s", args, err, code, want, errs)
		}
	}
}
