package launch

import (
	"context"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"
)

const (
	// reportTime is how long the other ranks have to report a failure that they see.
	reportTime = time.Second
	// quitTime is how long ranks have, at least, to print their stacks after SIGQUIT.
	quitTime = 5 * time.Second
)

// watch is a running attempt at a job.
type watch struct {
	job    Job
	screen *screen
	ranks  []*rank
	exits  chan ending

	mu   sync.Mutex
	ends []ending // of the ranks that have ended; only run changes them, under mu

	why   error            // why the job was told to end, other than by a rank
	timer <-chan time.Time // when next is sent, nil for never
	next  syscall.Signal
}

// newWatch prepares the ranks of an attempt. Their output also goes to logs, unless
// that is nil.
func newWatch(j Job, path string, env []string, logs []*os.File) *watch {
	w := &watch{job: j, screen: newScreen(), exits: make(chan ending, j.Ranks)}
	for r := range j.Ranks {
		var log *os.File
		if logs != nil {
			log = logs[r]
		}
		w.ranks = append(w.ranks, w.command(path, j.first()+r, env, log))
	}
	return w
}

// start starts all ranks, or none.
func (w *watch) start() error {
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

// run watches the ranks to their end.
func (w *watch) run(ctx context.Context) error {
	telling, told := context.WithCancel(context.WithoutCancel(ctx))
	var tellers sync.WaitGroup
	defer tellers.Wait()
	defer told()
	over := ctx.Done()
	for len(w.ends) < len(w.ranks) {
		select {
		case e := <-w.exits:
			w.ended(e)
			tellers.Go(func() { w.tell(telling, e) })
		case err := <-w.screen.broken:
			w.stop(syscall.SIGTERM, err)
		case s := <-w.job.Signals:
			number, _ := s.(syscall.Signal)
			w.stop(number, &Interrupted{s})
		case <-over:
			over = nil
			w.stop(syscall.SIGTERM, context.Cause(ctx))
		case <-w.timer:
			w.signal(w.next)
		}
	}
	if w.why == nil { // the last writes may have failed
		w.why = w.screen.failure()
	}
	if w.why != nil {
		return w.why
	}
	if f := verdict(w.ends); f != nil {
		return f
	}
	return nil
}

// ended records the end of a rank. After the first failure the other ranks have
// reportTime to report what they see of it.
func (w *watch) ended(e ending) {
	w.mu.Lock()
	w.ends = append(w.ends, e)
	w.mu.Unlock()
	if e.failed() && w.timer == nil {
		w.timer, w.next = time.After(reportTime), syscall.SIGTERM
	}
}

// stop tells the ranks to end. The second call kills them.
func (w *watch) stop(s syscall.Signal, why error) {
	if w.why != nil {
		s = syscall.SIGKILL
	} else {
		w.why = why
	}
	w.signal(s)
}

// signal sends a signal to all ranks, and SIGKILL after the grace.
func (w *watch) signal(s syscall.Signal) {
	for _, r := range w.ranks {
		r.look()
		r.signal(s)
	}
	grace := w.job.Grace
	if s == syscall.SIGQUIT {
		grace = max(grace, quitTime)
	}
	w.timer, w.next = time.After(grace), syscall.SIGKILL
}
