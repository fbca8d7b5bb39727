package launch

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	variables "github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/exit"
)

const (
	// MaxRanks bounds Job.Ranks. It is far above the number of CPUs of a machine, and
	// small enough that the pipes of all ranks fit the usual limit of open files.
	MaxRanks = 1024
	// defaultGrace replaces a Job.Grace of 0. It is short: after a failure there is nothing to wait
	// for, and after Ctrl-C a user waits. Programs that save on SIGTERM need a larger Job.Grace.
	defaultGrace = time.Second
	// lastCalls is the number of collectives that a rank prints on SIGQUIT.
	lastCalls = 10
)

// Job says what to run.
type Job struct {
	// Program is an executable, or the directory of a Go package. A package is built first, into a
	// temporary directory that is removed at the end. If the first line of a script does not say
	// what runs it, /bin/sh runs it, provided that its name has the extension .sh or none.
	Program string
	// Args are passed to the program unchanged.
	Args []string
	// Ranks is the number of processes to start, 1 to [MaxRanks] on a machine.
	Ranks int
	// Hosts are machines on which ssh starts the ranks, in this order, instead of on this machine.
	// Hosts without a rank are on standby: after a failure they replace lost hosts. With Elastic
	// all hosts are used, and Slots bounds the processes on each. Stdin must be nil. A Program
	// without a slash is looked up in each host's own PATH. Go packages are built for the system of
	// each host.
	Hosts []Host
	// Rendezvous is HOST:PORT, an address by which the others reach the first of Hosts. Set it if
	// that is not the address by which ssh reaches it; otherwise "".
	Rendezvous string
	// Machines says which part of a job on several machines this one is; nil if it is the whole
	// job.
	Machines *Machines
	// Elastic makes the job replace lost ranks; nil for a job that ends with the first of them.
	Elastic *Elastic
	// Env is the environment of the ranks, to which their own variables are added; nil means the
	// environment of this process. On Hosts it is added to theirs; nil means those variables of
	// this process that belong to Euryale or NCCL.
	Env []string
	// Dir is the working directory of the ranks; "" means the directory of this process. Hosts
	// without that directory use the one in which ssh starts commands.
	Dir string
	// Stdin is the input of rank 0 on the first attempt, nil for none; with Elastic, of process 0.
	Stdin *os.File
	// Stdout and Stderr take the outputs of the ranks; nil discards them.
	Stdout, Stderr io.Writer
	// Plain leaves the prefixes out.
	Plain bool
	// LogDir is a directory for log files: one with the output of each rank, without prefixes, at
	// attempt_0/rank_0.log and so on (with Elastic, of each process), and attempt_0/launcher_0.log,
	// which says when the attempt began, when it ended, and how. It must not hold such files yet:
	// a second job needs another directory. Launchers of several machines may share one. "" means
	// no logs.
	LogDir string
	// Grace is the time between the signal that tells ranks to end and SIGKILL; 0
	// means a second.
	Grace time.Duration
	// MaxRestarts is how many times all ranks are restarted after one has failed.
	MaxRestarts int
	// Signals delivers signals to pass to the ranks, such as from signal.Notify; nil for none.
	Signals <-chan os.Signal
	// Notice is called with lines for the user: what is built, that all ranks are restarted, and
	// why, and which ranks SIGKILL does not end. nil drops them.
	Notice func(text string)

	times times
	guard *guard // of what it starts
}

// times are launcher times that tests shorten; 0 means the value of defaultTimes.
type times struct {
	kill   time.Duration // from SIGKILL until ranks that are still there are named
	giveUp time.Duration // from then until the launcher ends without them
	look   time.Duration // between looks at ranks that may be stopped
	hold   time.Duration // how long lines of a rank that begins are held
}

// defaultTimes give processes time to free the memory of several GPUs.
func defaultTimes() times {
	return times{5 * time.Second, 15 * time.Second, time.Second, time.Second}
}

// orDefault replaces each 0 by the default.
func (t times) orDefault() times {
	d := defaultTimes()
	return times{cmp.Or(t.kill, d.kill), cmp.Or(t.giveUp, d.giveUp), cmp.Or(t.look, d.look),
		cmp.Or(t.hold, d.hold)}
}

// Machines is the place of this machine in a job on several. Each machine has a separate launcher,
// with the same Job.Ranks.
type Machines struct {
	// Count is the number of machines, and Number is the number of this one, from 0.
	Count, Number int
	// Rendezvous is HOST:PORT: an address of machine 0, where its rank 0 serves the others.
	Rendezvous string
	// Token is the secret of the job, the same on all machines.
	Token string
	// Job names the job where Rendezvous is not the same on all machines; "" names it by that.
	Job string
}

// check reports values that no job can have.
func (m *Machines) check() error {
	switch err := checkMeeting(m.Rendezvous); {
	case m.Count < 1 || m.Number < 0 || m.Number >= m.Count:
		return fmt.Errorf("machine %d of %d: machines are counted from 0", m.Number, m.Count)
	case err != nil:
		return err
	case m.Token == "":
		return errors.New("several machines need a secret: set EURYALE_TOKEN to the same random " +
			"text on all of them, such as the output of euryale token")
	}
	return nil
}

// checkMeeting checks a HOST:PORT.
func checkMeeting(at string) error {
	host, port, err := net.SplitHostPort(at)
	if n, wrong := strconv.Atoi(port); err != nil || wrong != nil || host == "" || n < 1 ||
		n > 65535 {
		return fmt.Errorf("a rendezvous at %q: give HOST:PORT, an address of machine 0 that all "+
			"machines reach, and a free port there", at)
	}
	return nil
}

// Run runs a job to its end. When ctx ends, Run acts as on SIGTERM. The error is a [*Failed] if a
// rank failed in the last attempt, a [*HostLost], an [*Interrupted] after a signal, the cause of
// ctx, or an error of the start or the output.
//
// The kernel may hold a rank so that SIGKILL does not end it, or nobody may read its output. Run
// then returns without it, 20 seconds after SIGKILL. A process that the kernel holds still ends
// once it is released.
//
// Run locks the calling goroutine to its thread, because the kernel kills the processes that a
// thread has started when that thread ends.
func Run(ctx context.Context, j Job) error {
	if err := j.check(); err != nil {
		return wrongJob{err}
	}
	if err := j.checkLogs(); err != nil {
		return err
	}
	j.Grace, j.times = cmp.Or(j.Grace, defaultGrace), j.times.orDefault()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	expire(os.TempDir())
	j.guard = newGuard()
	defer j.guard.close()
	b := &builder{stop: j.Signals, guard: j.guard, notice: j.notice}
	defer b.remove()
	if j.Elastic != nil && j.Machines != nil && j.Machines.Count > 1 {
		return j.runAgents(ctx, b)
	}
	if len(j.Hosts) > 0 {
		c := newCluster(j, b)
		return j.repeat(func(n int) error { return c.attempt(ctx, n) })
	}
	path, err := b.resolve(ctx, j.Program)
	if err != nil {
		return err
	}
	command, err := interpreted(path)
	if err != nil {
		return err
	}
	j.Program, j.Args = command[0], append(command[1:], j.Args...)
	return j.repeat(func(n int) error {
		if n > 0 {
			j.Stdin = nil // its beginning was already read
		}
		return j.attempt(ctx, n)
	})
}

// repeat makes attempts, up to Job.MaxRestarts more, until one succeeds or another would fail, too.
func (j Job) repeat(attempt func(n int) error) error {
	for n := 0; ; n++ {
		err := attempt(n)
		var f *Failed
		var lost *HostLost
		var text string
		switch {
		case n == j.MaxRestarts:
			return err
		case errors.As(err, &lost):
			text, _, _ = strings.Cut(lost.Error(), "\n")
		case errors.As(err, &f) && !f.Usage() && len(f.Hang) == 0:
			text = f.summary()
		default:
			return err
		}
		select {
		case s := <-j.Signals: // of whoever signalled to the ranks, too, and they were faster
			return &Interrupted{s}
		default:
		}
		j.notice(fmt.Sprintf("%s: restarting all ranks (restart %d of %d)", text, n+1,
			j.MaxRestarts))
	}
}

// notice says something to the user.
func (j Job) notice(text string) {
	if j.Notice != nil {
		j.Notice(text)
	}
}

// check reports values that no job can have.
func (j Job) check() error {
	for _, h := range j.Hosts {
		if err := h.check(); err != nil {
			return err
		}
	}
	switch slots := Slots(j.Hosts); {
	case slots > 0 && (j.Ranks < 1 || j.Ranks > slots):
		return fmt.Errorf("%d ranks: the hosts take 1 to %d: write HOST:N for a host that takes N",
			j.Ranks, slots)
	case slots == 0 && (j.Ranks < 1 || j.Ranks > MaxRanks):
		return fmt.Errorf("%d ranks: a job has 1 to %d on one machine", j.Ranks, MaxRanks)
	case j.Grace < 0:
		return fmt.Errorf("a grace of %v: it must not be negative", j.Grace)
	case j.MaxRestarts < 0:
		return fmt.Errorf("%d restarts: the number must not be negative", j.MaxRestarts)
	case slots > 0 && (j.Machines != nil || j.Stdin != nil):
		return errors.New("a job on hosts has neither Machines nor Stdin")
	case j.Machines != nil && j.MaxRestarts > 0:
		return errors.New("a job on several machines cannot be restarted: the launchers do not " +
			"know of each other")
	}
	if j.Elastic != nil {
		if err := j.Elastic.check(j); err != nil {
			return err
		}
	}
	switch {
	case j.Machines != nil:
		return j.Machines.check()
	case j.Rendezvous != "":
		return checkMeeting(j.Rendezvous)
	}
	return nil
}

// wrongJob is the error of an impossible job.
type wrongJob struct{ error }

func (e wrongJob) Unwrap() error { return e.error }

// ExitCode is 2, the code of wrong usage.
func (wrongJob) ExitCode() int { return exit.Usage }

// attempt runs the ranks once on this machine; n counts from 0.
func (j Job) attempt(ctx context.Context, n int) error {
	meeting, err := j.meeting()
	if err != nil {
		return err
	}
	return newWatch(j, j.environment(n, meeting)).attempt(ctx, n)
}

// environment returns the variables that all ranks of an attempt share, with those by which they
// meet. Each attempt is a new job, so that nothing left from one reaches the next.
func (j Job) environment(attempt int, meeting []string) []string {
	env := j.Env
	if env == nil {
		env = os.Environ()
	}
	credential := variables.MetricsCredential(variables.Lookup(env))
	if j.Env == nil && len(j.Hosts) > 0 {
		env = slices.DeleteFunc(env, staysHere)
	}
	all := slices.Concat(env, meeting, []string{"LOCAL_WORLD_SIZE=" + strconv.Itoa(j.Ranks),
		"TORCHELASTIC_RESTART_COUNT=" + strconv.Itoa(attempt), "TORCHELASTIC_MAX_RESTARTS=" +
			strconv.Itoa(j.MaxRestarts), "EURYALE_TERMINAL=", "EURYALE_REPORT=",
		"EURYALE_CREDENTIAL=" + credential})
	if !slices.ContainsFunc(env, func(entry string) bool {
		return strings.HasPrefix(entry, "EURYALE_LAST_CALLS=")
	}) {
		all = append(all, "EURYALE_LAST_CALLS="+strconv.Itoa(lastCalls))
	}
	return all
}

// staysHere reports whether a variable of this process is not passed to hosts.
func staysHere(entry string) bool {
	name, _, _ := strings.Cut(entry, "=")
	ours := slices.Contains(variables.Names(), name) && name != string(variables.Token)
	return !ours && !strings.HasPrefix(name, "NCCL_")
}

// meeting returns the variables by which the ranks find each other.
func (j Job) meeting() ([]string, error) {
	if m := j.Machines; m != nil {
		host, port, err := net.SplitHostPort(m.Rendezvous)
		name := sha256.Sum256([]byte(cmp.Or(m.Job, m.Rendezvous) + "\n" + m.Token))
		return []string{fmt.Sprint("WORLD_SIZE=", m.Count*j.Ranks),
			fmt.Sprint("GROUP_RANK=", m.Number),
			"MASTER_ADDR=" + host, "MASTER_PORT=" + port, fmt.Sprintf("EURYALE_JOB=run-%.6x", name),
			"EURYALE_TOKEN=" + m.Token}, err
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	return append(newMeeting(j.Ranks, "127.0.0.1", port), "GROUP_RANK=0"), nil
}

// newMeeting returns the variables by which the ranks of a new job find each other.
func newMeeting(size int, host, port string) []string {
	return []string{fmt.Sprint("WORLD_SIZE=", size), "MASTER_ADDR=" + host, "MASTER_PORT=" + port,
		"EURYALE_JOB=run-" + rand.Text()[:12], "EURYALE_TOKEN=" + token()}
}

// first returns the number of this machine's first rank.
func (j Job) first() int {
	if j.Machines == nil {
		return 0
	}
	return j.Machines.Number * j.Ranks
}

// token returns 32 random bytes in hexadecimal.
func token() string {
	var b [32]byte
	rand.Read(b[:]) // never fails
	return fmt.Sprintf("%x", b)
}

// freePort returns a port for programs that read MASTER_PORT. Euryale does not use it.
func freePort() (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	defer ln.Close()
	return strconv.Itoa(ln.Addr().(*net.TCPAddr).Port), nil
}
