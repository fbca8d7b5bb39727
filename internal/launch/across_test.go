//go:build linux

package launch

import (
	"bufio"
	"cmp"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// fakeSSH puts a program ssh into PATH that runs commands on this machine, with a home directory
// for each host. It writes its arguments to the file "asked" there. first are its first lines.
func fakeSSH(t *testing.T, first string) (homes string) {
	t.Helper()
	homes = t.TempDir()
	text := fmt.Sprintf("#!/bin/sh\n%s\necho \"$@\" >>%s/asked\n"+
		"while [ \"$1\" != -- ]; do shift; done\n"+
		"HOME=%[2]s/$2 SSH_CONNECTION=\"${GUEST-127.0.0.1} 1 127.0.0.1 22\" %s=host\n"+
		"export HOME SSH_CONNECTION %[3]s\nunset XDG_CACHE_HOME\nshift 2\n"+
		"exec ${LOGIN:-sh} -c \"$*\"\n", first, homes, asHelper)
	require.NoError(t, os.WriteFile(filepath.Join(homes, "ssh"), []byte(text), 0o700))
	t.Setenv("PATH", homes+":"+os.Getenv("PATH"))
	return homes
}

// onHosts is a job of a script on hosts with a rank each.
func onHosts(t *testing.T, script string, ranks int, hosts ...string) (Job, *output, *output) {
	t.Helper()
	job, out, err := shell(ranks, script)
	job.Program = "sh"
	for _, h := range hosts {
		job.Hosts = append(job.Hosts, Host{h, 1})
	}
	return job, out, err
}

func TestRanksOnHostsSeeTheirEnvironment(t *testing.T) {
	homes := fakeSSH(t, "")
	t.Setenv("EURYALE_TIMEOUT", "77s")
	t.Setenv("EURYALE_TOKEN", "that of another job")
	job, out, _ := onHosts(t, `echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK `+
		`$MASTER_ADDR $EURYALE_TIMEOUT $(basename $HOME) $PWD
		echo $EURYALE_TOKEN $MASTER_PORT >&2`, 3, "a", "u@b", "standby")
	stderr := job.Stderr.(*output)
	job.Hosts[0].Slots, job.LogDir = 2, filepath.Join(t.TempDir(), "logs")
	require.NoError(t, Run(t.Context(), job))
	here := require.Value(os.Getwd())(t)
	want := []string{"[0] 0 3 0 2 0 127.0.0.1 77s a " + here + "\n",
		"[1] 1 3 1 2 0 127.0.0.1 77s a " + here + "\n",
		"[2] 2 3 0 1 1 127.0.0.1 77s u@b " + here + "\n"}
	require.Slices(t, "sorted", sorted(out.String()), want)
	log, err := os.ReadFile(filepath.Join(job.LogDir, "attempt_0", "rank_2.log"))
	require.Check(t, err == nil && strings.Contains(string(log), strings.TrimPrefix(want[2],
		"[2] ")), "a log has %q, %v", log, err)
	secrets := strings.Fields(stderr.String())
	asked, err := os.ReadFile(filepath.Join(homes, "asked"))
	require.Check(t, err == nil && len(secrets) == 9 && len(secrets[1]) == 64 &&
		secrets[1] == secrets[7] && secrets[2] == secrets[8] && !strings.Contains(string(asked),
		secrets[1]), "the secret and port are %q, ssh was asked for %s, %v", secrets, asked, err)
	require.Fails(t, "the standby was used", require.Err(os.Stat(filepath.Join(homes, "standby"))))
}

// TestTheCredentialOfMetricsFollowsFromTheUsersTokenInEveryKindOfJob: it is what clients can
// compute, and the ranks get another token.
func TestTheCredentialOfMetricsFollowsFromTheUsersTokenInEveryKindOfJob(t *testing.T) {
	const token = "0123456789abcdef"
	for kind, change := range map[string]func(j *Job){
		"plain":     func(*Job) {},
		"restarted": func(j *Job) { j.MaxRestarts = 1 },
		"elastic":   func(j *Job) { j.Elastic = &Elastic{Least: 1} },
		"on hosts":  func(j *Job) { j.Program, j.Hosts = "sh", []Host{{"a", 1}, {"b", 1}} },
		"on hosts, elastic": func(j *Job) {
			j.Program, j.Hosts, j.Elastic = "sh", []Host{{"a", 1}, {"b", 1}}, &Elastic{Least: 1}
		},
		"on machines": func(j *Job) {
			j.Machines = &Machines{Count: 2, Rendezvous: "127.0.0.1:1", Token: token}
		},
	} {
		for chosen, want := range map[string]string{"chosen by the user": "chosen by the user",
			"": "1e85c05da9c1b308672075fd9711441b03100bdb2571c8a024bdccea00869132"} {
			fakeSSH(t, "")
			t.Setenv("EURYALE_TOKEN", token)
			t.Setenv("EURYALE_CREDENTIAL", chosen)
			job, out, _ := shell(2, `echo "$EURYALE_CREDENTIAL"; test "$EURYALE_TOKEN" || exit 1
				test "$TORCHELASTIC_RESTART_COUNT" = "$TORCHELASTIC_MAX_RESTARTS"`)
			change(&job)
			err := Run(t.Context(), job)
			require.Check(t, err == nil, "%s: %v", kind, err)
			ranks := strings.Count(out.String(), "] "+want+"\n")
			require.Check(t, ranks >= 2 && ranks == strings.Count(out.String(), "\n"),
				"%s: the ranks have %q, want %q", kind, out, want)
		}
	}
}

func TestHostsGetTheProgramOnce(t *testing.T) {
	homes := fakeSSH(t, "")
	program := filepath.Join(t.TempDir(), "my program.sh")
	require.NoError(t, os.WriteFile(program, []byte("echo $0 $*"), 0o700))
	var first []os.FileInfo
	for range 2 {
		job, out, _ := onHosts(t, "", 1, "a")
		job.Program, job.Args = program, []string{"'two", `words' "`}
		require.NoError(t, Run(t.Context(), job))
		cached, err := filepath.Glob(homes + "/a/.cache/euryale/run/*/*")
		require.That(t, err == nil && len(cached) == 2 &&
			strings.HasSuffix(out.String(),
				"/my program.sh 'two words' \"\n"), "%v, %v: %s", cached, err, out)
		for i, name := range cached {
			info, err := os.Stat(name)
			require.That(t, err == nil && info.Mode() == 0o700, "%v, %v", info, err)
			require.Check(t, len(first) != 2 || os.SameFile(info, first[i]), "%s was copied again",
				name)
			first = append(first, info)
		}
	}
}

// TestLoginsOfHostsMayBeOdd: whatever the shell and its startup files say, the ranks get words and
// variables as they are.
func TestLoginsOfHostsMayBeOdd(t *testing.T) {
	words := []string{"", "a b", "two\nlines", "$HOME", ";exit", "`id`", `"'\`, "!x", "*", "-n"}
	want := "v\nw|" + strings.Join(words, "|") + "|"
	t.Setenv("NCCL_TEST", "v\nw")
	for _, login := range []string{"sh", "bash", "busybox sh", "fish", "csh"} {
		if _, err := exec.LookPath(strings.Fields(login)[0]); err != nil {
			continue // it is not installed
		}
		fakeSSH(t, "LOGIN='"+login+"'; echo stty: no terminal >&2; echo; printf 'Welcome! '")
		job, out, _ := onHosts(t, `printf '%s|' "$NCCL_TEST" "$@"`, 1, "a")
		job.Args, job.Plain = append(append(job.Args, "sh"), words...), true
		err := Run(t.Context(), job)
		require.Check(t, err == nil && strings.TrimSuffix(out.String(), "\n") == want,
			"%s: %v, %q, want %q", login, err, out, want)
	}
}

func TestDamagedCopyIsNotRun(t *testing.T) {
	homes := fakeSSH(t, "")
	program := filepath.Join(t.TempDir(), "program")
	require.NoError(t, os.WriteFile(program, []byte("echo good"), 0o700))
	run := func() (string, error) {
		job, out, _ := onHosts(t, "", 1, "a")
		job.Program, job.Args = program, nil
		err := Run(t.Context(), job)
		return out.String(), err
	}
	require.Equal(t, "run", require.Got(run())(t), "[0] good\n")
	copies, err := filepath.Glob(homes + "/a/.cache/euryale/run/*/program")
	require.That(t, err == nil && len(copies) == 1, "%v, %v", copies, err)
	require.NoError(t, os.WriteFile(copies[0], []byte("echo evil"), 0o700))
	if out, err := run(); err == nil || out != "" ||
		!strings.Contains(err.Error(), "program is damaged: run again to copy it anew") {
		t.Errorf("%v, %q", err, out)
	}
	require.Equal(t, "run", require.Got(run())(t), "[0] good\n")
}

// TestJobsShareTheCacheOfAHost: those that copy the same file at once, too. What else is in the
// directory, which may be a link, stays.
func TestJobsShareTheCacheOfAHost(t *testing.T) {
	homes, dir := fakeSSH(t, ""), t.TempDir()
	size := 1 << 20
	if os.Getenv("EURYALE_FULL") == "1" {
		size = 60 << 20
	}
	program := filepath.Join(dir, "program.sh")
	err := os.WriteFile(program, append([]byte("echo up; exit\n"), make([]byte, size)...), 0o700)
	own := filepath.Join(dir, "own")
	err = errors.Join(err, os.Mkdir(own, 0o700), os.MkdirAll(homes+"/a/.cache/euryale", 0o700),
		os.Symlink(own, homes+"/a/.cache/euryale/run"))
	for i := range 30 {
		err = errors.Join(err, os.WriteFile(filepath.Join(own, fmt.Sprint(i)), nil, 0o600))
	}
	require.NoError(t, err)
	var jobs sync.WaitGroup
	for range 3 {
		jobs.Go(func() {
			job, out, _ := onHosts(t, "", 1, "a")
			job.Program, job.Args = program, nil
			if err := Run(t.Context(), job); err != nil || out.String() != "[0] up\n" {
				t.Errorf("%v, %s", err, out)
			}
		})
	}
	jobs.Wait()
	require.Equal(t, "ReadDir", len(require.Got(os.ReadDir(own))(t)), 30+2)
}

// TestHostsWaitForOneThatTakesLongerToCopy: than a silence.
func TestHostsWaitForOneThatTakesLongerToCopy(t *testing.T) {
	if os.Getenv("EURYALE_FULL") != "1" {
		t.Skip("it takes 5 seconds: set EURYALE_FULL=1")
	}
	homes := fakeSSH(t, `case "$*" in *"-- b "*) PATH=${0%/*}/slow:$PATH;; esac`)
	require.NoError(t, os.Mkdir(homes+"/slow", 0o700))
	chmod := "#!/bin/sh\nsleep 5\nexec /bin/chmod \"$@\"\n" // the script calls it after a copy
	require.NoError(t, os.WriteFile(homes+"/slow/chmod", []byte(chmod), 0o700))
	job, out, _ := onHosts(t, "echo up", 2, "a", "b")
	err := Run(t.Context(), job)
	require.Check(t, err == nil, "%v, %s", err, out)
}

// TestJobOnHostsGoesOnAfterAPauseOfItsLauncher: of less than EURYALE_TIMEOUT.
func TestJobOnHostsGoesOnAfterAPauseOfItsLauncher(t *testing.T) {
	if os.Getenv("EURYALE_FULL") != "1" {
		t.Skip("it takes 6 seconds: set EURYALE_FULL=1")
	}
	fakeSSH(t, "")
	over := filepath.Join(t.TempDir(), "over")
	cmd := exec.Command(os.Args[0], "-c", "echo up; until [ -e "+over+" ]; do sleep 0.1; done")
	cmd.Env = append(os.Environ(), asHelper+"=launcher of hosts", "EURYALE_TIMEOUT=20s")
	out := newOutput()
	cmd.Stdout, cmd.Stderr = out, out
	require.NoError(t, cmd.Start())
	out.await(t, 2, "up")
	cmd.Process.Signal(syscall.SIGSTOP)
	time.Sleep(silence + 2*beat)
	cmd.Process.Signal(syscall.SIGCONT)
	time.Sleep(beat)
	require.Report(t, os.WriteFile(over, nil, 0o600))
	err := cmd.Wait()
	require.Check(t, err == nil, "%v\n%s", err, out)
}

func TestAlarmRingsAfterASilence(t *testing.T) {
	began := time.Now()
	rang := make(chan time.Duration, 1)
	a := newAlarm(2*beat, func() { rang <- time.Since(began) })
	a.Stop()
	time.Sleep(beat / 2)
	a.Reset()
	time.Sleep(beat * 3 / 2)
	a.Reset()
	after := <-rang
	require.Check(t, after >= 5*beat/2, "it rings after %v", after)
}

func TestLostHostIsReplacedByAStandbyOrLeftOut(t *testing.T) {
	script := `echo $RANK $WORLD_SIZE $TORCHELASTIC_RESTART_COUNT $(basename $HOME)
		if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then
			[ $RANK = 1 ] && touch %[1]s/gone && kill -9 $PPID
			sleep 100
		fi`
	cases := []struct {
		hosts         []string
		again, notice string
	}{
		{[]string{"a", "b", "c"}, "[0] 0 2 1 a [1] 1 2 1 c",
			"the ranks are on a with rank 0, c with rank 1; left out: b"},
		{[]string{"a", "b"}, "[0] 0 1 1 a",
			"the ranks are on a with rank 0; left out: b; they are 1 instead of 2"},
	}
	if os.Getenv("EURYALE_FULL") != "1" {
		cases = cases[:1]
	}
	for _, c := range cases {
		dir := t.TempDir()
		// A host that was lost once cannot be reached again.
		fakeSSH(t, fmt.Sprintf(`case "$*" in *"-- b "*) [ -e %s/gone ] && exit 255;; esac`, dir))
		job, out, _ := onHosts(t, fmt.Sprintf(script, dir), 2, c.hosts...)
		job.MaxRestarts = 1
		var notices []string
		job.Notice = func(text string) { notices = append(notices, text) }
		err := Run(t.Context(), job)
		require.That(t, err == nil, "%v: %s, %q", err, out, notices)
		lines := sorted(out.String())
		got := slices.DeleteFunc(lines, func(line string) bool {
			return strings.Contains(line, " 2 0 ") // of the first attempt
		})
		if text := strings.Join(strings.Fields(strings.Join(got, "")), " "); text != c.again ||
			!slices.Contains(notices, c.notice) ||
			!strings.HasPrefix(notices[0], "host b is lost, with rank 1: ") {
			t.Errorf("%q, %q", text, notices)
		}
	}
}

// TestElasticJobReplacesProcessesOnHosts: on the same one, or on the first that has room where that
// is lost. If none has room, the process is left out.
func TestElasticJobReplacesProcessesOnHosts(t *testing.T) {
	homes := fakeSSH(t, "")
	script := `n=${EURYALE_ELASTIC#*'"Process":'}; n=${n%%,*}
		echo $n $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $(basename $HOME) \
			>>` + homes + `/said # the output of one that is killed may be lost
		case $EURYALE_ELASTIC in *'"Host":"127.0.0.1"'*) ;; *) echo no address;; esac
		await() { while ! [ -e ` + homes + `/$1 ]; do sleep 0.02; done; }
		case $n in
		1) await up;;                # until all the others are
		2) exit 3;;
		3) kill -9 $PPID; sleep 100;; # its host is lost
		4) kill -9 $PPID; sleep 100;; # the standby, too
		esac`
	job, out, _ := onHosts(t, script, 2, "a", "b", "c")
	job.Elastic = &Elastic{Least: 1}
	var notices []string
	job.Notice = func(text string) {
		notices = append(notices, text)
		if strings.Contains(text, "not replaced, since") {
			require.Report(t, os.WriteFile(homes+"/up", nil, 0o600))
		}
	}
	err := Run(t.Context(), job)
	require.Check(t, err == nil, "%v: %s, %q", err, out, notices)
	said, err := os.ReadFile(homes + "/said")
	want := []string{"1 0/2 0/1 0 a\n", "2 1/2 0/1 1 b\n", "3 0/2 0/1 1 b\n", "4 1/2 0/1 2 c\n"}
	if got := sorted(string(said)); err != nil || !slices.Equal(got, want) || out.String() != "" {
		t.Errorf("it says %q, %v, %s", got, err, out)
	}
	want = []string{"process 1 has ended (exit status 3): process 2 takes its place",
		"host b is lost: ssh has ended with signal: killed",
		"process 2 has ended (host b is lost): process 3 takes its place",
		"host c is lost: ssh has ended with signal: killed",
		"process 3 has ended (host c is lost): it is not replaced, since no host can take " +
			"another process",
		"process 0 has ended (exit status 0) before its last step: it is not replaced, since it " +
			"has not failed"}
	require.Slices(t, "the notices", notices, want)
}

func TestJobOnHostsEndsWithTheFirstFailureOrSignal(t *testing.T) {
	fakeSSH(t, "")
	job, _, _ := onHosts(t, `[ $RANK = 1 ] && echo broken >&2 && exit 7; exec sleep 100`, 2, "a",
		"b")
	var f *Failed
	if err := Run(t.Context(), job); !errors.As(err, &f) || f.Host != "b" || f.ExitCode() != 7 ||
		!strings.Contains(f.Error(), "rank 1 failed first: exit status 7; its last lines:\n    "+
			"broken") {
		t.Errorf("%v", err)
	}
	signals := make(chan os.Signal, 1)
	job, out, _ := onHosts(t, `echo up; exec sleep 100`, 2, "a", "b")
	job.Signals = signals
	go func() {
		<-out.more
		signals <- syscall.SIGINT
	}()
	var told *Interrupted
	err := Run(t.Context(), job)
	require.Check(t, errors.As(err, &told) && told.ExitCode() == 130, "%v", err)
}

// As when a host is shut down, which tells its ranks, and their launcher there.
func TestARankOnAHostThatIsToldToEndIsStartedAgain(t *testing.T) {
	fakeSSH(t, "")
	job, out, _ := onHosts(t, `[ $TORCHELASTIC_RESTART_COUNT = 1 ] && echo again && exit 0
		trap "exit 143" TERM; [ $RANK = 1 ] && kill $$; while :; do sleep 0.01; done`, 2, "a", "b")
	var f *Failed
	err := Run(t.Context(), job)
	require.Check(t, errors.As(err, &f) && f.Host == "b" && f.ExitCode() == 143, "%v", err)
	job.MaxRestarts = 1
	require.Report(t, Run(t.Context(), job))
	out.await(t, 2, "again")
}

// TestHostSaysWhenARankEnded: although what the rank has started holds its output open.
func TestHostSaysWhenARankEnded(t *testing.T) {
	homes := fakeSSH(t, "")
	job, _, _ := onHosts(t, `if [ $RANK = 0 ]; then
			setsid sleep 2 & touch `+homes+`/over; exit 3
		fi
		until [ -e `+homes+`/over ]; do sleep 0.01; done; sleep 0.2; exit 4`, 2, "a", "b")
	var f *Failed
	err := Run(t.Context(), job)
	require.Check(t, errors.As(err, &f) && f.Rank == 0 && f.ExitCode() == 3, "%v", err)
}

func TestHostsThatCannotBeUsedAreErrors(t *testing.T) {
	for _, c := range []struct{ first, want string }{
		{"echo Host key verification failed. >&2; exit 255",
			"host a: Host key verification failed.\nssh -o BatchMode=yes a true must work"},
		{"head() { echo head: no space >&2; return 1; }; head; exit 1", "head: no space"},
		{`for last; do :; done; cache=%s/.cache/euryale/run; mkdir -p $cache; chmod 750 $cache`,
			"run must be a directory of this user alone, and is drwxr-x---"},
		{"mkdir -p %s/.cache; chmod 777 %s/.cache",
			"which others may write (drwxrwxrwx): they could have another program started: run " +
				"chmod go-w "},
		{"mkdir -p %s/.cache; chmod 757 %s", "/a, which others may write (drwxr-xrwx)"},
		{"mkdir -p %s; touch %s/.cache", "run cannot be used: remove it, or set XDG_CACHE_HOME"},
		{"echo euryale-host Plan9 mips", "host a: program "},
		{"echo a login script that goes on; exit 0", "host a: ssh has ended with exit status 0"},
	} {
		homes := fakeSSH(t, "")
		first := strings.ReplaceAll(c.first, "%s", homes+"/a")
		text, err := os.ReadFile(filepath.Join(homes, "ssh"))
		if err == nil {
			err = os.WriteFile(filepath.Join(homes, "ssh"), []byte(strings.Replace(string(text),
				"\n", "\n"+first+"\n", 1)), 0o700)
		}
		require.NoError(t, err)
		job, _, _ := onHosts(t, "", 1, "a")
		if job.Program, err = os.Executable(); err != nil {
			t.Fatal(err)
		}
		require.Fails(t, c.first, Run(t.Context(), job), c.want)
	}
}

// TestHostsThatDoNotReachTheRegisterSaySo: where ssh comes from need not be where connections go.
func TestHostsThatDoNotReachTheRegisterSaySo(t *testing.T) {
	for guest, want := range map[string]string{"255.255.255.255": "allow connections from here",
		"": "does not set SSH_CONNECTION"} {
		fakeSSH(t, "GUEST='"+guest+"'; true")
		job, out, _ := onHosts(t, "echo up", 1, "a")
		job.Elastic = &Elastic{Least: 1}
		err := Run(t.Context(), job)
		require.Check(t, err != nil && strings.Contains(err.Error(), want) && out.String() == "",
			"with %q: %v, %s", guest, err, out)
	}
}

// TestLauncherEndsWithoutAHostThatObeysNothing: although the connection to it goes on.
func TestLauncherEndsWithoutAHostThatObeysNothing(t *testing.T) {
	signals := make(chan os.Signal, 1)
	w := newWatch(Job{Ranks: 1, Signals: signals, Grace: time.Millisecond,
		times: times{kill: time.Millisecond, giveUp: time.Millisecond, look: time.Second}}, nil,
		&remote{host: host{Host: Host{"a", 1}, ranks: 1}, orders: make(chan order, 10)})
	w.step(begins{})
	signals <- syscall.SIGINT
	err := w.run(t.Context())
	var told *Interrupted
	if !errors.As(err, &told) ||
		!strings.Contains(err.Error(), "rank 0 on host a has not ended after SIGKILL") {
		t.Error(err)
	}
}

// TestLauncherEndsThoughSIGKILLDoesNotEndSSH: which the kernel may hold. A process of another
// family has the pipe from it open, too.
func TestLauncherEndsThoughSIGKILLDoesNotEndSSH(t *testing.T) {
	if os.Getenv("EURYALE_FULL") != "1" {
		t.Skip("it takes 6 seconds: set EURYALE_FULL=1")
	}
	held := filepath.Join(t.TempDir(), "held")
	fakeSSH(t, fmt.Sprintf("export RANK=1 %s=traced; exec %s 3>&1 >%s", asHelper, os.Args[0], held))
	job, _, _ := onHosts(t, "echo up", 1, "a")
	signals, ended := signalled(t, job)
	var tracer, ssh int
	require.Soon(t, "ssh is held", func() bool {
		text, _ := os.ReadFile(held) // it is not there yet
		n, _ := fmt.Sscanf(string(text), "tracer %d of %d", &tracer, &ssh)
		return n == 2
	})
	defer syscall.Kill(tracer, syscall.SIGKILL)
	signals <- syscall.SIGINT
	err := await(t, ended)
	require.Check(t, errors.As(err, new(*Interrupted)), "%v", err)
}

// unread is an output that nobody reads. It tells of the first write.
type unread chan struct{}

func (u unread) Write([]byte) (int, error) {
	u <- struct{}{}
	select {}
}

func TestJobEndsThoughNobodyReadsItsOutput(t *testing.T) { endsUnread(t) }

func TestJobOnHostsEndsThoughNobodyReadsItsOutput(t *testing.T) {
	fakeSSH(t, "")
	endsUnread(t, "a")
}

func endsUnread(t *testing.T, hosts ...string) {
	t.Helper()
	signals, out := make(chan os.Signal, 1), make(unread)
	job, _, _ := onHosts(t, "echo up; exec sleep 100", 1, hosts...)
	job.Stdout, job.Signals, job.Grace = out, signals, time.Millisecond
	job.times = times{kill: 2 * drainTime, giveUp: time.Millisecond}
	ended := make(chan error, 1)
	go func() { ended <- Run(context.Background(), job) }()
	<-out
	signals <- syscall.SIGINT
	select {
	case err := <-ended:
		if !errors.As(err, new(*Interrupted)) || !strings.Contains(err.Error(), "nobody reads") {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("it goes on")
	}
}

// talk returns how orders are given to Serve, and news heard, once it has said a port.
func talk(t *testing.T, orders io.Writer, told io.Reader) (*gob.Encoder, *gob.Decoder) {
	t.Helper()
	lines := bufio.NewReader(told)
	port, err := lines.ReadString('\n')
	require.That(t, err == nil && len(port) >= 2, "%q, %v", port, err)
	return gob.NewEncoder(orders), gob.NewDecoder(lines)
}

// slowReader lets who writes wait a while for each read.
type slowReader struct{ io.Reader }

func (r slowReader) Read(b []byte) (int, error) {
	time.Sleep(20 * time.Millisecond)
	return r.Reader.Read(b)
}

// serving starts Serve with a rank that runs a script, and returns what this prints first. What is
// told ends with Serve, as with the process that it is in.
func serving(t *testing.T, script string, grace time.Duration, signals <-chan os.Signal) (n news,
	orders io.WriteCloser, told *gob.Decoder, served chan error) {
	t.Helper()
	in, orders := io.Pipe()
	from, out := io.Pipe()
	served = make(chan error, 1)
	go func() {
		err := Serve(context.Background(), in, out, nil, signals)
		out.Close()
		served <- err
	}()
	e, told := talk(t, orders, slowReader{from})
	err := errors.Join(e.Encode(order{Task: &task{Program: "sh", Args: []string{"-c", script},
		Dir: t.TempDir(), Grace: grace}}), e.Encode(order{Start: &member{}}))
	return printed(t, err, told), orders, told, served
}

// printed returns the news of what a rank prints first, unless there was an error before.
func printed(t *testing.T, err error, d *gob.Decoder) (n news) {
	t.Helper()
	for err == nil && n.Out == nil && n.Failed == "" {
		err = d.Decode(&n)
	}
	require.That(t, err == nil && n.Failed == "", "%v %v", err, n.Failed)
	return n
}

func TestHostEndsItsRanksWithTheConnection(t *testing.T) {
	n, orders, told, served := serving(t, "echo $$; sleep 100", time.Second, nil)
	go func() {
		for told.Decode(&news{}) == nil {
		}
	}()
	orders.Close()
	select {
	case err := <-served:
		require.Report(t, err)
	case <-time.After(time.Minute):
		t.Fatal("it goes on")
	}
	var pid int
	_, err := fmt.Sscan(string(n.Out), &pid)
	require.Check(t, err == nil && syscall.Kill(pid, 0) == syscall.ESRCH, "%q goes on, %v", n.Out,
		err)
}

func TestAHostThatIsToldToEndSaysHowItsRanksEndedBeforeItEnds(t *testing.T) {
	signals := make(chan os.Signal, 1)
	_, _, told, served := serving(t, "echo; exec sleep 100", time.Minute, signals)
	signals <- syscall.SIGTERM
	var n news
	for n.End == nil {
		require.NoError(t, told.Decode(&n))
	}
	require.Equal(t, "the signal", n.End.Status.Signal(), syscall.SIGTERM)
	require.Check(t, errors.As(<-served, new(*Interrupted)), "it was not interrupted")
}

// TestHostStartsNothingOnceRanksAreToldToEnd: what was ordered before may still wait to be obeyed.
func TestHostStartsNothingOnceRanksAreToldToEnd(t *testing.T) {
	w := newWatch(Job{Program: "/bin/true"}, nil)
	w.heard, w.supervisor.above = func(n news) { t.Errorf("it says %+v", n) }, true
	w.step(told{errOver})
	w.step(order{Start: &member{}})
	require.Check(t, len(w.children) == 0, "a rank has started")
}

func TestHostsOfALauncherWithoutADirectoryTakeTheirHome(t *testing.T) {
	t.Setenv("HOME", t.TempDir())
	in, orders := io.Pipe()
	told, out := io.Pipe()
	defer orders.Close()
	go Serve(context.Background(), in, out, func() []string { return nil }, nil)
	e, d := talk(t, orders, told)
	err := errors.Join(e.Encode(order{Task: &task{Program: "sh", Args: []string{"-c", "pwd"}}}),
		e.Encode(order{Start: &member{}}))
	n := printed(t, err, d)
	go io.Copy(io.Discard, told)
	require.Equal(t, "its directory", string(n.Out), os.Getenv("HOME")+"\n")
}

// TestHostEndsItsRanksThoughNobodyTakesItsNews: behind a network that is cut, sshd takes no more.
func TestHostEndsItsRanksThoughNobodyTakesItsNews(t *testing.T) {
	printed := filepath.Join(t.TempDir(), "printed")
	// It prints while it ends: more than a pipe holds.
	_, orders, _, served := serving(t, `trap "head -c 200000 /dev/zero && touch `+printed+
		`; exit" TERM
		echo up; while :; do sleep 0.01; done`, time.Minute, nil)
	orders.Close()
	select {
	case err := <-served:
		require.Report(t, err)
	case <-time.After(30 * time.Second):
		t.Fatal("it goes on")
	}
	_, err := os.Stat(printed)
	require.Check(t, err == nil, "the rank could not print: %v", err)
}

// TestHostsGetWhatIsBuiltForThem: a package, for the host's system, and this launcher.
func TestHostsGetWhatIsBuiltForThem(t *testing.T) {
	if os.Getenv("EURYALE_FULL") != "1" {
		t.Skip("it builds the launcher anew: set EURYALE_FULL=1")
	}
	b := &builder{notice: func(string) {}}
	defer b.remove()
	c := newCluster(Job{Program: "../../examples/digits"}, b)
	for _, p := range []platform{here(), {"linux", "arm64"}} {
		k := require.Value(c.newKit(t.Context(), p))(t)
		if of := builtFor(k[1].path); of != p || usesGPU(k[1].path) {
			t.Errorf("the program for %v is for %v", p, of)
		}
		of := builtFor(k[0].path)
		require.Check(t, of == p, "the launcher for %v is for %v", p, of)
	}
}

// TestHostsOfAnotherArchitectureRunALauncherBuiltForThem: here on an emulator, which starts
// programs of this machine.
func TestHostsOfAnotherArchitectureRunALauncherBuiltForThem(t *testing.T) {
	emulator, err := exec.LookPath("qemu-aarch64")
	if err != nil || os.Getenv("EURYALE_FULL") != "1" || here().arch == "arm64" {
		t.Skip("it builds the launcher anew: set EURYALE_FULL=1 where there is qemu-aarch64")
	}
	homes := fakeSSH(t, `PATH=${0%/*}/arm:$PATH`)
	err = os.Mkdir(homes+"/arm", 0o700)
	for name, text := range map[string]string{
		"uname": "#!/bin/sh\n[ $1 = -m ] && echo aarch64 || exec /bin/uname \"$@\"\n",
		"sh":    "#!/bin/bash\nBASH_ENV=${0%/*}/exec exec bash \"$@\"\n",
		"exec": "exec() { case $1 in ./sha256*) builtin exec " + emulator +
			" \"$@\" ;; *) builtin exec \"$@\" ;; esac; }\n",
	} {
		err = errors.Join(err, os.WriteFile(filepath.Join(homes, "arm", name), []byte(text), 0o700))
	}
	require.NoError(t, err)
	job, out, _ := onHosts(t, "echo up", 1, "a")
	err = Run(t.Context(), job)
	require.Check(t, err == nil && out.String() == "[0] up\n", "%v, %s", err, out)
	copies, err := filepath.Glob(homes + "/a/.cache/euryale/run/*/euryale")
	require.Check(t, err == nil && len(copies) == 1 &&
		builtFor(copies[0]) == (platform{"linux", "arm64"}), "it runs %v, %v", copies, err)
}

// TestHostsSayWhatTheyLackForGPUs: before a program with GPU support begins, and for no other.
func TestHostsSayWhatTheyLackForGPUs(t *testing.T) {
	if os.Getenv("EURYALE_FULL") != "1" {
		t.Skip("it builds programs: set EURYALE_FULL=1")
	}
	fakeSSH(t, "")
	dir := t.TempDir()
	for name, text := range map[string]string{"go.mod": "module program\n",
		"main.go": "package main\n\nfunc main() { println(\"under way\") }\n",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	for tags, want := range map[string]string{"gpu": "host a: nccl: " + lackOfTests + "\n",
		"": ""} {
		t.Setenv("GOFLAGS", "-tags="+tags)
		job, out, _ := onHosts(t, "", 1, "a")
		job.Program, job.Args, job.Stderr = dir, nil, out
		job.Notice = func(text string) { fmt.Fprintln(out, text) }
		if err := Run(t.Context(), job); err != nil || out.String() != want+"[0] under way\n" {
			t.Errorf("with tags %q: %v, %q", tags, err, out)
		}
	}
}

func TestHostThatFailedFirstIsBlamed(t *testing.T) {
	on := func(host string, e ending) ending {
		e.host = host
		return e
	}
	failed := func(host string, why error, e ending) ending {
		e.why = why
		return on(host, e)
	}
	one := on("b", after(0, 1, exits(3)))
	because := on("a", after(1, 0, exits(1), "because of rank 1: closed"))
	loss := &HostLost{Host: "b", why: errors.New("no reason")}
	lost, too := failed("b", loss, after(1000, 2, 0)), failed("b", loss, after(1001, 1, 0))
	text := "host b is lost, with ranks 1 to 2: no reason"
	for _, c := range []struct {
		ends  []ending
		want  string // the beginning; "" for none
		code  int    // 0 if the error has none
		final bool
	}{
		{[]ending{on("a", after(0, 0, exits(0))), asked(on("b", after(0, 1, exits(0))))}, "", 0,
			true},
		{[]ending{because, one}, "host b: rank 1 failed first: exit status 3", 3, false},
		{[]ending{because, lost, too}, text, 0, false},
		{[]ending{on("a", after(0, 0, exits(1))), lost, too}, text, 0, false},
		{[]ending{lost, too, on("a", after(1500, 0, exits(1)))}, text, 0, false},
		{[]ending{on("a", after(0, 0, exits(2))), on("b", after(1, 1, exits(2)))},
			"host a: rank 0 failed first: exit status 2", 2, true},
		{[]ending{on("a", after(0, 0, exits(2))), asked(on("b", after(1, 1, exits(0))))},
			"host a: rank 0 failed: exit status 2", 2, true},
		{[]ending{failed("a", errors.New("host a: no program"), after(0, 0, 0))},
			"host a: no program", 0, true},
	} {
		attempts := 0
		err := Job{MaxRestarts: 1}.repeat(func(int) error {
			attempts++
			w := newWatch(Job{}, nil)
			w.supervisor.ends = c.ends
			return w.supervisor.outcome()
		})
		code := 0
		var coded interface{ ExitCode() int }
		if errors.As(err, &coded) {
			code = coded.ExitCode()
		}
		if text := fmt.Sprint(err); !strings.HasPrefix(text, cmp.Or(c.want, "<nil>")) ||
			code != c.code || c.final != (attempts == 1) {
			t.Errorf("got %v, %d, after %d attempts, want %+v", err, code, attempts, c)
		}
	}
}

// TestRanksOfHostsDoNotAccuseEachOtherOnceTheJobIsToldToEnd: on some hosts they are told later.
func TestRanksOfHostsDoNotAccuseEachOtherOnceTheJobIsToldToEnd(t *testing.T) {
	w := newWatch(Job{Ranks: 3}, nil,
		&remote{host: host{Host: Host{"a", 3}, ranks: 3}, orders: make(chan order, 4)})
	w.step(begins{})
	now := func(e ending) ended {
		e.at = time.Now()
		return ended{e}
	}
	w.step(now(ending{rank: 1, why: &HostLost{Host: "a", why: errors.New("silent")}}))
	w.step(late(nil))
	w.step(now(asked(after(0, 0, killedBy(syscall.SIGTERM)))))
	w.step(now(after(0, 2, exits(1), "because of rank 0: rank 0 is down: it was killed")))
	require.Equal(t, "outcome", fmt.Sprint(w.supervisor.outcome()),
		"host a is lost, with rank 1: silent")
}

// TestEachRankOfALostHostEndsOnce: also if another one is placed there while the loss is told.
func TestEachRankOfALostHostEndsOnce(t *testing.T) {
	h := &remote{host: host{Host: Host{"a", 3}, ranks: 3}, orders: make(chan order, 3),
		out: bufio.NewReader(strings.NewReader(""))}
	h.hangUp.Do(func() { h.why = errors.New("cut") })
	h.late = h.mustSpeakWithin(silence)
	w := newWatch(Job{Ranks: 2, times: defaultTimes()}, nil, h)
	w.step(begins{})
	go h.listen(w)
	w.step(<-w.events) // the host is down
	w.step(<-w.events) // it tells of the first one
	w.supervisor.job.Ranks++
	w.step(begins{})
	go h.endAll(w, errors.New("again"))
	if err := w.run(t.Context()); len(w.supervisor.ends) != 3 || fmt.Sprint(err) !=
		"host a is lost, with ranks 0 to 2: cut" {
		t.Errorf("they end with %v: %v", w.supervisor.ends, err)
	}
}
