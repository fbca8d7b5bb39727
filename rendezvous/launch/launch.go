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
)

const (
	// MaxRanks bounds Job.Ranks. It is far above the number of CPUs of a machine, and
	// small enough that the pipes of all ranks fit the usual limit of open files.
	MaxRanks = 1024
	// defaultGrace is Job.Grace if it is 0. It is short: after a failure there is
	// nothing to wait for, and after Ctrl-C a user waits. Programs that save on SIGTERM
	// need a larger Job.Grace.
	defaultGrace = time.Second
	// lastCalls is how many collectives a rank prints on SIGQUIT.
	lastCalls = 10
)

// Job is what to run.
type Job struct {
	// Program is an executable, or the directory of a Go package, which is built
	// first, into a temporary directory that is removed at the end. A script whose first
	// line does not say what runs it is run by /bin/sh, if its name ends in .sh or has no
	// such end.
	Program string
	// Args go to the program as they are.
	Args []string
	// Ranks is how many processes to start, 1 to [MaxRanks] on a machine.
	Ranks int
	// Hosts are machines to start the ranks on by ssh, in this order, instead of on this one.
	// Those that get none are spares: after a failure they take the place of lost hosts. With
	// Elastic all are used, and Slots bounds the processes of each. Stdin must be nil. A Program
	// without a slash is each host's own, from its PATH. Go packages are built for the system of
	// each host.
	Hosts []Host
	// Rendezvous is HOST:PORT, an address of the first of Hosts that the others reach, if that
	// is not the one by which ssh reaches it, or "".
	Rendezvous string
	// Machines says which part of a job on several machines this is; nil for all of it.
	Machines *Machines
	// Elastic has ranks that are lost replaced; nil for a job that ends with the first of them.
	Elastic *Elastic
	// Env is the environment that the ranks get, with their own variables on
	// top; nil means that of this process. On Hosts it is put on top of theirs; nil means those
	// of this process that are Euryale's or NCCL's.
	Env []string
	// Dir is the working directory of the ranks; "" means that of this process. Hosts that
	// do not have it take the one in which ssh starts commands.
	Dir string
	// Stdin is the input of rank 0 on the first attempt, nil for none; with Elastic, of process 0.
	Stdin *os.File
	// Stdout and Stderr take the outputs of the ranks, nil for nowhere.
	Stdout, Stderr io.Writer
	// Plain leaves the prefixes out.
	Plain bool
	// LogDir is a directory that gets a file with the output of each rank, without
	// prefixes: attempt_0/rank_0.log and so on, with Elastic of each process, and
	// attempt_0/launcher_0.log, which says when the attempt began, when it ended, and how. It must
	// not hold such files yet: a second job needs a directory of its own. Launchers of several
	// machines may share one. "" is for none.
	LogDir string
	// Grace is the time between the signal that tells ranks to end and SIGKILL; 0
	// means a second.
	Grace time.Duration
	// MaxRestarts is how many times all ranks are restarted after one has failed.
	MaxRestarts int
	// Signals brings the signals to pass to the ranks, such as from
	// signal.Notify; nil for none.
	Signals <-chan os.Signal
	// Notice takes lines for the user: that all ranks are restarted, and why, and which
	// SIGKILL does not end. nil drops them.
	Notice func(text string)

	times times
}

// times are the times of the launcher that tests shorten; 0 stands for those of defaultTimes.
type times struct {
	kill   time.Duration // from SIGKILL until ranks that are still there are named
	giveUp time.Duration // from then until the launcher ends without them
	look   time.Duration // between looks at ranks that may be stopped
}

// defaultTimes give processes time to free the memory of several GPUs.
func defaultTimes() times { return times{5 * time.Second, 15 * time.Second, time.Second} }

// orDefault puts the default in the place of each 0.
func (t times) orDefault() times {
	d := defaultTimes()
	return times{cmp.Or(t.kill, d.kill), cmp.Or(t.giveUp, d.giveUp), cmp.Or(t.look, d.look)}
}

// Machines is the place of this machine in a job on several. Each has a launcher of its own, with
// the same Job.Ranks.
type Machines struct {
	// Count is how many there are, and Number which of them this is, from 0.
	Count, Number int
	// Rendezvous is HOST:PORT: an address of machine 0, where its rank 0 serves the others.
	Rendezvous string
	// Token is the secret of the job, the same on all machines.
	Token string
}

// check finds what no job can have.
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

// Run runs a job to its end. When ctx ends, Run does what it does on SIGTERM. The
// error is a [*Failed] if a rank failed in the last attempt, a [*HostLost], an [*Interrupted]
// after a signal, the cause of ctx, or an error of the start or the output.
//
// A rank may be held in the kernel, so that SIGKILL does not end it, or nobody may read its output.
// Run then returns without it, 20 seconds after SIGKILL. A process that the kernel holds still ends
// once it is let go.
//
// Run locks the calling goroutine to its thread: the kernel kills the processes that
// a thread has started when the thread ends.
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
	b := &builder{stop: j.Signals}
	defer b.remove()
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
			j.Stdin = nil // its beginning is lost
		}
		return j.attempt(ctx, n)
	})
}

// repeat makes attempts, up to Job.MaxRestarts more, until one does not fail or the next would.
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

// check finds what no job can have.
func (j Job) check() error {
	for _, h := range j.Hosts {
		if err := h.check(); err != nil {
			return err
		}
	}
	switch slots := Slots(j.Hosts); {
	case slots > 0 && (j.Ranks < 1 || j.Ranks > slots):
		return fmt.Errorf("%d ranks: the hosts take 1 to %d", j.Ranks, slots)
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

// wrongJob is the error of a job that there cannot be.
type wrongJob struct{ error }

func (e wrongJob) Unwrap() error { return e.error }

// ExitCode is 2, that of wrong usage.
func (wrongJob) ExitCode() int { return usageCode }

// attempt runs the ranks once on this machine; n counts from 0.
func (j Job) attempt(ctx context.Context, n int) error {
	meeting, err := j.meeting()
	if err != nil {
		return err
	}
	return newWatch(j, j.environment(n, meeting)).attempt(ctx, n)
}

// environment returns the variables that all ranks of an attempt share, with those by which they
// meet. Each attempt is a new job, so that nothing left of one reaches the next.
func (j Job) environment(attempt int, meeting []string) []string {
	env := j.Env
	if env == nil {
		env = os.Environ()
		if len(j.Hosts) > 0 {
			env = slices.DeleteFunc(env, staysHere)
		}
	}
	all := slices.Concat(env, meeting, []string{"LOCAL_WORLD_SIZE=" + strconv.Itoa(j.Ranks),
		"TORCHELASTIC_RESTART_COUNT=" + strconv.Itoa(attempt), "TORCHELASTIC_MAX_RESTARTS=" +
			strconv.Itoa(j.MaxRestarts), "EURYALE_TERMINAL=", "EURYALE_REPORT="})
	if !slices.ContainsFunc(env, func(entry string) bool {
		return strings.HasPrefix(entry, "EURYALE_LAST_CALLS=")
	}) {
		all = append(all, "EURYALE_LAST_CALLS="+strconv.Itoa(lastCalls))
	}
	return all
}

// staysHere reports whether hosts do not get a variable of this process.
func staysHere(entry string) bool {
	name, _, _ := strings.Cut(entry, "=")
	ours := slices.Contains(variables.Names(), name) && name != string(variables.Token)
	return !ours && !strings.HasPrefix(name, "NCCL_")
}

// meeting returns the variables by which the ranks find each other.
func (j Job) meeting() ([]string, error) {
	if m := j.Machines; m != nil {
		host, port, err := net.SplitHostPort(m.Rendezvous)
		name := sha256.Sum256([]byte(m.Rendezvous + "\n" + m.Token))
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
