package launch

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/euryale-ml/euryale/internal/elastic"
)

// Elastic makes a job whose ranks are replaced one by one. The program joins the job by
// euryale.JoinElastic.
type Elastic struct {
	// Least is the number of ranks that the job needs to go on; with fewer it waits for
	// replacements.
	Least int
	// Standby is the number of processes that wait, with their program loaded, to replace a lost
	// rank.
	Standby int
	// Most is the number of ranks up to which hosts that are added let the job grow; 0 means
	// Job.Ranks.
	Most int
	// Hosts is asked every second which hosts there are; a list holds if it is the same twice in a
	// row, and not empty. The job goes on on those that are added or have come back; the processes
	// of a host that is not there any more are told to end, and replaced elsewhere. nil means those
	// of Job.Hosts, of which none comes back.
	Hosts func() ([]Host, error)
}

// most is the largest number of ranks.
func (e *Elastic) most(j Job) int { return max(j.Ranks, e.Most) }

const (
	// stoppedLooks is the number of looks in a row that must find a process stopped, and one that
	// has the state of the training running, before it is ended: the others wait for it.
	stoppedLooks = 3
	// maxFaults is how many processes may fail (see fails) in one step of the job. Once so many
	// have, the program is at fault, and nothing more is started. It is also how many replacements
	// in a row, each started after the end of the one before, may end on a host, for any reason,
	// before their first step, unless they were idle. After that the host is at fault and gets no
	// more processes: it may have too little memory, so that the kernel kills them.
	maxFaults = 5
	// stayLooks is after how many looks it is told who has not ended after the last step, and then
	// after twice as many, and so on: it may save what it has trained, or wait for ever.
	stayLooks = 5
)

// pool is what a supervisor knows of the processes of an elastic job.
type pool struct {
	*Elastic
	job   *elastic.Observer
	heard int          // entries of the job's log
	view  elastic.View // of the current generation
	fit   map[int]bool // numbers of processes of past generations that have done a step
	// numbers of live processes that the others have left behind; false: by a fault of their own
	behind map[int]bool
	idle   map[int]bool // numbers of processes that were ready when they ended, and not needed yet

	faults   int      // processes that failed in step
	step     int      // of the job
	finished bool     // a process has done its last step
	joined   bool     // a process has taken part; otherwise nobody has any step to do
	failed   []ending // processes that failed after their last step
	lost     error    // no process has the parameters any more

	homeless int               // processes for which no host has room
	joining  map[string]string // hosts that are being reached, "", or were not, and why
}

// check reports values that no job can have.
func (e *Elastic) check(j Job) error {
	slots := Slots(j.Hosts)
	switch {
	case slots > 0 && e.Most > j.Ranks && max(e.Least, j.Ranks)+e.Standby > slots:
		return fmt.Errorf("at least %d of %d ranks and %d on standby: the hosts take %d", e.Least,
			e.Most, e.Standby, slots)
	case e.Least < 1 || e.Least > j.Ranks:
		return fmt.Errorf("at least %d of %d ranks: the number must be 1 to the number of ranks",
			e.Least, j.Ranks)
	case e.Standby < 0 || e.Most < 0 || e.Standby+e.most(j) > MaxRanks:
		return fmt.Errorf("%d ranks and %d on standby: a job has at most %d processes", e.most(j),
			e.Standby, MaxRanks)
	case j.MaxRestarts > 0:
		return errors.New("an elastic job replaces ranks one by one, and is never restarted: " +
			"leave the restarts out")
	case j.Rendezvous != "":
		return errors.New("the ranks of an elastic job choose a new rendezvous after each loss: " +
			"leave the rendezvous out")
	case slots > 0 && j.Ranks+e.Standby > slots:
		return fmt.Errorf("%d ranks and %d on standby: the hosts take %d", j.Ranks, e.Standby,
			slots)
	}
	return nil
}

// newPool returns the pool of a job that begins with a generation.
func newPool(e *Elastic, first elastic.View) *pool {
	p := &pool{Elastic: e, view: first, fit: map[int]bool{}, behind: map[int]bool{},
		idle: map[int]bool{}, joining: map[string]string{},
		homeless: max(0, e.Most-len(first.Members))}
	p.job = elastic.NewObserver(first, p.goesOn)
	return p
}

// goesOn is told of a generation, and which processes of the one before are left behind.
func (p *pool) goesOn(v elastic.View, behind []elastic.ID) {
	for _, id := range p.view.Members {
		p.fit[int(id)-1] = p.fit[int(id)-1] || v.Next() > p.view.Next()
	}
	for _, id := range behind {
		p.behind[int(id)-1] = id != v.Fault
	}
	p.view = v
}

// allows returns how long a process may go on with what it does once it takes no part any more, or
// the others have left it behind or wait for it; 0 means any time.
func (p *pool) allows(number int, patience time.Duration) time.Duration {
	_, behind := p.behind[number]
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

// replaces is told of the end of a process, and reports whether to start another one in its place.
// A process that ends well before its last step gives up its place for good.
func (p *pool) replaces(e ending) bool {
	id := elastic.ID(e.rank + 1)
	p.idle[e.rank] = p.job.Idle(id)
	left, finished := p.job.Left(id)
	p.finished = finished
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
	return !p.finished && p.job.Lost() == nil && e.failed() && p.faults < maxFaults
}

// outcome is the error of a job whose processes have ended, nil for none.
func (p *pool) outcome(ends []ending) *Failed {
	last := ends[len(ends)-1]
	switch {
	case p.finished:
		return verdict(p.failed)
	case last.failed():
		return verdict(ends)
	case p.joined:
		return &Failed{Host: last.host, Rank: last.rank, Status: last.Status, Lines: last.lines,
			cause: causeEarly}
	}
	return nil
}

// fails reports whether a process has failed by itself: no signal ended it or told it to end, its
// host is not lost, and the others have not left it behind, as they do if the machine has no time
// for it.
func (p *pool) fails(e ending) bool {
	return e.failed() && !e.told() && !e.lost() && !p.behind[e.rank]
}

// excludes is told of the end of a process. It reports whether this end is the one after which
// nothing more is started on its host.
func (s *supervisor) excludes(e ending) bool {
	host := s.rank(e.rank).host
	row, ends := 0, 0 // of replacements since the last one that was fit
	for _, r := range s.ranks[s.job.Ranks:] {
		if r.host != host {
			continue
		}
		end := slices.IndexFunc(s.ends, func(e ending) bool {
			return e.rank == r.number && e.failed() && !e.lost() && !s.pool.behind[e.rank] &&
				!s.pool.idle[e.rank]
		})
		switch {
		case s.pool.fit[r.number]:
			row = 0
		case s.pool.view.Rank(elastic.ID(r.number+1)) >= 0: // the next generation tells what it did
		case end >= 0 && r.after >= ends: // otherwise both ends may have one cause
			row, ends = row+1, end+1
		}
	}
	if row < maxFaults || host.unfit {
		return false
	}
	host.unfit = true
	return true
}

func (e heard) apply(s *supervisor) {
	if e.entry < s.pool.heard {
		return
	}
	s.pool.heard++
	s.pool.job.Hear(e.Event)
	if d, ok := e.Event.(elastic.Dead); ok {
		s.buried(int(d.ID) - 1)
	}
	if s.pool.lost == nil && s.pool.job.Lost() != nil {
		s.pool.lost = s.pool.job.Lost()
		s.endSoon()
	}
}

func (e unregistered) apply(s *supervisor) { s.do(bury(e)) }

// buried is told that the log has all of a process. If it has ended, another one may be started.
func (s *supervisor) buried(number int) {
	r := s.rank(number)
	if r == nil || !r.over || r.buried {
		return
	}
	r.buried = true
	e := s.ends[slices.IndexFunc(s.ends, func(e ending) bool { return e.rank == number })]
	again, ended := s.pool.replaces(e), fmt.Sprintf("process %d has ended (%s)", number, e.how())
	if s.settled() {
		return
	}
	const unfit = "the last %d that joined have ended before completing a step"
	here, excludes := r.host.Name == "", s.excludes(e)
	if excludes && !here {
		s.notice("host %s gets no more processes: "+unfit, e.host, maxFaults)
	}
	h, _ := s.room()
	switch {
	case !e.failed():
		s.notice("%s before its last step: it is not replaced, since it has not failed", ended)
	case s.pool.faults >= maxFaults:
		s.notice("%s: it is not replaced, because %d processes have failed in step %d", ended,
			s.pool.faults, s.pool.step)
	case excludes && here:
		s.notice("%s: neither it nor others are replaced: "+unfit, ended, maxFaults)
	case again && h == nil && here:
		s.notice("%s: it is not replaced: "+unfit, ended, maxFaults)
	case again && h == nil:
		s.pool.homeless++
		s.notice("%s: it is not replaced, since no host can take another process", ended)
	case again:
		s.notice("%s: process %d takes its place", ended, len(s.ranks))
		s.launch()
	}
}

// settled reports whether nothing more is started.
func (s *supervisor) settled() bool {
	return s.why != nil || s.killed || s.pool.finished || s.pool.lost != nil
}

func (e listed) apply(s *supervisor) {
	if s.settled() {
		return
	}
	listed := func(name string) bool {
		return slices.ContainsFunc(e, func(h Host) bool { return h.Name == name })
	}
	there := map[string]bool{}
	for _, h := range s.hosts {
		if there[h.Name] = h.down == nil && !h.leaves; there[h.Name] && !listed(h.Name) {
			h.leaves = true
			s.notice("host %s is to be left: its processes are told to end", h.Name)
			s.do(signals{h.number, syscall.SIGTERM})
		}
	}
	ends := func(name string) bool { // it has the slots and GPUs of the host
		return slices.ContainsFunc(s.ranks, func(r *rank) bool {
			return r.host.Name == name && !r.over
		})
	}
	for _, h := range e {
		if why, known := s.pool.joining[h.Name]; !there[h.Name] && !ends(h.Name) &&
			(!known || why != "") {
			s.pool.joining[h.Name] = ""
			s.do(join{h, why})
		}
	}
}

// A host that is not reached is tried again, and why is told once.
func (e joined) apply(s *supervisor) {
	name := e.host.Name
	delete(s.pool.joining, name)
	if e.why != nil {
		if s.pool.joining[name] = e.why.Error(); e.before != e.why.Error() {
			s.notice("host %s does not take part: %v", name, e.why)
		}
		return
	}
	s.hosts = append(s.hosts, e.host)
	s.notice("host %s takes part", name)
	s.house()
}

// house starts a process for which no host had room, if one has now.
func (s *supervisor) house() {
	if s.pool == nil || s.pool.homeless == 0 || s.starting != nil || s.settled() {
		return
	}
	if h, _ := s.room(); h != nil {
		s.pool.homeless--
		s.launch()
	}
}

// noticeStop notices if this process itself was stopped for longer than processes of an elastic job
// wait for it.
func (s *supervisor) noticeStop() {
	if away := s.now.Sub(s.looked); !s.looked.IsZero() && away > s.patience {
		s.away = away
		s.notice("%s", s.wasAway())
	}
}

func (s *supervisor) wasAway() string {
	return fmt.Sprintf("the launcher was stopped for %v, and processes wait %v for it "+
		"(EURYALE_TIMEOUT)", s.away.Round(time.Second), s.patience)
}

// noteHalts notes which ranks are stopped, and returns those of which that is new.
func (s *supervisor) noteHalts(states map[int]string) (changed []*rank) {
	for _, r := range s.ranks {
		stops := !r.over && (states[r.number] == "T" || r.host.Name != "" && r.halted)
		if stops != r.halted {
			changed = append(changed, r)
		}
		r.halted = stops
	}
	return changed
}

// endHalted soon ends a stopped process of an elastic job, and no other. One that is held in the
// kernel may be reading a file; if others wait for it, they go on without it. Where all that have
// the state of the training, or its part of it, are stopped, as by a freeze of machines, none is at
// fault: their time begins once one of them is known to run. A host reports its stopped processes,
// unless it is stopped as a whole.
func (s *supervisor) endHalted(states map[int]string) {
	lives := func(r *rank) bool { return !r.over && !r.killed }
	if s.idle() && !slices.ContainsFunc(s.ranks, lives) { // the kernel holds who is left
		s.signal(syscall.SIGKILL)
	}
	goesOn := map[int]bool{} // by the part of the model
	for _, id := range s.pool.job.Holders() {
		if r := s.rank(int(id) - 1); r != nil && !r.over && !r.halted &&
			states[r.number] != unknown {
			goesOn[s.pool.job.Part(id)] = true
		}
	}
	for _, r := range s.ranks {
		id := elastic.ID(r.number + 1)
		over, done := s.pool.job.Over(id)
		if r.halts++; !r.halted || done || !goesOn[s.pool.job.Part(id)] && !over {
			r.halts = 0
		}
		if r.halts == stoppedLooks {
			s.notice("%sprocess %d is stopped: killing it", r.where(), r.number)
			s.kill(r)
		} else if !r.halted {
			s.endHung(r)
		}
	}
	s.tellWhoStays()
}

// kill kills one process.
func (s *supervisor) kill(r *rank) {
	r.killed = true
	s.do(kill{r})
}

// tellWhoStays tells for whom the job waits once nobody but processes that have done the last step
// is left.
func (s *supervisor) tellWhoStays() {
	var all []string
	for _, r := range s.ranks {
		if r.over {
			continue
		}
		if _, done := s.pool.job.Over(elastic.ID(r.number + 1)); !done {
			return
		}
		name := fmt.Sprintf("process %d", r.number)
		if r.host.Name != "" {
			name += " on " + r.host.Name
		} else if r.pid > 0 {
			name += fmt.Sprintf(" (pid %d)", r.pid)
		}
		if r.halted {
			name += ", which is stopped (kill -CONT lets it go on)"
		}
		all = append(all, name)
	}
	if s.stays++; s.stays >= stayLooks && s.stays%stayLooks == 0 &&
		s.stays/stayLooks&(s.stays/stayLooks-1) == 0 {
		s.notice("the job waits for %s to end: the last step was done at least %v ago",
			strings.Join(all, ", "), time.Duration(s.stays)*s.job.times.look)
	}
}

// endHung ends a process of an elastic job that the others have left behind, or wait for, if it has
// not stopped in time: otherwise it would keep its place, and its GPU, for ever.
func (s *supervisor) endHung(r *rank) {
	limit := s.pool.allows(r.number, s.patience)
	if r.looks++; limit == 0 {
		r.looks = 0
	}
	if limit == 0 || r.over || r.killed || time.Duration(r.looks)*s.job.times.look < limit {
		return
	}
	s.notice("%sprocess %d hangs: for %v the others have waited for it or gone on without it, or "+
		"it has left the job and not ended: killing it", r.where(), r.number, limit)
	s.kill(r)
}

// where names the host of the rank, if it has one, before what is said of the rank.
func (r *rank) where() string {
	if r.host.Name == "" {
		return ""
	}
	return "host " + r.host.Name + ": "
}
