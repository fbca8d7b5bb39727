package launch

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/internal/elastic"
	variables "github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Elastic makes a job whose ranks are replaced one by one. The program joins the job by
// euryale.JoinElastic.
type Elastic struct {
	// Least is the number of ranks that the job needs to go on; with fewer it waits for
	// replacements.
	Least int
	// Spares is the number of processes that wait, with their program loaded, to replace a lost
	// rank.
	Spares int
}

const (
	// stoppedLooks is the number of looks in a row that must find a process stopped, and one that
	// has the state of the training running, before it is ended: the others wait for it.
	stoppedLooks = 3
	// maxFaults is how many processes may fail (see fails) in one step of the job. Once so many
	// have, the program is at fault, and nothing more is started. It is also how many newcomers in
	// a row, each started after the end of the one before, may end on a host, for any reason,
	// before their first step, unless they were idle. After that the host is at fault and gets no
	// more processes: it may have too little memory, so that the kernel kills them.
	maxFaults = 5
	// stayLooks is after how many looks it is told who has not ended after the last step, and then
	// after twice as many, and so on: it may save what it has trained, or wait for ever.
	stayLooks = 5
)

// pool replaces the processes of an elastic job.
type pool struct {
	*Elastic
	register *rendezvous.Register
	faults   int      // processes that failed in step
	step     int      // of the job
	finished bool     // a process has done its last step
	failed   []ending // processes that failed after their last step
	unfit    bool     // newcomers on this machine end before their first step

	job *elastic.Observer

	mu   sync.Mutex
	view elastic.View // of the current generation
	fit  map[int]bool // numbers of processes of past generations that have done a step
	// numbers of live processes that the others have left behind; false: by a fault of their own
	behind map[int]bool
	idle   map[int]bool // numbers of processes that were ready when they ended, and not needed yet

	over    chan error // reports that no process has the parameters any more
	lost    error      // the error from over
	stop    context.CancelFunc
	watches sync.WaitGroup
}

// check reports values that no job can have.
func (e *Elastic) check(j Job) error {
	switch {
	case e.Least < 1 || e.Least > j.Ranks:
		return fmt.Errorf("at least %d of %d ranks: the number must be 1 to the number of ranks",
			e.Least, j.Ranks)
	case e.Spares < 0 || e.Spares+j.Ranks > MaxRanks:
		return fmt.Errorf("%d ranks and %d spares: a job has at most %d processes", j.Ranks,
			e.Spares, MaxRanks)
	case j.MaxRestarts > 0:
		return errors.New("an elastic job replaces ranks one by one, and is never restarted: " +
			"leave the restarts out")
	case j.Rendezvous != "":
		return errors.New("the ranks of an elastic job choose a new rendezvous after each loss: " +
			"leave the rendezvous out")
	case j.Machines != nil:
		return errors.New("launchers that do not know of each other cannot run an elastic job: " +
			"give one of them the hosts")
	case len(j.Hosts) > 0 && j.Ranks+e.Spares > Slots(j.Hosts):
		return fmt.Errorf("%d ranks and %d spares: the hosts take %d", j.Ranks, e.Spares,
			Slots(j.Hosts))
	}
	return nil
}

// newPool serves the register of a job.
func newPool(j Job, env []string) (*pool, error) {
	job, err := rendezvous.ReadEnv(variables.Lookup(slices.Concat(env,
		[]string{"RANK=0", "LOCAL_RANK=0"})))
	if err != nil {
		return nil, err
	}
	first := elastic.Env{First: j.Ranks}.FirstView()
	p := &pool{Elastic: j.Elastic, view: first, fit: map[int]bool{}, behind: map[int]bool{},
		idle: map[int]bool{}, over: make(chan error, 1)}
	p.register, err = rendezvous.ServeRegister(job, len(j.Hosts) > 0, func(process int) {
		p.bury(process)
	})
	if err != nil {
		return nil, err
	}
	p.job = elastic.NewObserver(p.register.Store(), first, p.goesOn)
	ctx, stop := context.WithCancel(context.Background())
	p.stop = stop
	p.watches.Go(func() {
		err := p.job.Follow(ctx)
		if errors.As(err, new(*elastic.StoppedError)) {
			p.over <- err
		}
	})
	return p, nil
}

// close ends the register.
func (p *pool) close() {
	p.stop()
	p.watches.Wait()
	p.register.Close()
}

// goesOn is told of a generation, and which processes of the one before are left behind.
func (p *pool) goesOn(v elastic.View, behind []elastic.ID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range p.view.Members {
		p.fit[int(id)-1] = p.fit[int(id)-1] || v.Next() > p.view.Next()
	}
	for _, id := range behind {
		p.behind[int(id)-1] = id != v.Fault
	}
	p.view = v
}

// allows returns how long a process may go on with what it does once it takes no part any more, or
// the others have left it behind or wait for it; 0 means any time. The launcher of a host has no
// pool and cannot tell: it returns 0.
func (p *pool) allows(number int, patience time.Duration) time.Duration {
	if p == nil {
		return 0
	}
	p.mu.Lock()
	_, behind := p.behind[number]
	p.mu.Unlock()
	over, done := p.job.Over(elastic.ID(number + 1))
	ids, whole := p.job.Awaited()
	switch awaited := slices.Contains(ids, elastic.ID(number+1)); {
	case done: // it may save what it has trained, also where the others have left it behind then
	case behind, over, awaited && whole:
		return patience / 2
	case awaited: // it may have the state of the training
		return patience
	}
	return 0
}

// bury tells the job that a process, counted from 1, has ended. It reports whether this process had
// done its last step, and whether any process has.
func (p *pool) bury(process int) (left, finished bool) {
	// the register is in this process: only a closed one returns an error
	left, finished, _ = p.job.Bury(context.Background(), elastic.ID(process))
	return left, finished
}

// variable tells a process its number and place in a job of that many ranks.
func (p *pool) variable(r *rank, ranks int) string {
	e := elastic.Env{Addr: p.register.Addr(), Process: elastic.ID(r.number + 1), First: ranks,
		Limits: elastic.Limits{Least: p.Least, Most: ranks}}
	if p.Spares == 0 { // spares do not know whose place they take
		e.Seat = r.slot + 1
	}
	if r.host != nil {
		e.Addr, e.Host = p.reached(r.host), r.host.address
	}
	return "EURYALE_ELASTIC=" + e.String()
}

// reached returns where a host reaches the register.
func (p *pool) reached(h *remote) string {
	_, port, _ := net.SplitHostPort(p.register.Addr()) // which has one
	return net.JoinHostPort(h.guest, port)
}

// replaces is told of the end of a process, and reports whether to start another one in its place.
// A process that ends well before its last step gives up its place for good.
func (p *pool) replaces(e ending) bool {
	idle := p.job.Idle(elastic.ID(e.rank + 1))
	left, finished := p.bury(e.rank + 1)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.finished, p.idle[e.rank] = finished, idle
	// A signal of this launcher ends only what nobody needs any more.
	if left && e.failed() && !e.lost() && !(e.Asked && e.told()) {
		p.failed = append(p.failed, e)
	}
	if step := p.view.Next(); step > p.step {
		p.step, p.faults = step, 0
	}
	if p.fails(e) {
		p.faults++
	}
	return !p.finished && e.failed() && p.faults < maxFaults
}

// fails reports whether a process has failed by itself: no signal ended it or told it to end, its
// host is not lost, and the others have not left it behind, as they do if the machine has no time
// for it. p.mu is held.
func (p *pool) fails(e ending) bool {
	return e.failed() && !e.told() && !e.lost() && !p.behind[e.rank]
}

// excludes is told of the end of a process. It reports whether this end is the one after which
// nothing more is started on its host, or on this machine.
func (w *watch) excludes(e ending) bool {
	host, excluded := w.rank(e.rank).host, &w.pool.unfit
	if host != nil {
		excluded = &host.unfit
	}
	w.pool.mu.Lock()
	defer w.pool.mu.Unlock()
	row, ends := 0, 0 // of newcomers, without those before one that was fit; with the last of them
	for _, r := range w.ranks[w.job.Ranks:] {
		if r.host != host {
			continue
		}
		end := slices.IndexFunc(w.ends, func(e ending) bool {
			return e.rank == r.number && e.failed() && !e.lost() && !w.pool.behind[e.rank] &&
				!w.pool.idle[e.rank]
		})
		switch {
		case w.pool.fit[r.number]:
			row = 0
		case w.pool.view.Rank(elastic.ID(r.number+1)) >= 0: // the next generation tells what it did
		case end >= 0 && r.after >= ends: // otherwise both ends may have one cause
			row, ends = row+1, end+1
		}
	}
	if row < maxFaults || *excluded {
		return false
	}
	*excluded = true
	return true
}

// endedElastic is ended for an elastic job.
func (w *watch) endedElastic(e ending) {
	again, ended := w.pool.replaces(e), fmt.Sprintf("process %d has ended (%s)", e.rank, e.how())
	if w.why != nil || w.pool.finished || w.pool.lost != nil {
		return
	}
	const unfit = "the last %d that joined have ended before completing a step"
	excludes := w.excludes(e)
	if excludes && w.hosts != nil {
		w.notice(fmt.Sprintf("host %s gets no more processes: "+unfit, e.host, maxFaults))
	}
	h, _ := w.room()
	switch {
	case !e.failed():
		w.notice(ended + " before its last step: it is not replaced")
	case w.pool.faults >= maxFaults:
		w.notice(fmt.Sprintf("%s: it is not replaced, because %d processes have failed in "+
			"step %d", ended, w.pool.faults, w.pool.step))
	case excludes && w.hosts == nil:
		w.notice(fmt.Sprintf("%s: neither it nor others are replaced: "+unfit, ended,
			maxFaults))
	case w.pool.unfit:
		w.notice(ended + ": it is not replaced")
	case again && w.hosts != nil && h == nil:
		w.notice(ended + ": it is not replaced, since no host can take another process")
	case again:
		w.notice(fmt.Sprintf("%s: process %d takes its place", ended, len(w.ranks)))
		w.launch()
	}
}
