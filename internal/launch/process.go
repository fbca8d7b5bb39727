package launch

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// drainTime is how long output is still read after a process has ended, if processes that it
// started hold the output open.
const drainTime = 500 * time.Millisecond

// process is a command with the processes that it starts. Signals reach it only after start, until
// wait has returned.
type process struct {
	cmd    *exec.Cmd
	family family
	guard  *guard // ends the family if the launcher is killed; may be nil

	mu      sync.Mutex
	alive   bool // not yet waited for, so its number is not reused
	asked   bool // it was signalled
	stopped bool // it was stopped when look looked
}

// start starts the command. Once it has ended, its output is read for at most drainTime more.
func (p *process) start() (err error) {
	p.cmd.WaitDelay = drainTime
	p.family, err = start(p.cmd)
	if p.alive = err == nil; p.alive {
		p.guard.tell("+", p.cmd.Process.Pid)
	}
	return err
}

// wait waits for the process to end, kills the rest of its family, and reads the rest of its
// output. The ending says when and how the process ended.
func (p *process) wait() ending {
	state := p.family.wait()
	e := ending{at: time.Now()}
	p.mu.Lock()
	p.alive = false
	e.Asked, e.Stopped = p.asked, p.stopped
	p.family.end()
	p.guard.tell("-", p.cmd.Process.Pid)
	p.mu.Unlock()
	p.cmd.Wait() // the state has everything
	if state == nil {
		state = p.cmd.ProcessState
	}
	e.Status, _ = state.Sys().(syscall.WaitStatus)
	return e
}

// end waits for the process to end. If a signal comes or ctx ends first, it kills the process, and
// the error says why.
func (p *process) end(ctx context.Context, stop <-chan os.Signal) (ending, error) {
	ended := make(chan ending, 1)
	go func() { ended <- p.wait() }()
	e, err := until(ctx, stop, ended)
	if err != nil {
		p.signal(syscall.SIGKILL)
		within(defaultTimes().kill, func() { <-ended }) // the kernel may hold it
	}
	return e, err
}

// look records whether the process is stopped. It must run before the launcher signals the process,
// because signals change that.
func (p *process) look() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.alive && !p.asked {
		p.stopped = p.family.stopped()
	}
}

// signal sends a signal to the family. A stopped process is continued, so that the signal reaches
// it.
func (p *process) signal(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.alive {
		return
	}
	p.asked = true
	p.family.send(s)
	if p.stopped {
		p.family.goOn()
	}
}

// state returns the letter of the process's state according to the kernel, "" if there is none.
func (p *process) state() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.alive {
		return ""
	}
	// without /proc there is no text
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	return stateLetter(string(stat))
}

// until waits for something to end. If a signal comes or ctx ends first, the error says so.
func until[T any](ctx context.Context, stop <-chan os.Signal, ended <-chan T) (how T, err error) {
	select {
	case how = <-ended:
	case s := <-stop:
		err = &Interrupted{s}
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	return how, err
}

// within runs f and waits at most limit; f goes on after that.
func within(limit time.Duration, f func()) {
	ended := make(chan struct{})
	go func() {
		f()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(limit):
	}
}
