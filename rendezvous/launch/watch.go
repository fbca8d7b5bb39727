package launch

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	variables "github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/rendezvous"
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

	pool     *pool         // of an elastic job; nil of others
	reports  reports       // on several machines
	report   string        // that was heard first
	patience time.Duration // how long ranks wait for each other

	mu   sync.Mutex
	ends []ending // of the ranks that have ended; only run changes them, under mu

	why   error            // why the job was told to end, other than by a rank
	timer <-chan time.Time // when next is sent, nil for never
	next  syscall.Signal

	patient bool // the timer belongs to hear, and any failure here replaces it
	killed  bool // SIGKILL was sent
	named   bool // the ranks were named that it has not ended
	left    bool // the launcher ends without them
}

// newWatch prepares the ranks of an attempt. Their output also goes to logs, unless
// that is nil.
func newWatch(j Job, path string, env []string, logs *logs) (w *watch, err error) {
	w = &watch{job: j, screen: newScreen(), exits: make(chan ending, j.Ranks)}
	w.patience = rendezvous.DefaultTimeout
	if set, err := variables.Timeout.Read(lookup(env), rendezvous.DefaultTimeout); err == nil {
		w.patience = set
	}
	if j.Elastic != nil {
		w.pool, err = newPool(j.Elastic, j.Ranks, env)
		if err != nil {
			return nil, err
		}
		w.pool.start = func(number int) (*rank, error) {
			log, err := logs.of(number)
			return w.command(path, number, env, log), err
		}
		return w, nil
	}
	for r := range j.Ranks {
		log, err := logs.of(j.first() + r)
		if err != nil {
			return nil, err
		}
		w.ranks = append(w.ranks, w.command(path, j.first()+r, env, log))
	}
	return w, nil
}

// start starts all ranks. If one does not start, run ends those before it.
func (w *watch) start() {
	if w.pool != nil {
		for range w.job.Ranks + w.pool.Spares {
			w.launch()
		}
		return
	}
	for i, r := range w.ranks {
		err := w.input(r)
		if err == nil {
			r.family, err = start(r.cmd)
		}
		if err != nil {
			w.ranks = w.ranks[:i]
			w.why = fmt.Errorf("start rank %d: %w", r.number, explainStart(err))
			w.signal(syscall.SIGKILL)
			return
		}
		r.alive = true
		go func() { w.exits <- r.wait() }()
	}
}

// run watches the ranks to their end.
func (w *watch) run(ctx context.Context) error {
	telling, told := context.WithCancel(context.WithoutCancel(ctx))
	var tellers sync.WaitGroup
	defer tellers.Wait()
	defer told()
	defer w.reports.close()
	var looks <-chan time.Time
	var lost <-chan error
	if w.pool != nil {
		defer w.pool.close()
		lost = w.pool.over
	}
	if w.job.Machines != nil || w.pool != nil {
		ticker := time.NewTicker(w.job.times.look)
		defer ticker.Stop()
		looks = ticker.C
	}
	over := ctx.Done()
	for len(w.ends) < len(w.ranks) && !w.left {
		select {
		case e := <-w.exits:
			w.ended(e)
			if w.pool == nil {
				tellers.Go(func() { w.tell(telling, e) })
			}
		case err := <-w.screen.broken:
			w.stop(syscall.SIGTERM, err)
		case s := <-w.job.Signals:
			number, _ := s.(syscall.Signal)
			w.stop(number, &Interrupted{s})
		case <-over:
			over = nil
			w.stop(syscall.SIGTERM, context.Cause(ctx))
		case <-w.timer:
			w.late()
		case w.pool.lost = <-lost:
			w.endSoon()
		case text := <-w.reports.first:
			w.hear(text)
		case <-looks:
			w.endStopped()
		}
	}
	if w.left {
		w.abandonRest()
	}
	return w.outcome()
}

// outcome is the error of the attempt.
func (w *watch) outcome() error {
	if w.why == nil { // the last writes may have failed
		w.why = w.screen.failure()
	}
	f := verdict(w.ends)
	if w.pool != nil && w.pool.finished {
		f = nil
	}
	if f != nil && f.cause != causeEnded && f.Seen == "" && w.report != "" {
		f.Seen = "the job: " + w.report
	}
	switch {
	case w.why != nil && f != nil && len(f.Hang) > 0:
		return fmt.Errorf("%w\n%s", w.why, strings.Join(f.Hang, "\n"))
	case w.why != nil:
		return w.why
	case f != nil && w.pool != nil && w.pool.lost != nil:
		return fmt.Errorf("%w; %w", w.pool.lost, f)
	case f != nil:
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
	if w.pool != nil {
		w.endedElastic(e)
		return
	}
	if e.failed() {
		w.endSoon()
	}
}

// endSoon tells the ranks to end, unless they are told already, when they have had time to report.
func (w *watch) endSoon() {
	if w.idle() {
		w.patient = false
		w.timer, w.next = time.After(reportTime), syscall.SIGTERM
	}
}

// stop tells the ranks to end. The second call kills them. Another one leaves those that
// SIGKILL has not ended.
func (w *watch) stop(s syscall.Signal, why error) {
	w.left = w.named
	if w.why != nil {
		s = syscall.SIGKILL
	} else {
		w.why = why
	}
	w.signal(s)
}

// idle reports whether the ranks have not been told to end, and are not to be soon.
func (w *watch) idle() bool { return w.timer == nil || w.patient }

// signal sends a signal to all ranks, and SIGKILL after the grace.
func (w *watch) signal(s syscall.Signal) {
	w.patient = false
	for _, r := range w.ranks {
		r.look()
		r.signal(s)
	}
	switch {
	case w.killed: // the timer is about what follows
	case s == syscall.SIGKILL:
		w.killed, w.timer = true, time.After(w.job.times.kill)
	case s == syscall.SIGQUIT:
		w.timer, w.next = time.After(max(w.job.Grace, quitTime)), syscall.SIGKILL
	default:
		w.timer, w.next = time.After(w.job.Grace), syscall.SIGKILL
	}
}

// late goes on with what comes after a wait: the next signal, or without ranks that SIGKILL has
// not ended.
func (w *watch) late() {
	switch {
	case !w.killed:
		w.signal(w.next)
	case !w.named:
		w.named = true
		for _, r := range w.ranks {
			if text := r.hang(); text != "" {
				w.job.notice(fmt.Sprintf("%s; the launcher ends without it in %v, or at the next "+
					"signal",
					text, w.job.times.giveUp))
			}
		}
		w.timer = time.After(w.job.times.giveUp)
	default:
		w.left = true
	}
}

// abandonRest records as ended the ranks that SIGKILL has not ended.
func (w *watch) abandonRest() {
	for _, r := range w.ranks {
		if text := r.hang(); text != "" {
			e := ending{rank: r.number, at: time.Now(), asked: true, hang: text}
			r.tail.tell(&e)
			w.ended(e)
		}
	}
	for len(w.ends) < len(w.ranks) { // the others have ended, and their output is being read
		e := <-w.exits
		if !slices.ContainsFunc(w.ends, func(known ending) bool { return known.rank == e.rank }) {
			w.ended(e)
		}
	}
}

// endStopped tells the ranks to end if one is stopped, or held in the kernel, so long that ranks
// on other machines have given it up: they may begin to wait for it a little later. Their launchers
// have ended them then, and this one would not get to know. While this process is stopped, too, no
// time is counted.
func (w *watch) endStopped() {
	if w.pool != nil {
		w.endHalted()
		return
	}
	late := false
	for _, r := range w.ranks {
		r.halts++
		if !r.halted() {
			r.halts = 0
		}
		late = late || time.Duration(r.halts)*w.job.times.look >= 2*w.patience
	}
	if late && w.idle() {
		w.signal(syscall.SIGTERM)
	}
}
