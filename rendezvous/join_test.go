package rendezvous

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// notice is how soon the loss of a rank must be known.
const notice = time.Second

// asRank makes this executable a rank instead of a test.
const asRank = "RENDEZVOUS_TEST_RANK"

// withFiles bounds the file descriptors of such a rank.
const withFiles = "RENDEZVOUS_TEST_FILES"

func TestMain(m *testing.M) {
	if os.Getenv(asRank) != "" {
		rankMain()
		return
	}
	os.Exit(m.Run())
}

// rankMain joins, reports, and obeys one word on its input.
func rankMain() {
	if os.Getenv(asRank) == "launcher" {
		fmt.Println(launcherProcess(os.Getenv("PMI_RANK")))
		return
	}
	if files, err := strconv.ParseUint(os.Getenv(withFiles), 10, 64); err == nil {
		limitFiles(files)
	}
	e, err := ReadEnv(os.Getenv)
	if err != nil {
		fmt.Println("error", err)
		return
	}
	w, err := Join(context.Background(), e)
	if err != nil {
		fmt.Println("error", err)
		return
	}
	fmt.Println("joined", w.Rank, w.Size, w.LocalRank, w.LocalSize, w.Node)
	word := make(chan string)
	go func() {
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			word <- in.Text()
		}
	}()
	for {
		select {
		case <-w.Down():
			fmt.Println("down", w.Failure().Rank, w.Failure().Cause)
			w.Close()
			return
		case what := <-word:
			switch what {
			case "leave":
				w.Close()
				fmt.Println("left")
				return
			case "barrier":
				fmt.Println("barrier", w.Barrier(context.Background(), "b"))
			}
		}
	}
}

// process is a rank in its own process.
type process struct {
	cmd   *exec.Cmd
	in    io.Writer
	lines chan string // closed at the end of its output
}

// start starts ranks of a job of size ranks that meet in dir. Variables in vars
// come on top.
func start(t *testing.T, dir string, size int, ranks []int, vars ...string) map[int]*process {
	t.Helper()
	all := map[int]*process{}
	for _, r := range ranks {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), asRank+"=1", "XDG_RUNTIME_DIR="+dir, "EURYALE_JOB=test",
			"EURYALE_TIMEOUT=20s",
			fmt.Sprint("RANK=", r), fmt.Sprint("WORLD_SIZE=", size), fmt.Sprint("LOCAL_RANK=", r),
			fmt.Sprint("LOCAL_WORLD_SIZE=", size))
		cmd.Env = append(cmd.Env, vars...)
		cmd.Stderr = os.Stderr
		in := require.Value(cmd.StdinPipe())(t)
		out := require.Value(cmd.StdoutPipe())(t)
		require.NoError(t, cmd.Start())
		p := &process{cmd, in, make(chan string, 16)}
		go func() {
			defer close(p.lines)
			for s := bufio.NewScanner(out); s.Scan(); {
				p.lines <- s.Text()
			}
		}()
		t.Cleanup(func() {
			cmd.Process.Kill()
			cmd.Wait()
		})
		all[r] = p
	}
	return all
}

// expect reads the next line, which must come within d and contain parts.
func (p *process) expect(t *testing.T, d time.Duration, parts ...string) {
	t.Helper()
	select {
	case line := <-p.lines:
		for _, part := range parts {
			require.Check(t, strings.Contains(line, part), "%q lacks %q", line, part)
		}
	case <-time.After(d):
		t.Errorf("nothing within %v, want %q", d, parts)
	}
}

func (p *process) say(word string) { fmt.Fprintln(p.in, word) }

func (p *process) signal(s syscall.Signal) { p.cmd.Process.Signal(s) }

// recordDirOf makes an empty directory to meet in, and sees that it is empty
// in the end.
func recordDirOf(t *testing.T) string {
	dir := t.TempDir()
	t.Cleanup(func() { isEmpty(t, dir) })
	return dir
}

func isEmpty(t *testing.T, dir string) {
	t.Helper()
	left, _ := filepath.Glob(filepath.Join(dir, "euryale", "*"))
	require.Check(t, len(left) == 0, "left behind: %v", left)
}

func freePort(t *testing.T) int {
	t.Helper()
	ln := require.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port
}

// machines are the variables of ranks that are told to be on several machines.
func machines(t *testing.T) []string {
	return []string{"LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", "EURYALE_TOKEN=secret",
		"MASTER_ADDR=127.0.0.1", fmt.Sprint("MASTER_PORT=", freePort(t))}
}

func TestProcessesMeetAndLeave(t *testing.T) {
	dir := recordDirOf(t)
	ps := start(t, dir, 4, []int{3, 2, 1, 0})
	for r, p := range ps {
		p.expect(t, long, fmt.Sprintf("joined %d 4 %d 4 0", r, r))
	}
	isEmpty(t, dir) // as soon as all have joined
	for _, p := range ps {
		p.say("barrier")
	}
	for _, p := range ps {
		p.expect(t, long, "barrier <nil>")
		p.say("leave")
	}
	for _, p := range ps {
		p.expect(t, long, "left")
	}
}

func TestProcessesOfSeveralMachinesMeet(t *testing.T) {
	ps := start(t, t.TempDir(), 3, []int{0, 1, 2}, machines(t)...)
	for r, p := range ps {
		// They find out that they are on one machine after all.
		p.expect(t, long, fmt.Sprintf("joined %d 3 %d 3 0", r, r))
		p.say("leave")
	}
	for _, p := range ps {
		p.expect(t, long, "left")
	}
}

func TestKilledRankIsNoticed(t *testing.T) {
	for _, victim := range []int{0, 1, 3} {
		t.Run(fmt.Sprint("rank", victim), func(t *testing.T) {
			ps := start(t, recordDirOf(t), 4, []int{0, 1, 2, 3})
			for _, p := range ps {
				p.expect(t, long, "joined")
			}
			ps[victim].signal(syscall.SIGKILL)
			for r, p := range ps {
				if r != victim {
					p.expect(t, notice, fmt.Sprintf("down %d", victim), "ended or was killed")
				}
			}
		})
	}
}

// TestKilledWhileMeeting kills a rank that has come, while another is still
// missing: the test itself, which sees who has come.
func TestKilledWhileMeeting(t *testing.T) {
	for _, victim := range []int{0, 1} {
		t.Run(fmt.Sprint("rank", victim), func(t *testing.T) {
			dir := recordDirOf(t)
			t.Setenv("XDG_RUNTIME_DIR", dir)
			ps := start(t, dir, 4, []int{0, 1, 2})
			e := Env{Launcher: "euryale run", Job: "test", Rank: 3, Size: 4, LocalRank: 3,
				LocalSize: 4, Timeout: long}
			store := dialAs(t, e)
			for r := range 3 {
				require.NoError(t, require.Err(store.Get(within(t, long), rankKey(joinKey, r))))
			}
			ps[victim].signal(syscall.SIGKILL)
			for r, p := range ps {
				if r != victim {
					p.expect(t, notice, "error", fmt.Sprintf("rank %d: join job test", r),
						fmt.Sprintf("rank %d is down", victim))
				}
			}
			store.Close()
			for _, p := range ps { // and to have cleaned up
				p.cmd.Wait()
			}
		})
	}
}

func dialAs(t *testing.T, e Env) *client {
	t.Helper()
	me := require.Value(identify(e))(t)
	m := require.Value(newJoinRecord(e))(t)
	return require.Value(findServer(within(t, long), e, me, m.read, m.where))(t)
}

// joinAll joins ranks that are goroutines of this process, and returns their
// Worlds and errors.
func joinAll(t *testing.T, all []Env) ([]*World, []error) {
	t.Helper()
	ws, errs := make([]*World, len(all)), make([]error, len(all))
	var wg sync.WaitGroup
	for i, e := range all {
		wg.Go(func() { ws[i], errs[i] = Join(t.Context(), e) })
	}
	wg.Wait()
	return ws, errs
}

func closeWorlds(ws []*World) {
	each(slices.DeleteFunc(slices.Clone(ws), func(w *World) bool { return w == nil }),
		func(w *World) { w.Close() })
}

// local returns the Envs of a job on this machine.
func local(t *testing.T, size int, timeout time.Duration) []Env {
	t.Setenv("XDG_RUNTIME_DIR", recordDirOf(t))
	all := make([]Env, size)
	for r := range all {
		all[r] = Env{Job: t.Name(), Rank: r, Size: size, LocalRank: r, LocalSize: size,
			Timeout: timeout}
	}
	return all
}

func TestJoinLeavesNothing(t *testing.T) {
	before := goleak.IgnoreCurrent()
	ws, errs := joinAll(t, local(t, 5, long))
	require.NoError(t, errors.Join(errs...))
	closeWorlds(ws)
	require.NoError(t, goleak.Find(before))
}

func TestOneRankNeedsNothing(t *testing.T) {
	e := require.Value(ReadEnv(func(string) string { return "" }))(t)
	t.Setenv("XDG_RUNTIME_DIR", "")
	t.Setenv("TMPDIR", "/none")
	w := require.Value(Join(t.Context(), e))(t)
	defer w.Close()
	err := w.Barrier(t.Context(), "b")
	require.Check(t, err == nil && w.Size == 1 && w.LocalSize == 1, "%+v, %v", w, err)
}

func TestMissingRankIsNamedToAll(t *testing.T) {
	before := goleak.IgnoreCurrent()
	all := local(t, 4, 2*time.Second) // enough for a store on a loaded machine
	_, errs := joinAll(t, []Env{all[0], all[1], all[3]})
	for i, err := range errs {
		require.Fails(t, fmt.Sprint("Env ", i), err, "rank 2 did not join")
	}
	require.NoError(t, goleak.Find(before))
}

func TestMissingRank0IsNamed(t *testing.T) {
	all := local(t, 2, 200*time.Millisecond)
	_, errs := joinAll(t, all[1:])
	require.Fails(t, "Join of rank 0", errs[0], "rank 0 is missing (timeout after 200ms")
}

func TestJoinEndsWithContext(t *testing.T) {
	all := local(t, 2, long)
	for _, e := range all {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(soon, cancel)
		require.Fails(t, fmt.Sprint("rank ", e.Rank), require.Err(Join(ctx, e)), context.Canceled)
	}
}

func TestTokenOfTheUserIsUsed(t *testing.T) {
	all := local(t, 2, long)
	for i := range all {
		all[i].Token = "secret"
	}
	ws, errs := joinAll(t, all)
	require.Report(t, errors.Join(errs...))
	closeWorlds(ws)

	all[0].Timeout, all[1].Timeout = 300*time.Millisecond, 300*time.Millisecond
	all[1].Token = "another"
	_, errs = joinAll(t, all)
	require.Fails(t, "rank 0", errs[0], "rank 1 did not join", errToken)
	require.Fails(t, "rank 1", errs[1], errToken)
}

// elsewhere is an address that no machine has: it is reserved for documents.
const elsewhere = "198.51.100.1"

// distant returns the Envs of ranks that are told to be on several machines.
func distant(t *testing.T, size int) []Env {
	port := freePort(t)
	all := make([]Env, size)
	for r := range all {
		all[r] = Env{Job: "j", Rank: r, Size: size, LocalSize: 1, Node: r, Addr: "127.0.0.1",
			Port: port, Token: testToken, Timeout: 500 * time.Millisecond}
	}
	return all
}

func TestSeveralMachinesNeedATokenAndAnAddress(t *testing.T) {
	for want, change := range map[string]func(*Env){
		"set EURYALE_TOKEN": func(e *Env) { e.Token, e.Addr = "", elsewhere },
		"set MASTER_ADDR":   func(e *Env) { e.Addr = "" },
		"MASTER_PORT":       func(e *Env) { e.Port = 0 },
	} {
		for _, e := range distant(t, 2) {
			change(&e)
			require.Fails(t, fmt.Sprint("rank ", e.Rank), require.Err(Join(t.Context(), e)), want)
		}
	}
}

func TestWrongTokenAcrossMachinesIsToldInTheEnd(t *testing.T) {
	all := distant(t, 2)
	all[1].Token = "another"
	_, errs := joinAll(t, all)
	require.Fails(t, "rank 1", errs[1], errToken, "rank 1: join job j")
	require.Fails(t, "rank 0", errs[0], "rank 1 did not", errToken)
}

func TestPortInUse(t *testing.T) {
	all := distant(t, 2)
	ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(all[0].Port)))
	require.NoError(t, err)
	defer ln.Close()
	require.Fails(t, "several machines", require.Err(Join(t.Context(), all[0])), errAddrInUse,
		"set MASTER_PORT to a free port")
	// On one machine the port is not needed: a launcher may hold it.
	near := local(t, 2, long)
	for i := range near {
		near[i].Addr, near[i].Port = all[0].Addr, all[0].Port
	}
	ws, errs := joinAll(t, near)
	err = errors.Join(errs...)
	require.Check(t, err == nil, "one machine: %v", err)
	closeWorlds(ws)
}

func TestAddressOfAnotherMachine(t *testing.T) {
	all := distant(t, 2)
	all[0].Addr = elsewhere
	require.Fails(t, "Join", require.Err(Join(t.Context(), all[0])),
		"must be an address of the machine that rank 0 runs on")
}

func TestSameRankTwice(t *testing.T) {
	all := local(t, 3, long)
	all[2].Rank = 1
	_, errs := joinAll(t, all)
	for i, err := range errs {
		require.Fails(t, fmt.Sprint("Env ", i), err, "two processes say that they are rank 1")
	}
}

func TestWorldSizesDiffer(t *testing.T) {
	all := local(t, 2, long)
	all[1].Size, all[1].LocalSize = 3, 3
	_, errs := joinAll(t, all)
	for i, err := range errs {
		require.Fails(t, fmt.Sprint("Env ", i), err, "world sizes differ")
	}
}

func TestNoteLeftBehindIsPassedOver(t *testing.T) {
	all := local(t, 2, long)
	m := require.Value(newJoinRecord(all[0]))(t)
	stale := recordValue{addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(freePort(t))),
		token: "old"}
	require.NoError(t, m.write(stale))
	require.NoError(t, os.WriteFile(m.path+lockName, nil, 0o600))
	late := make(chan error, 1)
	go func() {
		w, err := Join(t.Context(), all[1])
		if err == nil {
			defer w.Close()
		}
		late <- err
	}()
	pause(t.Context(), soon) // rank 1 may see the stale record first, or not
	w, err := Join(t.Context(), all[0])
	require.NoError(t, errors.Join(err, <-late))
	w.Close()
}

func TestTwoJobsOfOneName(t *testing.T) {
	all := local(t, 2, long)
	m := require.Value(newJoinRecord(all[0]))(t)
	require.NoError(t, m.publish(t.Context(), recordValue{addr: "127.0.0.1:1", token: "t"}))
	defer m.removeRecord()
	require.Fails(t, "Join", require.Err(Join(t.Context(), all[0])), "EURYALE_JOB")
	_, ok := m.read()
	require.Check(t, ok, "the second job removed the record of the first")
}

func TestMeetingFilesArePrivate(t *testing.T) {
	all := local(t, 2, long)
	m := require.Value(newJoinRecord(all[0]))(t)
	require.NoError(t, m.publish(t.Context(), recordValue{addr: "127.0.0.1:1", token: "t"}))
	defer m.removeRecord()
	for _, path := range []string{m.path, m.path + lockName} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}
	if info, _ := os.Stat(filepath.Dir(m.path)); info.Mode().Perm() != 0o700 {
		t.Errorf("directory: %v", info.Mode())
	}
}

// homeless takes away the directories where ranks meet if they cannot in TMPDIR.
func homeless(t *testing.T) {
	for _, name := range []string{"XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "HOME"} {
		t.Setenv(name, "")
	}
}

func TestUnsafeDirectoryIsRefused(t *testing.T) {
	for what, make := range map[string]func(dir string) error{
		"open to others": func(dir string) error {
			return errors.Join(os.Mkdir(dir, 0o700), os.Chmod(dir, 0o755))
		},
		"a link": func(dir string) error { return os.Symlink(t.TempDir(), dir) },
		"a file": func(dir string) error { return os.WriteFile(dir, nil, 0o600) },
	} {
		run := t.TempDir()
		homeless(t)
		t.Setenv("TMPDIR", run)
		require.NoError(t, make(filepath.Join(run, fmt.Sprintf("euryale-%d", os.Getuid()))))
		require.Fails(t, what, require.Err(recordDir()), "mode 0700", "set TMPDIR")
	}
	t.Setenv("TMPDIR", "/none")
	require.Fails(t, "no directory", require.Err(recordDir()), "set TMPDIR")
}

func TestMachinesAreNumberedByTheirFirstRank(t *testing.T) {
	all := []string{"b", "a", "b", "c", "a"}
	for r, want := range [][3]int{{0, 0, 2}, {1, 0, 2}, {0, 1, 2}, {2, 0, 1}, {1, 1, 2}} {
		w := &World{Rank: r, Size: 5}
		w.numberMachines(all)
		require.Equal(t, fmt.Sprintf("rank %d: node, local rank, local size", r),
			[3]int{w.Node, w.LocalRank, w.LocalSize}, want)
	}
}

// another is a user that is not the test's.
func another() int { return os.Getuid() + 1 }

// othersDir returns a directory of another user: one that is given away or, without the right to do
// that, one of the system.
func othersDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	given := os.Chown(dir, another(), another())
	if given != nil {
		dir = "/usr"
	}
	if info, err := os.Stat(dir); err != nil || ownerOf(info) == os.Getuid() {
		t.Skipf("needs a directory of another user: %v", errors.Join(given, err))
	}
	return dir
}

func TestFoundRuntimeDirectoryOfAnotherUserIsLeftAlone(t *testing.T) {
	run := othersDir(t)
	all := local(t, 2, long)
	t.Setenv("XDG_RUNTIME_DIR", run)
	t.Setenv("TMPDIR", t.TempDir())
	ws, errs := joinAll(t, all)
	require.Report(t, errors.Join(errs...))
	closeWorlds(ws)
	require.Fails(t, "something was made in the directory of another user",
		require.Err(os.Lstat(filepath.Join(run, "euryale"))), os.ErrNotExist)
}

func TestFoundMeetingDirectoryOfAnotherUserIsNamed(t *testing.T) {
	dir := t.TempDir()
	homeless(t)
	t.Setenv("TMPDIR", dir)
	taken := filepath.Join(dir, fmt.Sprintf("euryale-%d", os.Getuid()))
	require.NoError(t, os.Mkdir(taken, 0o700))
	if err := os.Chown(taken, another(), another()); err != nil {
		t.Skipf("needs the right to give a directory to another user: %v", err)
	}
	_, err := recordDir()
	for _, part := range []string{
		fmt.Sprintf("%s belongs to user %d, not to user %d", taken, another(), os.Getuid()),
		fmt.Sprintf("set TMPDIR to a directory that user %d owns", os.Getuid()),
	} {
		require.Fails(t, "recordDir", err, part)
	}
}

func TestRanksMeetAlthoughAnotherUserHasTakenTheirDirectory(t *testing.T) {
	temp, home := t.TempDir(), filepath.Join(t.TempDir(), "home")
	all := local(t, 3, long)
	t.Setenv("XDG_RUNTIME_DIR", "")
	t.Setenv("XDG_CACHE_HOME", home)
	t.Setenv("TMPDIR", temp)
	// A link is refused like a directory of another user, and needs no rights to make.
	taken := filepath.Join(temp, fmt.Sprintf("euryale-%d", os.Getuid()))
	require.NoError(t, os.Symlink("/usr", taken))
	ws, errs := joinAll(t, all)
	require.Report(t, errors.Join(errs...))
	closeWorlds(ws)
	dirs, err := filepath.Glob(filepath.Join(home, "euryale", "join-*"))
	require.That(t, err == nil && len(dirs) == 1, "%q, %v", dirs, err)
	left, err := os.ReadDir(dirs[0])
	require.Check(t, err == nil && len(left) == 0, "left behind: %v, %v", left, err)
	require.Equal(t, "Stat", require.Value(os.Stat(dirs[0]))(t).Mode().Perm(), 0o700)
}

// Who only reports an end makes no directory: it waits for the one that ranks make, although their
// user has met in the cache before.
func TestWhoReportsAnEndWaitsForTheDirectoryOfTheRanks(t *testing.T) {
	temp := t.TempDir()
	homeless(t)
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("TMPDIR", temp)
	require.NoError(t, os.MkdirAll(cacheRecords(), 0o700))
	require.Check(t, !recordDirMade(), "the directory in TMPDIR is still to be made")
	dir := filepath.Join(temp, fmt.Sprintf("euryale-%d", os.Getuid()))
	for what, make := range map[string]func() error{
		"theirs":    func() error { return os.Mkdir(dir, 0o700) },
		"another's": func() error { return os.Symlink(temp, dir) },
		"of no safe mode": func() error {
			return errors.Join(os.Mkdir(dir, 0o700), os.Chmod(dir, 0o755))
		},
	} {
		require.NoError(t, make())
		require.Check(t, recordDirMade(), "%s: ranks meet there, or in the cache", what)
		require.NoError(t, os.Remove(dir))
	}
}

func TestFoundFilesOfKilledMeetingsAreSwept(t *testing.T) {
	all := local(t, 2, long)
	m := require.Value(newJoinRecord(all[0]))(t)
	dir := filepath.Dir(m.path)
	other := filepath.Join(dir, strings.Repeat("0a", keyBytes))
	for _, path := range []string{other, other + newName,
		filepath.Join(dir, strings.Repeat("0b", keyBytes)) + newName, filepath.Join(
			dir, strings.Repeat("0c", keyBytes)) + lockName} {
		require.NoError(t, os.WriteFile(path, nil, 0o600))
	}
	held, err := lockFile(filepath.Join(dir, strings.Repeat("0d", keyBytes)) + lockName)
	require.NoError(t, err)
	ws, errs := joinAll(t, all)
	require.Report(t, errors.Join(errs...))
	closeWorlds(ws)
	left, _ := filepath.Glob(filepath.Join(dir, "*"))
	require.Check(t, slices.Equal(left, []string{held.Name()}),
		"left %v, want only the lock of a job that meets now", left)
	(&joinRecord{path: strings.TrimSuffix(held.Name(), lockName), lock: held}).removeRecord()
}

func TestFoundWorldsOfOneJobHaveDifferentNames(t *testing.T) {
	all := local(t, 2, long)
	var names []string
	for range 2 {
		ws, errs := joinAll(t, all)
		require.NoError(t, errors.Join(errs...))
		require.Check(t, ws[0].Name == ws[1].Name && strings.HasPrefix(ws[0].Name, all[0].Job+"-"),
			"the ranks are of %q and %q", ws[0].Name, ws[1].Name)
		names = append(names, ws[0].Name)
		closeWorlds(ws)
	}
	require.Check(t, names[0] != names[1], "both are %q", names[0])
}

// needsName skips a test where no resolver knows this machine by a name, as without /etc/hosts.
func needsName(t *testing.T, name string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := net.DefaultResolver.LookupIPAddr(ctx, name); err != nil {
		t.Skip("no resolver knows this machine by the name ", name, ": ", err)
	}
}

// Two agents of torchrun, or two nodes of Slurm, can be on one machine.
func TestFoundNodesOfOneMachineMeet(t *testing.T) {
	host := require.Value(os.Hostname())(t)
	for name, c := range map[string]struct{ addr, token string }{
		"loopback":                       {"127.0.0.1", ""},
		"the machine's name":             {host, ""},
		"loopback and a token":           {"localhost", testToken},
		"the machine's name and a token": {host, testToken},
	} {
		t.Run(name, func(t *testing.T) {
			needsName(t, c.addr)
			all := local(t, 4, long)
			port := freePort(t)
			for r := range all {
				all[r].LocalRank, all[r].LocalSize, all[r].Node = r%2, 2, r/2
				all[r].Addr, all[r].Port, all[r].Token = c.addr, port, c.token
			}
			ws, errs := joinAll(t, all)
			require.NoError(t, errors.Join(errs...))
			for r, w := range ws {
				require.Check(t, w.Node == 0 && w.LocalRank == r && w.LocalSize == 4,
					"rank %d: node %d, local rank %d of %d", r, w.Node, w.LocalRank, w.LocalSize)
			}
			closeWorlds(ws)
		})
	}
}

func TestRankOfAMachineThatNobodyReachesIsExplained(t *testing.T) {
	all := distant(t, 2)
	all[0].Token = "guessed"
	_, errs := joinAll(t, all[:1])
	for _, part := range []string{"rank 1 did not join",
		"ranks on other machines cannot reach 127.0.0.1", "EURYALE_TOKEN to 16 bytes"} {
		require.Fails(t, "Join of rank 0", errs[0], part)
	}
}

// A controller may give rank 0 its own name, or all of its addresses, and the others a name of it.
func TestRank0ThatKnowsNoAddressOfItsOwnIsReached(t *testing.T) {
	needsName(t, "localhost")
	addrs := require.Value(net.InterfaceAddrs())(t)
	outside := "127.0.0.1" // where there is no network
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLoopback() && n.IP.To4() != nil {
			outside = n.IP.String()
		}
	}
	for _, own := range []string{"localhost", "127.0.0.1", "0.0.0.0"} {
		t.Run(own, func(t *testing.T) {
			all := distant(t, 3)
			for r := range all {
				all[r].Addr, all[r].Timeout = outside, long
			}
			all[0].Addr, all[1].Addr = own, "localhost"
			ws, errs := joinAll(t, all)
			require.NoError(t, errors.Join(errs...))
			defer closeWorlds(ws)
			ln := require.Value(ws[0].Listen("n", func(_ int, conn net.Conn) { conn.Close() }))(t)
			defer ln.Close()
			host, _, _ := net.SplitHostPort(ln.Addr())
			require.Check(t, host == outside, "rank 0 is at %s, want %s", host, outside)
			conn := require.Value(ws[2].Dial(t.Context(), "n", 0, ln.Addr()))(t)
			conn.Close()
		})
	}
}

func TestDirectoriesThatDifferAreNamed(t *testing.T) {
	dirs := []string{t.TempDir(), t.TempDir()}
	short := []string{"EURYALE_TIMEOUT=500ms"}
	for r := range dirs {
		t.Run(fmt.Sprint("rank ", r), func(t *testing.T) {
			ps := start(t, dirs[r], 2, []int{r}, short...)
			ps[r].expect(t, long, "rank", `XDG_RUNTIME_DIR="`+dirs[r]+`"`, "TMPDIR=",
				"the same on all ranks")
		})
	}
}

func TestFoundRankThatEndedBeforeItJoinedIsNamed(t *testing.T) {
	for ended := range 2 {
		for name, all := range map[string][]Env{"one machine": local(t, 2, long),
			"by an address": distant(t, 2)} {
			if ended == 0 && name == "by an address" {
				continue // rank 0 serves the store, so there is nobody to tell
			}
			t.Run(fmt.Sprintf("rank %d, %s", ended, name), func(t *testing.T) {
				before := goleak.IgnoreCurrent()
				all[0].Timeout, all[1].Timeout = long, long
				ctx, cancel := context.WithCancel(t.Context())
				told := make(chan error, 1)
				go func() { told <- Ended(ctx, all[1], ended, errors.New("exit status 0")) }()
				_, err := Join(t.Context(), all[1-ended])
				var f *Failure
				require.Check(t, errors.As(err, &f) && f.Rank == ended &&
					strings.Contains(err.Error(), fmt.Sprintf("rank %d is down: its process "+
						"ended with exit status 0 "+"before it joined", ended)), "got %v", err)
				if ended == 0 {
					cancel() // until then it keeps a record for stragglers
				}
				err = <-told
				require.Check(t, err == nil, "Ended: %v", err)
				cancel()
				require.NoError(t, goleak.Find(before))
			})
		}
	}
}

func TestEndOfARankThatHasJoinedIsNoNews(t *testing.T) {
	s := tcpServer(t, 3)
	c := connectRank(t, s, 1)
	for ended, failed := range []bool{false, false, true} {
		id := testIdentity(ended, 3)
		id.ended, id.build = "exit status 0", "a launcher's"
		o, err := dial(within(t, long), s.ln.Addr().String(), testToken, id, handshakeTime, long)
		if ended == 0 {
			require.Check(t, lasting(err), "rank 0 serves the store, so it has joined: %v", err)
			continue
		}
		require.NoError(t, err)
		o.Close()
		require.Equal(t, fmt.Sprintf("after word of rank %d: failed", ended), s.failure() != nil,
			failed)
	}
	c.Close()
}

func TestFoundHydraRanksFindTheirLauncher(t *testing.T) {
	// A shell between the launcher and the rank has the rank's variables.
	for name, script := range map[string]string{"alone": `exec "$0"`, "in a shell": `"$0"; true`} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command("sh", "-c", script, os.Args[0])
			cmd.Env = append(os.Environ(), asRank+"=launcher", "PMI_RANK=7")
			out, err := cmd.Output()
			want := fmt.Sprint(os.Getpid(), "-")
			require.Check(t, err == nil && strings.HasPrefix(string(out), want),
				"started by %q (%v), want process %s", out, err, want)
		})
	}
}
