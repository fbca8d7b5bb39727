//go:build linux

package launch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// signalled is a job that ranks and signals can be sent to.
func signalled(t *testing.T, job Job) (signals chan os.Signal, ended chan error) {
	t.Helper()
	signals, ended = make(chan os.Signal, 2), make(chan error, 1)
	job.Signals = signals
	go func() { ended <- Run(context.Background(), job) }()
	return signals, ended
}

func TestFoundStoppedRankIsToBlame(t *testing.T) {
	job, out, _ := shell(
		3,
		`echo pid $RANK $$; if [ $RANK = 0 ]; then kill -STOP $$; fi; sleep 0.2
		echo "because of rank 0: timeout: no sign of rank 0 for 1s" >&2; exit 1`)
	err := Run(t.Context(), job)
	var f *Failed
	require.Check(t, errors.As(err, &f) && f.Rank == 0 && f.cause == causeStopped &&
		f.ExitCode() == 1 && strings.Contains(err.Error(), "SIGSTOP"), "%v", err)
	for _, line := range out.await(t, 3, "pid ") {
		gone(t, line[strings.LastIndex(line, " ")+1:])
	}
}

func TestStoppedRankGetsSignals(t *testing.T) {
	job, out, _ := shell(
		2,
		`trap "echo saved; exit 0" TERM; echo ready
		if [ $RANK = 1 ]; then kill -STOP $$; fi; while :; do sleep 0.01; done`)
	job.Grace = long
	signals, ended := signalled(t, job)
	out.await(t, 2, "ready")
	signals <- syscall.SIGTERM
	var i *Interrupted
	err := <-ended
	require.Check(t, errors.As(err, &i), "%v", err)
	out.await(t, 2, "saved")
}

func TestFoundTooManyRanksAreRefusedBeforeMemoryIsTaken(t *testing.T) {
	for _, n := range []int{-1, 0, MaxRanks + 1, 1 << 62} {
		require.Fails(t, fmt.Sprintf("%d ranks", n),
			Run(t.Context(), Job{Program: "/bin/true", Ranks: n}), "1 to 1024")
	}
}

func TestFoundFullOutputIsTheLaunchersOwnFailure(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip(err)
	}
	defer full.Close()
	reader, closed, err := os.Pipe()
	require.NoError(t, err)
	reader.Close()
	defer closed.Close()
	for want, to := range map[error]*os.File{unix.ENOSPC: full, unix.EPIPE: closed} {
		for _, script := range []string{`while :; do echo something; done`, `echo something`} {
			job, _, _ := shell(2, script)
			job.Stdout = to
			err := Run(t.Context(), job)
			var f *Failed
			require.Check(t, errors.Is(err, want) && !errors.As(err, &f) &&
				strings.Contains(err.Error(),
					"the output of the ranks cannot be written"), "%s: %v", script, err)
		}
	}
}

// TestBuildEndsThoughItsOutputStaysOpen: as by the server of a compiler that it has started.
func TestBuildEndsThoughItsOutputStaysOpen(t *testing.T) {
	dir := t.TempDir()
	server := "#!/bin/sh\necho broken\nsetsid sh -c 'echo $$ >" + dir + "/pid; exec sleep 100' &" +
		"\nuntil [ -s " + dir + "/pid ]; do sleep 0.01; done; exit 1\n"
	err := os.WriteFile(filepath.Join(dir, "go"), []byte(server), 0o700)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "main.go"), nil, 0o600)
	}
	require.NoError(t, err)
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	_, ended := signalled(t, Job{Program: dir, Ranks: 1})
	err = await(t, ended)
	require.Check(t, err != nil && strings.HasSuffix(err.Error(), "broken"), "%v", err)
	var pid int
	text, err := os.ReadFile(filepath.Join(dir, "pid"))
	_, scanned := fmt.Sscan(string(text), &pid)
	require.That(t, err == nil && scanned == nil, "%v %v", err, scanned)
	syscall.Kill(pid, syscall.SIGKILL)
}

func TestGraceIsTimeToSave(t *testing.T) {
	// Each rank takes longer than the default grace allows.
	job, out, _ := shell(
		2, `trap "sleep 1.3; echo saved; exit 0" TERM; echo ready; while :; do sleep 0.01; done`)
	job.Grace = long
	signals, ended := signalled(t, job)
	out.await(t, 2, "ready")
	signals <- syscall.SIGTERM
	var i *Interrupted
	err := <-ended
	require.Check(t, errors.As(err, &i) && i.ExitCode() == 143, "%v", err)
	out.await(t, 2, "saved")
}

func TestSecondSignalEndsTheGrace(t *testing.T) {
	job, out, _ := shell(2, `trap "" TERM; echo ready; while :; do sleep 0.01; done`)
	job.Grace = time.Hour
	signals, ended := signalled(t, job)
	out.await(t, 2, "ready")
	signals <- syscall.SIGTERM
	time.Sleep(2 * sameTime) // sooner it would be the same
	signals <- syscall.SIGTERM
	select {
	case <-ended:
	case <-time.After(long):
		t.Error("the grace goes on")
	}
}

// restarting is a job that fails on its first attempts.
func restarting(t *testing.T, failures, restarts int) (Job, *output, *[]string) {
	job, out, _ := shell(2, `attempt="$TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS"
		echo attempt $attempt $EURYALE_JOB $EURYALE_TOKEN
		if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT -lt `+fmt.Sprint(failures)+` ]; then
			echo why >&2; exit 7
		fi
		read line; echo got $line`)
	notices := &[]string{}
	job.MaxRestarts, job.Notice = restarts, func(text string) { *notices = append(*notices, text) }
	return job, out, notices
}

func TestFailedJobIsStartedAnew(t *testing.T) {
	job, out, notices := restarting(t, 2, 3)
	require.NoError(t, Run(t.Context(), job))
	want := []string{
		"rank 1 failed: exit status 7: restarting all ranks (restart 1 of 3)",
		"rank 1 failed: exit status 7: restarting all ranks (restart 2 of 3)",
	}
	require.Slices(t, "notices", *notices, want)
	jobs := map[string]bool{}
	for n := range 3 {
		for _, line := range out.await(t, 2, fmt.Sprintf("attempt %d of 3 ", n)) {
			_, names, _ := strings.Cut(line, " of 3 ")
			jobs[names] = true
		}
	}
	require.Check(t, len(jobs) == 3, "3 attempts had %d names and tokens", len(jobs))
}

func TestLastAttemptIsTheOutcome(t *testing.T) {
	job, out, notices := restarting(t, 9, 1)
	var f *Failed
	err := Run(t.Context(), job)
	require.Check(t, errors.As(err, &f) && f.Rank == 1 && f.ExitCode() == 7 && len(*notices) == 1,
		"%v, %q", err, *notices)
	require.Check(t, !strings.Contains(out.String(), "attempt 2"), "%s", out)
}

func TestWrongCommandLineIsNotStartedAnew(t *testing.T) {
	job, out, _ := shell(2, `echo started; exit 2`)
	job.MaxRestarts = 3
	var f *Failed
	if err := Run(t.Context(), job); !errors.As(err, &f) || f.ExitCode() != 2 ||
		strings.Count(out.String(), "started") != 2 {
		t.Errorf("%v, %s", err, out)
	}
}

func TestNothingIsStartedAnewAfterASignal(t *testing.T) {
	job, out, _ := shell(2, `trap "exit 1" TERM; echo ready; while :; do sleep 0.01; done`)
	job.MaxRestarts = 3
	signals, ended := signalled(t, job)
	out.await(t, 2, "ready")
	signals <- syscall.SIGTERM
	var i *Interrupted
	if err := <-ended; !errors.As(err, &i) || strings.Count(out.String(), "ready") != 2 {
		t.Errorf("%v, %s", err, out)
	}
}

// A shutdown signals to all processes, and ranks may end before the launcher reads its signal.
func TestNothingIsStartedAnewIfTheSignalIsReadAfterTheRanks(t *testing.T) {
	signals, attempts := make(chan os.Signal, 1), 0
	err := Job{MaxRestarts: 3, Signals: signals}.repeat(func(int) error {
		attempts++
		signals <- syscall.SIGTERM
		return &Failed{Status: exits(143)}
	})
	i := (*Interrupted)(nil)
	require.Check(t, errors.As(err, &i) && attempts == 1, "%v after %d attempts", err, attempts)
}

// As timeout(1) sends it: to its child, and to its process group.
func TestASignalThatComesTwiceAtOnceLeavesTimeToSave(t *testing.T) {
	job, out, _ := shell(2, `trap "sleep 1.3; echo saved; exit 143" TERM; echo ready
		while :; do sleep 0.01; done`)
	job.Grace = long
	signals, ended := signalled(t, job)
	out.await(t, 2, "ready")
	signals <- syscall.SIGTERM
	signals <- syscall.SIGTERM
	i := (*Interrupted)(nil)
	require.Check(t, errors.As(<-ended, &i), "it was not interrupted")
	out.await(t, 2, "saved")
}

func TestTheStatusOfRanksIsThatOfTheJob(t *testing.T) {
	for _, status := range []int{exit.Failed, exit.Usage, exit.Fault, exit.Unfinished, 130, 137,
		143} {
		for _, script := range []string{"exit ", "kill -s $(kill -l $0) $$; exit "} {
			if exit.SignalOf(status) == 0 && strings.HasPrefix(script, "kill") {
				continue
			}
			job, _, _ := shell(2, script+fmt.Sprint(status), fmt.Sprint(status))
			var f *Failed
			if err := Run(t.Context(), job); !errors.As(err, &f) || f.ExitCode() != status ||
				exit.Of(fmt.Errorf("euryale: %w", err)) != status {
				t.Errorf("%s%d: %v", script, status, err)
			}
		}
	}
}

func TestLogsHoldTheOutputOfEachRankAndAttempt(t *testing.T) {
	for _, ranks := range []int{1, 2} {
		job, out, _ := shell(ranks,
			`echo out $RANK; echo err $RANK >&2
			if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then exit 1; fi`)
		job.LogDir, job.MaxRestarts = filepath.Join(t.TempDir(), "logs"), 1
		require.NoError(t, Run(t.Context(), job))
		for attempt := range 2 {
			for r := range ranks {
				text, err := os.ReadFile(
					filepath.Join(job.LogDir, fmt.Sprintf("attempt_%d", attempt),
						fmt.Sprintf("rank_%d.log", r)))
				if got, want := sorted(string(text)), []string{fmt.Sprintf("err %d\n", r),
					fmt.Sprintf("out %d\n", r)}; err != nil || !slices.Equal(got, want) {
					t.Errorf("rank %d of %d, attempt %d: %q, %v", r, ranks, attempt, text, err)
				}
			}
		}
		n := strings.Count(out.String(), "out ")
		require.Check(t, n == 2*ranks, "%d ranks: the output is %q", ranks, out)
		require.Fails(t, "logs are overwritten", Run(t.Context(), job), "logs of an earlier job")
	}
}

// scratches are the scratch directories in a directory.
func scratches(t *testing.T, dir string) []string {
	t.Helper()
	return require.Value(filepath.Glob(filepath.Join(dir, "*")))(t)
}

func TestFoundScratchOfAKilledLauncherIsSwept(t *testing.T) {
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	live := require.Value(newScratch())(t)
	dead := require.Value(newScratch())(t)
	require.NoError(t, os.WriteFile(filepath.Join(dead.path, "program"), []byte("x"), 0o700))
	dead.lock.Close() // as the kernel does
	other := filepath.Join(temp, "other")
	require.NoError(t, errors.Join(os.Mkdir(other, 0o700),
		os.Symlink(other, filepath.Join(temp, "euryale-run-link"))))
	require.NoError(t, Run(t.Context(), Job{Program: "/bin/true", Ranks: 1}))
	if left := scratches(t, temp); len(left) != 3 { // the live one, the other and the link to it
		t.Errorf("left: %q", left)
	}
	require.Fails(t, "not swept", require.Err(os.Stat(dead.path)), fs.ErrNotExist)
	live.remove()
	require.Fails(t, "not removed", require.Err(os.Stat(live.path)), fs.ErrNotExist)
}

// slowGo is a directory with a go command that makes files, says its process
// number in a file, and goes on for ever.
func slowGo(t *testing.T) (dir, pid string) {
	t.Helper()
	dir = t.TempDir()
	pid = filepath.Join(dir, "pid")
	script := fmt.Sprintf("#!/bin/sh\nmkdir $GOTMPDIR/go-build1 $TMPDIR/cc1\necho $$ > "+
		"%[1]s.new\nmv %[1]s.new %[1]s\nexec sleep 100\n", pid)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go"), []byte(script), 0o755))
	return dir, pid
}

// awaitFile waits for a file and returns what is in it.
func awaitFile(t *testing.T, path string) string {
	t.Helper()
	var text []byte
	require.Soon(t, path, func() (there bool) {
		var err error
		text, err = os.ReadFile(path)
		return err == nil
	})
	return strings.TrimSpace(string(text))
}

func TestFoundInterruptedBuildLeavesNothing(t *testing.T) {
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	goDir, pid := slowGo(t)
	t.Setenv("PATH", goDir+":"+os.Getenv("PATH"))
	pkg := writeFiles(t, map[string]string{"go.mod": goMod,
		"main.go": "package main\n\nfunc main() {}\n"})
	signals, ended := signalled(t, Job{Program: pkg, Ranks: 2})
	builder := awaitFile(t, pid)
	signals <- syscall.SIGINT
	var i *Interrupted
	err := <-ended
	require.Check(t, errors.As(err, &i) && i.ExitCode() == 130, "%v", err)
	gone(t, builder)
	left := scratches(t, temp)
	require.Check(t, len(left) == 0, "left: %q", left)
}

func TestFoundBuildEndsWithAKilledLauncher(t *testing.T) {
	temp := t.TempDir()
	goDir, pid := slowGo(t)
	pkg := writeFiles(t, map[string]string{"go.mod": goMod,
		"main.go": "package main\n\nfunc main() {}\n"})
	cmd := exec.Command(os.Args[0], pkg)
	cmd.Env = append(os.Environ(), asHelper+"=builder", "TMPDIR="+temp, "PATH="+goDir+":"+os.Getenv(
		"PATH"))
	require.NoError(t, cmd.Start())
	builder := awaitFile(t, pid)
	require.NoError(t, cmd.Process.Kill())
	cmd.Wait() // says that it was killed
	gone(t, builder)
	require.Soon(t, "nothing is left in "+temp, func() bool { return len(scratches(t, temp)) == 0 })
}

func TestPackageIsBuiltInARelativeDirectoryUnemulated(t *testing.T) {
	pkg := writeFiles(t, map[string]string{"go.mod": goMod,
		"main.go": "package main\n\nfunc main() {}\n"})
	t.Chdir(t.TempDir())
	t.Setenv("TMPDIR", ".")
	require.Report(t, Run(t.Context(), Job{Program: pkg, Ranks: 1}))
	left := scratches(t, ".")
	require.Check(t, len(left) == 0, "left: %q", left)
}

// Git refuses to read a checkout that is another user's, such as a container's volume, or broken.
func TestPackageIsBuiltInACheckoutThatGitRefusesUnemulated(t *testing.T) {
	t.Setenv("GOFLAGS", "-buildvcs=auto")
	pkg := writeFiles(t, map[string]string{"go.mod": goMod,
		"main.go": "package main\n\nfunc main() {}\n"})
	require.NoError(t, os.Mkdir(filepath.Join(pkg, ".git"), 0o755))
	require.NoError(t, Run(t.Context(), Job{Program: pkg, Ranks: 1}))
}

func TestFoundDirectoryOfAGoFileIsNamed(t *testing.T) {
	for file, want := range map[string]string{
		"/abs/x/main.go": "/abs/x", "main.go": ".", "./main.go": ".", "x/main.go": "./x",
		"../x/main.go": "../x", "..x/main.go": "./..x",
	} {
		require.Equal(t, file, directory(file), want)
	}
}

func TestFoundProgressBarIsSeenAsItIsNow(t *testing.T) {
	// As schollz/progressbar writes it: it clears the line, and the bar comes last.
	got := write(true, "\r", "\r10%", "\r   \r", "\r20%", "\r   \r")
	want := eraseLine + "[0] 10%" + eraseLine + eraseLine + "[0] 20%" + eraseLine
	require.Equal(t, "write", got, want)
	require.Equal(t, "write", write(false, "\r10%", "\r   \r", "done\n", "\r   \r"), "[0] done\n")
}
