//go:build linux

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// site is hosts with sshd and nothing of ours, and a machine from which a user starts jobs on them.
type site struct {
	ssh     proctest.SSH
	hosts   []*proctest.Namespace
	user    *proctest.Namespace
	euryale string
}

// newSite makes hosts. prepare may change one before its sshd starts, and returns variables of its
// sessions.
func newSite(t *testing.T, hosts int, wire proctest.Wire,
	prepare func(*proctest.Namespace) []string) site {
	t.Helper()
	if !full() {
		t.Skip("set EURYALE_FULL=1")
	}
	machines := proctest.Machines(t, hosts+1, wire)
	s := site{ssh: proctest.NewSSH(t), hosts: machines[:hosts], user: machines[hosts],
		euryale: built(t, "cmd/euryale")}
	for _, h := range s.hosts {
		var variables []string
		if prepare != nil {
			variables = prepare(h)
		}
		s.ssh.Serve(t, h, variables...)
	}
	return s
}

// list is the argument of -H, with two ranks on each host.
func (s site) list() string {
	var all []string
	for _, h := range s.hosts {
		all = append(all, h.Addr+":2")
	}
	return strings.Join(all, ",")
}

// run starts a job on the hosts.
func (s site) run(t *testing.T, args ...string) *proctest.Program {
	t.Helper()
	return s.runWith(t, "", "authorized", args...)
}

// runWith is run with more options for ssh, and a key.
func (s site) runWith(t *testing.T, options, key string, args ...string) *proctest.Program {
	t.Helper()
	return s.start(t, options, key, append([]string{"run", "-H", s.list()}, args...)...)
}

// start starts the command.
func (s site) start(t *testing.T, options, key string, args ...string) *proctest.Program {
	t.Helper()
	cmd := exec.Command(s.euryale, args...)
	cmd.Env = append(os.Environ(), "PATH="+s.ssh.Path+":"+os.Getenv("PATH"),
		"TEST_SSH_OPTIONS="+options, "TEST_SSH_KEY="+key, fmt.Sprint("EURYALE_TIMEOUT=", patience))
	return proctest.Launch(t, s.user.Command(cmd))
}

// isEmpty checks that nothing of a job is left on any machine.
func (s site) isEmpty(t *testing.T) {
	t.Helper()
	for _, h := range append(s.hosts, s.user) {
		h.IsEmpty(t)
	}
}

// find returns the processes of a machine whose command lines match.
func find(t *testing.T, m *proctest.Namespace, pattern string) (pids []int) {
	t.Helper()
	for pid, line := range m.Commands(t) {
		if regexp.MustCompile(pattern).MatchString(line) {
			pids = append(pids, pid)
		}
	}
	if len(pids) == 0 {
		t.Fatalf("nothing on %s is %s: %v", m.Name, pattern, m.Commands(t))
	}
	return pids
}

const remoteLauncher = `/euryale host$`

var trains = regexp.MustCompile(`epoch 2/`)

// TestMachinesBySSH: one command trains, the first step within 3 s, and has the bits of launchers
// that are started by hand. What it copies is there the next time.
func TestMachinesBySSH(t *testing.T) {
	s := newSite(t, 3, proctest.Wire{}, nil)
	program := built(t, digits)
	var ends [2]string
	for i := range ends {
		began := time.Now()
		job := s.run(t, program, "--epochs", "5")
		if !job.Says(regexp.MustCompile(`epoch 1/`), atStart(t)) {
			t.Errorf("run %d: training does not begin:\n%s", i, job.Output())
		}
		t.Logf("run %d: an epoch of training after %v", i, time.Since(began))
		if err := job.Ends(t, long); err != nil {
			t.Fatalf("run %d: %v\n%s", i, err, job.Output())
		}
		ends[i] = learned(t, job.Output(), "tcp")
		s.isEmpty(t)
	}
	by := startJob(t, proctest.Machines(t, 3, proctest.Wire{}), program, "--epochs", "5")
	hand := learned(t, by.succeeds(t), "tcp")
	require.Check(t, ends == [2]string{hand, hand}, "it ends with %s, by hand with %s", ends, hand)
	for _, h := range s.hosts {
		cache := filepath.Join(h.Home(), ".cache/euryale/run")
		files, _ := filepath.Glob(cache + "/*/*")
		info, err := os.Stat(cache)
		require.Check(t, err == nil && info.Mode().Perm() == 0o700 && len(files) == 2,
			"%s keeps %v, %v, in %v", h.Name, files, err, info)
	}
}

// atStart is how long a job may take until it trains: 3 s, but more where others want the cores.
func atStart(t *testing.T) time.Duration {
	t.Helper()
	text := require.Value(os.ReadFile("/proc/loadavg"))(t)
	var load float64
	require.NoError(t, require.Err(fmt.Sscan(string(text), &load)))
	if load > float64(runtime.NumCPU()) {
		return long
	}
	return 3 * time.Second
}

// TestMachinesBySSHEndTogether: whatever ends, all ends within 5 s and nothing is left.
func TestMachinesBySSHEndTogether(t *testing.T) {
	s := newSite(t, 3, proctest.Wire{}, nil)
	program := built(t, digits)
	for _, c := range []struct {
		name string
		end  func(job *proctest.Program)
		code int
		says string
	}{
		{"Ctrl-C", func(job *proctest.Program) { job.Process.Signal(syscall.SIGINT) }, 130,
			"stopped by a signal: interrupt"},
		{"kill -9 of the local launcher", func(job *proctest.Program) { job.Process.Kill() }, -1,
			""},
		{"kill -9 of a remote launcher", func(*proctest.Program) {
			kill(t, find(t, s.hosts[1], remoteLauncher))
		}, 1, "host " + s.hosts[1].Addr + " is lost, with ranks 2 to 3"},
		{"kill -9 of ssh", func(*proctest.Program) {
			kill(t, find(t, s.user, "^[^ ]*ssh .*"+s.hosts[0].Addr))
		}, 1, "host " + s.hosts[0].Addr + " is lost, with ranks 0 to 1"},
		{"kill -9 of a rank", func(*proctest.Program) {
			syscall.Kill(s.hosts[2].Ranks(t)[5], syscall.SIGKILL)
		}, 137, "host " + s.hosts[2].Addr + ": rank 5 failed first: signal: killed"},
		{"a remote launcher is stopped", func(*proctest.Program) {
			syscall.Kill(find(t, s.hosts[1], remoteLauncher)[0], syscall.SIGSTOP)
		}, 1, "nothing was heard of it for 4s"},
		{"kill -9 of sshd", func(*proctest.Program) { kill(t, find(t, s.hosts[1], "^sshd")) }, 1,
			"host " + s.hosts[1].Addr + " is lost"},
		{"a cut link", func(*proctest.Program) { s.hosts[2].Cut(t) }, 1,
			"host " + s.hosts[2].Addr + " is lost, with ranks 4 to 5"},
	} {
		t.Run(c.name, func(t *testing.T) {
			job := s.run(t, program, "--epochs", "1000000")
			if !job.Says(trains, long) {
				t.Fatalf("no training:\n%s", job.Output())
			}
			hasNoSecrets(t, s)
			c.end(job)
			began := time.Now()
			err := job.Ends(t, long)
			if code := job.ProcessState.ExitCode(); code != c.code ||
				!strings.Contains(job.Output(), c.says) {
				t.Errorf("exit code %d, %v, no %q in\n%s", code, err, c.says, job.Output())
			}
			if c.name == "a remote launcher is stopped" { // what is stopped takes no SIGTERM
				s.hosts[1].Signal(t, syscall.SIGCONT)
			}
			if c.name == "a cut link" { // sshd waits for TCP longer than that
				for ours(t, s.hosts[2]) && time.Since(began) < long {
					time.Sleep(10 * time.Millisecond)
				}
				took := time.Since(began)
				s.hosts[2].Mend(t)
				s.isEmpty(t)
				inTime(t, took)
				return
			}
			s.isEmpty(t)
			inTime(t, time.Since(began))
			if c.name == "kill -9 of sshd" {
				s.ssh.Serve(t, s.hosts[1])
			}
		})
	}
}

// TestMachinesBySSHEndWhileCopying: whoever is killed, what was copied so far does not stay.
func TestMachinesBySSHEndWhileCopying(t *testing.T) {
	s := newSite(t, 1, proctest.Wire{Rate: 2e6}, nil)
	program := built(t, digits)
	for name, end := range map[string]func(job *proctest.Program){
		"kill -9": func(job *proctest.Program) { job.Process.Kill() },
		"Ctrl-C":  func(job *proctest.Program) { job.Process.Signal(syscall.SIGINT) },
	} {
		t.Run(name, func(t *testing.T) {
			job := s.run(t, program)
			cached := func() []string {
				files, _ := filepath.Glob(s.hosts[0].Home() + "/.cache/euryale/run/.new*")
				return files
			}
			for began := time.Now(); len(cached()) == 0; time.Sleep(10 * time.Millisecond) {
				if time.Since(began) > long {
					t.Fatalf("nothing is copied:\n%s", job.Output())
				}
			}
			end(job)
			if err := job.Ends(t, long); err == nil {
				t.Errorf("it ends well:\n%s", job.Output())
			}
			s.isEmpty(t)
			left := cached()
			require.Check(t, len(left) == 0, "%v stays", left)
		})
	}
}

// ours reports whether there is something on a machine beside sshd.
func ours(t *testing.T, m *proctest.Namespace) bool {
	t.Helper()
	for _, line := range m.Commands(t) {
		if line != "" && !strings.HasPrefix(line, "sshd") {
			return true
		}
	}
	return false
}

// inTime checks that all has ended within 5 s, and what a busy machine adds.
func inTime(t *testing.T, took time.Duration) {
	t.Helper()
	t.Logf("all has ended after %v", took)
	require.Check(t, took <= proctest.Within(5*time.Second)+time.Second, "that is more than 5 s")
}

func kill(t *testing.T, pids []int) {
	t.Helper()
	for _, pid := range pids {
		err := syscall.Kill(pid, syscall.SIGKILL)
		require.That(t, err == nil || err == syscall.ESRCH, "%v", err)
	}
}

// hasNoSecrets checks that no command line has the token of the job.
func hasNoSecrets(t *testing.T, s site) {
	t.Helper()
	for _, pid := range s.hosts[0].Ranks(t) {
		vars := require.Value(os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid)))(t)
		_, token, found := strings.Cut(string(vars), "\x00EURYALE_TOKEN=")
		token, _, _ = strings.Cut(token, "\x00")
		require.That(t, found && len(token) >= 32, "a rank has the token %q", token)
		for _, m := range append(s.hosts, s.user) {
			for _, line := range m.Commands(t) {
				require.Check(t, !strings.Contains(line, token), "everybody reads the token in %q",
					line)
			}
		}
	}
}

// TestMachinesBySSHReplaceALostOne: by a standby, and the training has the bits of one that was not
// disturbed. Without a standby it goes on with fewer ranks.
func TestMachinesBySSHReplaceALostOne(t *testing.T) {
	program := built(t, digits)
	train := func(t *testing.T, s site, lost *proctest.Namespace, n string) string {
		t.Helper()
		job := s.run(t, "-n", n, "--max-restarts", "1", program, "--epochs", "12", "--checkpoint",
			filepath.Join(t.TempDir(), "checkpoint"))
		if lost != nil {
			if !job.Says(trains, long) {
				t.Fatalf("no training:\n%s", job.Output())
			}
			lost.Cut(t)
			lost.Signal(t, syscall.SIGKILL)
		}
		if err := job.Ends(t, long); err != nil {
			t.Fatalf("%v\n%s", err, job.Output())
		}
		t.Log(job.Output())
		return job.Output()
	}
	s := newSite(t, 3, proctest.Wire{}, nil)
	want := learned(t, train(t, s, nil, "4"), "tcp")
	out := train(t, s, s.hosts[1], "4")
	if end := learned(t, out, "tcp"); end != want || strings.Count(out, "epoch 1/") > 1 ||
		!strings.Contains(out, "left out: "+s.hosts[1].Addr) {
		t.Errorf("it ends with %s, undisturbed with %s:\n%s", end, want, out)
	}
	s = newSite(t, 3, proctest.Wire{}, nil)
	if out := train(t, s, s.hosts[1], "6"); !strings.Contains(out, "they are 4 instead of 6") ||
		!strings.Contains(out, " ranks=4 ") {
		t.Errorf("it says\n%s", out)
	}
}

// TestMachinesBySSHHealElasticJobs: a machine is lost, and the others train on, with what takes the
// place of its ranks or without, to the parameters of a training on one machine.
func TestMachinesBySSHHealElasticJobs(t *testing.T) {
	s := newSite(t, 3, proctest.Wire{}, nil)
	program := built(t, "examples/elastic")
	params := regexp.MustCompile(`params=[0-9a-f]{16}`)
	alone, err := command(t, "run", "--elastic", "-n", "1", program, "-steps=120").CombinedOutput()
	want := params.FindString(string(alone))
	require.That(t, err == nil && want != "", "%v\n%s", err, alone)
	lose := func(host int) func(*testing.T) {
		return func(t *testing.T) {
			s.hosts[host].Cut(t)
			s.hosts[host].Signal(t, syscall.SIGKILL)
		}
	}
	for _, c := range []struct {
		name, flags string
		lose        func(*testing.T) // a host, or something there
		host        int              // to mend
		says        []string
	}{
		{"nothing", "-n 6", func(*testing.T) {}, -1, nil},
		{"a host", "-n 4", lose(1), 1, []string{"takes its place"}},
		{"that of rank 0", "-n 3 --standby=1", lose(0), 0, []string{"takes its place"}},
		{"a host of all", "-n 6", lose(2), 2,
			[]string{"it is not replaced, since no host can take another process", "on 4 ranks"}},
		{"a process is stopped", "-n 6", func(t *testing.T) {
			syscall.Kill(s.hosts[1].Ranks(t)[2], syscall.SIGSTOP)
		}, -1, []string{"process 2 is stopped: killing it",
			"process 2 has ended (signal: killed): process 6 takes its place"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			args := append(strings.Fields("--elastic "+c.flags), program, "-steps=120", "-every=10",
				"-pause=50ms")
			job := s.run(t, args...)
			if !job.Says(regexp.MustCompile(`step 20:`), long) {
				t.Fatalf("no training:\n%s", job.Output())
			}
			c.lose(t)
			err := job.Ends(t, long)
			ends := params.FindAllString(job.Output(), -1)
			if err != nil || len(ends) == 0 || slices.ContainsFunc(ends, func(end string) bool {
				return end != want
			}) {
				t.Errorf("%v: it ends with %v, on one machine with %s:\n%s", err, ends, want,
					job.Output())
			}
			for _, says := range c.says {
				if !strings.Contains(job.Output(), says) {
					t.Errorf("it does not say %q:\n%s", says, job.Output())
				}
			}
			if c.host >= 0 {
				s.hosts[c.host].Mend(t)
			}
			s.isEmpty(t)
			if c.host >= 0 {
				s.ssh.Serve(t, s.hosts[c.host])
			}
			t.Log(job.Output())
		})
	}
}

// TestMachinesBySSHComeAndGo: one is removed from the file of hosts, and leaves without a lost
// step; one is lost, and takes part again once it is back; one that is added lets the job grow to
// -n. It ends with the parameters of one machine.
func TestMachinesBySSHComeAndGo(t *testing.T) {
	s := newSite(t, 3, proctest.Wire{}, nil)
	program := built(t, digits)
	const epochs = "-epochs=300"
	want := elasticHash(t, program, epochs)
	file := filepath.Join(t.TempDir(), "hosts")
	list := func(hosts ...int) {
		text := ""
		for _, h := range hosts {
			text += s.hosts[h].Addr + " slots=1\n"
		}
		require.NoError(t, os.WriteFile(file+".new", []byte(text), 0o666))
		require.NoError(t, os.Rename(file+".new", file))
	}
	list(0, 1)
	job := s.start(t, "", "authorized", "run", "--hostfile", file, "--elastic", "-n", "3",
		"--grace=20s", program, "-elastic", epochs)
	await := func(what string) {
		t.Helper()
		require.That(t, job.Says(regexp.MustCompile(what), long), "it does not say %q:\n%s", what,
			job.Output())
	}
	await(`epoch 1/`)
	list(0, 1, 2)
	await(s.hosts[2].Addr + " takes part")
	await(fmt.Sprintf("epoch %d/", 60+strings.Count(job.Output(), "epoch"))) // with its process
	list(0, 2)
	await("the other ranks go on")
	await(`process 1 has ended \(exit status 143.*no host can take another`)
	s.hosts[0].Cut(t) // with the process that printed
	s.hosts[0].Signal(t, syscall.SIGKILL)
	await("is lost: ")
	s.hosts[0].Mend(t)
	s.ssh.Serve(t, s.hosts[0])
	await(s.hosts[0].Addr + " takes part")
	err := job.Ends(t, long)
	require.Check(t, err == nil && hash.FindString(job.Output()) == want,
		"%v: on one machine it ends with %s:\n%s", err, want, job.Output())
	s.isEmpty(t)
	t.Log(job.Output())
}

var hash = regexp.MustCompile(`params=[0-9a-f]{64}`)

// TestMachinesBySSHSurviveACutLink: between two hosts, one way or both, while all processes live;
// nothing gets through there, or no data, while connections are made. The others train on in time,
// at the pace of before, to the parameters of a training on one machine. What comes in the place of
// the one that is left out takes part once the link is mended.
func TestMachinesBySSHSurviveACutLink(t *testing.T) {
	whole := newSite(t, 3, proctest.Wire{}, nil)
	wired := newSite(t, 3, proctest.Wire{Rate: 1 << 30}, nil)
	program := built(t, "examples/elastic")
	params := regexp.MustCompile(`params=[0-9a-f]{16}`)
	const steps = "-steps=400"
	alone, err := command(t, "run", "--elastic", "-n", "1", program, steps).CombinedOutput()
	want := params.FindString(string(alone))
	require.That(t, err == nil && want != "", "%v\n%s", err, alone)
	for _, c := range []struct {
		from, to int
		both     bool
		out      int  // who is left out
		data     bool // alone is lost
	}{{0, 1, true, 1, false}, {0, 2, true, 2, false}, {1, 2, true, 2, false},
		{0, 1, false, 1, false}, {1, 0, false, 1, false}, {1, 2, false, 2, false},
		{2, 1, false, 2, false}, {0, 1, true, 1, true}, {1, 2, true, 2, true},
		{1, 0, false, 1, true}, {1, 2, false, 2, true}} {
		name := fmt.Sprintf("%d-%d both %t data %t", c.from, c.to, c.both, c.data)
		t.Run(name, func(t *testing.T) {
			s, sever := whole, (*proctest.Namespace).Sever
			if c.data {
				s, sever = wired, (*proctest.Namespace).Starve
			}
			job := s.run(t, "--elastic", "-n", "6", "--min-ranks", "4", program, steps, "-every=1",
				"-pause=10ms")
			if !job.Says(regexp.MustCompile(`step 20:`), long) {
				t.Fatalf("no training:\n%s", job.Output())
			}
			a, b := s.hosts[c.from], s.hosts[c.to]
			if sever(a, t, b); c.both {
				sever(b, t, a)
			}
			cut := time.Now()
			if !job.Says(regexp.MustCompile(`on 4 ranks|params=`), long) {
				t.Fatalf("nobody trains on:\n%s", job.Output())
			}
			took := time.Since(cut)
			if strings.Contains(job.Output(), "params=") {
				t.Log("no step has used that way")
				a.Mend(t)
				return
			}
			t.Logf("the next step is done after %v", took)
			require.Check(t, took <= 2*patience+proctest.Within(time.Second),
				"the next step is done after %v", took)
			require.Check(t, !strings.Contains(job.Output(), "on 2 ranks"),
				"more than one host is left out")
			a.Mend(t)
			b.Mend(t)
			err := job.Ends(t, long)
			out := job.Output()
			ends := params.FindAllString(out, -1)
			if err != nil || len(ends) < 4 || slices.ContainsFunc(ends, func(end string) bool {
				return end != want
			}) {
				t.Errorf("%v: it ends with %v, on one machine with %s:\n%s", err, ends, want, out)
			}
			says := fmt.Sprintf("process %d: the others go on without it; it cannot reach process",
				2*c.out)
			_, after, _ := strings.Cut(out, "on 4 ranks")
			require.Check(t, strings.Contains(out, says) && strings.Contains(after, "on 6 ranks"),
				"it does not say %q, or 6 ranks do not train on:\n%s", says, out)
			s.isEmpty(t)
		})
	}
}

func TestMachinesBySSHSayWhatIsWrong(t *testing.T) {
	otherUser := 1000
	cache := func(m *proctest.Namespace) string {
		return filepath.Join(m.Home(), ".cache/euryale/run")
	}
	for _, c := range []struct {
		name, options, key string
		prepare            func(*proctest.Namespace) []string
		says               string
	}{
		{"wrong key", "", "other", nil, `(?s)Permission denied \(publickey\).*BatchMode=yes`},
		{"unknown host", "-o UserKnownHostsFile=/dev/null", "authorized", nil,
			`(?s)Host key verification failed.*the host's key must be known`},
		{"no space", "", "authorized", func(m *proctest.Namespace) []string {
			mounted(t, m.Home(), "size=1m")
			return nil
		}, `copy euryale \(\d+\.\d MB\): head: .*No space left on device`},
		{"other architecture", "", "authorized", func(m *proctest.Namespace) []string {
			dir := filepath.Join(m.Shm(), "..", "other")
			require.NoError(t, os.Mkdir(dir, 0o755))
			uname := "#!/bin/sh\ncase $1 in -m) echo aarch64 ;; *) exec /bin/uname \"$@\" ;; esac\n"
			require.NoError(t, os.WriteFile(filepath.Join(dir, "uname"), []byte(uname), 0o755))
			return []string{"PATH=" + dir + ":/usr/bin:/bin"}
		}, `is for linux/amd64, not for linux/arm64: give the directory`},
		{"another user's cache folder", "", "authorized", func(m *proctest.Namespace) []string {
			err := os.MkdirAll(cache(m), 0o700)
			if err == nil {
				err = os.Chown(cache(m), otherUser, otherUser)
			}
			require.NoError(t, err)
			return nil
		}, `the cache folder /\S+ must be .* user alone, and is drwx------ of user 1000`},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSite(t, 1, proctest.Wire{}, c.prepare)
			job := s.runWith(t, c.options, c.key, built(t, digits))
			err := job.Ends(t, long)
			if err == nil || !regexp.MustCompile(c.says).MatchString(job.Output()) {
				t.Errorf("%v, and it says\n%s", err, job.Output())
			}
			t.Log(job.Output())
			s.isEmpty(t)
		})
	}
}

// mounted mounts a tmpfs.
func mounted(t *testing.T, dir, options string) {
	t.Helper()
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		err = syscall.Mount("euryale", dir, "tmpfs", 0, options)
	}
	require.NoError(t, err)
	t.Cleanup(func() { syscall.Unmount(dir, syscall.MNT_DETACH) })
}
