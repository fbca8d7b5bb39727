package main

import (
	"bytes"
	"context"
	"errors"
	"net/url"
	"reflect"
	"strings"
	"testing"

	"github.com/alecthomas/kong"

	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// commandLine runs a command line and returns its exit code and outputs. Asking for
// help gives code 100.
func commandLine(args ...string) (code int, out, err string) {
	var stdout, stderr bytes.Buffer
	exited := false
	code = run(context.Background(), args, &streams{nil, &stdout, &stderr}, func(int) {
		exited = true
	})
	if exited {
		code = 100
	}
	return code, stdout.String(), stderr.String()
}

// Each example in a help text is a separate line that can be copied, and the parser takes it.
func TestExamplesInHelpCanBeCopied(t *testing.T) {
	var c cli
	parser := require.Value(kong.New(&c, kong.Name("euryale"), vars(),
		kong.KindMapper(reflect.Int, kong.MapperFunc(wholeNumber))))(t)
	for _, command := range parser.Model.Children {
		if command.Hidden || command.Name == "help" {
			continue
		}
		_, help, _ := commandLine("help", command.Name)
		found := 0
		for line := range strings.Lines(help) {
			_, words, is := strings.Cut(line, "euryale "+command.Name)
			if !is || !strings.HasPrefix(line, "    ") {
				continue
			}
			found++
			for _, end := range []string{" #", " |", ")"} { // of the command in its line
				words, _, _ = strings.Cut(words, end)
			}
			args := append([]string{command.Name}, strings.Fields(strings.ReplaceAll(words,
				`"NVIDIA H200"`, "H200"))...)
			_, err := parser.Parse(args)
			require.Check(t, err == nil, "help %s has the example %q: %v", command.Name, line, err)
		}
		require.Check(t, found > 0, "%s has no example", command.Name)
	}
}

func TestCommandLines(t *testing.T) {
	code, _, err := commandLine("run", "")
	require.Check(t, code == exit.Usage && strings.Contains(err, "run which program?"),
		"run of an empty name: code %d, %q", code, err)
	for _, c := range []struct {
		line     string // words between spaces
		code     int
		out, err string // what the outputs contain
	}{
		{"", 100, "Commands:", ""},
		{"--help", 100, "run", ""},
		{"run --help", 100, "--n=", ""},
		{"fly", exit.Usage, "", "unexpected argument fly"},
		{"run", exit.Usage, "", "run which program?"},
		{"run -n", exit.Usage, "", "expected"},
		{"run -H a:x /bin/true", exit.Usage, "", "write HOST:N"},
		{"run --hostfile /nowhere /bin/true", exit.Usage, "", "open /nowhere"},
		{"run -H a --hostfile b /bin/true", exit.Usage, "", "can't be used together"},
		{"run -H a:2 -n 3 /bin/true", exit.Usage, "", "3 ranks: the hosts take 1 to 2"},
		{"run --standby 3 /bin/true", exit.Usage, "", "--standby are for --elastic"},
		{"run --elastic -H a:2 --spares 3 /bin/true", exit.Usage, "",
			"1 ranks and 3 on standby: the hosts take 2"},
		{"run -H a --nnodes 2 --rendezvous b:1 /bin/true", exit.Usage, "", "-H and --hostfile"},
		{"run -n -1 /bin/true", exit.Usage, "", "-1 is not a number of ranks: write 1 to 1024"},
		{"run -n", exit.Usage, "", "--n: expected a value, but nothing follows"},
		{"bench --min", exit.Usage, "", "--min: expected a value, but nothing follows"},
		{"explain allreduce 1M -n 0", exit.Usage, "", "0 ranks: there must be at least 1"},
		{"explain allreduce 1M -n -1", exit.Usage, "", "-1 ranks: there must be at least 1"},
		{"explain allreduce 1M -n", exit.Usage, "", "--n: expected a value, but nothing follows"},
		{"bench -n -1", exit.Usage, "", "-1 ranks: there must be at least 1"},
		{"bench -n two", exit.Usage, "", "--n: two is not a whole number"},
		{"bnch", exit.Usage, "", `did you mean "bench"?`},
		{"run --max-restart 2 /bin/true", exit.Usage, "", "did you mean --max-restarts? flags of"},
		{"run --grce=2s /bin/true", exit.Usage, "",
			"run has no flag --grce: did you mean --grace?"},
		{"run --rendezvous host:0 /bin/true", exit.Usage, "", "HOST:PORT"},
		{"run --rendezvous host:1 /bin/true", exit.Usage, "", "EURYALE_TOKEN"},
		{"run -n two /bin/true", exit.Usage, "", "two"},
		{"run -n 0 /bin/true", exit.Usage, "", "write 1 to 1024"},
		{"run -n 9223372036854775807 /bin/true", exit.Usage, "", "write 1 to 1024"},
		{"run -n 1025 /bin/true", exit.Usage, "", "write 1 to 1024"},
		{"run -n 1e3 /bin/true", exit.Usage, "", "write 1 to 1024"},
		{"run --max-restarts=-1 /bin/true", exit.Usage, "", "must not be negative"},
		{"run --grace 0s /bin/true", exit.Usage, "", "must be positive"},
		{"run --grace soon /bin/true", exit.Usage, "", "soon"},
		{"run -n 2 /bin/sh -c exit\t2 -n 4", exit.Usage, "", "-n came after the program"},
		{"run --hosts= /bin/true", exit.Usage, "", "--hosts is empty: give it a value"},
		{"run --log-dir= /bin/true", exit.Usage, "", "--log-dir is empty"},
		{"run --fast /bin/true", exit.Usage, "", "run has no flag --fast: see"},
		{"run --nproc_per_node=2 /bin/true", exit.Usage, "",
			"instead of --nproc_per_node write -n"},
		{"run -np 2 /bin/true", exit.Usage, "", "instead of -np write -n"},
		{"bench --nproc-per-node 2", exit.Usage, "", "instead of --nproc-per-node write -n"},
		{"bench --itters=3", exit.Usage, "", `did you mean "--iters"?`},
		{"bench --factor=1", exit.Usage, "", "must be at least 2"},
		{"--version", 100, "euryale ", ""},
		{"help", 0, "Commands:", ""},
		{"help run", 0, "--n=", ""},
		{"help fly", exit.Usage, "", "unexpected argument fly"},
		{"run --", exit.Usage, "", "run which program"},
		{"run -n 2 /no/such", 1, "", "does not exist"},
		{"run -n 2 /bin/echo hello", 0, "[1] hello\n", ""},
		{"run -n2 -- /bin/echo hello", 0, "[1] hello\n", ""},
		{"run -n 1 /bin/echo -n 3 --help -- x", 0, "3 --help -- x", ""},
		{"run -n 2 /bin/sh -c exit\t$((RANK*3))", 3, "", "euryale: rank 1 failed: exit status 3"},
		{"run -n 1 /bin/sh -c kill\t-9\t$$", 137, "", "euryale: rank 0 failed: signal: killed"},
	} {
		args := strings.Fields(strings.ReplaceAll(c.line, "\t", "\x01"))
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "\x01", " ")
		}
		code, out, err := commandLine(args...)
		if code != c.code || !strings.Contains(out, c.out) || !strings.Contains(err, c.err) {
			t.Errorf("euryale %s: code %d, output %q, errors %q", c.line, code, out, err)
		}
	}
}

func TestFoundErrorsNameEuryaleTwice(t *testing.T) {
	t.Setenv("RANK", "1") // and nothing else of a launcher's
	code, _, err := commandLine("bench", "-n", "1", "--backend", "host")
	require.Check(t, code == exit.Usage && strings.Count(err, "euryale: ") == 1, "code %d, %q",
		code, err)
	var out bytes.Buffer
	exitCode(t.Context(), errors.New("euryale: no backend"), &streams{err: &out})
	require.Equal(t, "String", out.String(), "euryale: no backend\n")
}

func TestRunSaysWhichVariablesNothingReads(t *testing.T) {
	t.Setenv("EURYALE_TIMOUT", "5s")
	t.Setenv("EURYALE_XYZZY", "1")
	t.Setenv("EURYALE_TIMEOUT", "9s")
	code, _, err := commandLine("run", "-n", "2", "/bin/true")
	for _, want := range []string{
		"euryale: nothing reads the variable EURYALE_TIMOUT: did you mean EURYALE_TIMEOUT?\n",
		"euryale: nothing reads the variable EURYALE_XYZZY: see euryale doctor\n",
	} {
		require.Check(t, code == 0 && strings.Count(err, want) == 1, "code %d, no %q in %q", code,
			want, err)
	}
	require.Check(t, strings.Count(err, "\n") == 2, "%q", err)
}

func TestTokensAreRandomAndFitAnAddress(t *testing.T) {
	seen := map[string]bool{}
	for range 3 {
		code, out, err := commandLine("token")
		token := strings.TrimSpace(out)
		// 26 letters of 5 bits are 130 bits.
		plain := url.QueryEscape(token) == token
		require.Check(t, code == 0 && err == "" && len(token) >= 26 && plain && !seen[token],
			"code %d: %q %q", code, out, err)
		seen[token] = true
	}
}
