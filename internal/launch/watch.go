package launch

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/euryale-ml/euryale/internal/elastic"
	variables "github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/rendezvous"
)

// watch carries out what a supervisor decides.
type watch struct {
	job    Job
	env    []string // that all ranks share
	screen *screen
	events chan event
	over   chan struct{} // closed when nobody handles events any more
	logs   *logs
	timer  <-chan time.Time // of the supervisor

	remotes  []*remote             // that the ranks run on; nil for this machine
	connects func(h *remote) error // to one more host
	joins    []*remote             // hosts that were begun to be reached since
	hosts    []Host                // as they were listed last
	listing  string                // why it is not known which hosts there are
	orders   <-chan order          // from the job's launcher, if this is its launcher on a host
	heard    func(news)            // sends news to that launcher
	register *rendezvous.Register
	oom      *oom
	reports  reports // on several machines

	telling context.Context // until the attempt is over
	tellers sync.WaitGroup

	mu         sync.Mutex // guards the fields below, which only run changes
	supervisor supervisor
	children   []*child
}

// newWatch returns an attempt whose ranks share an environment. Without hosts they run on this
// machine.
func newWatch(j Job, env []string, hosts ...*remote) *watch {
	w := &watch{job: j, env: env, screen: newScreen(), events: make(chan event),
		over: make(chan struct{}), oom: newOOM(os.DirFS("/")), remotes: hosts,
		telling: context.Background(), supervisor: supervisor{job: j, patience: patience(env)}}
	for i, h := range hosts {
		h.number = i
		w.supervisor.hosts = append(w.supervisor.hosts, &h.host)
	}
	if len(hosts) == 0 {
		w.supervisor.hosts = []*host{{ranks: MaxRanks}}
	}
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
	w.begin()
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
		err = w.openRegister()
	case w.job.Machines != nil:
		err = w.openReports()
	}
	return err
}

// openRegister serves the register of an elastic job.
func (w *watch) openRegister() error {
	job, err := rendezvous.ReadEnv(variables.Lookup(slices.Concat(w.env,
		[]string{"RANK=0", "LOCAL_RANK=0"})))
	if err != nil {
		return err
	}
	w.supervisor.pool = newPool(w.job.Elastic, elastic.Env{First: w.job.Ranks}.FirstView())
	w.register, err = rendezvous.ServeRegister(job, w.remotes != nil, func(process int) {
		w.pass(unregistered(process))
	})
	return err
}

// begin starts all ranks; it stops if one does not start.
func (w *watch) begin() {
	for _, h := range w.remotes {
		w.employ(h)
	}
	w.step(begins{})
}

// employ gives a host its part of the job.
func (w *watch) employ(h *remote) {
	h.late = h.mustSpeakWithin(silence)
	h.listening.Go(func() { h.listen(w) })
	h.order(order{Task: w.task(h)})
}

// follow hears the log of an elastic job, until ctx ends.
func (w *watch) follow(ctx context.Context) {
	for i := 0; ; i++ {
		e, err := elastic.Entry(ctx, w.register.Store(), i)
		if err != nil {
			return
		}
		w.pass(heard{i, e})
	}
}

// pass gives run an event, if run still listens.
func (w *watch) pass(e event) {
	select {
	case w.events <- e:
	case <-w.over:
	}
}

// run watches the ranks to their end.
func (w *watch) run(ctx context.Context) error {
	var end context.CancelFunc
	w.telling, end = context.WithCancel(context.WithoutCancel(ctx))
	defer w.tellers.Wait()
	defer w.reports.close()
	if w.register != nil {
		w.tellers.Go(func() { w.follow(w.telling) })
		defer w.register.Close()
	}
	defer end()
	defer close(w.over)
	looks := time.NewTicker(w.job.times.look)
	defer looks.Stop()
	for done := ctx.Done(); !w.supervisor.over(); {
		select {
		case e := <-w.events:
			if j, ok := e.(joined); ok && j.why == nil {
				w.admit(j)
			}
			w.step(e)
		case o := <-w.orders:
			w.step(o)
		case err := <-w.screen.broken:
			w.step(told{err})
		case s := <-w.job.Signals:
			w.step(interrupted{s})
		case <-done:
			done = nil
			w.step(told{context.Cause(ctx)})
		case <-w.timer:
			w.step(late(w.hangs()))
		case <-looks.C:
			w.step(w.look())
			w.list()
		}
	}
	w.step(abandoned(w.hangs()))
	if w.register != nil {
		w.supervisor.pool.joined = w.register.Joined()
	}
	if w.supervisor.why == nil { // the last writes may have failed
		w.supervisor.why = w.screen.failure()
	}
	return w.supervisor.outcome()
}

// list asks which hosts an elastic job has now. One answer may be half of what is being written.
func (w *watch) list() {
	if w.job.Elastic == nil || w.job.Elastic.Hosts == nil {
		return
	}
	before := w.hosts
	hosts, err := w.job.Elastic.Hosts()
	if err == nil && len(hosts) == 0 {
		err = errors.New("none is listed")
	}
	switch w.hosts = hosts; {
	case err != nil && err.Error() != w.listing:
		w.listing = err.Error()
		w.notice("the hosts stay as they are: " + w.listing)
	case err == nil && slices.Equal(hosts, before):
		w.listing = ""
		w.step(listed(hosts))
	}
}

// join begins to reach a host. ssh ends with the thread that starts it.
func (w *watch) join(of join) {
	h := &remote{host: host{Host: of.Host, ranks: of.Slots}}
	if err := h.start(); err != nil {
		w.step(joined{host: &h.host, why: err, before: of.before})
		return
	}
	w.joins = append(w.joins, h)
	go func() { w.pass(joined{host: &h.host, why: w.connects(h), before: of.before}) }()
}

// admit makes a host that is reached one of the job's.
func (w *watch) admit(j joined) {
	if j.agent != nil {
		w.joins = append(w.joins, j.agent)
	}
	i := slices.IndexFunc(w.joins, func(h *remote) bool { return &h.host == j.host })
	h := w.joins[i]
	h.number = len(w.remotes)
	w.remotes = append(w.remotes, h)
	w.employ(h)
}

// look looks at the processes, if the job asks for it.
func (w *watch) look() looked {
	states := looked{}
	for _, c := range w.children {
		switch {
		case w.job.Elastic == nil && w.job.Machines == nil:
		case c.host == nil:
			states[c.number] = c.state()
		case c.host.late.silent():
			states[c.number] = unknown
		}
	}
	return states
}

// step gives the supervisor an event, and carries out what it asks for.
func (w *watch) step(e event) {
	w.mu.Lock()
	actions := w.supervisor.step(time.Now(), e)
	w.mu.Unlock()
	for _, a := range actions {
		switch a := a.(type) {
		case spawn:
			w.step(w.start(a))
		case signals:
			w.signal(a)
		case kill:
			w.kill(a)
		case notice:
			w.notice(string(a))
		case arm:
			w.timer = time.After(time.Duration(a))
		case tell:
			if c := w.child(a.rank); c != nil && c.cmd != nil {
				w.tellers.Go(func() { w.tell(w.telling, a.ending, c.cmd.Env) })
			}
		case says:
			w.heard(a.news)
		case join:
			w.join(a)
		case bury:
			// the register is in this process: only a closed one returns an error
			elastic.Bury(w.telling, w.register.Store(), w.supervisor.pool.heard, elastic.ID(a),
				func(i int, e elastic.Event) { w.step(heard{i, e}) })
		}
	}
}

// start starts a rank.
func (w *watch) start(a spawn) event {
	c, err := w.newChild(a.number, w.remote(a.host.number))
	if !w.supervisor.above {
		a.env = w.own(c, a.rank)
	}
	switch {
	case err != nil:
	case c.host != nil:
		w.add(c)
		c.host.order(order{Start: &member{a.number, a.env}})
		return started{}
	default:
		err = w.startHere(c, a.env)
	}
	if err != nil {
		return notStarted{err}
	}
	return started{c.cmd.Process.Pid}
}

// remote returns the host of a number, nil for this machine.
func (w *watch) remote(number int) *remote {
	if w.remotes == nil {
		return nil
	}
	return w.remotes[number]
}

// own returns a rank's own variables. A process of an elastic job gets a number below Job.Ranks, as
// if it were a rank of a job of that size, although its actual rank may differ.
func (w *watch) own(c *child, r *rank) (own []string) {
	number, local := r.number, r.number-w.job.first()
	if c.err != nil && c.err.live { // its output is shown on a terminal
		own = append(own, "EURYALE_TERMINAL=1")
	}
	if w.register != nil {
		number %= w.job.Ranks
		local = r.slot % w.job.Ranks
		own = append(own, w.place(c, r))
	}
	if c.host != nil {
		size := min(c.host.ranks, w.job.Ranks) // a host may take more in an elastic job
		local = r.slot % size
		own = append(own, fmt.Sprint("GROUP_RANK=", c.host.number),
			fmt.Sprint("LOCAL_WORLD_SIZE=", size))
	}
	return append(own, fmt.Sprint("RANK=", number), fmt.Sprint("LOCAL_RANK=", local))
}

// place tells a process its number and place in an elastic job.
func (w *watch) place(c *child, r *rank) string {
	e := elastic.Env{Addr: w.register.Addr(), Process: elastic.ID(r.number + 1), First: w.job.Ranks,
		Limits: elastic.Limits{Least: w.job.Elastic.Least, Most: w.job.Elastic.most(w.job)}}
	if w.job.Elastic.Standby == 0 { // standbys do not know whose place they take
		e.Seat = r.slot + 1
	}
	if c.host != nil {
		e.Addr, e.Host = w.reached(c.host), c.host.address
	}
	return "EURYALE_ELASTIC=" + e.String()
}

// reached returns where a host reaches the register.
func (w *watch) reached(h *remote) string {
	_, port, _ := net.SplitHostPort(w.register.Addr()) // which has one
	return net.JoinHostPort(h.guest, port)
}

// signal sends a signal to all ranks of a host.
func (w *watch) signal(a signals) {
	if h := w.remote(a.host); h != nil {
		h.order(order{Signal: int(a.signal)})
		return
	}
	for _, c := range w.children {
		c.look()
		c.signal(a.signal)
	}
}

// kill ends one rank.
func (w *watch) kill(a kill) {
	if h := w.remote(a.host.number); h != nil {
		h.order(order{Kill: &member{Number: a.number}})
		return
	}
	w.child(a.number).signal(syscall.SIGKILL)
}

// hangs says where ranks hang that may not have ended.
func (w *watch) hangs() (ends []ending) {
	for _, c := range w.children {
		ends = append(ends, c.ending(ending{at: time.Now(), Asked: true, Hang: c.hangs()}))
	}
	return ends
}
