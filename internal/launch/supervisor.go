package launch

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/euryale-ml/euryale/internal/elastic"
)

const (
	// reportTime is how long the other ranks have to report a failure that they see.
	reportTime = time.Second
	// quitTime is the minimum time that ranks have to print their stacks after SIGQUIT.
	quitTime = 5 * time.Second
)

// supervisor decides what a launcher does in an attempt at a job, or the launcher of a host in its
// part of one. It is a pure state machine: events go in, actions come out, and the same events give
// the same actions. What carries them out is a [watch].
type supervisor struct {
	job      Job
	patience time.Duration // how long ranks wait for each other
	hosts    []*host       // that the ranks run on; this machine alone has no name
	above    bool          // the job's launcher gives the orders, and hears of the ranks
	pool     *pool         // of the launcher of an elastic job; otherwise nil

	now  time.Time // of the event
	todo []action

	ranks    []*rank
	starting *rank    // nil for none
	ends     []ending // of the ranks that have ended
	report   string   // the first one heard: see report.go

	why  error     // why the job was told to end, other than by a rank
	told time.Time // when the ranks were told to end, zero before
	last time.Time // when a signal of the user came, zero for never

	armed   bool // the timer was set
	next    syscall.Signal
	patient bool           // reported set the timer: a failure here replaces it
	killed  bool           // SIGKILL was sent
	named   bool           // the ranks that it has not ended were named
	left    bool           // the launcher ends without them
	cut     bool           // nobody gives orders any more
	leaves  syscall.Signal // of the user, to the launcher of a host

	stays  int           // looks in which only processes that have done the last step ran
	looked time.Time     // at processes
	away   time.Duration // how long this process was stopped, if too long for an elastic job
}

// host is a machine that ranks run on.
type host struct {
	Host
	number int   // in supervisor.hosts
	ranks  int   // how many it has in the attempt; in an elastic job, how many it takes
	unfit  bool  // in an elastic job, replacements on it are unfit
	leaves bool  // in an elastic job, its processes were told to end, and no others come
	down   error // why it has no ranks, or no more; a *HostLost if it had been reached
}

// rank is one process of the job.
type rank struct {
	number int
	host   *host
	slot   int // of the host
	after  int // how many ranks had ended before it was started
	pid    int // 0 on another machine

	over   bool // its end is known
	buried bool // in an elastic job, what it had said before is known, too
	halted bool // it was stopped at the last look, or its host says so
	halts  int  // for how many looks in a row it was stopped, or held in the kernel
	looks  int  // for how many looks the others have waited for it, or left it behind
	killed bool // in an elastic job, alone
}

// event is what a supervisor learns; an order to a host's launcher is one, too.
type event interface{ apply(s *supervisor) }

// The events.
type (
	// begins starts the ranks.
	begins struct{}
	// started says that what spawn asked for is done, and notStarted why it cannot be.
	started    struct{ pid int }
	notStarted struct{ why error }
	// ended is the end of a rank, which may come twice.
	ended struct{ ending }
	// down says why a host has no ranks, or no more; their ends follow.
	down struct {
		host int
		why  error
	}
	// halted says that a host's rank has been stopped, or goes on.
	halted struct {
		number int
		stops  bool
	}
	// leaving says that a host of an elastic job was told to end.
	leaving struct{ host int }
	// interrupted is a signal of the user, and told another reason why the job has to end: nobody
	// gives orders any more, or takes the output.
	interrupted struct{ signal os.Signal }
	told        struct{ why error }
	// late follows arm, and abandoned the end of the attempt. They have an ending for each rank
	// that may not have ended, which says where it hangs.
	late      []ending
	abandoned []ending
	// reported is a report that the job has lost a rank.
	reported struct{ text string }
	// looked comes at intervals. It has the states of this machine's processes: see process.state.
	// Those of a host from which nothing is heard, which may be stopped as a whole, are unknown.
	looked map[int]string
	// heard is an entry of an elastic job's log, which may come twice, and unregistered a process
	// that is no client of the log any more.
	heard struct {
		entry int
		elastic.Event
	}
	unregistered elastic.ID
	// listed are the hosts of an elastic job from now on, and joined says that one of them is
	// reached, or why not, and why not before.
	listed []Host
	joined struct {
		*host
		why    error
		before string
		agent  *remote // that has come by itself; otherwise nil
	}
)

// unknown is the state of a process.
const unknown = "?"

// action is what the driver has to do. It passes no other event before, except for those that an
// action asks for.
type action any

// The actions.
type (
	// spawn starts a rank: started or notStarted follows at once. The variables are those that only
	// this rank has, as the job's launcher says.
	spawn struct {
		*rank
		env []string
	}
	// signals sends a signal to all ranks of a host.
	signals struct {
		host   int
		signal syscall.Signal
	}
	// kill ends one rank by SIGKILL.
	kill struct{ *rank }
	// notice tells the user something.
	notice string
	// arm sets the only timer.
	arm time.Duration
	// tell tells the ranks that are still joining of the end of another one.
	tell struct{ ending }
	// says tells something to the job's launcher.
	says struct{ news }
	// bury writes to an elastic job's log that a process has ended. What the log has up to there is
	// heard at once.
	bury elastic.ID
	// join reaches a host, which was not reached before for a reason: joined follows.
	join struct {
		Host
		before string
	}
)

// step takes an event at a time and returns what to do, in this order.
func (s *supervisor) step(now time.Time, e event) []action {
	s.now, s.todo = now, nil
	e.apply(s)
	return s.todo
}

func (s *supervisor) do(a ...action) { s.todo = append(s.todo, a...) }

func (s *supervisor) notice(text string, args ...any) { s.do(notice(fmt.Sprintf(text, args...))) }

// over reports whether the attempt has ended.
func (s *supervisor) over() bool {
	return s.left || len(s.ends) >= len(s.ranks) && (s.cut || !s.above)
}

// rank returns the rank with a number, nil if there is none.
func (s *supervisor) rank(number int) *rank {
	for _, r := range s.ranks {
		if r.number == number {
			return r
		}
	}
	return nil
}

func (begins) apply(s *supervisor) {
	ranks := s.job.Ranks
	if s.pool != nil {
		ranks += s.pool.Standby
	}
	for len(s.ranks) < ranks && s.starting == nil && s.why == nil {
		s.launch()
	}
}

// launch starts one more rank on the first host that has room. If none has, it picks a host that
// was just lost, where the rank ends at once.
func (s *supervisor) launch() {
	r := &rank{number: s.job.first() + len(s.ranks), after: len(s.ends)}
	if r.host, r.slot = s.room(); r.host == nil {
		i := slices.IndexFunc(s.hosts, func(h *host) bool { return h.down != nil })
		r.host = s.hosts[max(0, i)]
	}
	if r.host.down != nil {
		s.ranks = append(s.ranks, r)
		ended{ending{rank: r.number, host: r.host.Name, at: s.now, why: r.host.down}}.apply(s)
		return
	}
	s.starting = r
	s.do(spawn{rank: r})
}

// room returns the first host that takes another rank, and its first free slot; nil if there is
// none.
func (s *supervisor) room() (*host, int) {
	for _, h := range s.hosts {
		slot := 0
		for slices.ContainsFunc(s.ranks, func(r *rank) bool {
			return r.host == h && r.slot == slot && !r.over
		}) {
			slot++
		}
		if slot < h.ranks && h.down == nil && !h.unfit && !h.leaves {
			return h, slot
		}
	}
	return nil, 0
}

func (e started) apply(s *supervisor) {
	s.starting.pid = e.pid
	s.ranks, s.starting = append(s.ranks, s.starting), nil
	if !s.above {
		begins{}.apply(s)
		s.house()
	}
}

// A rank that does not start on this machine is why the job ends, and the others are killed.
func (e notStarted) apply(s *supervisor) {
	r := s.starting
	if s.starting = nil; s.above {
		s.do(says{news{Number: r.number, End: &ending{}, Failed: e.why.Error()}})
		return
	}
	s.stop(syscall.SIGKILL, e.why)
}

// After the first failure the other ranks have reportTime to report what they see of it.
func (e ended) apply(s *supervisor) {
	r := s.rank(e.rank)
	if r.over {
		return
	}
	r.over = true
	if r.host.Name != "" && e.why == nil && !s.told.IsZero() && e.at.After(s.told) {
		e.Asked = true // by this launcher, if not yet by its host's
	}
	s.ends = append(s.ends, e.ending)
	switch {
	case s.above:
		e.Late = s.now.Sub(e.at)
		s.do(says{news{Number: e.rank, End: &e.ending}})
	case s.pool != nil:
		s.do(bury(e.rank + 1))
	case e.failed():
		s.endSoon()
	}
	if s.job.Elastic == nil {
		s.do(tell(e))
	}
}

func (e down) apply(s *supervisor) {
	h := s.hosts[e.host]
	// in any other job this is the error
	if lost, ok := e.why.(*HostLost); ok && s.pool != nil && !h.leaves {
		s.notice("host %s is lost: %v", h.Name, lost.why)
	}
	h.down = cmp.Or(h.down, e.why)
}

func (e leaving) apply(s *supervisor) {
	if h := s.hosts[e.host]; s.pool != nil && !h.leaves && !s.settled() {
		h.leaves = true
		s.notice("host %s was told to end: its processes leave", h.Name)
	}
}

func (e halted) apply(s *supervisor) { s.rank(e.number).halted = e.stops }

// endSoon tells the ranks to end, unless they were already told, once they have had time to report.
func (s *supervisor) endSoon() {
	if s.idle() {
		s.patient = false
		s.wait(reportTime, syscall.SIGTERM)
	}
}

// wait sends a signal in a while, or takes the step that follows SIGKILL.
func (s *supervisor) wait(d time.Duration, next syscall.Signal) {
	s.armed, s.next = true, next
	s.do(arm(d))
}

// idle reports whether the ranks were not told to end, and will not be soon.
func (s *supervisor) idle() bool { return !s.armed || s.patient }

// stop tells the ranks to end. A second call kills them. Another one gives up those that SIGKILL
// has not ended.
func (s *supervisor) stop(signal syscall.Signal, why error) {
	s.left = s.named
	if s.why != nil {
		signal = syscall.SIGKILL
	} else {
		s.why = why
	}
	s.signal(signal)
}

// A signal that comes again at once is the same, as that of timeout(1), which signals to its child
// and to its process group.
func (e interrupted) apply(s *supervisor) {
	if s.last.IsZero() || s.now.Sub(s.last) > sameTime {
		s.last = s.now
		number, _ := e.signal.(syscall.Signal)
		if s.above { // the job goes on without this host
			s.do(says{news{Leaves: true}})
			s.cut, s.leaves = true, number
		}
		s.stop(number, &Interrupted{e.signal})
	}
}

func (e told) apply(s *supervisor) {
	s.cut = true
	s.stop(syscall.SIGTERM, e.why)
}

// signal sends a signal to all ranks, and SIGKILL after the grace. Launchers of hosts do the same.
func (s *supervisor) signal(signal syscall.Signal) {
	s.patient = false
	if s.told.IsZero() {
		s.told = s.now
	}
	for _, h := range s.hosts {
		s.do(signals{h.number, signal})
	}
	switch {
	case s.killed: // the timer is for what follows
	case signal == syscall.SIGKILL:
		s.killed = true
		s.wait(s.job.times.kill, 0)
	case signal == syscall.SIGQUIT:
		s.wait(max(s.job.Grace, quitTime), syscall.SIGKILL)
	default:
		s.wait(s.job.Grace, syscall.SIGKILL)
	}
}

// The next signal is sent, or the ranks that SIGKILL has not ended are given up.
func (e late) apply(s *supervisor) {
	switch {
	case !s.killed:
		s.signal(s.next)
	case !s.named:
		s.named = true
		for _, end := range e {
			if !s.rank(end.rank).over {
				s.notice("%s; the launcher ends without it in %v, or at the next signal", end.Hang,
					s.job.times.giveUp)
			}
		}
		s.wait(s.job.times.giveUp, 0)
	default:
		s.left = true
	}
}

// Also ranks whose output nobody reads count as ended.
func (e abandoned) apply(s *supervisor) {
	for _, end := range e {
		ended{end}.apply(s)
	}
}

// Ranks of this machine learn of a report in their next call and end by themselves. A rank that
// takes longer than ranks wait for each other hangs.
func (e reported) apply(s *supervisor) {
	s.report = e.text
	if !s.armed {
		s.patient = true
		s.wait(s.patience, syscall.SIGTERM)
	}
}

func (o order) apply(s *supervisor) {
	switch {
	case o.Signal != 0:
		signal := syscall.Signal(o.Signal)
		s.stop(signal, &Interrupted{signal})
	case o.Kill != nil:
		if r := s.rank(o.Kill.Number); r != nil {
			s.do(kill{r})
		}
	case o.Start != nil && s.why == nil: // otherwise it was ordered before all were told to end
		s.starting = &rank{number: o.Start.Number, host: s.hosts[0]}
		s.do(spawn{s.starting, o.Start.Env})
	}
}

func (e looked) apply(s *supervisor) {
	if s.pool != nil {
		s.noticeStop()
	}
	s.looked = s.now
	changed := s.noteHalts(e)
	switch {
	case s.above:
		for _, r := range changed {
			s.do(says{news{Number: r.number, Stops: r.halted, Goes: !r.halted}})
		}
	case s.pool != nil:
		s.endHalted(e)
	case s.job.Machines != nil: // elsewhere the end of a rank ends all
		s.endStopped(e)
	}
}

// endStopped tells the ranks to end if one has been stopped, or held in the kernel, for so long
// that ranks on other machines have given it up; they may have begun to wait for it a little later.
// Their launchers have then ended them, and this one would not learn it. No time counts while this
// process is stopped, too.
func (s *supervisor) endStopped(states map[int]string) {
	for _, r := range s.ranks {
		if r.halts++; states[r.number] != "T" && states[r.number] != "D" {
			r.halts = 0
		}
		if time.Duration(r.halts)*s.job.times.look >= 2*s.patience && s.idle() {
			s.signal(syscall.SIGTERM)
		}
	}
}

// outcome is the error of the attempt.
func (s *supervisor) outcome() error {
	f := verdict(s.ends)
	if s.pool != nil && len(s.ends) > 0 {
		f = s.pool.outcome(s.ends)
	}
	if f != nil && f.why != nil {
		return cmp.Or(s.why, f.why)
	}
	if f != nil && f.cause != causeEnded && f.Seen == "" && s.report != "" {
		f.Seen = "the job: " + s.report
	}
	switch {
	case s.why != nil && f != nil && len(f.Hang) > 0:
		return fmt.Errorf("%w\n%s", s.why, strings.Join(f.Hang, "\n"))
	case s.why != nil:
		return s.why
	case f != nil && s.pool != nil && s.pool.lost != nil && s.away > 0:
		return fmt.Errorf("%w; %s", s.pool.lost, s.wasAway())
	case f != nil && s.pool != nil && s.pool.lost != nil:
		return fmt.Errorf("%w; %w", s.pool.lost, f)
	case f != nil:
		return f
	}
	return nil
}
