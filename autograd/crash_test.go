//go:build linux

package autograd

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/rendezvous"
)

// The tests of this file run jobs that resume from a directory and save to it. strace kills one of
// their processes at a system call, or lets the call fail.

// What these processes are told.
const (
	resumes   = "resumes"                  // the scenario
	resumeDir = "EURYALE_TEST_CHECKPOINT"  // the directory
	resumeEnd = "EURYALE_TEST_STEPS"       // how many steps they train
	tracing   = "EURYALE_TEST_STRACE"      // the arguments of strace
	traced    = "EURYALE_TEST_STRACE_RANK" // the rank that it traces
)

// strace counts the calls of each thread, so what it traces must stay on the first one.
func init() {
	if os.Getenv(resumeDir) != "" {
		runtime.LockOSThread()
	}
}

// resume is a process of such a job. It says from which step it goes on, and what it ends with.
func resume() (err error) {
	if args := os.Getenv(tracing); args != "" && os.Getenv("RANK") == os.Getenv(traced) {
		path, err := exec.LookPath("strace")
		if err == nil {
			err = os.Unsetenv(tracing)
		}
		if err != nil {
			return err
		}
		command := append(append([]string{path}, strings.Fields(args)...), os.Args[0])
		return syscall.Exec(path, command, os.Environ())
	}
	beyondOthers()
	// Ranks that join look for each other's files, so that is for another thread.
	var own *testenv.Rank
	joined := make(chan error)
	go func() {
		var err error
		own, err = join()
		joined <- err
	}()
	if err := <-joined; err != nil {
		return err
	}
	var steps int
	if _, err := fmt.Sscan(os.Getenv(resumeEnd), &steps); err != nil {
		return err
	}
	r := rank{comm: own.Comm, build: new(sync.Mutex)}
	notice := WithNotice(func(text string) { fmt.Println("notice:", text) })
	train := func(l *lesson) error { return l.resume(os.Getenv(resumeDir), steps) }
	err = r.teach(heavyBall(), train, append([]Option{notice}, compressions["topk"]...)...)
	if err != nil {
		own.Comm.Abort(err)
		return err
	}
	return own.Close()
}

// beyond is more than the calls of a name that other threads make.
const beyond = 200

// beyondOthers makes calls that fail, so that the numbers of later ones are beyond those of other
// threads: strace injects into the call of a number on each thread. pointsOf checks that.
func beyondOthers() {
	for range beyond {
		for _, call := range []uintptr{
			syscall.SYS_RENAMEAT, syscall.SYS_UNLINKAT, syscall.SYS_MKDIRAT, syscall.SYS_OPENAT,
		} {
			syscall.Syscall6(call, 0, 0, 0, 0, 0, 0)
		}
		syscall.Syscall(syscall.SYS_FSYNC, ^uintptr(0), 0, 0)
	}
}

// join joins the job.
func join() (*testenv.Rank, error) {
	env, err := rendezvous.ReadEnv(os.Getenv)
	if err != nil {
		return nil, err
	}
	w, err := rendezvous.Join(context.Background(), env)
	if err != nil {
		return nil, err
	}
	return testenv.Host(w)
}

// resume trains from the checkpoint of a directory, if there is one, to a step, and saves each.
func (l *lesson) resume(dir string, steps int) error {
	at := 0
	if err := l.d.Load(dir, l.solver, &at); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	fmt.Println("from", at)
	for ; at < steps; at++ {
		if err := errors.Join(l.step(at), l.d.Save(dir, l.solver, at+1)); err != nil {
			return err
		}
	}
	sum := sha256.New()
	for _, v := range l.values() {
		sum.Write(backend.Of(v).Bytes())
	}
	fmt.Printf("ends with %x\n", sum.Sum(nil))
	return nil
}

// job runs such a job of two ranks, and returns their last lines.
func job(t *testing.T, dir string, steps int, env ...string) (last [2]string) {
	t.Helper()
	env = append(env, resumeDir+"="+dir, fmt.Sprint(resumeEnd, "=", steps))
	for r, rank := range proctest.Start(t, resumes, len(last), env...) {
		last[r] = rank.End()
	}
	return last
}

// straced returns the variables that have strace trace a rank of a job, with such arguments.
func straced(rank int, format string, args ...any) []string {
	return []string{fmt.Sprint(traced, "=", rank), tracing + "=" + fmt.Sprintf(format, args...)}
}

// point is a system call of a process, by its name and its number among those of the name.
type point struct {
	call   string
	number int
	text   string // as strace writes it
}

// calls are those that change a directory, or need one.
const calls = "rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,openat,fsync"

var called = regexp.MustCompile(`^(\d+) +(\w+)\(`)

// pointsOf returns the calls of a job's rank that concern a directory.
func pointsOf(t *testing.T, dir string, steps, rank int) (all []point) {
	t.Helper()
	log := filepath.Join(t.TempDir(), "log")
	said := job(t, dir, steps, straced(rank, "-f -y -o %s -e trace=%s", log, calls)...)
	text, err := os.ReadFile(log)
	require.That(t, err == nil, "%v: it says %q", err, said)
	numbers, first := map[[2]string]int{}, ""
	for line := range strings.Lines(string(text)) {
		c := called.FindStringSubmatch(line)
		if c == nil {
			continue
		}
		first = cmp.Or(first, c[1])
		of := [2]string{c[1], c[2]} // the thread and the name
		numbers[of]++
		switch {
		case c[1] != first && numbers[of] >= beyond:
			t.Fatalf("a thread beside the first makes %d calls like %s", beyond, line)
		case c[1] == first && strings.Contains(line, dir):
			all = append(all, point{c[2], numbers[of], strings.TrimSpace(line)})
		}
	}
	return all
}

// needStrace skips a test where strace cannot be used.
func needStrace(t *testing.T) {
	t.Helper()
	if out, err := exec.Command("strace", "-o", os.DevNull, "true").CombinedOutput(); err != nil {
		t.Skipf("the test follows processes by strace (apt-get install strace): %v %s", err, out)
	}
}

// failures are what happens at a point.
var failures = []string{"signal=KILL", "error=EIO", "error=ENOSPC"}

// TestFoundSaveStopsAnywhere: whenever a rank is killed, or a call of Save or Load fails, the next
// job ends with the bits of one that was not disturbed, and what the user has in the directory is
// there.
func TestFoundSaveStopsAnywhere(t *testing.T) {
	needStrace(t)
	t.Run("begins", func(t *testing.T) { stopsAnywhere(t, filepath.Join("new", "run"), 0, 1) })
	t.Run("goes on", func(t *testing.T) { stopsAnywhere(t, ".", 2, 4) })
}

// stopsAnywhere stops jobs that go on from a step to another, in a directory below the user's.
func stopsAnywhere(t *testing.T, below string, from, to int) {
	home, undisturbed := t.TempDir(), t.TempDir()
	want := [2][2]string{job(t, undisturbed, to), job(t, undisturbed, to+1)}
	require.NoError(t, errors.Join(
		os.Mkdir(filepath.Join(home, "mine"), 0o777),
		os.WriteFile(filepath.Join(home, "mine", "thesis"), []byte("mine"), 0o666),
	))
	if from > 0 {
		job(t, filepath.Join(home, below), from)
	}
	every := map[string]int{ // a sample, or all
		"openat": 61, "fsync": 11, "unlinkat": 11, "mkdirat": 3, "renameat": 3,
	}
	if os.Getenv("EURYALE_FULL") == "1" {
		every = nil
	}
	for rank := range 2 {
		for _, p := range pointsOf(t, filepath.Join(copyOf(t, home), below), to, rank) {
			for k, how := range failures {
				if n := every[p.call]; n > 0 && (p.number+7*k)%n != 0 {
					continue
				}
				name := fmt.Sprintf("rank %d %s %s %d", rank, how, p.call, p.number)
				t.Run(name, func(t *testing.T) {
					copied := copyOf(t, home)
					p.stop(t, filepath.Join(copied, below), rank, how, want, to)
					mine, err := os.ReadFile(filepath.Join(copied, "mine", "thesis"))
					require.Check(t, err == nil && string(mine) == "mine",
						"%s: the user's file is %q: %v", p.text, mine, err)
				})
			}
		}
	}
}

// copyOf returns a copy of a directory.
func copyOf(t *testing.T, dir string) string {
	t.Helper()
	to, err := os.MkdirTemp(t.TempDir(), "run")
	if err == nil {
		err = os.CopyFS(to, os.DirFS(dir))
	}
	require.NoError(t, err)
	return to
}

// stop runs a job that fails at the point, and another one that goes on for another step.
func (p point) stop(t *testing.T, dir string, rank int, how string, want [2][2]string, steps int) {
	log := filepath.Join(t.TempDir(), "log")
	first := job(t, dir, steps,
		straced(rank, "-f -o %s -e trace=%s -e inject=%[2]s:%[3]s:when=%[4]d",
			log, p.call, how, p.number)...)
	text, err := os.ReadFile(log)
	happened := strings.Contains(string(text), "INJECTED") ||
		strings.Contains(string(text), "SIGKILL")
	require.Check(t, err == nil && happened, "nothing has happened at %s: %v: %q", p.text, err,
		first)
	failed := strings.HasPrefix(first[0], "failed")
	require.Check(t, failed || strings.HasPrefix(how, "signal") || first == want[0],
		"%s: the job ends with %q, want %q", p.text, first, want[0])
	if left := drafts(dir); failed && len(left) > 0 &&
		!slices.Contains([]string{"unlink", "unlinkat", "rmdir"}, p.call) {
		t.Errorf("%s: a Save that failed has left %v: %s", p.text, left, first[0])
	}
	if got := job(t, dir, steps+1); got != want[1] {
		t.Errorf("%s: the next job ends with %q, want %q\nafter %q", p.text, got, want[1], first)
	}
	left := drafts(dir)
	require.Check(t, len(left) == 0, "%s: the next job leaves %v", p.text, left)
}

// TestAFileSystemWithoutLocksIsSaid: once, and the job goes on.
func TestAFileSystemWithoutLocksIsSaid(t *testing.T) {
	needStrace(t)
	dir := t.TempDir()
	env := straced(0, "-f -o %s -e trace=flock -e inject=flock:error=ENOLCK", os.DevNull)
	ranks := proctest.Start(t, resumes, 1, append(env, resumeDir+"="+dir, resumeEnd+"=3")...)
	said, line := "", ranks[0].Next()
	for ; line != ""; line = ranks[0].Next() {
		said += line + "\n"
	}
	require.Check(t, strings.Count(said, "notice:") == 1 &&
		strings.Contains(said, "has no locks") && strings.Contains(said,
		"ends with"), "it says %q", said)
}

// TestTwoJobsOnOneDirectoryOnHost: each ends with the bits of one that is alone, or with the error
// that names the other, and the next job ends bitwise identical.
func TestTwoJobsOnOneDirectoryOnHost(t *testing.T) {
	const from, to = 2, 6
	alone, base := t.TempDir(), t.TempDir()
	want := [2][2]string{job(t, alone, to), job(t, alone, to+1)}
	job(t, base, from)
	trials := 4
	if os.Getenv("EURYALE_FULL") == "1" {
		trials = 100
	}
	ended, refused := 0, 0
	for trial := range trials {
		dir := t.TempDir()
		if trial%2 > 0 { // both go on
			dir = copyOf(t, base)
		}
		var jobs [2][]proctest.Rank
		for i := range jobs {
			end := fmt.Sprint(resumeEnd, "=", to)
			jobs[i] = proctest.Start(t, resumes, 2, resumeDir+"="+dir, end)
		}
		for _, ranks := range jobs {
			said := [2]string{ranks[0].End(), ranks[1].End()}
			locked := func(s string) bool {
				return strings.HasPrefix(s, "failed: ") &&
					strings.Contains(s, ErrLocked.Error()+": job ")
			}
			switch {
			case said == want[0]:
				ended++
			case locked(said[0]) || locked(said[1]): // the other may end because of it
				refused++
			default:
				t.Errorf("trial %d: a job ends with %q, want %q", trial, said, want[0])
			}
		}
		if got := job(t, dir, to+1); got != want[1] {
			t.Errorf("trial %d: the next job ends with %q, want %q", trial, got, want[1])
		}
	}
	require.Check(t, ended >= trials, "of two jobs %d times %d end, and %d are refused", trials,
		ended, refused)
	t.Logf("%d trials: %d jobs have ended, %d were refused", trials, ended, refused)
}

// TestFilesAreOnTheDiskBeforeTheRenameOnHost: what a machine that stops may lose is not yet a
// checkpoint, and no older one is removed before the new one is on the disk.
func TestFilesAreOnTheDiskBeforeTheRenameOnHost(t *testing.T) {
	needStrace(t)
	dir := t.TempDir()
	job(t, dir, 2)
	written, synced := map[string]bool{}, map[string]bool{}
	renamed := "" // the last checkpoint that has its name
	path := regexp.MustCompile(`"([^"]*)"`)
	made := regexp.MustCompile(`openat\(.*(\.safetensors|/checkpoint\.json)", .*O_CREAT`)
	for _, p := range pointsOf(t, dir, 4, 0) {
		what := path.FindAllStringSubmatch(p.text, -1)
		switch {
		case made.MatchString(p.text):
			written[what[0][1]] = true
			delete(synced, filepath.Dir(what[0][1])) // it has another name since
		case p.call == "fsync":
			_, file, _ := strings.Cut(p.text, "<")
			file, _, _ = strings.Cut(file, ">")
			synced[file] = true
		case strings.HasPrefix(p.call, "rename") && strings.Contains(what[0][1], "saving"):
			for file := range written {
				require.Check(t, synced[file], "%s is not on the disk at %s", file, p.text)
			}
			require.Check(t, len(written) == 3 && synced[what[0][1]],
				"%v are written, and on the disk is %v, at %s", written, synced, p.text)
			renamed = what[1][1]
			clear(written)
			clear(synced)
		case strings.HasPrefix(p.call, "rename"):
			require.Check(t, renamed != "" && synced[dir], "nothing else is on the disk at %s",
				p.text)
			renamed = ""
		}
	}
}
