package launch

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/term"
)

// drainTime is how long output is read that processes of a rank that has ended
// still hold open.
const drainTime = 500 * time.Millisecond

// rank is one process.
type rank struct {
	number   int
	cmd      *exec.Cmd // nil where a host has it
	host     *remote   // that one
	slot     int       // of it
	env      []string  // that it alone has, on a host
	family   family
	out, err *liner // nil where the rank writes to the outputs itself
	tail     *tail
	log      *os.File // nil for none

	mu      sync.Mutex
	alive   bool // not yet waited for, so that its number is its own
	asked   bool // it was signalled
	stopped bool // it was stopped when look looked
	halts   int  // for how many looks in a row it was halted; only watch.endStopped counts
}

// newRank makes a rank, which is not started, and its log.
func (w *watch) newRank(number int) (*rank, error) {
	log, err := w.logs.of(number)
	r := &rank{number: number, tail: &tail{}, log: log}
	if w.several() || log != nil {
		r.out, r.err = w.liner(r, w.job.Stdout, nil), w.liner(r, w.job.Stderr, r.tail)
	}
	return r, err
}

// startHere starts a rank on this machine, with variables of its own.
func (w *watch) startHere(path string, r *rank, own []string) (err error) {
	r.cmd = exec.Command(path, w.job.Args...)
	r.cmd.Env = slices.Concat(w.env, own, w.reports.variable, r.terminal())
	r.cmd.ExtraFiles = w.reports.inherited
	r.cmd.Dir, r.cmd.WaitDelay = w.job.Dir, drainTime
	if len(w.job.Args) == 0 {
		r.cmd.Args = r.cmd.Args[:1]
	}
	switch {
	case r.out != nil:
		r.cmd.Stdout, r.cmd.Stderr = r.out, r.err
	case w.orders != nil:
		r.cmd.Stdout = writer(func(b []byte) { w.heard(news{Number: r.number, Out: b}) })
		r.cmd.Stderr = writer(func(b []byte) { w.heard(news{Number: r.number, Err: b}) })
	default:
		r.cmd.Stdout, r.cmd.Stderr = w.job.Stdout, w.job.Stderr
	}
	if err = w.input(r); err != nil {
		return err
	}
	if r.family, err = start(r.cmd); err != nil {
		return err
	}
	r.alive = true
	go func() { w.exit(r.wait()) }()
	return nil
}

// terminal is the variable that tells a rank that its output is shown on a terminal.
func (r *rank) terminal() []string {
	if r.err == nil || !r.err.live {
		return nil
	}
	return []string{"EURYALE_TERMINAL=1"}
}

// rank returns the rank of a number.
func (w *watch) rank(number int) *rank {
	return w.ranks[slices.IndexFunc(w.ranks, func(r *rank) bool { return r.number == number })]
}

// several reports whether the job may have several processes.
func (w *watch) several() bool {
	return w.job.Ranks > 1 || w.job.Machines != nil || w.job.Elastic != nil || w.hosts != nil
}

// liner returns where an output of a rank goes.
func (w *watch) liner(r *rank, to io.Writer, t *tail) *liner {
	if to == nil {
		to = io.Discard
	}
	l := &liner{screen: w.screen, to: to, tail: t, live: r.number == 0 && isTerminal(to)}
	if r.log != nil {
		l.log = r.log
	}
	if !w.job.Plain && w.several() {
		l.prefix = fmt.Sprintf("[%d] ", r.number)
	}
	return l
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
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
	if !inForeground(in) {
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

// wait waits for the rank to end, kills what is left of its family, and reads
// the rest of its output.
func (r *rank) wait() ending {
	state := r.family.wait()
	e := ending{rank: r.number, at: time.Now()}
	r.mu.Lock()
	r.alive = false
	e.asked, e.stopped = r.asked, r.stopped
	r.family.end()
	r.mu.Unlock()
	r.cmd.Wait() // the state says it all
	r.flush()
	if state == nil {
		state = r.cmd.ProcessState
	}
	e.status, _ = state.Sys().(syscall.WaitStatus)
	r.tail.tell(&e)
	return e
}

// flush prints the rank's last incomplete line. It gives up after drainTime if nobody
// reads the output.
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

// look records whether the rank is stopped. It must run before the launcher signals
// the rank, which changes that.
func (r *rank) look() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.alive || r.asked {
		return
	}
	r.stopped = r.family.stopped()
}

// signal sends a signal to the rank's family. A stopped one is continued, so that the signal
// reaches it.
func (r *rank) signal(s syscall.Signal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.alive {
		return
	}
	r.asked = true
	r.family.send(s)
	if r.stopped {
		r.family.goOn()
	}
}

// hang says where the rank hangs, "" if it has ended.
func (r *rank) hang() string {
	if r.host != nil {
		return r.host.hang(r)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.alive {
		return ""
	}
	where := state(os.DirFS("/"), r.cmd.Process.Pid)
	return fmt.Sprintf("rank %d has not ended after SIGKILL: %s", r.number, where)
}

// halted reports whether the rank is stopped, or waits in the kernel where no signal reaches it.
func (r *rank) halted() bool {
	state := r.state()
	return state == "T" || state == "D"
}

// state returns the letter of the state that the kernel says the rank is in, "" if there is none.
func (r *rank) state() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.alive {
		return ""
	}
	// without /proc there is no text
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.cmd.Process.Pid))
	return stateLetter(string(stat))
}
