//go:build linux

package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

// long bounds what should never take that long.
const long = 20 * time.Second

// asHelper makes this executable something else than a test.
const asHelper = "LAUNCH_TEST_HELPER"

// lackOfTests is what hosts of tests lack for GPUs.
const lackOfTests = "install it"

func TestMain(m *testing.M) {
	switch os.Getenv(asHelper) {
	case "":
		os.Exit(m.Run())
	case "launcher": // of a program that says its process's number and a child's, and sleeps
		os.Setenv(asHelper, "")
		Run(context.Background(),
			Job{Program: "/bin/sh", Args: []string{"-c",
				"sleep 100 & echo $!; echo $$; exec sleep 100"}, Ranks: 3, Stdout: os.Stdout})
	case "launcher of hosts": // of the shell and the script that its arguments name
		os.Setenv(asHelper, "")
		if err := Run(context.Background(), Job{Program: "sh", Args: os.Args[1:], Ranks: 2,
			Hosts: []Host{{"a", 1}, {"b", 1}}, Stdout: os.Stdout}); err != nil {
			panic(err)
		}
	case "builder": // of the package that its argument names
		os.Setenv(asHelper, "")
		Run(context.Background(), Job{Program: os.Args[1], Ranks: 1})
	case "traced": // a rank that SIGKILL does not end, and others
		beTraced()
	case "tracer": // holds the process that its argument names
		beTracer()
	case "host": // has a part of a job, behind the ssh of fakeSSH
		Serve(context.Background(), os.Stdin, os.Stdout, func() []string {
			return []string{"nccl: " + lackOfTests}
		}, nil)
	case "rank": // joins, and fails in its own way
		joinAndFail()
	}
}

func joinAndFail() {
	e, err := rendezvous.ReadEnv(os.Getenv)
	if err != nil {
		panic(err)
	}
	w, err := rendezvous.Join(context.Background(), e)
	if err != nil {
		panic(err)
	}
	if w.Rank == 2 { // once the others have joined, too
		for _, r := range []int{0, 1, 3} {
			if _, err := w.Store.Get(context.Background(), fmt.Sprint("here/", r)); err != nil {
				panic(err)
			}
		}
		panic("rank 2 has had enough")
	}
	if err := w.Store.Set(context.Background(), fmt.Sprint("here/", w.Rank), nil); err != nil {
		panic(err)
	}
	<-w.Down()
	fmt.Fprintln(os.Stderr, "I see that", w.Failure())
	os.Exit(5)
}

// output collects what ranks write, and lets a test wait for it.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
	more chan struct{}
}

func newOutput() *output { return &output{more: make(chan struct{}, 1)} }

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	select {
	case o.more <- struct{}{}:
	default:
	}
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// await waits for n lines that contain part, and returns them.
func (o *output) await(t *testing.T, n int, part string) []string {
	t.Helper()
	late := time.After(long)
	for {
		var found []string
		for line := range strings.Lines(o.String()) {
			if strings.Contains(line, part) {
				found = append(found, strings.TrimSpace(line))
			}
		}
		if len(found) >= n {
			return found
		}
		select {
		case <-o.more:
		case <-late:
			t.Fatalf("no %d lines with %q in %q", n, part, o)
		}
	}
}

func sorted(text string) []string { return slices.Sorted(strings.Lines(text)) }

// shell is the job of a shell script on every rank.
func shell(ranks int, script string, args ...string) (Job, *output, *output) {
	out, err := newOutput(), newOutput()
	return Job{Program: "/bin/sh", Args: append([]string{"-c", script}, args...), Ranks: ranks,
		Stdout: out, Stderr: err}, out, err
}

func TestRanksSeeTheirEnvironment(t *testing.T) {
	job, out, _ := shell(
		3,
		`echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR
		echo $MASTER_PORT $EURYALE_JOB $EURYALE_TOKEN >&2; echo "$X"`)
	job.Env = []string{"X=kept", "RANK=77", "EURYALE_TOKEN=old", "EURYALE_TERMINAL=1"}
	stderr := job.Stderr.(*output)
	require.NoError(t, Run(t.Context(), job))
	want := []string{
		"[0] 0 3 0 3 0 127.0.0.1\n", "[0] kept\n",
		"[1] 1 3 1 3 0 127.0.0.1\n", "[1] kept\n",
		"[2] 2 3 2 3 0 127.0.0.1\n", "[2] kept\n",
	}
	require.Slices(t, "sorted", sorted(out.String()), want)
	same := map[string]bool{}
	for line := range strings.Lines(stderr.String()) {
		_, rest, _ := strings.Cut(line, "] ")
		same[rest] = true
		if !regexp.MustCompile(`^\d+ run-\w{12} [0-9a-f]{64}\n$`).MatchString(rest) {
			t.Errorf("port, job and token: %q", rest)
		}
	}
	require.Check(t, len(same) == 1, "ranks differ in %v", same)
}

func TestOneRankHasNoPrefix(t *testing.T) {
	job, out, _ := shell(1, `printf 'a\rb'; printf "%s|" "$@"`, "x", "--flag", "two words")
	require.NoError(t, Run(t.Context(), job))
	require.Equal(t, "String", out.String(), "a\rb--flag|two words|")
}

func TestPlainLeavesPrefixesOut(t *testing.T) {
	job, out, _ := shell(2, `echo hello`)
	job.Plain = true
	err := Run(t.Context(), job)
	require.Check(t, err == nil && out.String() == "hello\nhello\n", "%q, %v", out, err)
}

func TestLinesAreNeverMixed(t *testing.T) {
	job, out, _ := shell(
		4,
		`i=0; while [ $i -lt 200 ]; do printf "$RANK$RANK"; printf "$RANK\n"; i=$((i+1)); done
		printf end$RANK`)
	require.NoError(t, Run(t.Context(), job))
	counts := map[string]int{}
	for line := range strings.Lines(out.String()) {
		counts[line]++
	}
	for r := range 4 {
		n := counts[fmt.Sprintf("[%d] %d%d%d\n", r, r, r, r)]
		require.Check(t, n == 200, "rank %d: %d whole lines", r, n)
		require.Check(t, counts[fmt.Sprintf("[%d] end%d\n", r, r)] == 1,
			"rank %d: the last line, without an end, is missing", r)
	}
	require.Check(t, len(counts) == 8, "other lines: %v", counts)
}

func TestOnlyRank0HasInput(t *testing.T) {
	in, feed, err := os.Pipe()
	require.NoError(t, err)
	defer in.Close()
	feed.WriteString("something to read\n")
	feed.Close()
	job, out, _ := shell(3, `read line; echo "read $line"`)
	job.Stdin = in
	require.NoError(t, Run(t.Context(), job))
	got, want := sorted(out.String()), []string{"[0] read something to read\n", "[1] read \n",
		"[2] read \n"}
	require.Check(t, slices.Equal(got, want), "%q", got)
}

func TestFirstFailureIsReportedAndOthersStop(t *testing.T) {
	job, _, _ := shell(4, `if [ $RANK = 2 ]; then echo this is why >&2; exit 7; fi; exec sleep 100`)
	started := time.Now()
	err := Run(t.Context(), job)
	var f *Failed
	require.That(t, errors.As(err, &f) && f.Rank == 2 && f.ExitCode() == 7 &&
		slices.Equal(f.Lines, []string{"this is why"}) && len(f.Others) == 3, "%#v", err)
	want := "rank 2 failed first: exit status 7; its last lines:\n    this is why\nthen " +
		"ranks 0, 1, 3 failed or were stopped"
	require.Equal(t, err, err.Error(), want)
	took := time.Since(started)
	require.Check(t, took <= long, "took %v", took)
}

func TestOthersMayReportWhatTheySee(t *testing.T) {
	job := Job{Program: os.Args[0], Ranks: 4, Env: append(os.Environ(), asHelper+"=rank",
		"XDG_RUNTIME_DIR="+t.TempDir())}
	stderr := newOutput()
	job.Stderr = stderr
	err := Run(t.Context(), job)
	var f *Failed
	require.Check(t, errors.As(err, &f) && f.Rank == 2 && f.ExitCode() == 2 &&
		f.Lines[0] == "panic: rank 2 has had enough", "%v", err)
	for _, r := range []int{0, 1, 3} {
		want := fmt.Sprintf("[%d] I see that rank 2 is down", r)
		require.Check(t, strings.Contains(stderr.String(), want), "no %q in %q", want, stderr)
	}
}

func TestRankThatOthersBlameIsFirst(t *testing.T) {
	blame := fmt.Sprint("allreduce: ", &rendezvous.Failure{Rank: 1,
		Cause: errors.New("its process ended")})
	job, _, _ := shell(
		3,
		`if [ $RANK = 1 ]; then sleep 0.3; echo the cause >&2; exit 4; fi; echo "$0" >&2; exit 5`,
		blame)
	err := Run(t.Context(), job)
	var f *Failed
	require.Check(t, errors.As(err, &f) && f.Rank == 1 && f.ExitCode() == 4 &&
		f.Lines[0] == "the cause", "%v", err)
}

func TestSignalledRankIsFirst(t *testing.T) {
	job, _, _ := shell(3, `if [ $RANK = 1 ]; then kill -SEGV $$; fi; exit 1`)
	err := Run(t.Context(), job)
	var f *Failed
	require.Check(t, errors.As(err, &f) && f.Rank == 1 && f.ExitCode() == 128+
		int(syscall.SIGSEGV) && strings.Contains(err.Error(), "segmentation fault"), "%v", err)
}

func TestRankThatIgnoresTermIsKilled(t *testing.T) {
	job, _, _ := shell(
		2, `if [ $RANK = 1 ]; then exit 3; fi; trap "" TERM; while :; do sleep 0.05; done`)
	started := time.Now()
	err := Run(t.Context(), job)
	var f *Failed
	require.Check(t, errors.As(err, &f) && f.Rank == 1, "%v", err)
	took := time.Since(started)
	require.Check(t, took <= long, "took %v", took)
}

func TestSignalsGoToTheRanks(t *testing.T) {
	job, out, _ := shell(
		2, `trap "echo caught; exit 0" INT; echo ready; while :; do sleep 0.01; done`)
	signals := make(chan os.Signal, 1)
	job.Signals = signals
	ended := make(chan error, 1)
	go func() { ended <- Run(context.Background(), job) }()
	out.await(t, 2, "ready")
	signals <- syscall.SIGINT
	err := <-ended
	var i *Interrupted
	require.Check(t, errors.As(err, &i) && i.ExitCode() == 130, "%v", err)
	out.await(t, 2, "caught")
}

func TestInterruptEndsEverythingWithinTwoSeconds(t *testing.T) {
	// The ranks and their children ignore what can be ignored.
	job, out, _ := shell(
		3, `trap "" INT TERM; sleep 100 & echo pid $!; echo pid $$; while :; do sleep 0.05; done`)
	signals := make(chan os.Signal, 1)
	job.Signals = signals
	ended := make(chan error, 1)
	go func() { ended <- Run(context.Background(), job) }()
	pids := out.await(t, 6, "pid ")
	started := time.Now()
	signals <- syscall.SIGINT
	<-ended
	took := time.Since(started)
	require.Check(t, took <= proctest.Within(2*time.Second), "took %v", took)
	for _, line := range pids {
		gone(t, line[strings.LastIndex(line, " ")+1:])
	}
}

func TestSecondSignalKillsAtOnce(t *testing.T) {
	job, out, _ := shell(2, `trap "" INT TERM; echo ready; while :; do sleep 0.05; done`)
	signals := make(chan os.Signal, 2)
	job.Signals, job.Grace = signals, time.Minute
	ended := make(chan error, 1)
	go func() { ended <- Run(context.Background(), job) }()
	out.await(t, 2, "ready")
	started := time.Now()
	signals <- syscall.SIGINT
	time.Sleep(2 * sameTime) // sooner it would be the same
	signals <- syscall.SIGINT
	<-ended
	took := time.Since(started)
	require.Check(t, took <= long, "took %v", took)
}

func TestEndOfContextStopsTheRanks(t *testing.T) {
	job, out, _ := shell(2, `echo ready; exec sleep 100`)
	ctx, cancel := context.WithCancelCause(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, job) }()
	out.await(t, 2, "ready")
	why := errors.New("enough")
	cancel(why)
	err := <-ended
	require.Check(t, errors.Is(err, why), "%v", err)
}

// gone waits until a process is no more.
func gone(t *testing.T, pid string) {
	t.Helper()
	for end := time.Now().Add(long); ; time.Sleep(time.Millisecond) {
		stat, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
		if err != nil || strings.Contains(string(stat), ") Z ") {
			return
		}
		if time.Now().After(end) {
			t.Errorf("process %s is alive: %s", pid, stat)
			n, _ := strconv.Atoi(pid)
			syscall.Kill(n, syscall.SIGKILL)
			return
		}
	}
}

func TestKilledLauncherLeavesNoProcess(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), asHelper+"=launcher")
	out := newOutput()
	cmd.Stdout = out
	require.NoError(t, cmd.Start())
	pids := out.await(t, 6, "] ")
	cmd.Process.Kill()
	cmd.Wait()
	for _, line := range pids {
		gone(t, line[strings.LastIndex(line, " ")+1:])
	}
}

func TestGroupEndsWithItsRank(t *testing.T) {
	job, out, _ := shell(2, `sleep 100 & echo pid $!`)
	started := time.Now()
	require.NoError(t, Run(t.Context(), job))
	took := time.Since(started)
	require.Check(t, took <= long, "took %v", took)
	for _, line := range out.await(t, 2, "pid ") {
		gone(t, line[strings.LastIndex(line, " ")+1:])
	}
}

// writeFiles makes a directory with files.
func writeFiles(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	return dir
}

const goMod = "module example.com/train\n\ngo 1.24\n"

func TestGoPackageIsBuiltUnemulated(t *testing.T) {
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	pkg := writeFiles(t, map[string]string{"go.mod": goMod, "main.go": `package main

import (
	"fmt"
	"os"
)

func main() { fmt.Println(os.Getenv("RANK"), os.Args[1:]) }
`})
	out := newOutput()
	require.NoError(t, Run(t.Context(), Job{Program: pkg, Args: []string{"--n", "3"}, Ranks: 2,
		Stdout: out}))
	require.Slices(t, "sorted", sorted(out.String()),
		[]string{"[0] 0 [--n 3]\n", "[1] 1 [--n 3]\n"})
	left, _ := filepath.Glob(filepath.Join(temp, "euryale*"))
	require.Check(t, len(left) == 0, "left behind: %v", left)
}

func TestProgramsThatCannotRunAreExplained(t *testing.T) {
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	broken := writeFiles(t, map[string]string{"go.mod": goMod,
		"main.go": "package main\n\nfunc main() { undefinedName() }\n"})
	library := writeFiles(t, map[string]string{"go.mod": goMod, "lib.go": "package lib\n"})
	plain := filepath.Join(writeFiles(t, map[string]string{"data": "no program"}), "data")
	garbage := filepath.Join(writeFiles(t, map[string]string{"exe": "\x00\x01garbage"}), "exe")
	require.NoError(t, os.Chmod(garbage, 0o755))
	for name, want := range map[string]string{
		broken: "does not build (exit status 1): correct " +
			"this|undefined: undefinedName",
		library:                          "must be named main",
		t.TempDir():                      "has no Go files",
		plain:                            "not executable: run chmod +x",
		garbage:                          "start rank 0|exec format error",
		filepath.Join(broken, "main.go"): "is a Go file: give its directory",
		"./no/such/program":              "does not exist: give the path",
		"no-such-program-anywhere":       "not found in PATH",
		"launch_test.go": "is not in PATH: for the one in this directory " +
			"write ./launch_test.go",
		filepath.Join(plain, "not", "a dir"): "not a directory",
	} {
		err := Run(t.Context(), Job{Program: name, Ranks: 2})
		if err == nil {
			t.Errorf("%s: no error", name)
			continue
		}
		for part := range strings.SplitSeq(want, "|") {
			require.Fails(t, name, err, part)
		}
	}
	left, _ := filepath.Glob(filepath.Join(temp, "euryale*"))
	require.Check(t, len(left) == 0, "left behind: %v", left)
	require.Fails(t, "0 ranks", Run(t.Context(), Job{Program: "/bin/true"}), "1 to 1024")
	t.Setenv("PATH", "/none")
	require.Fails(t, "without Go", Run(t.Context(), Job{Program: broken, Ranks: 1}),
		"needs the go command")
}

func TestRunLeavesNoGoroutine(t *testing.T) {
	before := goleak.IgnoreCurrent()
	job, _, _ := shell(3, `exit $RANK`)
	Run(t.Context(), job)
	require.NoError(t, goleak.Find(before))
}

// write sends pieces through a liner and returns what comes out.
func write(live bool, pieces ...string) string {
	var out bytes.Buffer
	l := &liner{screen: newScreen(), to: &out, prefix: "[0] ", live: live}
	for _, p := range pieces {
		io.WriteString(l, p)
	}
	l.flush()
	return out.String()
}

func TestOutputBecomesPrefixedLines(t *testing.T) {
	full := strings.Repeat("x", maxLine)
	for _, c := range []struct {
		pieces []string
		want   string
	}{
		{nil, ""},
		{[]string{"a\nb\n"}, "[0] a\n[0] b\n"},
		{[]string{"a", "b", "\n", "\n", "c"}, "[0] ab\n[0] \n[0] c\n"},
		{[]string{"windows\r\nline\r", "\n"}, "[0] windows\n[0] line\n"},
		{[]string{"10%\r20%\r", "100%\ndone\n"}, "[0] 100%\n[0] done\n"},
		{[]string{"10%\r"}, "[0] 10%\n"},
		{[]string{full}, "[0] " + full + "\n"},
		{[]string{full, "\n"}, "[0] " + full + "\n"},
		{[]string{full + full[1:], "yz\n"}, "[0] " + full + "\n[0] " + full[1:] + "y\n[0] z\n"},
	} {
		require.Equal(t, fmt.Sprintf("%.60q became", c.pieces), write(false, c.pieces...), c.want)
	}
}

func TestProgressIsRewrittenOnATerminal(t *testing.T) {
	got := write(true, "10%\r", "20%\r", "done\n")
	want := eraseLine + "[0] 10%" + eraseLine + "[0] 20%" + eraseLine + "[0] done\n"
	require.Equal(t, "write", got, want)
	// A line of another rank goes above.
	var out bytes.Buffer
	s := newScreen()
	bar := &liner{screen: s, to: &out, prefix: "[0] ", live: true}
	other := &liner{screen: s, to: &out, prefix: "[1] "}
	io.WriteString(bar, "10%\r")
	io.WriteString(other, "hello\n")
	if got, want := out.String(), eraseLine+"[0] 10%"+eraseLine+"[1] hello\n[0] 10%"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func lastLines(t *tail) []string {
	var e ending
	t.tell(&e)
	return e.lines
}

func TestTailKeepsTheLastLinesOrTheCrash(t *testing.T) {
	var last, crash tail
	for i := range 100 {
		last.add(fmt.Append(nil, "line ", i))
		if i == 50 {
			crash.add([]byte("panic: why"))
		}
		crash.add(fmt.Append(nil, "line ", i))
	}
	got := lastLines(&last)
	require.Check(t, len(got) == tailLines && got[0] == "line 80" && got[tailLines-1] == "line 99",
		"%q", got)
	if got := lastLines(&crash); len(got) != tailLines || got[0] != "panic: why" ||
		got[1] != "line 50" {
		t.Errorf("%q", got)
	}
	var fault tail
	for _, line := range []string{"noise", "SIGSEGV: segmentation violation", "goroutine 1"} {
		fault.add([]byte(line))
	}
	require.Equal(t, "lastLines", lastLines(&fault)[0], "SIGSEGV: segmentation violation")
	var long tail
	long.add(bytes.Repeat([]byte("x"), 2*tailLine))
	long.add([]byte("  "))
	if got := lastLines(&long); len(got) != 1 || len(got[0]) != tailLine {
		t.Errorf("%q", got)
	}
}
