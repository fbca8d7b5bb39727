package elastic

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
)

// The simulation runs whole jobs whose processes, network and register are moved one move at a
// time, by a seed. News arrive late, in one order, processes die, stop and go on in every phase of
// a step and of a recovery, links break between living processes, and newcomers come.
const (
	simSteps  = 6
	simMicros = 8 // micro-batches of a step
)

// simulated is a process with its driver.
type simulated struct {
	id       ID
	p        *Process
	heard    int     // of the news
	inbox    []Event // timers that have ended
	grace    []Event // timers that run
	killed   bool
	paused   bool
	cut      bool // the calls of its generation fail
	has      bool // the state of the training
	state    uint64
	step     int    // of the state
	sum      uint64 // the reduced gradients of reduced
	reduced  int    // the step of sum, -1 for none
	todo     int    // of a generation: what it has done in its phase
	gen      int
	stopped  *Reason
	training int // the step that it trains
}

// meeting is what the members of a generation share.
type meeting struct {
	view     View
	dialled  map[ID]bool
	handed   bool // the source has sent its state
	handover [2]uint64
	parts    map[[2]int]map[ID]bool // by step: processes that have sent gradients
	barrier  map[int]map[ID]bool    // of a step: who has entered, and whether it wishes
	posted   map[ID]Position
	revoked  bool
}

type simulation struct {
	rng         *rand.Rand
	procs       []*simulated
	generations []*meeting
	news        []Event
	limits      Limits
	want        []uint64 // the state before each step
	faults      int
	log         *strings.Builder // nil for none
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

func newSimulation(seed uint64, log *strings.Builder) *simulation {
	s := &simulation{rng: rand.New(rand.NewPCG(seed, 39)), log: log}
	size := 1 + s.rng.IntN(6)
	s.limits = Limits{1 + s.rng.IntN(size), size}
	s.faults = s.rng.IntN(8)
	state := uint64(1)
	for step := range simSteps + 1 {
		s.want = append(s.want, state)
		sum := uint64(0)
		for m := range simMicros {
			sum += gradient(state, step, m)
		}
		state = mixed(state, sum)
	}
	ids := make([]ID, size)
	for i := range ids {
		ids[i] = ID(i)
	}
	first := First(ids...)
	s.generations = []*meeting{newMeeting(first)}
	for _, id := range ids {
		c := &simulated{id: id, has: true, state: s.want[0], reduced: -1}
		s.procs = append(s.procs, c)
		p, actions := NewProcess(id, s.limits, first)
		c.p = p
		s.act(c, actions)
	}
	return s
}

func newMeeting(v View) *meeting {
	return &meeting{view: v, dialled: map[ID]bool{}, parts: map[[2]int]map[ID]bool{},
		barrier: map[int]map[ID]bool{}, posted: map[ID]Position{}}
}

func (s *simulation) logf(format string, args ...any) {
	if s.log != nil {
		fmt.Fprintf(s.log, format+"\n", args...)
	}
}

// tell lets every process hear an event, when it has heard those before.
func (s *simulation) tell(e Event) { s.news = append(s.news, e) }

// spawn starts a newcomer, which reads all news.
func (s *simulation) spawn() {
	c := &simulated{id: ID(len(s.procs)), reduced: -1}
	s.procs = append(s.procs, c)
	present := s.generations[len(s.generations)-1].view
	c.gen = present.Generation
	p, actions := NewNewcomer(c.id, s.limits, present)
	c.p = p
	s.act(c, actions)
}

// act carries actions out.
func (s *simulation) act(c *simulated, actions []Action) {
	for _, a := range actions {
		s.logf("%d: %T%v", c.id, a, a)
		switch a := a.(type) {
		case Revoke:
			s.generations[a.Generation].revoked = true
			s.tell(Revoked(a))
		case Interrupt:
			c.cut = true
		case Await:
			c.grace = append(c.grace, Lingers(a))
		case Live:
			s.tell(Lives{a.Generation, c.id})
		case Post:
			c.gen = a.Generation // of which a newcomer has heard
			s.generations[a.Generation].posted[c.id] = a.Position
			s.tell(Posted{a.Generation, c.id, a.Position})
			c.grace = append(c.grace, GraceOver{a.Generation}, LateOver{a.Generation})
		case Propose:
			s.propose(a.View)
		case Connect:
			s.connect(c, a.View)
		case Stop:
			if c.stopped = &a.Why; a.Why == Finished { // its program ends
				s.tell(Dead{c.id})
			}
		}
	}
}

func (s *simulation) propose(v View) {
	if v.Generation == len(s.generations) {
		s.logf("decided %+v", v)
		s.generations = append(s.generations, newMeeting(v))
		s.tell(Decided{v})
	}
}

// connect begins a generation.
func (s *simulation) connect(c *simulated, v View) {
	c.gen, c.cut, c.todo = v.Generation, false, 0
}

// step gives a process an event.
func (s *simulation) step(c *simulated, e Event) {
	s.logf("%d <- %T%v", c.id, e, e)
	s.act(c, c.p.Step(e))
}

// moves returns what may happen next.
func (s *simulation) moves() (moves []func() error) {
	for _, c := range s.procs {
		if c.killed || c.paused || c.stopped != nil {
			continue
		}
		if c.heard < len(s.news) {
			moves = append(moves, func() error {
				c.heard++
				s.step(c, s.news[c.heard-1])
				return nil
			})
		}
		for i, e := range c.inbox {
			moves = append(moves, func() error {
				c.inbox = slices.Delete(c.inbox, i, i+1)
				s.step(c, e)
				return nil
			})
		}
		if c.p.State() == Gathering {
			continue
		}
		g := s.generations[c.gen]
		if f := s.work(c, g); f != nil {
			moves = append(moves, f)
		}
		if c.cut || g.revoked || s.gone(g) {
			moves = append(moves, func() error { s.step(c, Broken{c.gen}); return nil })
		}
	}
	return moves
}

// gone reports whether a member of a generation has died or stopped taking part.
func (s *simulation) gone(g *meeting) bool {
	return slices.ContainsFunc(g.view.Members, func(id ID) bool {
		_, posted := g.posted[id]
		return s.procs[id].killed || posted
	})
}

// work is what the driver of a process does next, nil if it waits for others.
func (s *simulation) work(c *simulated, g *meeting) func() error {
	all := func(m map[ID]bool) bool { return len(m) == len(g.view.Members) }
	switch connecting := c.p.State() == Connecting; {
	case connecting && c.has && c.step < g.view.Next():
		return func() error { return s.apply(c) }
	case connecting && !g.dialled[c.id]:
		return func() error { g.dialled[c.id] = true; return nil }
	case connecting && all(g.dialled):
		return func() error { s.step(c, Connected{c.gen}); return nil }
	case c.p.State() == CatchingUp:
		return s.catchUp(c, g)
	case c.p.State() == Training:
		return s.train(c, g, all)
	}
	return nil
}

func (s *simulation) catchUp(c *simulated, g *meeting) func() error {
	next := g.view.Next()
	switch {
	case !c.has && !g.handed:
		return nil
	case !c.has:
		return func() error {
			c.has, c.state, c.step = true, g.handover[0], int(g.handover[1])
			s.step(c, At{Position{Step: c.step, Phase: Computing}})
			return s.check(c)
		}
	}
	return func() error {
		if g.view.Rank(c.id) == 0 {
			g.handed, g.handover = true, [2]uint64{c.state, uint64(c.step)}
		}
		s.step(c, CaughtUp{c.gen})
		c.training = next
		return nil
	}
}

// train is the next part of a step: send gradients, receive the sum, enter the barrier, pass it.
func (s *simulation) train(c *simulated, g *meeting, all func(map[ID]bool) bool) func() error {
	step := c.training
	if step == simSteps {
		return func() error { s.step(c, Done{c.gen}); return nil }
	}
	parts := g.parts[[2]int{step}]
	if parts == nil {
		parts = map[ID]bool{}
		g.parts[[2]int{step}] = parts
	}
	if g.barrier[step] == nil {
		g.barrier[step] = map[ID]bool{}
	}
	entered := g.barrier[step]
	switch {
	case c.todo == 0:
		return func() error { parts[c.id] = true; c.reduced = -1; c.todo++; return nil }
	case c.todo == 1 && all(parts):
		return func() error {
			c.sum, c.reduced = 0, step
			for rank := range g.view.Members { // each member's share of the micro-batches
				for m := rank * simMicros / len(parts); m < (rank+1)*simMicros/len(parts); m++ {
					c.sum += gradient(c.state, step, m)
				}
			}
			s.step(c, At{Position{Step: step, Phase: Reduced}})
			c.todo++
			return nil
		}
	case c.todo == 2:
		return func() error { entered[c.id] = c.p.Waits(); c.todo++; return nil }
	case c.todo == 3 && all(entered):
		return func() error {
			if err := s.apply(c); err != nil {
				return err
			}
			c.todo, c.training = 0, step+1
			if slices.Contains(slices.Collect(maps.Values(entered)), true) {
				s.step(c, Admits{c.gen})
			}
			return nil
		}
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
	s.step(c, At{Position{Step: c.step, Phase: Computing}})
	return s.check(c)
}

func (s *simulation) check(c *simulated) error {
	if c.state != s.want[c.step] {
		return fmt.Errorf("process %d has a wrong state before step %d", c.id, c.step)
	}
	return nil
}

// fault lets something go wrong, or a newcomer come.
func (s *simulation) fault() {
	c := s.procs[s.rng.IntN(len(s.procs))]
	if c.killed || c.stopped != nil {
		return
	}
	s.faults--
	switch s.rng.IntN(4) {
	case 0, 1:
		if !s.spared(c) {
			return
		}
		s.logf("kill %d", c.id)
		c.killed = true
		s.tell(Dead{c.id})
		s.spawn()
	case 2:
		s.logf("pause %d: %t", c.id, !c.paused)
		c.paused = !c.paused && s.spared(c)
	case 3:
		s.logf("cut %d", c.id)
		c.cut = true
	}
}

// spared reports whether the job can do without a process: another one has the state, and is not
// stopped.
func (s *simulation) spared(c *simulated) bool {
	return slices.ContainsFunc(s.procs, func(o *simulated) bool {
		return o != c && o.has && !o.killed && !o.paused && o.stopped == nil &&
			o.p.View().Generation == len(s.generations)-1 && o.p.State() == Training
	})
}

// quiet is what happens when nothing else does: time passes.
func (s *simulation) quiet() bool {
	for _, c := range s.procs {
		if !c.killed && !c.paused && c.stopped == nil && len(c.grace) > 0 {
			c.inbox, c.grace = append(c.inbox, c.grace...), nil
			return true
		}
	}
	for _, c := range s.procs {
		if c.paused {
			s.logf("resume %d", c.id)
			c.paused = false
			return true
		}
	}
	for _, c := range s.procs {
		if c.stopped != nil && *c.stopped == LeftBehind && !c.killed {
			c.killed = true
			s.tell(Dead{c.id})
			s.spawn()
			return true
		}
	}
	return false
}

// run runs the job to its end.
func (s *simulation) run() error {
	for range 200_000 {
		if s.faults > 0 && s.rng.IntN(12) == 0 {
			s.fault()
		}
		moves := s.moves()
		if len(moves) == 0 {
			if !s.quiet() {
				return s.ended()
			}
			continue
		}
		if err := moves[s.rng.IntN(len(moves))](); err != nil {
			return err
		}
	}
	return fmt.Errorf("the job does not end")
}

// ended checks that the job has ended well.
func (s *simulation) ended() error {
	finished := 0
	for _, c := range s.procs {
		switch {
		case c.killed:
		case c.stopped == nil && !c.has: // a newcomer that came too late
		case c.stopped == nil:
			return fmt.Errorf("process %d hangs: state %d of generation %d", c.id, c.p.State(),
				c.gen)
		case *c.stopped == Finished:
			if !c.has { // a newcomer that came too late
				continue
			}
			finished++
			if c.step != simSteps || c.state != s.want[simSteps] {
				return fmt.Errorf("process %d has finished before step %d", c.id, c.step)
			}
		case *c.stopped != LeftBehind:
			return fmt.Errorf("process %d has stopped for reason %d", c.id, *c.stopped)
		}
	}
	if finished == 0 {
		return fmt.Errorf("nobody has finished")
	}
	return nil
}

func TestJobsWithFaultsEndWithTheStateOfJobsWithout(t *testing.T) {
	seeds := 3_000
	if os.Getenv("EURYALE_FULL") != "" {
		seeds = 100_000
	}
	generations := 0
	for seed := range uint64(seeds) {
		s := newSimulation(seed, nil)
		if s.run() != nil {
			var log strings.Builder
			err := newSimulation(seed, &log).run()
			lines := strings.Split(log.String(), "\n")
			t.Fatalf("seed %d: %v; the last lines of its log:\n%s", seed, err,
				strings.Join(lines[max(0, len(lines)-60):], "\n"))
		}
		generations = max(generations, len(s.generations))
	}
	if generations < 5 {
		t.Errorf("no job had more than %d generations", generations)
	}
}
