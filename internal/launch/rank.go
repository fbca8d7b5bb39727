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

// child is what this launcher has of a rank: its outputs, and its process if that runs here.
type child struct {
	process
	number   int
	host     *remote // that it runs on; nil for this machine
	out, err *liner  // nil where the rank writes to the outputs itself
	tail     *tail
}

// newChild makes what a rank needs, without starting it, and its log.
func (w *watch) newChild(number int, host *remote) (*child, error) {
	c := &child{number: number, host: host, tail: &tail{}}
	if w.supervisor.above { // the job's launcher has the rest
		return c, nil
	}
	log, err := w.logs.of(number)
	if w.several() || log != nil {
		c.out = w.liner(number, w.job.Stdout, c.tail, log)
		c.out.aside = true
		c.err = w.liner(number, w.job.Stderr, c.tail, log)
		c.out.errors = c.err
		c.err.hold(w.job.times.hold)
	}
	return c, err
}

// startHere starts a rank on this machine, with its own variables.
func (w *watch) startHere(c *child, own []string) (err error) {
	c.guard, c.cmd = w.job.guard, exec.Command(w.job.Program, w.job.Args...)
	c.cmd.Env = slices.Concat(w.env, own, w.reports.variable)
	c.cmd.ExtraFiles = w.reports.inherited
	c.cmd.Dir = w.job.Dir
	if len(w.job.Args) == 0 {
		c.cmd.Args = c.cmd.Args[:1]
	}
	switch {
	case c.out != nil:
		c.cmd.Stdout, c.cmd.Stderr = c.out, c.err
	case w.supervisor.above:
		c.cmd.Stdout = writer(func(b []byte) { w.heard(news{Number: c.number, Out: b}) })
		c.cmd.Stderr = writer(func(b []byte) { w.heard(news{Number: c.number, Err: b}) })
	default:
		c.cmd.Stdout, c.cmd.Stderr = w.job.Stdout, w.job.Stderr
	}
	if err = w.input(c); err == nil {
		err = c.start()
	}
	if err != nil {
		return fmt.Errorf("start rank %d: %w", c.number, explainStart(err))
	}
	w.add(c)
	go func() {
		e := c.wait()
		e.Memory = w.oom.explain(e)
		w.exit(c, e)
	}()
	return nil
}

// add adds a rank to the attempt.
func (w *watch) add(c *child) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.children = append(w.children, c)
}

// child returns the rank with a number, nil if there is none.
func (w *watch) child(number int) *child {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.children {
		if c.number == number {
			return c
		}
	}
	return nil
}

// several reports whether the job may have several processes.
func (w *watch) several() bool {
	return w.job.Ranks > 1 || w.job.Machines != nil || w.job.Elastic != nil || w.remotes != nil
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

// input gives rank 0 the input of the job. A rank is not a foreground process: if it read the
// terminal itself, it would be stopped.
func (w *watch) input(c *child) error {
	in := w.job.Stdin
	if c.number != 0 || in == nil {
		return nil
	}
	if !term.IsTerminal(int(in.Fd())) {
		c.cmd.Stdin = in
		return nil
	}
	if !inForeground(in) {
		return nil // in the background, the launcher must not read it either
	}
	pipe, err := c.cmd.StdinPipe()
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
func (w *watch) exit(c *child, e ending) {
	if c.out != nil {
		var said atomic.Bool
		within(drainTime, func() {
			c.out.flush()
			c.err.flush()
			said.Store(e.usage() && !c.tail.crashed() && c.err.refuse())
			c.err.release()
		})
		e.said = said.Load()
	}
	w.pass(ended{c.ending(e)})
}

// ending adds the rank's number and what it printed to its ending.
func (c *child) ending(e ending) ending {
	e.rank = c.number
	if c.host != nil {
		e.host = c.host.Name
	}
	c.tail.tell(&e)
	return e
}

// hangs returns where the rank hangs, unless its end is known. For its own ranks a host reports
// this, if it can.
func (c *child) hangs() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.host != nil && c.out != nil && c.out.screen.unread(): // so the host is not heard either
		return fmt.Sprintf("rank %d on host %s may have ended, but nobody reads the output of the "+
			"job", c.number, c.host.Name)
	case c.host != nil:
		return fmt.Sprintf("rank %d on host %s has not ended after SIGKILL", c.number, c.host.Name)
	case !c.alive:
		return fmt.Sprintf("rank %d has ended, but nobody reads its output", c.number)
	}
	where := state(os.DirFS("/"), c.cmd.Process.Pid)
	return fmt.Sprintf("rank %d has not ended after SIGKILL: %s", c.number, where)
}
