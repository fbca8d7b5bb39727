//go:build unix

package launch

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/sim"
)

// The simulation runs whole jobs: the job's launcher on host 0 of the network, one on each other
// host, and ranks, which are moved one move at a time, by a seed. Ways between the launcher and
// hosts are cut one way or both, for a while or for good, are slow, or lose packets. Launchers are
// stopped for a while, those of hosts die. Ranks are stopped, alone or all, fail, end too early,
// ignore SIGTERM, hang, or are held by the kernel. Hosts of an elastic job leave the list of hosts,
// and return to it. The user sends signals.
const (
	// mostReturns bounds the hosts that return: each has new links.
	mostReturns = 4
	simPatience = 10 * time.Second
	simGrace    = time.Second
	simStep     = 50 * time.Millisecond
	// simBound is how long a job may take from a fault to its next step or its end.
	simBound = 60 * time.Second
	// keepAlive is after how long ssh ends where the other end does not answer.
	keepAlive = 5 * time.Second
)

// simLauncher is a launcher with its driver.
type simLauncher struct {
	host   int
	s      *supervisor
	wires  []*simWire // of the job's launcher, by the number of a host; one to that
	local  []simMessage
	timer  time.Duration
	look   time.Duration
	paused bool
	gone   bool
	rests  time.Duration // how long it has been stopped
}

// simWire is an end of a connection, which delivers in order.
type simWire struct {
	of     *simLauncher
	other  *simWire
	number int // of the host
	inbox  []simMessage
	beat   time.Duration // when to send a sign of life
	alarm  countdown
	count  time.Duration // when to count
	mute   bool          // the other end can send nothing
	noted  time.Duration // when that was noted
	silent time.Duration // for how long that was so, since something has come
	closed bool
}

// simMessage is what arrives; eof ends a connection.
type simMessage struct {
	at   time.Duration
	what any
	here bool // over no link
}

type eof struct{}

// simRank is a rank with its process.
type simRank struct {
	number  int
	at      *simLauncher
	alive   bool
	paused  time.Duration // until when; 0 if it runs
	froze   time.Duration // since when
	held    bool          // SIGKILL does not end it
	deaf    bool          // SIGTERM does not
	hung    bool          // it does nothing
	own     bool          // it has failed by itself
	asked   bool          // as in process
	stopped bool
	quits   time.Duration
	how     syscall.WaitStatus
	blames  []int

	training
}

// training is a process of an elastic job.
type training struct {
	p      *elastic.Process
	heard  int
	timed  int
	has    bool
	step   int // of the state
	cut    bool
	done   bool
	since  time.Duration
	timers []simTimer
	writes []simMessage
}

type simTimer struct {
	at time.Duration
	e  elastic.Event
}

type simulation struct {
	*sim.Sim
	job       Job
	launchers []*simLauncher // by host, the job's first
	ranks     []*simRank     // by number
	steps     int
	done      int           // steps
	next      time.Duration // when
	log       []elastic.Event
	logged    []time.Duration
	dead      map[elastic.ID]bool

	faults    int
	failures  int          // processes that fail with a status
	hurt      map[int]bool // hosts that may be lost
	signalled bool
	left      bool       // a process of an elastic job, before its last step
	elsewhere bool       // a rank of another machine is lost
	comes     *rand.Rand // says which fault is that a host leaves the list; nil for none
	unlisted  map[string]bool
	lists     bool // the list of hosts is read
	returned  int  // hosts
	rests     bool // the launcher was stopped for too long
	ended     time.Duration
	outcome   error
	longest   time.Duration
	wrong     error
}

// drawn is a job of a seed.
func drawn(seed uint64, log *strings.Builder) *simulation {
	rng := rand.New(rand.NewPCG(seed, 58))
	hosts := rng.IntN(5) // 0 is a job of this machine
	j := Job{Ranks: 1 + rng.IntN(6), Grace: simGrace}
	for h := range hosts {
		slots := 1 + rng.IntN(3)
		j.Hosts = append(j.Hosts, Host{fmt.Sprint("h", h+2), slots})
	}
	if n := Slots(j.Hosts); n > 0 {
		j.Ranks = 1 + rng.IntN(n)
	}
	switch rng.IntN(4) {
	case 0, 1:
		standby := rng.IntN(3)
		if n := Slots(j.Hosts); n > 0 {
			standby = min(standby, n-j.Ranks)
		}
		j.Elastic = &Elastic{Least: 1 + rng.IntN(j.Ranks), Standby: standby}
	case 2:
		if hosts == 0 {
			j.Machines = &Machines{Count: 2}
		}
	}
	s := newSimulation(rng, j, 60+rng.IntN(200), log)
	s.faults = rng.IntN(6)
	s.comes = rand.New(rand.NewPCG(seed, 62))
	return s
}

func newSimulation(rng *rand.Rand, j Job, steps int, log *strings.Builder) *simulation {
	s := &simulation{Sim: sim.New(rng, 1+len(j.Hosts)+mostReturns, log), steps: steps,
		hurt: map[int]bool{}, dead: map[elastic.ID]bool{}, unlisted: map[string]bool{}}
	s.job = j
	s.job.times = defaultTimes()
	top := s.launcher(0)
	missing := j.Ranks
	if j.Elastic != nil {
		missing = MaxRanks
		top.s.pool = newPool(j.Elastic, elastic.Env{First: j.Ranks}.FirstView())
	}
	for i, h := range j.Hosts {
		if i == 0 {
			top.s.hosts = nil
		}
		if missing == 0 {
			break // standby hosts are for another attempt
		}
		there := s.connect(h, min(h.Slots, missing))
		missing -= there.ranks
		top.s.hosts = append(top.s.hosts, there)
	}
	s.After(0, func() { s.step(top, begins{}) })
	return s
}

// connect returns a host with a launcher, as the next one of the job's launcher.
func (s *simulation) connect(h Host, ranks int) *host {
	top, number := s.launchers[0], len(s.launchers)-1
	below := s.launcher(number + 1)
	below.s.above = true
	a := &simWire{of: top, number: number, alarm: countdown{limit: silence}}
	b := &simWire{of: below, number: number,
		alarm: countdown{limit: launcherSilence(simPatience)}}
	a.other, b.other = b, a
	top.wires, below.wires = append(top.wires, a), []*simWire{b}
	s.hear(a)
	s.hear(b)
	return &host{Host: h, number: number, ranks: ranks}
}

// list gives the launcher the hosts that there are, once a second.
func (s *simulation) list() {
	top := s.launchers[0]
	if s.lists = !top.gone; top.gone {
		return
	}
	there := slices.DeleteFunc(slices.Clone(s.job.Hosts), func(h Host) bool {
		return s.unlisted[h.Name]
	})
	top.local = append(top.local, simMessage{s.Now, listed(there), true})
	s.After(time.Second, s.list)
}

// joins has a host that was reached take part.
func (s *simulation) joins(a join) {
	switch top := s.launchers[0]; {
	case top.gone:
	case top.paused:
		s.After(time.Second, func() { s.joins(a) })
	case s.returned == mostReturns || s.unlisted[a.Name]:
		s.step(top, joined{host: &host{Host: a.Host}, why: errors.New("no route"),
			before: a.before})
	default:
		s.returned++
		s.step(top, joined{host: s.connect(a.Host, a.Slots), before: a.before})
		h, _ := top.s.room()
		if p := top.s.pool; p.homeless > 0 && h != nil && !top.gone && !top.s.settled() {
			s.wrong = fmt.Errorf("%d processes have no host, and %s has room", p.homeless, h.Name)
		}
	}
}

func (s *simulation) launcher(h int) *simLauncher {
	l := &simLauncher{host: h, timer: sim.Never, look: time.Second}
	l.s = &supervisor{job: s.job, patience: simPatience, hosts: []*host{{ranks: MaxRanks}}}
	s.launchers = append(s.launchers, l)
	return l
}

// where names a host of a launcher, or the one it runs on.
func (l *simLauncher) where(number int) string {
	switch name := l.s.hosts[number].Name; {
	case l.host > 0:
		return fmt.Sprintf("the launcher of h%d: ", l.host+1)
	case name != "":
		return "host " + name + ": "
	}
	return ""
}

// clock is the time as launchers see it.
func (s *simulation) clock() time.Time { return time.Unix(1000, 0).Add(s.Now) }

// step gives a launcher an event, and carries out what it asks for.
func (s *simulation) step(l *simLauncher, e event) {
	if l.gone {
		return
	}
	if _, looks := e.(looked); !looks {
		s.Logf("%d <- %T %+v", l.host, e, e)
	}
	for _, a := range l.s.step(s.clock(), e) {
		s.Logf("%d: %T %+v", l.host, a, a)
		s.act(l, a)
	}
	if l.s.over() && !l.gone && !s.begun(e) {
		s.leave(l)
	}
}

// begun reports whether an event is one that another one has asked for: the driver does not ask
// whether the attempt is over before the end of that.
func (s *simulation) begun(e event) bool {
	switch e.(type) {
	case started, notStarted, heard:
		return true
	}
	return false
}

// leave ends a launcher.
func (s *simulation) leave(l *simLauncher) {
	for _, a := range l.s.step(s.clock(), abandoned(s.stuck(l))) {
		s.act(l, a)
	}
	if l.host == 0 {
		if l.s.pool != nil {
			l.s.pool.joined = slices.ContainsFunc(s.ranks, func(r *simRank) bool {
				return r.p != nil
			})
		}
		s.outcome, s.ended = l.s.outcome(), s.Now
		s.Say("the job ends: %v", s.outcome)
		s.Disturbed = s.Now
	}
	s.vanish(l)
}

// vanish ends the process of a launcher, and with it its connections and ranks.
func (s *simulation) vanish(l *simLauncher) {
	l.gone = true
	for _, w := range l.wires {
		s.close(w)
	}
	for _, r := range s.ranks {
		if r.at == l && r.alive && !r.held {
			s.dies(r, killedBy(syscall.SIGKILL))
		}
	}
}

// close ends a connection at one end.
func (s *simulation) close(w *simWire) {
	if !w.closed {
		w.closed = true
		s.send(w, eof{})
	}
}

func (s *simulation) send(w *simWire, what any) {
	w.other.inbox = append(w.other.inbox, simMessage{at: s.Now, what: what})
}

// hear begins a silence of the other end.
func (s *simulation) hear(w *simWire) {
	w.alarm.left, w.count, w.silent = w.alarm.limit, s.Now+beat, 0
}

// act carries an action out.
func (s *simulation) act(l *simLauncher, a action) {
	remote := func(number int) *simWire {
		if len(l.s.hosts[number].Name) > 0 {
			return l.wires[number]
		}
		return nil
	}
	switch a := a.(type) {
	case spawn:
		if l.host == 0 {
			s.Say("%sstart rank %d", a.where(), a.number)
			s.many(l)
		}
		if w := remote(a.host.number); w != nil {
			s.send(w, order{Start: &member{Number: a.number}})
		} else {
			s.spawn(l, a.number)
		}
		s.step(l, started{pid: 1000 + a.number})
	case signals:
		s.Say("%s%v to its ranks", l.where(a.host), a.signal)
		if w := remote(a.host); w != nil {
			s.send(w, order{Signal: int(a.signal)})
			return
		}
		for _, r := range s.ranks {
			if r.at == l && r.alive {
				if !r.asked {
					r.stopped = r.paused > 0
				}
				s.signal(r, a.signal)
			}
		}
	case kill:
		if l.host == 0 {
			s.Say("%skill rank %d", a.where(), a.number)
		}
		s.noteLost(l, a.number)
		if w := remote(a.host.number); w != nil {
			s.send(w, order{Kill: &member{Number: a.number}})
		} else {
			s.signal(s.find(a.number), syscall.SIGKILL)
		}
	case notice:
		s.named(l, string(a))
		if l.host == 0 {
			s.Say("%s", string(a))
		} else {
			s.send(l.wires[0], news{Notice: string(a)})
		}
	case arm:
		l.timer = s.Now + time.Duration(a)
	case says:
		s.send(l.wires[0], a.news)
	case join:
		s.After(s.Between(100*time.Millisecond, 2*time.Second), func() { s.joins(a) })
	case bury:
		s.write(elastic.Dead{ID: elastic.ID(a)})
		for l.s.pool.heard < len(s.log) {
			s.step(l, heard{l.s.pool.heard, s.log[l.s.pool.heard]})
		}
	}
}

// many notes that an elastic job has more processes than it asks for.
func (s *simulation) many(l *simLauncher) {
	lives := 1 // which starts
	for _, r := range l.s.ranks {
		if !r.over {
			lives++
		}
	}
	if e := s.job.Elastic; e != nil && lives > s.job.Ranks+e.Standby {
		s.wrong = fmt.Errorf("there are %d processes", lives)
	}
}

// named notes that SIGKILL has not ended a rank that nothing holds.
func (s *simulation) named(l *simLauncher, text string) {
	var number int
	if _, err := fmt.Sscanf(text, "rank %d has not ended", &number); err != nil {
		return
	}
	if r := s.find(number); r != nil && r.alive && !r.held && !s.hurt[r.at.host] && !s.rests {
		s.wrong = fmt.Errorf("rank %d has no SIGKILL, asked %t", number, r.asked)
	}
}

// noteLost notes the end of a process that has the parameters while nobody else who runs has them.
func (s *simulation) noteLost(l *simLauncher, number int) {
	r := s.find(number)
	if s.job.Elastic == nil || l.host != 0 || r == nil || !r.has || r.hung || r.done || !r.alive ||
		s.done == s.steps {
		return
	}
	if !slices.ContainsFunc(s.ranks, func(o *simRank) bool {
		known := stoppedLooks * time.Second // so late
		if o.at.paused {
			known = time.Second + 3*beat
		}
		return o != r && o.alive && o.has && !s.dead[elastic.ID(o.number+1)] &&
			(o.paused == 0 || s.Now-o.froze < known)
	}) {
		s.wrong = fmt.Errorf("process %d is killed, and nobody else who has the parameters runs",
			number)
	}
}

func (s *simulation) find(number int) *simRank {
	for _, r := range s.ranks {
		if r.number == number {
			return r
		}
	}
	return nil
}

// spawn starts a rank.
func (s *simulation) spawn(l *simLauncher, number int) {
	r := &simRank{number: number, at: l, alive: true, quits: sim.Never,
		deaf: s.Tale == nil && s.Rand.IntN(4) == 0}
	r.timed = -1
	s.ranks = append(s.ranks, r)
	if s.job.Elastic == nil {
		return
	}
	id, first := elastic.ID(number+1), elastic.Env{First: s.job.Ranks}.FirstView()
	limits := elastic.Limits{Least: s.job.Elastic.Least, Most: s.job.Ranks}
	var actions []elastic.Action
	if r.since = s.Now; first.Rank(id) >= 0 {
		r.has = true
		r.p, actions = elastic.NewProcess(id, limits, first)
		s.train(r, actions)
		return
	}
	s.After(s.Between(simStep, time.Second), func() { // its program is loaded
		present := first
		for _, e := range s.log {
			if d, ok := e.(elastic.Decided); ok && d.View.Generation > present.Generation {
				present = d.View
			}
		}
		r.p, actions = elastic.NewReplacement(id, limits, present)
		s.train(r, actions)
	})
}

// signal sends a signal to a rank.
func (s *simulation) signal(r *simRank, sig syscall.Signal) {
	if !r.alive {
		return
	}
	if r.asked = true; r.stopped {
		r.paused = 0
	}
	switch {
	case r.held:
	case sig == syscall.SIGKILL:
		r.paused = 0
		s.quit(r, s.Between(time.Millisecond, 5*time.Millisecond), killedBy(sig))
	case r.deaf || r.hung:
	case r.quits == sim.Never && s.Tale != nil:
		s.quit(r, 100*time.Millisecond, killedBy(sig))
	case r.quits == sim.Never:
		ends := []syscall.WaitStatus{killedBy(sig), exits(128 + int(sig)), exits(0)}
		if h := r.at.host; h > 0 && s.launchers[0].s.hosts[h-1].leaves {
			ends = ends[:2] // who leaves without an error is not replaced
		}
		s.quit(r, s.Between(time.Millisecond, 300*time.Millisecond), ends[s.Rand.IntN(len(ends))])
	}
}

// quit lets a rank end in a while.
func (s *simulation) quit(r *simRank, d time.Duration, how syscall.WaitStatus, blames ...int) {
	if r.quits > s.Now+d {
		r.quits, r.how, r.blames = s.Now+d, how, blames
	}
}

// dies ends the process of a rank.
func (s *simulation) dies(r *simRank, status syscall.WaitStatus) {
	s.Logf("rank %d has ended: %#x, blames %d", r.number, status, r.blames)
	r.alive, r.how = false, status
	if !r.at.gone {
		e := ending{rank: r.number, Status: status, Asked: r.asked, Stopped: r.stopped,
			at: s.clock(), blames: r.blames,
			blaming: "because of rank " + strings.Trim(fmt.Sprint(r.blames), "[]")}
		r.at.local = append(r.at.local, simMessage{s.Now + s.Between(0, 5*time.Millisecond),
			ended{e}, true})
	}
	top := s.launchers[0]
	if l := &s.Links[r.at.host][0]; s.job.Elastic != nil && !l.Cut {
		top.local = append(top.local, simMessage{l.Arrives(s.Now), unregistered(r.number + 1),
			true})
	}
	switch {
	case s.job.Elastic != nil || s.done == s.steps:
	case r.own && status == 0:
		s.missed(r)
	default:
		for _, o := range s.ranks {
			s.notices(o, r)
		}
	}
}

// notices lets a rank of a plain job see that another one is lost. The last reports say if others
// have given up waiting for this one.
func (s *simulation) notices(r, lost *simRank) {
	if r == lost || !r.alive || r.hung || s.Rand.IntN(5) == 0 {
		return
	}
	blames := lost.number
	for range s.ranks {
		if lost != r && len(lost.blames) > 0 && s.find(lost.blames[0]) != nil {
			lost = s.find(lost.blames[0])
		}
	}
	if lost == r {
		blames = r.number
	}
	s.quit(r, s.Between(time.Millisecond, 50*time.Millisecond), exits(1), blames)
}

// stuck are the ranks that a launcher has, as those that may not have ended.
func (s *simulation) stuck(l *simLauncher) (ends []ending) {
	for _, r := range l.s.ranks {
		ends = append(ends, ending{rank: r.number, host: r.host.Name, at: s.clock(), Asked: true,
			Hang: fmt.Sprintf("rank %d has not ended", r.number)})
	}
	return ends
}

// moves returns what may happen next.
func (s *simulation) moves() (moves []sim.Move) {
	add := func(at time.Duration, do func()) {
		if at < sim.Never {
			moves = append(moves, sim.Move{At: at, Do: func() error { do(); return nil }})
		}
	}
	for _, l := range s.launchers {
		if l.paused || l.gone {
			continue
		}
		add(l.timer, func() {
			l.timer = sim.Never
			s.step(l, late(s.stuck(l)))
		})
		add(l.look, func() {
			l.look = max(l.look, s.Now) + time.Second
			s.step(l, s.states(l))
		})
		if len(l.local) > 0 {
			add(l.local[0].at, func() {
				e := l.local[0].what.(event)
				l.local = l.local[1:]
				s.step(l, e)
			})
		}
		for _, w := range l.wires {
			if !w.closed {
				s.wire(w, add)
			}
		}
	}
	for _, r := range s.ranks {
		if r.alive && r.paused > 0 {
			add(r.paused, func() { r.paused = 0; s.Disturbed = s.Now })
		} else if r.alive {
			add(r.quits, func() { s.dies(r, r.how) })
			if r.p != nil && r.quits == sim.Never && !r.hung {
				s.trains(r, add)
			}
		}
	}
	if s.job.Elastic == nil && len(s.ranks) == s.job.Ranks && s.done < s.steps && s.all(nil) {
		add(max(s.next, s.Now), func() {
			s.next, s.Disturbed = s.Now+simStep, s.Now
			if s.done++; s.done == s.steps {
				for _, r := range s.ranks {
					s.quit(r, s.Between(0, 30*time.Millisecond), exits(0))
				}
			}
		})
	}
	return moves
}

// all reports whether the processes of members, or all, run.
func (s *simulation) all(members []elastic.ID) bool {
	return !slices.ContainsFunc(s.ranks, func(r *simRank) bool {
		return (members == nil || slices.Contains(members, elastic.ID(r.number+1))) &&
			(!r.alive || r.paused > 0 || r.hung || r.quits < sim.Never)
	})
}

// states returns how the processes of a launcher are.
func (s *simulation) states(l *simLauncher) looked {
	states := looked{}
	for _, r := range s.ranks {
		if r.at == l && r.alive {
			states[r.number] = "S"
			if r.paused > 0 {
				states[r.number] = "T"
			}
		}
	}
	for _, w := range l.wires {
		for _, r := range l.s.ranks {
			if l.host == 0 && r.host.number == w.number && w.alarm.quiet() {
				states[r.number] = unknown
			}
		}
	}
	return states
}

// wire is what may happen at an end of a connection.
func (s *simulation) wire(w *simWire, add func(time.Duration, func())) {
	from, to := w.other.of.host, w.of.host
	if len(w.inbox) > 0 {
		m := w.inbox[0]
		at := m.at
		if !m.here {
			at = s.Links[from][to].Arrives(at)
		}
		add(at, func() {
			w.inbox = w.inbox[1:]
			s.hear(w)
			s.take(w, m.what)
		})
	}
	add(w.beat, func() {
		s.send(w, nil)
		w.beat = s.Now + beat
	})
	add(w.count, func() {
		if w.count = s.Now + beat; w.alarm.beat() {
			s.note()
			s.blameless(w)
			s.Logf("%d hears nothing of %d", to, from)
			s.lose(w, fmt.Sprintf("nothing was heard of it for %v", w.alarm.limit))
		}
	})
}

// blameless notes an alarm of an end that could have heard the other one.
func (s *simulation) blameless(w *simWire) {
	least := simPatience
	if w.of.host == 0 {
		least = silence - beat - beat/10 - 3*s.Links[w.other.of.host][0].Delay
	}
	if w.silent < least {
		s.wrong = fmt.Errorf("host %d gives up host %d, which was silent for %v", w.of.host+1,
			w.other.of.host+1, w.silent)
	}
}

// note keeps for how long ends of connections could hear nothing.
func (s *simulation) note() {
	for _, l := range s.launchers {
		for _, w := range l.wires {
			o := w.other.of
			if w.mute {
				w.silent += s.Now - w.noted
			}
			w.noted = s.Now
			w.mute = o.paused || o.gone || w.other.closed || s.Links[o.host][l.host].Cut
		}
	}
}

// lose ends a connection whose other end is lost.
func (s *simulation) lose(w *simWire, why string) {
	s.close(w)
	if w.of.host > 0 {
		s.step(w.of, told{errOver})
		return
	}
	h := w.of.s.hosts[w.number]
	s.step(w.of, down{w.number, &HostLost{Host: h.Name, why: errors.New(why)}})
	for _, r := range slices.Clone(w.of.s.ranks) {
		if r.host == h {
			s.step(w.of, ended{ending{rank: r.number, host: h.Name, at: s.clock(), why: h.down}})
		}
	}
}

// take handles a message.
func (s *simulation) take(w *simWire, what any) {
	switch m := what.(type) {
	case eof:
		s.lose(w, "ssh has ended")
	case order:
		s.step(w.of, m)
	case news:
		switch {
		case m.Notice != "":
			s.Say("host %s: %s", w.of.s.hosts[w.number].Name, m.Notice)
		case m.End != nil:
			e := *m.End
			e.rank, e.host, e.at = m.Number, w.of.s.hosts[w.number].Name, s.clock().Add(-e.Late)
			s.step(w.of, ended{e})
		default:
			s.step(w.of, halted{m.Number, m.Stops})
		}
	}
}

// write appends an entry to the log.
func (s *simulation) write(e elastic.Event) {
	s.Logf("entry %d: %T %+v", len(s.log), e, e)
	s.log, s.logged = append(s.log, e), append(s.logged, s.Now)
	switch e := e.(type) {
	case elastic.Dead:
		s.dead[e.ID] = true
	case elastic.Decided:
		s.Logf("generation %d: %d, step %d", e.View.Generation, e.View.Members, e.View.Next())
	}
}

// train carries out what a process of an elastic job asks for.
func (s *simulation) train(r *simRank, actions []elastic.Action) {
	write := func(e elastic.Event) { r.writes = append(r.writes, simMessage{at: s.Now, what: e}) }
	after := func(d time.Duration, e elastic.Event) {
		r.timers = append(r.timers, simTimer{s.Now + d, e})
	}
	id := elastic.ID(r.number + 1)
	for _, a := range actions {
		switch a := a.(type) {
		case elastic.Revoke:
			write(elastic.Revoked(a))
		case elastic.Interrupt:
			r.cut = true
		case elastic.Await:
			after(500*time.Millisecond, elastic.Lingers(a))
		case elastic.Live:
			write(elastic.Lives{Generation: a.Generation, ID: id})
		case elastic.Hold:
			write(elastic.Holds{Generation: a.Generation, ID: id})
		case elastic.Probe:
			after(time.Millisecond, elastic.Probed{Generation: a.View.Generation})
		case elastic.Post:
			write(elastic.Posted{Generation: a.Generation, ID: id, Position: a.Position,
				Report: a.Report})
		case elastic.Propose:
			write(elastic.Decided(a))
		case elastic.Connect:
			r.cut, r.since = false, s.Now
		case elastic.Stop:
			s.Logf("process %d stops: %d", r.number, a.Why)
			if !r.done {
				s.quit(r, 10*time.Millisecond,
					exits(map[bool]int{false: 1}[a.Why == elastic.Finished]))
			}
		}
	}
}

// give gives a process of an elastic job an event.
func (s *simulation) give(r *simRank, e elastic.Event) {
	switch e.(type) {
	case elastic.At, elastic.Stepped:
	default:
		s.Logf("process %d <- %T %+v", r.number, e, e)
	}
	if p, ok := e.(elastic.Posted); ok && p.ID == elastic.ID(r.number+1) && r.timed < p.Generation {
		r.timed = p.Generation
		for after, e := range map[time.Duration]elastic.Event{
			2 * time.Second: elastic.GraceOver{Generation: p.Generation},
			simPatience / 2: elastic.LateOver{Generation: p.Generation},
			simPatience:     elastic.GiveUp{Generation: p.Generation}} {
			r.timers = append(r.timers, simTimer{s.Now + after, e})
		}
		slices.SortFunc(r.timers, func(a, b simTimer) int { return cmp.Compare(a.at, b.at) })
	}
	s.train(r, r.p.Step(e))
}

// trains is what a process of an elastic job may do next.
func (s *simulation) trains(r *simRank, add func(time.Duration, func())) {
	top, host := s.launchers[0], r.at.host
	for i, t := range r.timers {
		add(t.at, func() { r.timers = slices.Delete(r.timers, i, i+1); s.give(r, t.e) })
	}
	if top.gone && !s.Links[0][host].Cut {
		add(s.Now, func() { s.quit(r, time.Millisecond, exits(1)) })
	}
	if len(r.writes) > 0 {
		add(r.writes[0].at+simPatience, func() { s.quit(r, time.Millisecond, exits(1)) })
	}
	if !top.gone && !top.paused {
		if len(r.writes) > 0 {
			add(s.Links[host][0].Arrives(r.writes[0].at), func() {
				e := r.writes[0].what.(elastic.Event)
				r.writes = r.writes[1:]
				s.write(e)
				top.local = append(top.local, simMessage{s.Now, heard{len(s.log) - 1, e}, true})
			})
		}
		if r.heard < len(s.log) {
			add(s.Links[0][host].Arrives(s.logged[r.heard]), func() {
				r.heard++
				s.give(r, s.log[r.heard-1])
			})
		}
	}
	v := r.p.View()
	state := r.p.State()
	if state == elastic.Gathering || state == elastic.Stopped || r.done {
		return
	}
	breaks, together := r.cut, true
	var silent elastic.ID
	for _, id := range v.Members {
		m := s.find(int(id) - 1)
		switch {
		case m == nil || m.p == nil: // it has not begun
			together = false
			continue
		case !m.alive || m.p.View().Generation > v.Generation || m.done ||
			m.p.View().Generation == v.Generation && (m.p.State() == elastic.Gathering &&
				m.p.View().Rank(id) >= 0 && v.Rank(id) >= 0 && m.since >= r.since ||
				m.p.State() == elastic.Stopped):
			breaks = true
		case m.paused > 0 || m.hung:
			silent = id
		}
		together = together && m.p.View().Generation == v.Generation && m.paused == 0 && !m.hung &&
			m.quits == sim.Never && (m.p.State() == state || m.p.State() > state)
	}
	g := v.Generation
	switch {
	case breaks:
		add(s.Now, func() { s.give(r, elastic.Broken{Generation: g}) })
	case silent > 0 && silent != elastic.ID(r.number+1):
		add(r.since+simPatience, func() {
			s.give(r, elastic.Broken{Generation: g, Blame: elastic.Blame{Blames: silent}})
		})
	}
	first := v.Members[0] == elastic.ID(r.number+1)
	switch {
	case !together || r.cut:
	case state == elastic.Connecting:
		add(r.since+time.Millisecond, func() { s.give(r, elastic.Connected{Generation: g}) })
	case state == elastic.CatchingUp && (r.has || s.find(int(v.Members[0])-1).has):
		add(s.Now, func() {
			r.has, r.step, r.since = true, v.Next(), s.Now
			s.give(r, elastic.At{Position: elastic.Position{Step: r.step,
				Phase: elastic.Computing}})
			s.give(r, elastic.CaughtUp{Generation: g})
		})
	case state == elastic.Training && first:
		add(r.since+simStep, func() { s.complete(v) })
	}
}

// complete ends a step of all members at once.
func (s *simulation) complete(v elastic.View) {
	admits := false
	var members []*simRank
	for _, id := range v.Members {
		m := s.find(int(id) - 1)
		members, admits = append(members, m), admits || m.p.Waits()
	}
	if members[0].step == s.steps {
		for _, m := range members {
			m.done = true
			s.give(m, elastic.Done{Generation: v.Generation})
			s.finish(m)
		}
		return
	}
	for _, m := range members {
		m.step, m.since = m.step+1, s.Now
		s.give(m, elastic.At{Position: elastic.Position{Step: m.step - 1, Phase: elastic.Reduced}})
		s.give(m, elastic.At{Position: elastic.Position{Step: m.step, Phase: elastic.Computing}})
		s.give(m, elastic.Stepped{Generation: v.Generation})
		if admits {
			s.give(m, elastic.Admits{Generation: v.Generation})
		}
	}
	if members[0].step > s.done {
		s.longest = max(s.longest, s.Now-s.Disturbed)
		s.done, s.Disturbed = members[0].step, s.Now
	}
}

// finish ends a process that has done its last step, once the log has that.
func (s *simulation) finish(r *simRank) {
	s.After(s.Between(100*time.Millisecond, 2*time.Second), func() {
		if len(r.writes) > 0 && r.alive {
			s.finish(r)
			return
		}
		s.quit(r, 0, exits(0))
	})
}

// viable reports whether an elastic job has to go on: a process that has the parameters runs where
// nothing is amiss, and there are places enough for --min-ranks.
func (s *simulation) viable() bool {
	top := s.launchers[0]
	places, holders, processes := 0, 0, 0
	for _, r := range top.s.ranks {
		if !r.over {
			processes++
		}
	}
	for _, h := range top.s.hosts {
		if !s.hurt[h.number+1] && !h.unfit {
			places += h.ranks
		}
	}
	for _, r := range s.ranks {
		if r.alive && (r.hung || r.paused > 0) && !s.hurt[r.at.host] {
			places, processes = places-1, processes-1 // until it has ended
		}
		if r.alive && r.has && !r.hung && r.paused == 0 && r.quits == sim.Never && !r.done &&
			!s.hurt[r.at.host] && !s.dead[elastic.ID(r.number+1)] {
			holders++
		}
	}
	return holders > 0 && min(places, processes) >= s.job.Elastic.Least
}

// fault lets something go wrong.
func (s *simulation) fault() {
	if s.launchers[0].gone || len(s.ranks) == 0 || s.done == s.steps {
		return
	}
	r, h := s.ranks[s.Rand.IntN(len(s.ranks))], s.Rand.IntN(len(s.launchers))
	what := []string{"fail", "kill", "stop", "hang", "hold", "leave", "cut", "cut>", "cut<",
		"delay", "lose", "pause", "end", "signal", "elsewhere", "freeze", "rest"}[s.Rand.IntN(17)]
	if s.comes != nil && s.comes.IntN(6) == 0 {
		what = "unlist"
	}
	d := s.Between(0, 3*simPatience/2)
	if strings.HasPrefix(what, "cut") && s.Rand.IntN(2) == 0 {
		d = 0
	}
	if s.may(what, r, h, d) {
		s.faults--
		s.happen(what, r, h, d)
	}
}

// may reports whether something may happen: an elastic job has to be able to go on.
func (s *simulation) may(what string, r *simRank, h int, d time.Duration) bool {
	l := s.launchers[h]
	switch what {
	case "fail", "kill", "stop", "hang", "hold", "leave":
		if !r.alive || r.paused > 0 || r.quits < sim.Never || r.hung || r.held || r.done {
			return false
		}
		if s.job.Elastic == nil { // somebody has to see it
			return what == "fail" || what == "kill" || slices.ContainsFunc(s.ranks,
				func(o *simRank) bool { return o != r && o.alive && !o.hung })
		}
		if what == "fail" && s.failures == maxFaults-1 {
			return false
		}
		if what == "leave" || s.left { // nobody takes its place, so too few may be left
			return what == "leave" && s.Rand.IntN(4) == 0 && !slices.ContainsFunc(s.ranks, idles)
		}
		r.hung = true
		defer func() { r.hung = false }()
		return s.viable()
	case "elsewhere":
		return s.job.Machines != nil
	case "freeze":
		return s.job.Elastic != nil && s.viable() && len(s.hurt) == 0
	case "rest":
		return s.job.Elastic != nil && len(s.hurt) == 0 && h > 0 && !l.paused && !l.gone &&
			!slices.ContainsFunc(s.ranks, idles) && s.unhurt(h, d)
	case "signal":
		return s.Rand.IntN(4) == 0
	case "unlist":
		return s.job.Elastic != nil && h > 0 && !l.gone && !l.paused && !s.hurt[h] &&
			s.unhurt(h, d)
	case "pause":
		return !l.paused && !l.gone && s.Now > l.rests && (h == 0 || s.unhurt(h, d))
	}
	return h > 0 && !l.gone && s.unhurt(h, d)
}

// idles reports whether a rank does nothing, although it seems to run.
func idles(r *simRank) bool { return r.alive && r.hung }

// unhurt reports whether a job may lose a host.
func (s *simulation) unhurt(h int, d time.Duration) bool {
	before := s.hurt[h]
	s.hurt[h] = true
	defer func() { s.hurt[h] = before }()
	return s.job.Elastic == nil || s.viable()
}

// happen lets something happen to a rank or a host.
func (s *simulation) happen(what string, r *simRank, h int, d time.Duration) {
	h = max(0, h) // of what happens to no host
	l, there, back := s.launchers[h], &s.Links[0][h], &s.Links[h][0]
	s.Disturbed = s.Now
	switch what {
	case "fail", "kill", "leave":
		how := []syscall.WaitStatus{exits(1), exits(2), exits(3), exits(75),
			killedBy(syscall.SIGSEGV), killedBy(syscall.SIGABRT)}[s.Rand.IntN(6)]
		switch {
		case what == "leave":
			how = exits(0)
		case what == "kill":
			how = killedBy(syscall.SIGKILL)
		case s.Tale != nil:
			how = exits(3)
		}
		if what == "fail" {
			s.failures++
		}
		s.left = s.left || what == "leave"
		s.Say("rank %d: %s, %s", r.number, what, ending{Status: how}.how())
		r.own = true
		s.quit(r, 0, how)
	case "stop":
		s.Say("rank %d: stop for %v", r.number, d.Round(time.Millisecond))
		r.own, r.paused, r.froze = true, s.Now+d+1, s.Now
		until := r.paused
		if s.job.Elastic == nil {
			s.After(simPatience, func() {
				if r.paused == until {
					s.missed(r)
				}
			})
		}
	case "hang":
		s.Say("rank %d: hang", r.number)
		r.own = true
		s.hangs(r)
	case "hold":
		s.Say("rank %d: hold", r.number)
		r.own, r.held = true, true
		s.hangs(r)
	case "cut", "cut>", "cut<":
		s.hurt[h] = true
		s.Logf("%s %d for %v", what, h+1, d.Round(time.Millisecond))
		for i, way := range []*sim.Link{there, back} {
			if !way.Cut && what != []string{"cut<", "cut>"}[i] {
				s.Sever(d, way)
				s.severed(h, way)
			}
		}
	case "delay", "lose":
		for _, way := range []*sim.Link{there, back} {
			way.Delay, way.Lossy = s.Between(0, 300*time.Millisecond), what == "lose"
		}
		s.Say("%s %d %v", what, h, there.Delay)
	case "pause":
		s.Say("the launcher of host %d is stopped for %v", h+1, d.Round(time.Millisecond))
		if h > 0 {
			s.hurt[h] = true
		} else if d >= simPatience {
			s.rests = true
		}
		l.paused = true
		s.After(d, func() { l.paused, s.Disturbed, l.rests = false, s.Now, s.Now+2*time.Second })
	case "end":
		s.hurt[h] = true
		s.Say("the launcher of host %d is killed", h+1)
		s.vanish(l)
	case "unlist":
		name := s.launchers[0].s.hosts[h-1].Name
		s.Say("host %d leaves the list for %v", h+1, d.Round(time.Millisecond))
		s.hurt[h], s.unlisted[name] = true, true
		s.After(d/5, func() { delete(s.unlisted, name) }) // before the job ends
		if !s.lists {
			s.list()
		}
	case "signal":
		s.signalled = true
		sig := []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT}[s.Rand.IntN(3)]
		if s.Tale != nil {
			sig = syscall.SIGINT
		}
		s.Say("signal: %v", sig)
		l := s.launchers[0]
		l.local = append(l.local, simMessage{s.Now, interrupted{sig}, true})
	case "freeze":
		d /= 2 // less than processes wait for each other
		s.Say("all processes are stopped for %v", d.Round(time.Millisecond))
		s.freeze(d, func(*simRank) bool { return true })
	case "rest": // those of other hosts by these, a little later
		most := min(d, silence-beat)
		s.Say("host %d as a whole is stopped for %v", h+1, most.Round(time.Millisecond))
		s.hurt[h], l.paused = true, true
		s.freeze(most, func(r *simRank) bool { return r.at == l })
		s.After(most, func() { l.paused, l.rests = false, s.Now+2*time.Second })
		s.After(s.Between(0, time.Second), func() {
			s.Say("the processes of the other hosts are stopped for %v", d.Round(time.Millisecond))
			s.freeze(d, func(r *simRank) bool { return r.at != l })
		})
	case "elsewhere":
		s.elsewhere = true
		s.Say("a rank of another machine is lost")
		l := s.launchers[0]
		l.local = append(l.local, simMessage{s.Now, reported{"rank 7 is down"}, true})
		for _, r := range s.ranks {
			if r.alive && s.Rand.IntN(2) == 0 {
				s.quit(r, s.Between(0, time.Second), exits(1), 7)
			} else {
				r.hung = true
			}
		}
	}
}

// freeze stops processes for a while.
func (s *simulation) freeze(d time.Duration, which func(*simRank) bool) {
	for _, r := range s.ranks {
		if r.alive && r.paused == 0 && which(r) {
			r.paused, r.froze = s.Now+d+1, s.Now
		}
	}
}

// hangs lets a rank do nothing any more.
func (s *simulation) hangs(r *simRank) {
	r.hung = true
	if s.job.Elastic == nil {
		s.After(simPatience, func() {
			if r.alive {
				s.missed(r)
			}
		})
	}
}

// missed lets the other ranks of a plain job give up waiting for one.
func (s *simulation) missed(r *simRank) {
	for _, o := range s.ranks {
		if o != r && o.alive && !o.hung {
			s.quit(o, s.Between(0, time.Second), exits(1), r.number)
		}
	}
}

// severed ends the connection to a host if it is still cut in a while.
func (s *simulation) severed(h int, way *sim.Link) {
	s.After(keepAlive, func() {
		w := s.launchers[0].wires[h-1]
		if way.Cut && s.Now-way.Since >= keepAlive && !w.closed {
			w.inbox = append(w.inbox, simMessage{s.Now, eof{}, true})
			s.send(w, eof{})
		}
	})
}

// run runs the job to its end.
func (s *simulation) run() error {
	for range 200_000 {
		if s.faults > 0 && s.Rand.IntN(60) == 0 {
			s.fault()
		}
		if s.over() {
			return s.verdict()
		}
		s.note()
		moved, err := s.Step(s.moves())
		if err := cmp.Or(err, s.wrong); err != nil {
			return err
		}
		if !moved {
			return errors.New("nothing moves")
		}
		if s.Now-s.Disturbed > simBound {
			return s.waits()
		}
	}
	return errors.New("the job does not end")
}

// waits is the error of a job that does not go on. A launcher that was stopped for too long has
// lost all that others told it of a process that hangs, which nobody kills then: it may be the only
// one that has the parameters.
func (s *simulation) waits() error {
	if s.rests && slices.ContainsFunc(s.ranks, func(r *simRank) bool {
		return r.alive && r.has && r.hung
	}) {
		return nil
	}
	return fmt.Errorf("no step within %v", simBound)
}

// over reports whether the launcher and all ranks have ended.
func (s *simulation) over() bool {
	return s.launchers[0].gone && !slices.ContainsFunc(s.ranks, func(r *simRank) bool {
		return r.alive && !r.held
	})
}

// verdict checks how the job has ended.
func (s *simulation) verdict() error {
	limit := 2*simGrace + 2*time.Second
	if len(s.hurt) > 0 { // it has to find out that its launcher has ended
		limit += 5 * simPatience / 2
	}
	if lives := s.Now - s.ended; lives > limit {
		return fmt.Errorf("a rank lives for %v after the launcher", lives)
	}
	var own []int
	var failed *Failed
	var lost *HostLost
	var told *Interrupted
	for _, r := range s.ranks {
		if r.own {
			own = append(own, r.number)
		}
	}
	amiss := len(own) > 0 || len(s.hurt) > 0 || s.signalled || s.rests || s.elsewhere
	switch err := s.outcome; {
	case s.Tale != nil: // has it
	case s.left && s.job.Elastic != nil:
		if err == nil && s.done < s.steps {
			return fmt.Errorf("no error after %d of %d steps", s.done, s.steps)
		}
	case s.job.Elastic != nil && !s.signalled && !s.rests:
		if err != nil || s.done < s.steps {
			return fmt.Errorf("after %d of %d steps: %v", s.done, s.steps, err)
		}
	case err == nil:
		if s.done < s.steps {
			return fmt.Errorf("no error after %d of %d steps", s.done, s.steps)
		}
	case !amiss:
		return fmt.Errorf("an error of a job without one: %v", err)
	case errors.As(err, &told):
		if !s.signalled {
			return fmt.Errorf("nobody sends a signal: %v", err)
		}
	case errors.As(err, &lost):
		h := slices.IndexFunc(s.job.Hosts, func(h Host) bool { return h.Name == lost.Host })
		if !s.hurt[h+1] && !s.rests {
			return fmt.Errorf("nothing is amiss with the host: %v", err)
		}
	case errors.As(err, &failed):
		return s.blamed(failed, own)
	}
	return nil
}

// blamed checks the rank that has failed first.
func (s *simulation) blamed(f *Failed, own []int) error {
	r := s.find(f.Rank)
	code := r.how.ExitStatus()
	if r.how.Signaled() {
		code = 128 + int(r.how.Signal())
	}
	switch {
	case f.cause == causeEnded && (f.Status != r.how || f.ExitCode() != code):
		return fmt.Errorf("rank %d ended with %#x: %v", f.Rank, r.how, f)
	case s.signalled || s.rests || s.elsewhere || len(s.hurt) > 0 || s.job.Elastic != nil:
	case !slices.Contains(own, f.Rank):
		return fmt.Errorf("only %d failed by themselves: %v", own, f)
	}
	return nil
}

// TestScenarios: each file of testdata has a job and what happens to it. Host 1 is the launcher's.
func TestScenarios(t *testing.T) { sim.Scenarios(t, play) }

// play runs a scenario.
func play(t *testing.T, script string) string {
	var s *simulation
	for line := range strings.Lines(script) {
		words := strings.Fields(line)
		switch {
		case line[0] == '#' || len(words) == 0:
		case words[0] == "restarts":
			_, happens, _ := strings.Cut(script, line)
			return playAttempts(t, line, strings.Split(strings.TrimSpace(happens), "\n"))
		case words[0] == "ranks":
			j, steps := parse(t, words)
			s = newSimulation(rand.New(rand.NewPCG(1, 1)), j, steps, nil)
			s.Tale = &strings.Builder{}
		default:
			s.After(sim.Lasts(t, words[1]), func() { s.event(t, words[2], words[3:]) })
		}
	}
	if err := s.run(); err != nil {
		fmt.Fprintln(s.Tale, err)
	}
	return s.Tale.String()
}

// parse reads the line of a job: ranks N steps N, then hosts LIST, for an elastic job min-ranks N
// and standby N, or machines N.
func parse(t *testing.T, words []string) (j Job, steps int) {
	j.Grace = simGrace
	for i := 0; i+1 < len(words); i += 2 {
		var n int
		if words[i] != "hosts" {
			sim.Scan(t, words[i+1], "%d", &n)
		}
		switch words[i] {
		case "ranks":
			j.Ranks = n
		case "steps":
			steps = n
		case "min-ranks":
			j.Elastic = &Elastic{Least: n}
		case "standby":
			j.Elastic.Standby = n
		case "machines":
			j.Machines = &Machines{Count: n}
		default:
			var err error
			if j.Hosts, err = ParseHosts(words[i+1]); err != nil {
				t.Fatal(err)
			}
		}
	}
	return j, steps
}

// event lets an event of a scenario happen: to ways, a rank, or the launcher of a host.
func (s *simulation) event(t *testing.T, what string, args []string) {
	s.Disturbed = s.Now
	if s.Disturb(t, what, args) {
		if ways := s.Ways(t, args[0]); what == "cut" {
			var a, b int
			sim.Scan(t, strings.NewReplacer("-", " ", ">", " ").Replace(args[0]), "%d %d", &a, &b)
			s.hurt[max(a, b)-1] = true
			for _, way := range ways {
				s.severed(max(a, b)-1, way)
			}
		}
		return
	}
	var n int
	var d time.Duration
	if len(args) > 0 {
		sim.Scan(t, args[0], "%d", &n)
	}
	if len(args) > 1 {
		d = sim.Lasts(t, args[len(args)-1])
	}
	if slices.Contains([]string{"pause", "end", "signal", "elsewhere", "rest"}, what) {
		s.happen(what, nil, n-1, d)
		return
	}
	r := s.find(n)
	require.That(t, r != nil, "there is no rank %d", n)
	s.happen(what, r, 0, d)
}

// TestSimulatedJobsEndAsTheyHaveTo: EURYALE_LAUNCH_SEED=seed runs one alone.
func TestSimulatedJobsEndAsTheyHaveTo(t *testing.T) {
	longest, outcomes, returned, there := time.Duration(0), map[string]int{}, 0, 0
	sim.Seeds(t, "EURYALE_LAUNCH_SEED", func(seed uint64, log *strings.Builder) error {
		s := drawn(seed, log)
		err := s.run()
		returned += s.returned
		for _, r := range s.ranks {
			if r.at.host > len(s.job.Hosts) && r.has {
				there++
			}
		}
		longest = max(longest, s.longest)
		outcomes[fmt.Sprintf("%T", s.outcome)]++
		return err
	})
	t.Logf("%v from a fault to the next step at most; %v; %d hosts returned, and %d processes on "+
		"them trained", longest, outcomes, returned, there)
	require.Check(t, os.Getenv("EURYALE_LAUNCH_SEED") != "" || returned > 0 && there > 0,
		"%d hosts returned, and %d processes on them trained", returned, there)
}
