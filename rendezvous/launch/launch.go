package launch

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/euryale-ml/euryale/rendezvous"
)

const (
	// reportTime is what the other ranks have to report a failure that they see.
	reportTime = time.Second
	// stopTime is what ranks have to end after a signal.
	stopTime = time.Second
	// drainTime is how long output is read that processes of a rank that has
	// ended still hold open.
	drainTime = 500 * time.Millisecond
	// sameTime is within which the order of two failures says nothing.
	sameTime = 100 * time.Millisecond
)

// DefaultRanks is the number of ranks when none is given: one for each CPU, 8
// at most.
func DefaultRanks() int { return min(runtime.NumCPU(), 8) }

// Job is what to run.
type Job struct {
	// Program is an executable, or the directory of a Go package, which is built
	// first, into a temporary directory that is removed at the end.
	Program string
	// Args go to the program as they are.
	Args []string
	// Ranks is how many processes to start, at least 1.
	Ranks int
	// Env is the environment that the ranks get, with their own variables on
	// top; nil means that of this process.
	Env []string
	// Stdin is the input of rank 0, nil for none.
	Stdin *os.File
	// Stdout and Stderr take the outputs of the ranks, nil for nowhere.
	Stdout, Stderr io.Writer
	// Plain leaves the prefixes out.
	Plain bool
	// Signals brings the signals to pass to the ranks, such as from
	// signal.Notify; nil for none.
	Signals <-chan os.Signal
}

// Run runs a job to its end. The end of ctx is the same as SIGTERM. The error is
// a [*Failed] if a rank failed, an [*Interrupted] if a signal came, that of ctx,
// or says what hindered the start.
func Run(ctx context.Context, j Job) error {
	if j.Ranks < 1 {
		return fmt.Errorf("%d ranks: a job needs at least 1", j.Ranks)
	}
	path, remove, err := resolve(ctx, j.Program, j.Signals)
	if err != nil {
		return err
	}
	defer remove()
	env, err := j.environment()
	if err != nil {
		return err
	}
	w := &watch{job: j, exits: make(chan exit, j.Ranks)}
	for r := range j.Ranks {
		w.ranks = append(w.ranks, w.command(path, r, env))
	}
	release, err := w.start()
	defer release()
	if err != nil {
		return err
	}
	return w.run(ctx)
}

// environment returns what all ranks share.
func (j Job) environment() ([]string, error) {
	port, err := freePort()
	if err != nil {
		return nil, fmt.Errorf("find a free port: %w", err)
	}
	env := j.Env
	if env == nil {
		env = os.Environ()
	}
	size := strconv.Itoa(j.Ranks)
	return append(slices.Clip(slices.Clone(env)),
		"WORLD_SIZE="+size, "LOCAL_WORLD_SIZE="+size, "GROUP_RANK=0",
		"MASTER_ADDR=127.0.0.1", "MASTER_PORT="+strconv.Itoa(port),
		"EURYALE_JOB=run-"+rand.Text()[:12], "EURYALE_TOKEN="+token(), "EURYALE_TERMINAL="), nil
}

// token returns 32 random bytes in hexadecimal.
func token() string {
	var b [32]byte
	rand.Read(b[:]) // never fails
	return fmt.Sprintf("%x", b)
}

// freePort returns a port for programs that read MASTER_PORT. Euryale itself
// takes another.
func freePort() (int, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port, nil
}

// watch is a job under way.
type watch struct {
	job    Job
	screen screen
	ranks  []*rank
	exits  chan exit
}

// rank is one process. It leads its process group.
type rank struct {
	number   int
	cmd      *exec.Cmd
	out, err *liner // nil where the rank writes to the outputs itself
	tail     *tail

	mu    sync.Mutex
	alive bool // not yet waited for, so that its number is its own
}

// exit is the end of a rank.
type exit struct {
	rank  *rank
	state *os.ProcessState
	at    time.Time
}

// command prepares a rank.
func (w *watch) command(path string, number int, env []string) *rank {
	r := &rank{number: number, tail: &tail{}, cmd: exec.Command(path, w.job.Args...)}
	n := strconv.Itoa(number)
	r.cmd.Env = append(slices.Clip(env), "RANK="+n, "LOCAL_RANK="+n)
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	r.cmd.WaitDelay = drainTime
	if len(w.job.Args) == 0 {
		r.cmd.Args = r.cmd.Args[:1]
	}
	r.cmd.Stdout, r.cmd.Stderr = w.job.Stdout, w.job.Stderr
	if w.job.Ranks > 1 {
		r.out, r.err = w.liner(r, w.job.Stdout, nil), w.liner(r, w.job.Stderr, r.tail)
		r.cmd.Stdout, r.cmd.Stderr = r.out, r.err
		if r.err.live {
			r.cmd.Env = append(r.cmd.Env, "EURYALE_TERMINAL=1")
		}
	}
	return r
}

// liner returns where an output of a rank goes.
func (w *watch) liner(r *rank, to io.Writer, t *tail) *liner {
	if to == nil {
		to = io.Discard
	}
	l := &liner{screen: &w.screen, to: to, tail: t, live: r.number == 0 && isTerminal(to)}
	if !w.job.Plain {
		l.prefix = fmt.Sprintf("[%d] ", r.number)
	}
	return l
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// start starts all ranks, or none. release must be called in the end.
//
// The kernel kills a rank when the thread that started it ends, not when the
// process does: so one goroutine starts them all, on a thread that it keeps
// until release.
func (w *watch) start() (release func(), err error) {
	started, done := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		started <- w.startAll()
		<-done
	}()
	err = <-started
	return sync.OnceFunc(func() { close(done) }), err
}

func (w *watch) startAll() error {
	for i, r := range w.ranks {
		err := w.input(r)
		if err == nil {
			err = r.cmd.Start()
		}
		if err != nil {
			for _, s := range w.ranks[:i] {
				s.signal(syscall.SIGKILL)
			}
			for range i {
				<-w.exits
			}
			return fmt.Errorf("start rank %d: %w", r.number, err)
		}
		r.alive = true
		go func() { w.exits <- r.wait() }()
	}
	return nil
}

// input gives rank 0 the input of the job. A rank is no foreground process, so
// it must not read the terminal itself, or it would be stopped.
func (w *watch) input(r *rank) error {
	in := w.job.Stdin
	if r.number != 0 || in == nil {
		return nil
	}
	if !term.IsTerminal(int(in.Fd())) {
		r.cmd.Stdin = in
		return nil
	}
	if group, err := unix.IoctlGetInt(int(in.Fd()), unix.TIOCGPGRP); err != nil || group != unix.Getpgrp() {
		return nil // in the background, the launcher must not read it either
	}
	pipe, err := r.cmd.StdinPipe()
	if err != nil {
		return err
	}
	go func() { // ends with the input, or with this process
		io.Copy(pipe, in)
		pipe.Close()
	}()
	return nil
}

// wait waits for the rank to end, kills what is left of its group, and reads
// the rest of its output.
func (r *rank) wait() exit {
	pid := r.cmd.Process.Pid
	for errors.Is(unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil), unix.EINTR) {
	}
	at := time.Now()
	r.mu.Lock()
	r.alive = false
	syscall.Kill(-pid, syscall.SIGKILL) // still its own number: it is not reaped yet
	r.mu.Unlock()
	r.cmd.Wait() // the state says it all
	r.flush()
	return exit{r, r.cmd.ProcessState, at}
}

// flush prints what the rank left without an end. It does not wait for ever
// for an output that nobody reads.
func (r *rank) flush() {
	if r.out == nil {
		return
	}
	flushed := make(chan struct{})
	go func() {
		r.out.flush()
		r.err.flush()
		close(flushed)
	}()
	select {
	case <-flushed:
	case <-time.After(drainTime):
	}
}

// signal sends a signal to the rank's group.
func (r *rank) signal(s syscall.Signal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.alive {
		syscall.Kill(-r.cmd.Process.Pid, s)
	}
}

func (w *watch) signalAll(s syscall.Signal) {
	for _, r := range w.ranks {
		r.signal(s)
	}
}

// run watches the ranks to their end.
func (w *watch) run(ctx context.Context) error {
	var failures []exit
	var stopped error // why the ranks were told to end
	var timer <-chan time.Time
	next := syscall.SIGTERM // what the timer sends
	stop := func(s syscall.Signal, why error) {
		if stopped != nil {
			s = syscall.SIGKILL // asked a second time
		} else {
			stopped = why
		}
		w.signalAll(s)
		timer, next = time.After(stopTime), syscall.SIGKILL
	}
	telling, told := context.WithCancel(context.WithoutCancel(ctx))
	var tellers sync.WaitGroup
	defer tellers.Wait()
	defer told()
	over := ctx.Done()
	for left := len(w.ranks); left > 0; {
		select {
		case e := <-w.exits:
			left--
			tellers.Go(func() { e.tell(telling) })
			if e.state.Success() {
				break
			}
			failures = append(failures, e)
			if timer == nil {
				timer = time.After(reportTime)
			}
		case s := <-w.job.Signals:
			number, _ := s.(syscall.Signal)
			stop(number, &Interrupted{s})
		case <-over:
			over = nil
			stop(syscall.SIGTERM, context.Cause(ctx))
		case <-timer:
			w.signalAll(next)
			timer, next = time.After(stopTime), syscall.SIGKILL
		}
	}
	if stopped == nil && len(failures) > 0 {
		return failed(failures)
	}
	return stopped
}

// tell lets ranks that wait for others to join know that this one will not come.
func (e exit) tell(ctx context.Context) {
	env, err := rendezvous.ReadEnv(func(name string) string {
		for _, v := range slices.Backward(e.rank.cmd.Env) {
			if value, ok := strings.CutPrefix(v, name+"="); ok {
				return value
			}
		}
		return ""
	})
	if err == nil { // otherwise no rank can join
		rendezvous.Ended(ctx, env, e.rank.number, errors.New(e.state.String())) // in vain if all have joined
	}
}

// failed makes the error of a job from its failures.
func failed(failures []exit) error {
	slices.SortStableFunc(failures, func(a, b exit) int { return a.at.Compare(b.at) })
	first := origin(failures)
	e := &Failed{Rank: first.rank.number, State: first.state, Lines: first.rank.tail.text()}
	for _, f := range failures {
		if f.rank != first.rank {
			e.Others = append(e.Others, f.rank.number)
		}
	}
	return e
}

// origin finds the failure that the others follow from. The order in which the
// ends are seen is not enough: the kernel closes the connections of a process
// some time before it reports its end, and other ranks are quick.
func origin(failures []exit) exit {
	first := failures[0]
	for _, e := range failures {
		if killed(e) && e.at.Sub(failures[0].at) < sameTime {
			first = e // a rank that loses another is not killed, it exits
			break
		}
	}
	for range failures {
		i := slices.IndexFunc(failures, func(e exit) bool { return e.rank.number == blamed(first.rank.tail.text()) })
		if i < 0 {
			break
		}
		first = failures[i]
	}
	return first
}

// downText is how errors name a lost rank: see rendezvous.Failure.
var downText = regexp.MustCompile(`\brank (\d+) is down: `)

// blamed returns the rank that the last lines of another say is down, or -1.
func blamed(lines []string) int {
	for _, line := range slices.Backward(lines) {
		if found := downText.FindStringSubmatch(line); found != nil {
			if n, err := strconv.Atoi(found[1]); err == nil {
				return n
			}
		}
	}
	return -1
}

func killed(e exit) bool {
	status, ok := e.state.Sys().(syscall.WaitStatus)
	return ok && status.Signaled()
}
