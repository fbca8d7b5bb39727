package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/euryale-ml/euryale/internal/elastic"
	variables "github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/rendezvous"
)

const (
	// reportTime is how long the other ranks have to report a failure that they see.
	reportTime = time.Second
	// quitTime is the minimum time that ranks have to print their stacks after SIGQUIT.
	quitTime = 5 * time.Second
)

// watch is a running attempt at a job, or a host's part of one.
type watch struct {
	job    Job
	env    []string // that all ranks share
	screen *screen
	exits  chan ending
	over   chan struct{} // closed when nobody handles exits any more
	logs   *logs

	hosts    []*remote    // that the ranks run on; nil for this machine
	orders   <-chan order // from the job's launcher, if this is its launcher on a host
	heard    func(news)   // sends news to that launcher
	pool     *pool        // of an elastic job; otherwise nil
	oom      *oom
	reports  reports       // on several machines
	report   string        // the first one heard
	patience time.Duration // how long ranks wait for each other

	mu    sync.Mutex // guards the fields below, which only run changes
	ranks []*rank
	ends  []ending // of the ranks that have ended

	why   error            // why the job was told to end, other than by a rank
	told  time.Time        // when the ranks were told to end, zero before
	timer <-chan time.Time // when to send next, nil for never
	next  syscall.Signal
	last  time.Time // when a signal came from Job.Signals, zero for never

	stays   int           // looks in which only processes that have done the last step ran
	patient bool          // hear set the timer, and any failure here replaces it
	looked  time.Time     // at processes
	away    time.Duration // how long this process was stopped, if too long for an elastic job

	killed bool // SIGKILL was sent
	named  bool // the ranks that it has not ended were named
	left   bool // the launcher ends without them
}

// newWatch returns an attempt whose ranks share an environment.
func newWatch(j Job, env []string) *watch {
	w := &watch{job: j, env: env, screen: newScreen(), exits: make(chan ending),
		over: make(chan struct{}), oom: newOOM(os.DirFS("/"))}
	w.patience = patience(env)
	return w
}

// patience is how long the ranks of an environment wait for each other.
func patience(env []string) time.Duration {
	get := variables.Lookup(env)
	if set, err := variables.Timeout.Read(get, rendezvous.DefaultTimeout); err == nil {
		return set
	}
	return rendezvous.DefaultTimeout
}

// attempt makes attempt n, which counts from 0.
func (w *watch) attempt(ctx context.Context, n int) (err error) {
	if w.logs, err = w.job.openLogs(n); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.logs.close()) }()
	if err := w.prepare(); err != nil {
		w.reports.close()
		return err
	}
	noted := w.logs.note(fmt.Sprintf("started %d ranks", w.job.Ranks))
	w.start()
	err = w.run(ctx)
	outcome := "all ranks have ended"
	if err != nil {
		outcome = err.Error()
	}
	return errors.Join(err, noted, w.logs.note(outcome))
}

// notice tells the user something, and logs it in the attempt's log.
func (w *watch) notice(text string) {
	w.job.notice(text)
	if err := w.logs.note(text); err != nil {
		w.job.notice(fmt.Sprintf("the log of the launcher: %v", err))
	}
}

// prepare makes what ranks need before the first one starts.
func (w *watch) prepare() (err error) {
	switch {
	case w.job.Elastic != nil:
		w.pool, err = newPool(w.job, w.env)
	case w.job.Machines != nil:
		err = w.openReports()
	}
	return err
}

// start starts all ranks; it stops if one does not start.
func (w *watch) start() {
	for _, h := range w.hosts {
		h.listening.Go(func() { h.listen(w) })
		h.order(order{Task: w.task(h)})
	}
	ranks := w.job.Ranks
	if w.pool != nil {
		ranks += w.pool.Spares
	}
	for len(w.ranks) < ranks && w.why == nil {
		w.launch()
	}
}

// launch starts one more rank. If that fails, the others are killed.
func (w *watch) launch() {
	r, err := w.newRank(w.job.first() + len(w.ranks))
	switch {
	case err != nil:
	case w.hosts != nil:
		w.startThere(r)
	default:
		r.slot = w.freeSlot(nil)
		err = w.startHere(r, w.own(r))
	}
	if err != nil {
		w.stop(syscall.SIGKILL, err)
	}
}

// own returns a rank's own variables. A process of an elastic job gets a number below Job.Ranks, as
// if it were a rank of a job of that size, although its actual rank may differ.
func (w *watch) own(r *rank) (own []string) {
	number, local := r.number, r.number-w.job.first()
	if r.err != nil && r.err.live { // its output is shown on a terminal
		own = append(own, "EURYALE_TERMINAL=1")
	}
	if w.pool != nil {
		number %= w.job.Ranks
		local = r.slot % w.job.Ranks
		own = append(own, w.pool.variable(r, w.job.Ranks))
	}
	if h := r.host; h != nil {
		size := min(h.ranks, w.job.Ranks) // a host may take more in an elastic job
		local = r.slot % size
		own = append(own, fmt.Sprint("GROUP_RANK=", slices.Index(w.hosts, h)),
			fmt.Sprint("LOCAL_WORLD_SIZE=", size))
	}
	return append(own, fmt.Sprint("RANK=", number), fmt.Sprint("LOCAL_RANK=", local))
}

// run watches the ranks to their end.
func (w *watch) run(ctx context.Context) error {
	defer close(w.over)
	telling, told := context.WithCancel(context.WithoutCancel(ctx))
	var tellers sync.WaitGroup
	defer tellers.Wait()
	defer told()
	defer w.reports.close()
	looks := time.NewTicker(w.job.times.look)
	defer looks.Stop()
	var lost <-chan error
	if w.pool != nil {
		defer w.pool.close()
		lost = w.pool.over
	}
	over := ctx.Done()
	for (len(w.ends) < len(w.ranks) || w.orders != nil && over != nil) && !w.left {
		select {
		case e := <-w.exits:
			w.ended(e)
			if r := w.rank(e.rank); w.job.Elastic == nil && r.cmd != nil {
				tellers.Go(func() { w.tell(telling, e, r.cmd.Env) })
			}
		case o := <-w.orders:
			w.obey(o)
		case err := <-w.screen.broken:
			w.stop(syscall.SIGTERM, err)
		case s := <-w.job.Signals:
			w.interrupt(s)
		case <-over:
			over = nil
			w.stop(syscall.SIGTERM, context.Cause(ctx))
		case <-w.timer:
			w.late()
		case w.pool.lost = <-lost:
			w.endSoon()
		case text := <-w.reports.first:
			w.hear(text)
		case <-looks.C:
			w.noticeStop(time.Now())
			w.endStopped()
		}
	}
	if w.left {
		w.abandonRest()
	}
	return w.outcome()
}

// interrupt tells the ranks to end. A signal that comes again at once is the same, as that of
// timeout(1), which signals to its child and to its process group.
func (w *watch) interrupt(s os.Signal) {
	if w.last.IsZero() || time.Since(w.last) > sameTime {
		w.last = time.Now()
		number, _ := s.(syscall.Signal)
		w.stop(number, &Interrupted{s})
	}
}

// outcome is the error of the attempt.
func (w *watch) outcome() error {
	if w.why == nil { // the last writes may have failed
		w.why = w.screen.failure()
	}
	f := verdict(w.ends)
	if w.pool != nil && len(w.ends) > 0 &&
		(w.pool.finished || !w.ends[len(w.ends)-1].failed()) {
		f = verdict(w.pool.failed) // nil for none
	}
	if f != nil && f.why != nil {
		return cmp.Or(w.why, f.why)
	}
	if f != nil && f.cause != causeEnded && f.Seen == "" && w.report != "" {
		f.Seen = "the job: " + w.report
	}
	switch {
	case w.why != nil && f != nil && len(f.Hang) > 0:
		return fmt.Errorf("%w\n%s", w.why, strings.Join(f.Hang, "\n"))
	case w.why != nil:
		return w.why
	case f != nil && w.pool != nil && w.pool.lost != nil && w.away > 0:
		return fmt.Errorf("%w; %s", w.pool.lost, w.wasAway())
	case f != nil && w.pool != nil && w.pool.lost != nil:
		return fmt.Errorf("%w; %w", w.pool.lost, f)
	case f != nil:
		return f
	}
	return nil
}

// ended records the end of a rank, which may be reported twice. After the first failure the other
// ranks have reportTime to report what they see of it.
func (w *watch) ended(e ending) {
	r := w.rank(e.rank)
	if r.over {
		return
	}
	r.over = true
	if r.host != nil && e.why == nil && !w.told.IsZero() && e.at.After(w.told) {
		e.Asked = true // by this launcher, if not yet by its host's
	}
	w.mu.Lock()
	w.ends = append(w.ends, e)
	w.mu.Unlock()
	switch {
	case w.orders != nil:
		e.Late = time.Since(e.at)
		w.heard(news{Number: e.rank, End: &e})
	case w.pool != nil:
		w.endedElastic(e)
	case e.failed():
		w.endSoon()
	}
}

// endSoon tells the ranks to end, unless they were already told, once they have had time to report.
func (w *watch) endSoon() {
	if w.idle() {
		w.patient = false
		w.timer, w.next = time.After(reportTime), syscall.SIGTERM
	}
}

// stop tells the ranks to end. A second call kills them. Another one gives up those that SIGKILL
// has not ended.
func (w *watch) stop(s syscall.Signal, why error) {
	w.left = w.named
	if w.why != nil {
		s = syscall.SIGKILL
	} else {
		w.why = why
	}
	w.signal(s)
}

// idle reports whether the ranks were not told to end, and will not be soon.
func (w *watch) idle() bool { return w.timer == nil || w.patient }

// signal sends a signal to all ranks, and SIGKILL after the grace. Launchers of hosts do the same.
func (w *watch) signal(s syscall.Signal) {
	w.patient = false
	if w.told.IsZero() {
		w.told = time.Now()
	}
	for _, h := range w.hosts {
		h.order(order{Signal: int(s)})
	}
	for _, r := range w.ranks {
		r.look()
		r.signal(s)
	}
	switch {
	case w.killed: // the timer is for what follows
	case s == syscall.SIGKILL:
		w.killed, w.timer = true, time.After(w.job.times.kill)
	case s == syscall.SIGQUIT:
		w.timer, w.next = time.After(max(w.job.Grace, quitTime)), syscall.SIGKILL
	default:
		w.timer, w.next = time.After(w.job.Grace), syscall.SIGKILL
	}
}

// late takes the step that follows a wait: it sends the next signal, or gives up the ranks that
// SIGKILL has not ended.
func (w *watch) late() {
	switch {
	case !w.killed:
		w.signal(w.next)
	case !w.named:
		w.named = true
		for _, r := range w.ranks {
			if text := r.hangs(); text != "" {
				w.notice(fmt.Sprintf("%s; the launcher ends without it in %v, or at the next "+
					"signal",
					text, w.job.times.giveUp))
			}
		}
		w.timer = time.After(w.job.times.giveUp)
	default:
		w.left = true
	}
}

// abandonRest records as ended the ranks that SIGKILL has not ended, and those whose output nobody
// reads.
func (w *watch) abandonRest() {
	for _, r := range w.ranks {
		if text := r.hangs(); text != "" {
			w.ended(r.ending(ending{at: time.Now(), Asked: true, Hang: text}))
		}
	}
}

// noticeStop notices if this process itself was stopped for longer than processes of an elastic job
// wait for it.
func (w *watch) noticeStop(now time.Time) {
	if away := now.Sub(w.looked); w.pool != nil && !w.looked.IsZero() && away > w.patience {
		w.away = away
		w.notice(w.wasAway())
	}
	w.looked = now
}

func (w *watch) wasAway() string {
	return fmt.Sprintf("the launcher was stopped for %v, and processes wait %v for it "+
		"(EURYALE_TIMEOUT)", w.away.Round(time.Second), w.patience)
}

// endStopped tells the ranks to end if one has been stopped, or held in the kernel, for so long
// that ranks on other machines have given it up; they may have begun to wait for it a little later.
// Their launchers have then ended them, and this one would not learn it. No time counts while this
// process is stopped, too.
func (w *watch) endStopped() {
	if w.job.Elastic != nil {
		w.endHalted()
		return
	}
	if w.job.Machines == nil {
		return // the end of a rank ends all
	}
	for _, r := range w.ranks {
		if r.halts++; r.state() != "T" && r.state() != "D" {
			r.halts = 0
		}
		if time.Duration(r.halts)*w.job.times.look >= 2*w.patience && w.idle() {
			w.signal(syscall.SIGTERM)
		}
	}
}

// endHalted is endStopped for an elastic job: it soon ends a stopped process, and no other. One
// that is held in the kernel may be reading a file; if others wait for it, they go on without it.
// Where all that have the state of the training are stopped, as by a freeze of the machine, none is
// at fault: their time begins once one of them runs. A host reports its stopped processes.
func (w *watch) endHalted() {
	stopped := map[*rank]bool{}
	for _, r := range w.ranks {
		stopped[r] = !r.over && (r.state() == "T" || r.host != nil && r.halted.Load())
		if w.orders != nil && stopped[r] != r.halted.Swap(stopped[r]) {
			w.heard(news{Number: r.number, Stops: stopped[r], Goes: !stopped[r]})
		}
	}
	if w.orders != nil {
		return
	}
	goesOn := slices.ContainsFunc(w.pool.job.Holders(), func(id elastic.ID) bool {
		r := w.rank(int(id) - 1)
		return r != nil && !r.over && !stopped[r]
	})
	for _, r := range w.ranks {
		over, done := w.pool.job.Over(elastic.ID(r.number + 1))
		if r.halts++; !stopped[r] || done || !goesOn && !over {
			r.halts = 0
		}
		if r.halts == stoppedLooks {
			w.notice(fmt.Sprintf("%sprocess %d is stopped: killing it", r.where(), r.number))
			w.kill(r)
		} else if !stopped[r] {
			w.endHung(r)
		}
	}
	w.tellWhoStays(stopped)
}

// tellWhoStays tells for whom the job waits once nobody but processes that have done the last step
// is left.
func (w *watch) tellWhoStays(stopped map[*rank]bool) {
	var all []string
	for _, r := range w.ranks {
		if r.over {
			continue
		}
		if _, done := w.pool.job.Over(elastic.ID(r.number + 1)); !done {
			return
		}
		name := fmt.Sprintf("process %d", r.number)
		if r.host != nil {
			name += " on " + r.host.Name
		} else if r.cmd != nil {
			name += fmt.Sprintf(" (pid %d)", r.cmd.Process.Pid)
		}
		if stopped[r] {
			name += ", which is stopped (kill -CONT lets it go on)"
		}
		all = append(all, name)
	}
	if w.stays++; w.stays >= stayLooks && w.stays%stayLooks == 0 &&
		w.stays/stayLooks&(w.stays/stayLooks-1) == 0 {
		w.notice(fmt.Sprintf("the job waits for %s to end: the last step was done at least %v ago",
			strings.Join(all, ", "), time.Duration(w.stays)*w.job.times.look))
	}
}

// kill kills one process of an elastic job.
func (w *watch) kill(r *rank) {
	if r.host != nil {
		r.host.order(order{Kill: &member{Number: r.number}})
		return
	}
	r.signal(syscall.SIGKILL)
}

// endHung ends a process of an elastic job that the others have left behind, or wait for, if it has
// not stopped in time: otherwise it would keep its place, and its GPU, for ever.
func (w *watch) endHung(r *rank) {
	limit := w.pool.allows(r.number, w.patience)
	if r.looks++; limit == 0 {
		r.looks = 0
	}
	if limit == 0 || r.over || r.hung || time.Duration(r.looks)*w.job.times.look < limit {
		return
	}
	r.hung = true
	w.notice(fmt.Sprintf("%sprocess %d hangs: for %v the others have waited for it or gone on "+
		"without it, or it has left the job and not ended: killing it", r.where(), r.number, limit))
	w.kill(r)
}
