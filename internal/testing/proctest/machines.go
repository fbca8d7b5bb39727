package proctest

import (
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// Namespace is a machine of its own, as far as ranks can tell: a network namespace with its own
// address, /dev/shm and temporary directory. All are of this host's cores and memory.
type Namespace struct {
	Name, Addr string

	port   Wire     // how it is connected
	starve sync.Map // by address: see Starve
	dir    string   // a tmpfs of its own
	others []*Namespace
	daemon int // the process of its sshd
}

// T is what this package needs of a [testing.T] where machines are made: programs that are tests
// have one of their own.
type T interface {
	Helper()
	Cleanup(func())
	TempDir() string
	Errorf(format string, args ...any)
	Fatal(args ...any)
	Fatalf(format string, args ...any)
	Skipf(format string, args ...any)
}

// Machines makes n machines on one network for a test, each connected to it by a wire, and runs a
// command on each. The test's end kills what runs on them and removes them. Where that fails, since
// the system lacks something or the test has no right to it, the test is skipped, and with
// REQUIRE_NETNS=1 it fails. Who the user is does not matter, nor which programs seem to be there.
func Machines(t T, n int, wire Wire) []*Namespace {
	t.Helper()
	hub := fmt.Sprintf("eu%d%s", os.Getpid(), strings.ToLower(rand.Text()[:3]))
	all := make([]*Namespace, n)
	for i := range all {
		all[i] = &Namespace{Name: fmt.Sprintf("%s%c", hub, 'a'+i), Addr: fmt.Sprintf("10.213.77.%d",
			i+1), port: wire, dir: filepath.Join(t.TempDir(), "machine")}
	}
	t.Cleanup(func() { ip("netns", "delete", hub) }) // what was made before a command failed, too
	need(t, "netns add "+hub, "-n "+hub+" link add hub type bridge", "-n "+hub+" link set hub up")
	for _, m := range all {
		m.others = all
		m.start(t, hub)
	}
	return all
}

// ip runs the command of that name.
func ip(args ...string) error {
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// need runs commands of ip that a test needs.
func need(t T, commands ...string) {
	t.Helper()
	for _, command := range commands {
		if err := ip(strings.Fields(command)...); err != nil {
			lacking(t, "network namespaces", err)
		}
	}
}

// lacking skips a test whose requirements were tried and failed.
func lacking(t T, what string, err error) {
	t.Helper()
	require.That(t, os.Getenv("REQUIRE_NETNS") != "1",
		"REQUIRE_NETNS=1, but there is no way to make %s: %v", what, err)
	t.Skipf("needs %s, which take root, iproute2 and a container that allows them: %v", what, err)
}

// start makes the machine, and connects it to a hub, where its end of the wire has its name.
func (m *Namespace) start(t T, hub string) {
	t.Helper()
	t.Cleanup(func() { ip("netns", "delete", m.Name) })
	need(t, "netns add "+m.Name)
	m.port.connect(t, m.Name, hub, func(frame []byte) bool {
		to, ok := hasData(frame)
		_, starves := m.starve.Load(to)
		return ok && starves
	})
	need(t, "-n "+hub+" link set "+m.Name+" up master hub", "-n "+m.Name+" link set lo up",
		"-n "+m.Name+" link set eth0 up",
		"-n "+m.Name+" address add "+m.Addr+"/24 dev eth0")
	require.NoError(t, os.Mkdir(m.dir, 0o755))
	if err := mountMemory(m.dir); err != nil {
		lacking(t, "a file system for each machine", err)
	}
	t.Cleanup(func() {
		m.Signal(t, syscall.SIGKILL)
		m.await(t, func() bool { return len(m.processes(t)) == 0 })
		if err := unmount(m.dir); err != nil {
			t.Errorf("%s: unmount %s: %v", m.Name, m.dir, err)
		}
	})
	for _, sub := range []string{"shm", "tmp"} {
		require.NoError(t, os.Mkdir(filepath.Join(m.dir, sub), 0o777))
	}
	require.NoError(t, m.nameAll())
	if out, err := m.Command(exec.Command("true")).CombinedOutput(); err != nil {
		lacking(t, "namespaces that run commands", fmt.Errorf("%w: %s", err, out))
	}
}

// nameAll gives the machines the names node-0, node-1 and so on, on this one.
func (m *Namespace) nameAll() error {
	text, err := os.ReadFile("/etc/hosts")
	if err != nil {
		return err
	}
	for i, other := range m.others {
		text = fmt.Appendf(text, "\n%s node-%d", other.Addr, i)
	}
	return os.WriteFile(filepath.Join(m.dir, "hosts"), append(text, '\n'), 0o644)
}

// Shm returns the directory that is the machine's /dev/shm.
func (m *Namespace) Shm() string { return filepath.Join(m.dir, "shm") }

// mount has a command see the machine's /dev/shm, and the names of the others.
const mount = `mount --bind "$0/shm" /dev/shm && mount --bind "$0/hosts" /etc/hosts && exec "$@"`

// Command makes a command one that runs on the machine. The process is the command's own.
func (m *Namespace) Command(cmd *exec.Cmd) *exec.Cmd {
	there := exec.Command("ip", append([]string{"netns", "exec", m.Name, "sh", "-c", mount, m.dir},
		cmd.Args...)...)
	there.Env = cmd.Env
	if there.Env == nil {
		there.Env = os.Environ()
	}
	tmp := filepath.Join(m.dir, "tmp")
	there.Env = append(there.Env, "TMPDIR="+tmp, "XDG_RUNTIME_DIR="+tmp)
	return there
}

// Shell writes a script that launchers can use in place of ssh: with options, which it ignores, a
// machine's Addr and a command, it runs the command there.
func Shell(t T, machines []*Namespace) (path string) {
	t.Helper()
	text := "#!/bin/sh\nwhile [ \"${1#-}\" != \"$1\" ]; do shift; done\naddr=$1\nshift\ncase " +
		"$addr in\n"
	for _, m := range machines {
		text += fmt.Sprintf("%s) name=%s dir=%s ;;\n", m.Addr, m.Name, m.dir)
	}
	text += "esac\nexport TMPDIR=$dir/tmp XDG_RUNTIME_DIR=$dir/tmp\nexec ip netns exec $name sh " +
		"-c '" + mount + "' $dir sh -c \"$*\"\n"
	path = filepath.Join(t.TempDir(), "shell")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o700))
	return path
}

// Cut cuts the machine off: nothing reaches it, and nothing it sends reaches others.
func (m *Namespace) Cut(t T) {
	t.Helper()
	require.NoError(t, ip("-n", m.Name, "link", "set", "eth0", "down"))
}

// Mend ends what Cut, Mute, Sever and Starve have done.
func (m *Namespace) Mend(t T) {
	t.Helper()
	m.starve.Clear()
	for _, command := range []string{"link set eth0 up", "neighbour flush nud permanent dev eth0"} {
		require.NoError(t, ip(strings.Fields("-n "+m.Name+" "+command)...))
	}
}

// Mute has nothing that the machine sends reach others, while what they send reaches it.
func (m *Namespace) Mute(t T) {
	t.Helper()
	for _, other := range m.others {
		if other != m {
			m.Sever(t, other)
		}
	}
}

// Sever has nothing that the machine sends reach another one: its frames are for an interface that
// nobody has.
func (m *Namespace) Sever(t T, other *Namespace) {
	t.Helper()
	require.NoError(t, ip("-n", m.Name, "neighbour", "replace", other.Addr, "lladdr",
		"02:00:00:00:00:01", "dev", "eth0", "nud", "permanent"))
}

// Starve has no data of TCP that the machine sends reach another one, though connections are made
// and acknowledged, as where large packets or old connections are lost. It takes a Wire that is not
// zero.
func (m *Namespace) Starve(t T, other *Namespace) {
	t.Helper()
	require.That(t, m.port != (Wire{}),
		"nothing is lost between interfaces of the kernel: give Machines a Wire")
	m.starve.Store(other.Addr, true)
}

// processes returns what runs on the machine.
func (m *Namespace) processes(t T) (pids []int) {
	t.Helper()
	out, err := exec.Command("ip", "netns", "pids", m.Name).Output()
	require.That(t, err == nil, "processes of %s: %v", m.Name, err)
	for text := range strings.FieldsSeq(string(out)) {
		pid, err := strconv.Atoi(text)
		require.That(t, err == nil, "processes of %s: %q", m.Name, out)
		pids = append(pids, pid)
	}
	return pids
}

// Commands returns the command lines of what runs on the machine, by process.
func (m *Namespace) Commands(t T) map[int]string {
	t.Helper()
	all := map[int]string{}
	for _, pid := range m.processes(t) {
		if line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil {
			all[pid] = strings.TrimSpace(strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return all
}

// Signal sends a signal to all processes of the machine.
func (m *Namespace) Signal(t T, s syscall.Signal) {
	t.Helper()
	for _, pid := range m.processes(t) {
		kill(pid, s) // it may have ended
	}
}

// Ranks returns the processes of the machine that have a rank, by their ranks.
func (m *Namespace) Ranks(t T) map[int]int {
	t.Helper()
	ranks := map[int]int{}
	for _, pid := range m.processes(t) {
		vars, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err != nil {
			continue // it has ended
		}
		for v := range strings.SplitSeq(string(vars), "\x00") {
			if text, ok := strings.CutPrefix(v, "RANK="); ok {
				rank, err := strconv.Atoi(text)
				require.That(t, err == nil, "process %d of %s has %s", pid, m.Name, v)
				ranks[rank] = pid
			}
		}
	}
	return ranks
}

// IsEmpty checks that nothing is left on the machine: no process but sshd, and no file in /dev/shm
// or the temporary directory. What has been killed may take a moment.
func (m *Namespace) IsEmpty(t T) {
	t.Helper()
	if !m.await(t, func() bool {
		left := m.processes(t)
		return len(left) == 0 || len(left) == 1 && left[0] == m.daemon
	}) {
		// for the message
		out, _ := exec.Command("ps", "-fp", strings.Trim(fmt.Sprint(m.processes(t)), "[]")).Output()
		t.Errorf("processes are left on %s:\n%s", m.Name, out)
	}
	for _, sub := range []string{"shm", "tmp"} {
		files, err := os.ReadDir(filepath.Join(m.dir, sub))
		if err != nil || len(files) > 0 {
			t.Errorf("files are left on %s, in %s: %v, %v", m.Name, sub, files, err)
		}
	}
}

// await waits for something, for some seconds at most.
func (m *Namespace) await(t T, what func() bool) bool {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(
		10 * time.Millisecond) {
		if what() {
			return true
		}
	}
	return what()
}
