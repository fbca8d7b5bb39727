package elastic

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/sim"
)

// The simulation runs whole jobs whose processes, links, register and clock are moved one move at a
// time, by a seed. News arrive late, in one order. Processes die, stop and go on, close their part
// and stay, in every phase of a step and of a recovery. Links between hosts are cut one way or
// both, for a while or for good, or are slow, while the processes at both ends live. Replacements
// come.
const (
	simSteps   = 8
	simMicros  = 8 // micro-batches of a step
	simTimeout = 5 * time.Second
	simProbe   = time.Second
	simStep    = 50 * time.Millisecond
	// simBound is how long after a fault the next step is done.
	simBound = 2*simTimeout + time.Second
)

// simulated is a process with its driver.
type simulated struct {
	id       ID
	host     int
	part     int // of the model
	p        *Process
	heard    int     // of the news
	timers   []timer // that run
	killed   bool
	closed   bool // it takes no part any more, and has not ended
	paused   bool
	frozen   bool // it was paused
	fails    bool // its calls fail, in each try
	retires  bool // it was told to end
	asked    bool // it has said so in the barrier
	cut      bool // the calls of its generation fail
	has      bool // the state of the training
	state    uint64
	step     int    // of the state
	sum      uint64 // the reduced gradients of reduced
	reduced  int    // the step of sum, -1 for none
	todo     int    // of a generation: what it has done in its phase
	since    time.Duration
	gen      int
	timed    int
	stopped  *Reason
	training int // the step that it trains
}

// timer gives its process an event.
type timer struct {
	at time.Duration
	of func() Event
}

// meeting is what the members of a generation share.
type meeting struct {
	view     View
	dialled  map[ID]time.Duration  // when it did
	handed   map[int]time.Duration // by part: when its source has sent its state
	handover map[int][2]uint64
	parts    map[int]map[ID]time.Duration // by step: when processes have sent gradients
	barrier  map[int]map[ID]time.Duration // of a step: when it has entered
	wishes   map[int]bool                 // members that ask to admit replacements
	ready    map[int]bool                 // the same, if there was room
	retires  map[int]map[ID]bool          // by step: who was told to end
	stays    map[int]bool                 // a member that was not
	posted   map[ID]bool
	revoked  bool
	broken   time.Duration // when
}

type simulation struct {
	*sim.Sim
	procs       []*simulated // in the order of their IDs, which count from 1
	generations []*meeting
	news        []Event
	times       []time.Duration // of the news
	limits      Limits
	parts       int      // of the model, 0 for one
	torn        bool     // a link was cut that a replica may need, since all others have ended
	want        []uint64 // the state before each step
	faults      int
	notices     *rand.Rand    // says which fault is that a process is told to end; nil for none
	done        int           // steps
	longest     time.Duration // from a fault to the next step
	wrong       error         // a generation that cannot be
}

// mixed is a hash of numbers.
func mixed(numbers ...uint64) uint64 {
	h := uint64(14695981039346656037)
	for _, n := range numbers {
		h = (h ^ n) * 1099511628211
		h ^= h >> 29
	}
	return h
}

// gradient is what a micro-batch of a step adds to the sum.
func gradient(state uint64, step, micro int) uint64 {
	return mixed(state, uint64(step), uint64(micro))
}

// drawn is a job of a seed.
func drawn(seed uint64, log *strings.Builder) *simulation {
	rng := rand.New(rand.NewPCG(seed, 39))
	size := 1 + rng.IntN(6)
	s := newSimulation(rng, Limits{1 + rng.IntN(size), size}, simSteps, log)
	s.faults = rng.IntN(8)
	s.notices = rand.New(rand.NewPCG(seed, 62))
	return s
}

// drawnInParts is a job of a seed whose model has parts.
func drawnInParts(seed uint64, log *strings.Builder) *simulation {
	rng := rand.New(rand.NewPCG(seed, 63))
	parts := 2 + rng.IntN(2)
	size := parts * (2 + rng.IntN(2))
	s := newSimulation(rng, Limits{1 + rng.IntN(size), size}, simSteps, log)
	s.faults, s.parts = 1+rng.IntN(8), parts
	s.notices = rand.New(rand.NewPCG(seed, 64))
	s.generations[0].view = s.generations[0].view.divided(parts)
	for i, c := range s.procs {
		c.part = i % parts
		c.p.Divide(parts, c.part)
	}
	return s
}

// newSimulation begins a job with a process on each host.
func newSimulation(rng *rand.Rand, limits Limits, steps int, log *strings.Builder) *simulation {
	s := &simulation{Sim: sim.New(rng, limits.Most, log), limits: limits}
	state := uint64(1)
	for step := range steps + 1 {
		s.want = append(s.want, state)
		sum := uint64(0)
		for m := range simMicros {
			sum += gradient(state, step, m)
		}
		state = mixed(state, sum)
	}
	ids := make([]ID, limits.Most)
	for i := range ids {
		ids[i] = ID(i + 1)
	}
	first := First(ids...)
	s.generations = []*meeting{newMeeting(first)}
	for i, id := range ids {
		c := &simulated{id: id, host: i, has: true, state: s.want[0], reduced: -1, timed: -1}
		s.procs = append(s.procs, c)
		p, actions := NewProcess(id, s.limits, first)
		c.p = p
		s.act(c, actions)
	}
	return s
}

func newMeeting(v View) *meeting {
	return &meeting{view: v, dialled: map[ID]time.Duration{}, posted: map[ID]bool{},
		parts: map[int]map[ID]time.Duration{}, barrier: map[int]map[ID]time.Duration{},
		wishes: map[int]bool{}, handed: map[int]time.Duration{}, handover: map[int][2]uint64{},
		ready: map[int]bool{}, retires: map[int]map[ID]bool{}, stays: map[int]bool{}}
}

// tell lets every process hear an event, when it has heard those before.
func (s *simulation) tell(e Event) { s.news, s.times = append(s.news, e), append(s.times, s.Now) }

// spawn starts a replacement on a host, which reads all news, once its program is loaded.
func (s *simulation) spawn(host int) {
	s.After(s.Between(simStep, 2*time.Second), func() {
		s.Disturbed = s.Now
		c := &simulated{id: ID(len(s.procs) + 1), host: host, reduced: -1, timed: -1}
		s.procs = append(s.procs, c)
		present := s.generations[len(s.generations)-1].view
		c.gen = present.Generation
		p, actions := NewReplacement(c.id, s.limits, present)
		if c.p = p; s.parts > 0 {
			have := map[ID]int{}
			for _, o := range s.procs {
				if !o.killed && o != c {
					have[o.id] = o.part
				}
			}
			c.part = rarest(have, s.parts)
			p.Divide(s.parts, c.part)
		}
		s.act(c, actions)
	})
}

// arrives returns when what a process has sent at a time comes to another one.
func (s *simulation) arrives(from ID, at time.Duration, to *simulated) time.Duration {
	if from == to.id {
		return at
	}
	return s.Links[s.procs[from-1].host][to.host].Arrives(at)
}

// all returns when something of all members has come to a process.
func (s *simulation) all(g *meeting, sent map[ID]time.Duration, to *simulated) time.Duration {
	last := time.Duration(0)
	for _, id := range g.view.Members {
		at, ok := sent[id]
		if !ok {
			return sim.Never
		}
		last = max(last, s.arrives(id, at, to))
	}
	return last
}

// unreached returns the processes to which a process has no way.
func (s *simulation) unreached(c *simulated, ids []ID) []ID {
	return slices.DeleteFunc(slices.Clone(ids), func(id ID) bool {
		return s.Open(c.host, s.procs[id-1].host)
	})
}

// act carries actions out.
func (s *simulation) act(c *simulated, actions []Action) {
	for _, a := range actions {
		s.Logf("%d: %T%v", c.id, a, a)
		switch a := a.(type) {
		case Revoke:
			if g := s.generations[a.Generation]; !g.revoked {
				g.revoked, g.broken = true, s.Now
			}
			s.tell(Revoked(a))
		case Interrupt:
			c.cut = true
		case Await:
			s.timer(c, grace/4, Lingers(a))
		case Live:
			s.tell(Lives{a.Generation, c.id})
		case Hold:
			s.tell(Holds{a.Generation, c.id})
		case Probe:
			s.probe(c, a.View)
		case Post:
			c.gen = a.Generation // of which a replacement has heard
			s.generations[a.Generation].posted[c.id] = true
			s.tell(Posted{a.Generation, c.id, a.Position, a.Report})
			if len(a.Unreached) > 0 {
				s.Say("process %d cannot reach %d", c.id, a.Unreached)
			}
		case Propose:
			s.propose(a.View)
		case Connect:
			c.gen, c.cut, c.todo, c.since = a.View.Generation, false, 0, s.Now
		case Stop:
			s.stop(c, a.Why)
		}
	}
}

// probe finds out whom a process cannot reach: it waits for those that do not answer.
func (s *simulation) probe(c *simulated, v View) {
	others := slices.DeleteFunc(c.p.alive(v.Members), func(id ID) bool { return id == c.id })
	wait := simProbe
	if len(s.unreached(c, others)) == 0 {
		wait = s.Between(time.Millisecond, 2*time.Millisecond)
		for _, id := range others {
			to := s.procs[id-1].host
			wait = max(wait, s.Links[c.host][to].Delay+s.Links[to][c.host].Delay)
		}
	}
	c.timers = append(c.timers, timer{s.Now + wait, func() Event {
		return Probed{v.Generation, s.unreached(c, others)}
	}})
}

// timer gives a process an event in a while.
func (s *simulation) timer(c *simulated, d time.Duration, e Event) {
	c.timers = append(c.timers, timer{s.Now + d, func() Event { return e }})
}

// stop ends a process. The launcher replaces it unless the others have done the last step.
func (s *simulation) stop(c *simulated, why Reason) {
	c.stopped = &why
	s.Say("process %d: %v", c.id, []string{"finished", "left behind", "too few", "state lost",
		"failing", "retired", "surplus"}[why])
	s.After(10*time.Millisecond, func() {
		if !c.killed {
			c.killed = true
			s.tell(Dead{c.id})
			if why == LeftBehind || why == Retired || why == Surplus {
				s.spawn(c.host)
			}
		}
	})
}

func (s *simulation) propose(v View) {
	if v.Generation == len(s.generations) {
		s.Say("generation %d: %d, step %d", v.Generation, v.Members, v.Next())
		s.refuses(v)
		s.generations = append(s.generations, newMeeting(v))
		s.tell(Decided{v})
	}
}

// refuses notes a generation of members that have not reached each other since the one before
// broke.
func (s *simulation) refuses(v View) {
	for r, id := range v.Members {
		if v.Ending || s.parts == 0 {
			break
		}
		if part := r % s.parts; s.procs[id-1].part != part || v.At[r].Part != part ||
			len(v.Members)%s.parts > 0 || r < s.parts && v.At[r].Phase == Empty {
			s.wrong = fmt.Errorf("generation %d has no whole replicas: %+v", v.Generation, v)
		}
	}
	before := s.generations[v.Generation-1]
	cut := func(a, b ID) bool {
		l := s.Links[s.procs[a-1].host][s.procs[b-1].host]
		return before.revoked && before.view.Rank(a) >= 0 && before.view.Rank(b) >= 0 && l.Cut &&
			l.Since <= before.broken
	}
	for _, a := range v.Members {
		if i := slices.IndexFunc(v.Members, func(b ID) bool { return cut(a, b) }); i >= 0 {
			s.wrong = fmt.Errorf("in generation %d process %d does not reach %d", v.Generation, a,
				v.Members[i])
		}
	}
}

// step gives a process an event.
func (s *simulation) step(c *simulated, e Event) {
	s.Logf("%d <- %T%v", c.id, e, e)
	if d, ok := e.(Posted); ok && d.ID == c.id && c.timed < d.Generation {
		c.timed = d.Generation
		s.timer(c, grace, GraceOver{d.Generation})
		s.timer(c, simTimeout/2, LateOver{d.Generation})
		s.timer(c, simTimeout, GiveUp{d.Generation})
	}
	s.act(c, c.p.Step(e))
}

// moves returns what may happen next.
func (s *simulation) moves() (moves []sim.Move) {
	for _, c := range s.procs {
		if c.killed || c.paused || c.closed || c.stopped != nil {
			continue
		}
		give := func(at time.Duration, of func() Event) {
			moves = append(moves, sim.Move{At: at, Do: func() error {
				s.step(c, of())
				return nil
			}})
		}
		if c.heard < len(s.news) {
			give(s.times[c.heard], func() Event { c.heard++; return s.news[c.heard-1] })
		}
		for i, t := range c.timers {
			give(t.at, func() Event { c.timers = slices.Delete(c.timers, i, i+1); return t.of() })
		}
		if c.p.State() == Gathering {
			continue
		}
		g := s.generations[c.gen]
		broken := func() Event { return Broken{c.gen, Blame{Blames: s.blamed(c, g)}} }
		if at, f := s.work(c, g); at < sim.Never {
			moves = append(moves, sim.Move{At: at, Do: f})
		}
		if c.p.State() != Training || c.todo > 0 {
			give(c.since+simTimeout, broken)
		}
		if c.p.State() == Connecting && len(s.unreached(c, g.view.Members)) > 0 {
			give(c.since+simProbe, broken)
		}
		switch {
		case c.p.State() == Training && slices.ContainsFunc(g.view.Members, func(id ID) bool {
			return s.procs[id-1].fails && s.Open(c.host, s.procs[id-1].host)
		}):
			give(s.Now, broken)
		case c.cut || s.gone(c, g):
			give(s.Now, func() Event { return Broken{Generation: c.gen} })
		}
	}
	return moves
}

// gone reports whether a process sees that a member of its generation has died, or stopped taking
// part.
func (s *simulation) gone(c *simulated, g *meeting) bool {
	return slices.ContainsFunc(g.view.Members, func(id ID) bool {
		m := s.procs[id-1]
		return (m.killed || m.closed || g.posted[id] || g.revoked && g.view.Rank(id) == 0) &&
			s.Open(c.host, m.host)
	})
}

// blamed returns a member from which nothing comes, or one that has waited for such a member.
func (s *simulation) blamed(c *simulated, g *meeting) ID {
	for _, id := range g.view.Members {
		if s.procs[id-1].fails {
			return id
		}
	}
	if away := s.unreached(c, g.view.Members); len(away) > 0 && s.Rand.IntN(2) == 0 {
		return away[0]
	}
	return g.view.Members[s.Rand.IntN(len(g.view.Members))]
}

// work is what the driver of a process does next, and when: never if it waits for others that have
// sent nothing, or to whom there is no way.
func (s *simulation) work(c *simulated, g *meeting) (time.Duration, func() error) {
	switch connecting := c.p.State() == Connecting; {
	case connecting && c.has && c.step < g.view.Next():
		return s.Now, func() error { return s.apply(c) }
	case connecting && g.dialled[c.id] == 0:
		return s.Now, func() error { g.dialled[c.id], c.since = s.Now, s.Now; return nil }
	case connecting && len(s.unreached(c, g.view.Members)) > 0:
		return sim.Never, nil
	case connecting:
		return s.all(g, g.dialled, c), func() error {
			c.since = s.Now
			s.step(c, Connected{c.gen})
			return nil
		}
	case c.p.State() == CatchingUp:
		return s.catchUp(c, g)
	}
	return s.train(c, g)
}

func (s *simulation) catchUp(c *simulated, g *meeting) (time.Duration, func() error) {
	source := slices.IndexFunc(g.view.At, func(p Position) bool {
		return p.Phase != Empty && p.Part == c.part
	})
	switch {
	case !c.has && g.handed[c.part] == 0:
		return sim.Never, nil
	case !c.has:
		return s.arrives(g.view.Members[source], g.handed[c.part], c), func() error {
			sent := g.handover[c.part]
			c.has, c.state, c.step = true, sent[0], int(sent[1])
			s.step(c, At{Position{Step: c.step, Phase: Computing}})
			return s.check(c)
		}
	}
	return s.Now, func() error {
		if g.view.Rank(c.id) == source {
			g.handed[c.part], g.handover[c.part] = s.Now, [2]uint64{c.state, uint64(c.step)}
		}
		s.step(c, CaughtUp{c.gen})
		c.training, c.since = g.view.Next(), s.Now
		return nil
	}
}

// train is the next part of a step: send gradients, receive the sum, enter the barrier, pass it.
func (s *simulation) train(c *simulated, g *meeting) (time.Duration, func() error) {
	step := c.training
	if step == len(s.want)-1 {
		return s.Now, func() error { s.step(c, Done{c.gen}); return nil }
	}
	for _, all := range []map[int]map[ID]time.Duration{g.parts, g.barrier} {
		if all[step] == nil {
			all[step] = map[ID]time.Duration{}
		}
	}
	next := func() { c.todo, c.since = c.todo+1, s.Now }
	switch c.todo {
	case 0:
		return c.since + simStep, func() error {
			g.parts[step][c.id], c.reduced = s.Now, -1
			next()
			return nil
		}
	case 1:
		return s.all(g, g.parts[step], c), func() error {
			c.sum, c.reduced = 0, step
			for rank, size := 0, len(g.view.Members)/max(1, s.parts); rank < size; rank++ {
				for m := rank * simMicros / size; m < (rank+1)*simMicros/size; m++ {
					c.sum += gradient(c.state, step, m)
				}
			}
			s.step(c, At{Position{Step: step, Phase: Reduced}})
			next()
			return nil
		}
	case 2:
		return s.Now, func() error {
			g.barrier[step][c.id] = s.Now
			g.wishes[step] = g.wishes[step] || c.p.Waits()
			g.ready[step] = g.ready[step] || c.p.Ready()
			if g.retires[step] == nil {
				g.retires[step] = map[ID]bool{}
			}
			if c.retires {
				g.retires[step][c.id] = true
			} else {
				g.stays[step] = true
			}
			c.asked = c.retires && s.parts == 0
			next()
			return nil
		}
	}
	return s.all(g, g.barrier[step], c), func() error { return s.pass(c, g) }
}

// pass ends a step.
func (s *simulation) pass(c *simulated, g *meeting) error {
	if err := s.apply(c); err != nil {
		return err
	}
	told := g.retires[c.training]
	goes := len(told) > 0 && (g.stays[c.training] || g.ready[c.training])
	if s.parts > 0 && !g.ready[c.training] {
		goes = goes && slices.ContainsFunc(g.view.Members, func(id ID) bool {
			return told[id] && slices.ContainsFunc(g.view.Members, func(o ID) bool {
				return o != id && s.procs[o-1].part == s.procs[id-1].part &&
					(!told[o] || g.view.Rank(o) < g.view.Rank(id))
			})
		})
	}
	admits := g.wishes[c.training] || goes
	c.asked = c.asked || admits && told[c.id]
	c.todo, c.training, c.since = 0, c.training+1, s.Now
	s.step(c, Stepped{c.gen})
	switch {
	case admits && c.asked:
		s.step(c, Retires{c.gen})
	case admits:
		s.step(c, Admits{c.gen})
	}
	return nil
}

// apply applies a step, and compares the state with the one that it must be.
func (s *simulation) apply(c *simulated) error {
	if c.reduced != c.step {
		return fmt.Errorf("process %d applies step %d with gradients of step %d", c.id, c.step,
			c.reduced)
	}
	c.state = mixed(c.state, c.sum)
	c.step++
	c.reduced = -1
	if c.step > s.done {
		s.longest = max(s.longest, s.Now-s.Disturbed)
		s.done, s.Disturbed = c.step, s.Now
	}
	s.step(c, At{Position{Step: c.step, Phase: Computing}})
	return s.check(c)
}

func (s *simulation) check(c *simulated) error {
	if c.state != s.want[c.step] {
		return fmt.Errorf("process %d has a wrong state before step %d", c.id, c.step)
	}
	return nil
}

// able returns the processes that can go on with the training at once.
func (s *simulation) able() (ids []*simulated) {
	last := s.generations[len(s.generations)-1].view
	for _, c := range s.procs {
		if c.has && !c.killed && !c.closed && !c.paused && !c.asked && c.stopped == nil &&
			last.Rank(c.id) >= 0 && c.p.View().Generation == last.Generation {
			ids = append(ids, c)
		}
	}
	return ids
}

// viable reports whether the job has to go on: whichever of the largest groups of processes that
// reach each other and have the state goes on, enough processes come on hosts that it reaches. It
// returns the size of these groups, too.
func (s *simulation) viable() (viable bool, most int) {
	able, hosts := s.able(), len(s.Links)
	joined := func(of int, host func(i int) int) bool {
		for i := range hosts {
			for j := range i {
				if of>>i&1 == 1 && of>>j&1 == 1 && !s.Open(host(i), host(j)) {
					return false
				}
			}
		}
		return true
	}
	size := func(set int) (n int) {
		for ; set > 0; set &= set - 1 {
			n++
		}
		return n
	}
	var groups []int
	for set := 1; set < 1<<len(able); set++ {
		if joined(set, func(i int) int { return able[i].host }) {
			groups = append(groups, set)
		}
	}
	if s.parts > 0 {
		return s.viableInParts(able, groups)
	}
	for _, set := range groups {
		most = max(most, size(set))
	}
	for _, set := range groups {
		on := 0
		for i, c := range able {
			on |= set >> i & 1 << c.host
		}
		enough := false
		for more := range 1 << hosts {
			enough = enough || more&on == on && size(more) >= s.limits.Least &&
				joined(more, func(i int) int { return i })
		}
		if size(set) == most && !enough {
			return false, most
		}
	}
	return len(groups) > 0, most
}

// viableInParts is viable where processes have parts, given which groups of able ones reach each
// other: one has a whole replica.
func (s *simulation) viableInParts(able []*simulated, groups []int) (viable bool, most int) {
	away := 0
	for _, set := range groups {
		have := make([]int, s.parts)
		for i, c := range able {
			have[c.part] += set >> i & 1
		}
		most = max(most, s.parts*slices.Min(have))
	}
	for _, id := range s.generations[len(s.generations)-1].view.Members {
		if c := s.procs[id-1]; c.killed || c.closed || c.paused || c.asked || c.stopped != nil {
			away++
		}
	}
	return most > 0 && away < 2, most
}

// kill ends a process, which the launcher replaces.
func (s *simulation) kill(c *simulated) {
	s.Say("kill %d", c.id)
	c.killed = true
	s.tell(Dead{c.id})
	s.spawn(c.host)
}

// pause stops a process for a while. The launcher kills one that is stopped for longer.
func (s *simulation) pause(c *simulated, d time.Duration) {
	s.Say("stop %d for %v", c.id, d.Round(time.Millisecond))
	c.paused, c.frozen = true, true
	s.After(d, func() { c.paused, s.Disturbed = false, s.Now })
}

// close ends the part of a process that stays, until the launcher ends it.
func (s *simulation) close(c *simulated) {
	s.Say("close %d", c.id)
	c.closed = true
	s.tell(Dead{c.id})
	s.After(simTimeout/2, func() { c.killed = true; s.spawn(c.host) })
}

// fault lets something go wrong.
func (s *simulation) fault() {
	c, o := s.procs[s.Rand.IntN(len(s.procs))], s.Rand.IntN(len(s.Links))
	if c.killed || c.closed || c.paused || c.stopped != nil {
		return
	}
	if _, most := s.viable(); most < s.limits.Least { // it waits for others as it is
		return
	}
	there, back := &s.Links[c.host][o], &s.Links[o][c.host]
	held := [2]bool{there.Cut, back.Cut}
	d := s.Between(0, 3*simTimeout)
	try := func(undo func()) bool {
		viable, _ := s.viable()
		undo()
		return viable
	}
	s.Disturbed = s.Now
	s.faults--
	kind, last := s.Rand.IntN(8), s.generations[len(s.generations)-1]
	if s.notices != nil && s.notices.IntN(6) == 0 {
		kind = 8
	}
	switch {
	case kind < 2:
		c.killed = true
		if try(func() { c.killed = false }) {
			s.kill(c)
		}
	case kind == 2:
		c.paused = true
		if try(func() { c.paused = false }) {
			s.pause(c, s.Between(0, 3*time.Second))
		}
	case kind == 3 && s.done > 0 && (s.parts == 0 || last.view.Tries == 0 && !last.revoked):
		s.Say("the calls of %d fail", c.id)
		c.cut = true
	case kind == 4:
		there.Delay, back.Delay = s.Between(0, simStep), s.Between(0, simStep)
	case kind == 5:
		c.closed = true
		if try(func() { c.closed = false }) {
			s.close(c)
		}
	case kind == 8 && c.has:
		alone := len(s.able()) == 1
		// it hands over first
		if c.killed = true; try(func() { c.killed = false }) || alone || s.parts > 0 {
			s.Say("tell %d to end", c.id)
			c.retires = true
		}
	case kind > 5 && kind < 8 && c.host != o && !there.Cut && !back.Cut &&
		(s.parts == 0 || s.limits.Least <= s.parts): // whoever others reach
		there.Cut, back.Cut = true, kind == 7
		if try(func() { there.Cut, back.Cut = held[0], held[1] }) {
			s.Say("cut %d-%d, both %t", c.host+1, o+1, kind == 7)
			s.torn = s.parts > 0
			if s.Rand.IntN(2) == 0 {
				d = 0
			}
			s.Sever(d, []*sim.Link{there, back}[:1+kind-6]...)
		}
	}
}

// run runs the job to its end.
func (s *simulation) run() error {
	for range 100_000 {
		if s.faults > 0 && s.Rand.IntN(40) == 0 {
			s.fault()
		}
		if s.over() {
			return s.ended()
		}
		moved, err := s.Step(s.moves())
		if err := cmp.Or(err, s.wrong); err != nil {
			return err
		}
		if !moved {
			return s.ended()
		}
		if s.Now-s.Disturbed > simBound {
			return fmt.Errorf("no step within %v", simBound)
		}
	}
	return fmt.Errorf("the job does not end")
}

// over reports whether all that are members have ended.
func (s *simulation) over() bool {
	return !slices.ContainsFunc(s.procs, func(c *simulated) bool {
		return c.has && !c.killed && !c.closed && c.stopped == nil
	})
}

// ended checks that the job has ended well.
func (s *simulation) ended() error {
	finished := 0
	for _, c := range s.procs {
		switch {
		case c.stopped == nil && (c.killed || c.closed):
		case c.stopped == nil && !c.has: // a replacement that came too late
		case c.stopped == nil:
			return fmt.Errorf("process %d hangs: state %d of generation %d", c.id, c.p.State(),
				c.gen)
		case *c.stopped == Finished:
			if !c.has { // a replacement that came too late
				continue
			}
			finished++
			if c.step != len(s.want)-1 {
				return fmt.Errorf("process %d has finished before step %d", c.id, c.step)
			}
		case *c.stopped == TooFew && c.frozen: // while the others went on
		case *c.stopped == Retired && c.retires:
		case *c.stopped == Surplus && s.parts > 0:
		case (*c.stopped == TooFew || *c.stopped == StateLost) && s.torn:
			finished++ // by an error
		case *c.stopped != LeftBehind:
			return fmt.Errorf("process %d has stopped for reason %d", c.id, *c.stopped)
		}
	}
	if finished == 0 {
		return fmt.Errorf("nobody has finished")
	}
	return nil
}

// TestJobsWithFaultsEndWithTheStateOfJobsWithout: EURYALE_ELASTIC_SEED=seed runs one alone.
func TestJobsWithFaultsEndWithTheStateOfJobsWithout(t *testing.T) {
	endAsWithout(t, drawn)
}

// TestJobsWithFaultsHaveWholeReplicas: of a model in parts, each handed over by who has it.
func TestJobsWithFaultsHaveWholeReplicas(t *testing.T) { endAsWithout(t, drawnInParts) }

func endAsWithout(t *testing.T, drawn func(seed uint64, log *strings.Builder) *simulation) {
	generations, longest := 0, time.Duration(0)
	sim.Seeds(t, "EURYALE_ELASTIC_SEED", func(seed uint64, log *strings.Builder) error {
		s := drawn(seed, log)
		err := s.run()
		generations, longest = max(generations, len(s.generations)), max(longest, s.longest)
		return err
	})
	t.Logf("%d generations and %v from a fault to the next step at most", generations, longest)
	require.Check(t, os.Getenv("EURYALE_ELASTIC_SEED") != "" || generations >= 5,
		"no job had more than %d generations", generations)
}
