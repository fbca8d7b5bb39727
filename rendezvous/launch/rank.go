package launch

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"sync/atomic"

	"golang.org/x/term"
)

// rank is one process of the job.
type rank struct {
	process
	number   int
	host     *remote // that it runs on; nil for this machine
	slot     int     // of the host, or of this machine
	after    int     // how many ranks had ended before it was started
	out, err *liner  // nil where the rank writes to the outputs itself
	tail     *tail

	halted atomic.Bool // its host has said that it is stopped, and not yet that it goes on

	over  bool // its end is known; only watch.run uses this and the fields below
	halts int  // for how many looks in a row it was stopped, or held in the kernel
	looks int  // for how many looks the others have waited for it, or left it behind
	hung  bool // for so long that it was ended
}

// newRank makes a rank, without starting it, and its log.
func (w *watch) newRank(number int) (*rank, error) {
	log, err := w.logs.of(number)
	r := &rank{number: number, after: len(w.ends), tail: &tail{}}
	if w.several() || log != nil {
		r.out = w.liner(number, w.job.Stdout, r.tail, log)
		r.out.aside = true
		r.err = w.liner(number, w.job.Stderr, r.tail, log)
	}
	return r, err
}

// startHere starts a rank on this machine, with its own variables.
func (w *watch) startHere(r *rank, own []string) (err error) {
	r.guard, r.cmd = w.job.guard, exec.Command(w.job.Program, w.job.Args...)
	r.cmd.Env = slices.Concat(w.env, own, w.reports.variable)
	r.cmd.ExtraFiles = w.reports.inherited
	r.cmd.Dir = w.job.Dir
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
	if err = w.input(r); err == nil {
		err = r.start()
	}
	if err != nil {
		return fmt.Errorf("start rank %d: %w", r.number, explainStart(err))
	}
	w.add(r)
	go func() {
		e := r.wait()
		e.Memory = w.oom.explain(e)
		w.exit(r, e)
	}()
	return nil
}

// add adds a rank to the attempt.
func (w *watch) add(r *rank) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ranks = append(w.ranks, r)
}

// rank returns the rank with a number, nil if there is none.
func (w *watch) rank(number int) *rank {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.ranks {
		if r.number == number {
			return r
		}
	}
	return nil
}

// several reports whether the job may have several processes.
func (w *watch) several() bool {
	return w.job.Ranks > 1 || w.job.Machines != nil || w.job.Elastic != nil || w.hosts != nil
}

// liner returns where an output of a rank goes.
func (w *watch) liner(number int, to io.Writer, t *tail, log io.Writer) *liner {
	if to == nil {
		to = io.Discard
	}
	l := &liner{screen: w.screen, to: to, log: log, tail: t, live: number == 0 && isTerminal(to)}
	if !w.job.Plain && w.several() {
		l.prefix = fmt.Sprintf("[%d] ", number)
	}
	return l
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// where names the host of the rank, if it has one, before what is said of the rank.
func (r *rank) where() string {
	if r.host == nil {
		return ""
	}
	return "host " + r.host.Name + ": "
}

// input gives rank 0 the input of the job. A rank is not a foreground process: if it read the
// terminal itself, it would be stopped.
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

// exit tells run that a rank has ended, if run still listens, after printing the rank's last
// incomplete line. It gives up after drainTime if nobody reads the output.
func (w *watch) exit(r *rank, e ending) {
	if r.out != nil {
		within(drainTime, func() {
			r.out.flush()
			r.err.flush()
		})
	}
	select {
	case w.exits <- r.ending(e):
	case <-w.over:
	}
}

// ending adds the rank's number and what it printed to its ending.
func (r *rank) ending(e ending) ending {
	e.rank = r.number
	if r.host != nil {
		e.host = r.host.Name
	}
	r.tail.tell(&e)
	return e
}

// hangs returns where the rank hangs, "" if it has ended. For its own ranks a host reports this, if
// it can.
func (r *rank) hangs() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.over:
		return ""
	case r.host != nil && r.out != nil && r.out.screen.unread(): // so the host is not heard either
		return fmt.Sprintf("rank %d on host %s may have ended, but nobody reads the output of the "+
			"job", r.number, r.host.Name)
	case r.host != nil:
		return fmt.Sprintf("rank %d on host %s has not ended after SIGKILL", r.number, r.host.Name)
	case !r.alive:
		return fmt.Sprintf("rank %d has ended, but nobody reads its output", r.number)
	}
	where := state(os.DirFS("/"), r.cmd.Process.Pid)
	return fmt.Sprintf("rank %d has not ended after SIGKILL: %s", r.number, where)
}
