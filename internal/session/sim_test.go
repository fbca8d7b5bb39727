package session

import (
	"cmp"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/sim"
	"github.com/euryale-ml/euryale/rendezvous"
)

// The simulation runs elastic jobs with a process on each of several hosts, which find out whom
// they reach by packets, and meet. Their log and the register are at another host. Links are cut
// one way or both, for a while or for good, are slow or lossy, or take no data; processes die and
// stop, and hosts stop as a whole, in every phase of a meeting. A step takes all members that have
// met.
const (
	simSteps   = 20
	simTimeout = 8 * time.Second
	simStep    = 50 * time.Millisecond
	// simFirst is how long the first meeting may take.
	simFirst = joinTime + joinTime/2
	// simBound is how long after the last fault the next step is done: a call that waits for a
	// member ends, or a meeting, and then who has not stopped is waited for.
	simBound = simFirst + simTimeout
)

// simProcess is a process with its drivers.
type simProcess struct {
	id      elastic.ID
	host    int
	p       *elastic.Process
	heard   int // entries of the log
	timers  []sim.Move
	timed   int
	dead    bool
	paused  bool
	hung    bool          // it runs, and does nothing that it has to
	froze   time.Duration // when it went on last
	stopped bool
	has     bool // the state of the training
	step    int  // of the state

	meeting *meeting // the last one
	view    elastic.View
	since   time.Duration // when the meeting began, or the last step
	joining bool
	broken  bool // its meeting has to end, or its calls
	why     error
}

type simulation struct {
	*sim.Sim
	procs    []*simProcess // by ID, from 1
	register map[string]string
	log      []elastic.Event
	logged   []time.Duration
	frozen   []bool // hosts
	thawed   []time.Duration
	mute     [][]bool // ways from a host to another one that take no data, but all else
	faults   int
	apart    bool          // hosts have not reached each other
	hangs    bool          // a process has hung
	done     int           // steps
	longest  time.Duration // from a fault to the next step
	views    []elastic.View
	wrong    error
}

func (s *simulation) fail(format string, args ...any) {
	if s.wrong == nil {
		s.wrong = fmt.Errorf(format, args...)
	}
}

// drawn is a job of a seed.
func drawn(seed uint64, log *strings.Builder) *simulation {
	rng := rand.New(rand.NewPCG(seed, 58))
	s := newSimulation(rng, 2+rng.IntN(3), log)
	s.faults = rng.IntN(6)
	return s
}

func newSimulation(rng *rand.Rand, hosts int, log *strings.Builder) *simulation {
	s := &simulation{Sim: sim.New(rng, hosts, log), register: map[string]string{},
		frozen: make([]bool, hosts), thawed: make([]time.Duration, hosts),
		mute: make([][]bool, hosts)}
	for i := range s.mute {
		s.mute[i] = make([]bool, hosts)
	}
	ids := make([]elastic.ID, hosts)
	for i := range ids {
		ids[i] = elastic.ID(i + 1)
	}
	s.views = []elastic.View{elastic.First(ids...)}
	for i, id := range ids {
		s.procs = append(s.procs, &simProcess{id: id, host: i, timed: -1, has: true})
	}
	for _, c := range s.procs {
		var actions []elastic.Action
		c.p, actions = elastic.NewProcess(c.id, s.limits(), s.views[0])
		s.act(c, actions)
	}
	return s
}

func (s *simulation) limits() elastic.Limits { return elastic.Limits{Least: 1, Most: len(s.Links)} }

// spawn starts a replacement on a host.
func (s *simulation) spawn(host int) {
	s.After(s.Between(simStep, time.Second), func() {
		c := &simProcess{id: elastic.ID(len(s.procs) + 1), host: host, timed: -1}
		s.procs = append(s.procs, c)
		var actions []elastic.Action
		c.p, actions = elastic.NewReplacement(c.id, s.limits(), s.views[len(s.views)-1])
		s.act(c, actions)
	})
}

func (s *simulation) write(e elastic.Event) {
	s.log, s.logged = append(s.log, e), append(s.logged, s.Now)
}

// after lets a process do something in a while.
func (s *simulation) after(c *simProcess, d time.Duration, do func()) {
	c.timers = append(c.timers, sim.Move{At: s.Now + d, Do: func() error { do(); return nil }})
}

// step gives a process an event.
func (s *simulation) step(c *simProcess, e elastic.Event) {
	s.Logf("%d <- %T%v", c.id, e, e)
	if p, ok := e.(elastic.Posted); ok && p.ID == c.id && c.timed < p.Generation {
		c.timed = p.Generation
		s.after(c, 2*time.Second, func() { s.step(c, elastic.GraceOver{Generation: p.Generation}) })
		s.after(c, simTimeout/2, func() { s.step(c, elastic.LateOver{Generation: p.Generation}) })
		s.after(c, simTimeout, func() { s.step(c, elastic.GiveUp{Generation: p.Generation}) })
	}
	s.act(c, c.p.Step(e))
}

// act carries out what a process asks for.
func (s *simulation) act(c *simProcess, actions []elastic.Action) {
	for _, a := range actions {
		s.Logf("%d: %T%v", c.id, a, a)
		switch a := a.(type) {
		case elastic.Revoke:
			s.write(elastic.Revoked(a))
		case elastic.Interrupt:
			c.broken = true
		case elastic.Await:
			s.after(c, simTimeout/16, func() { s.step(c, elastic.Lingers(a)) })
		case elastic.Live:
			s.write(elastic.Lives{Generation: a.Generation, ID: c.id})
		case elastic.Hold:
			s.write(elastic.Holds{Generation: a.Generation, ID: c.id})
		case elastic.Probe:
			s.probe(c, a.View.Members, func(ids []elastic.ID) {
				s.step(c, elastic.Probed{Generation: a.View.Generation, Unreached: ids})
			})
		case elastic.Post:
			if len(a.Unreached) > 0 {
				s.Say("process %d does not reach %d", c.id, a.Unreached)
			}
			s.write(elastic.Posted{Generation: a.Generation, ID: c.id, Position: a.Position,
				Report: a.Report})
		case elastic.Propose:
			s.decide(a.View)
		case elastic.Connect:
			s.meets(c, a.View)
		case elastic.Stop:
			s.stop(c, a.Why)
		}
	}
}

// decide makes a view the next generation, if it is the first one.
func (s *simulation) decide(v elastic.View) {
	if v.Generation != len(s.views) {
		return
	}
	s.Say("generation %d: %d, step %d", v.Generation, v.Members, v.Next())
	if first := s.procs[v.Members[0]-1]; !first.has {
		s.fail("rank 0 of generation %d has no parameters", v.Generation)
	}
	s.views = append(s.views, v)
	s.write(elastic.Decided{View: v})
}

func (s *simulation) stop(c *simProcess, why elastic.Reason) {
	s.Say("process %d stops: %v", c.id, (&elastic.StoppedError{ID: c.id, Why: why}).Error())
	c.stopped = true
	if why != elastic.Finished && why != elastic.LeftBehind {
		s.fail("process %d stops for reason %d", c.id, why)
	}
	s.after(c, 10*time.Millisecond, func() { s.ends(c, why == elastic.LeftBehind) })
}

// ends ends a process, which the launcher may replace.
func (s *simulation) ends(c *simProcess, again bool) {
	c.dead = true
	s.write(elastic.Dead{ID: c.id})
	if again {
		s.spawn(c.host)
	}
}

// sends sends a packet to a host, which its kernel takes unless the way is cut, or the host stops.
func (s *simulation) sends(from, to int, then func()) {
	l := &s.Links[from][to]
	if from == to {
		l = &sim.Link{}
	}
	if at := l.Arrives(s.Now); at < sim.Never {
		s.After(at-s.Now, func() {
			if (from == to || !l.Cut) && !s.frozen[from] && !s.frozen[to] {
				then()
			}
		})
	}
}

// open reports whether hosts reach each other.
func (s *simulation) open(a, b int) bool { return s.Open(a, b) && !s.mute[a][b] && !s.mute[b][a] }

// round lets a packet go to a host and back. Whoever is to answer has to run.
func (s *simulation) round(from, to int, runs func() bool, then func()) {
	s.sends(from, to, func() {
		if runs() {
			s.sends(to, from, then)
		}
	})
}

// probe finds out whom a process does not reach, as reach does.
func (s *simulation) probe(c *simProcess, ids []elastic.ID, then func([]elastic.ID)) {
	began, seen := s.Now, make([]signs, len(ids))
	ended, left := false, len(ids)
	over := func() {
		if ended {
			return
		}
		ended = true
		if all, sure := judge(ids, seen, s.Now-began); sure {
			s.blames(c, all, began)
			then(all)
			return
		}
		s.probe(c, ids, then)
	}
	kernel := func() bool { return true }
	for i, id := range ids {
		o := s.procs[id-1]
		answers := func() {
			if !seen[i].answers && !ended && !c.paused && !c.dead {
				if seen[i].answers = true; left == 1 {
					s.after(c, 0, over)
				}
				left--
			}
		}
		for n := range dials {
			s.after(c, time.Duration(n)*reachTime/dials, func() {
				if ended || seen[i].answers {
					return
				}
				s.round(c.host, o.host, kernel, func() { // it is connected
					if o.dead {
						answers()
						return
					}
					lives := false
					s.round(c.host, o.host, func() bool {
						lives = !o.paused
						return !s.mute[c.host][o.host]
					}, func() {
						seen[i].took, seen[i].lives = true, seen[i].lives || lives
						if lives && !s.mute[o.host][c.host] {
							answers()
						}
					})
				})
			})
		}
	}
	s.after(c, reachTime, over)
}

// blames checks that a process that is not reached cannot be.
func (s *simulation) blames(c *simProcess, ids []elastic.ID, began time.Duration) {
	for _, id := range ids {
		o := s.procs[id-1]
		there, back := &s.Links[c.host][o.host], &s.Links[o.host][c.host]
		whole := s.open(c.host, o.host) && there.Since < began && back.Since < began &&
			!s.frozen[o.host] && s.thawed[o.host] < began && !s.frozen[c.host] &&
			(c.froze < began || s.Now-began >= 2*reachTime) // then it knows
		if whole && 4*(there.Delay+back.Delay) < reachTime/2 && !there.Lossy && !back.Lossy {
			s.fail("process %d says that it does not reach %d", c.id, id)
		}
	}
}

// meets begins a meeting, which ends with the generation.
func (s *simulation) meets(c *simProcess, v elastic.View) {
	job := rendezvous.Env{Job: "job", Timeout: simFirst}
	m := newMeeting(c.id, v, job, true)
	c.meeting, c.view, c.since, c.joining, c.broken, c.why = m, v, s.Now, false, false, nil
	s.probe(c, v.Members, func(ids []elastic.ID) {
		if why := m.probed(ids); why != nil && m == c.meeting && m.next != over {
			c.why = why
		}
	})
	s.after(c, m.env.Timeout, func() {
		if m == c.meeting && m.next != over {
			c.why = errors.New("its time is over")
		}
	})
	s.meet(c, m)
}

// meet takes the next stage of a meeting.
func (s *simulation) meet(c *simProcess, m *meeting) {
	then := func(do func()) {
		s.after(c, s.Between(0, 2*time.Millisecond), func() {
			if m == c.meeting && m.next != over {
				do()
				s.meet(c, m)
			}
		})
	}
	switch m.next {
	case opens:
		then(func() { m.opened(fmt.Sprintf("h%d:%d", c.host, 1000+c.view.Generation), nil) })
	case tells:
		then(func() {
			s.register[m.key] = m.at
			m.told(m.at, nil)
		})
	case asks:
		then(func() {
			if at, ok := s.register[m.key]; ok {
				m.told(at, nil)
			}
		})
	case joins:
		c.joining = true
	}
}

// moves returns what may happen next.
func (s *simulation) moves() (moves []sim.Move) {
	for _, c := range s.procs {
		if c.dead || c.paused || c.hung {
			continue
		}
		give := func(at time.Duration, do func()) {
			moves = append(moves, sim.Move{At: at, Do: func() error { do(); return s.wrong }})
		}
		for i, t := range c.timers {
			give(t.At, func() { c.timers = slices.Delete(c.timers, i, i+1); t.Do() })
		}
		if c.stopped {
			continue
		}
		if c.heard < len(s.log) {
			give(s.logged[c.heard], func() { c.heard++; s.step(c, s.log[c.heard-1]) })
		}
		s.lives(c, give)
	}
	return moves
}

// lives is what a member of a generation does: it joins the others, takes steps with them, and ends
// that if it has to, or if another member has.
func (s *simulation) lives(c *simProcess, give func(time.Duration, func())) {
	state := c.p.State()
	if state == elastic.Gathering || c.meeting == nil {
		return
	}
	here, met, away := 0, 0, elastic.ID(0)
	for _, id := range c.view.Members {
		m := s.procs[id-1]
		same := m.meeting != nil && m.view.Generation == c.view.Generation
		open := m == c || s.open(c.host, m.host)
		switch {
		case !open || m.paused || m.hung:
			away = id
		case m.dead, m.p.View().Generation > c.view.Generation,
			same && m.p.State() == elastic.Gathering:
			c.broken = true // its connection has ended
		}
		if same && !m.dead && m.joining && open && !m.paused && !m.hung {
			here++
			if m.meeting.next == over && m.meeting.err == nil {
				met++
			}
		}
		if same && m.joining && c.joining && m.meeting.at != c.meeting.at {
			s.fail("process %d is at %q, process %d at %q", id, m.meeting.at, c.id, c.meeting.at)
		}
	}
	all, g := len(c.view.Members), c.view.Generation
	first := c.view.Members[0] == c.id
	switch {
	case state == elastic.Connecting && (c.broken || c.why != nil):
		give(s.Now, func() {
			c.meeting.joined(cmp.Or(c.why, errors.New("left")))
			s.step(c, elastic.Broken{Generation: g})
		})
	case c.broken:
		give(s.Now, func() { s.step(c, elastic.Broken{Generation: g}) })
	case state == elastic.Connecting && here == all:
		give(s.Now, func() {
			c.meeting.joined(nil)
			c.since = s.Now
			s.step(c, elastic.Connected{Generation: g})
		})
	case state == elastic.CatchingUp && (c.has || met == all):
		give(s.Now, func() { s.catchesUp(c) })
	case state == elastic.Training && first && met == all && s.train(c.view):
		give(c.since+simStep, func() { s.complete(c.view) })
	case state != elastic.Connecting:
		give(c.since+simTimeout, func() {
			s.step(c, elastic.Broken{Generation: g, Blame: elastic.Blame{Blames: away}})
		})
	}
}

func (s *simulation) catchesUp(c *simProcess) {
	c.has, c.step, c.since = true, c.view.Next(), s.Now
	s.step(c, elastic.At{Position: elastic.Position{Step: c.step, Phase: elastic.Computing}})
	s.step(c, elastic.CaughtUp{Generation: c.view.Generation})
}

// train reports whether all members of a view train.
func (s *simulation) train(v elastic.View) bool {
	for _, id := range v.Members {
		if c := s.procs[id-1]; c.p.State() != elastic.Training || c.broken || c.hung {
			return false
		}
		for _, o := range v.Members {
			if id != o && !s.open(s.procs[id-1].host, s.procs[o-1].host) {
				return false
			}
		}
	}
	return true
}

// complete ends a step of all members.
func (s *simulation) complete(v elastic.View) {
	admits := false
	for _, id := range v.Members {
		admits = admits || s.procs[id-1].p.Waits()
	}
	for _, id := range v.Members {
		c, g := s.procs[id-1], v.Generation
		if c.step == simSteps {
			s.step(c, elastic.Done{Generation: g})
			continue
		}
		c.step, c.since = c.step+1, s.Now
		s.step(c, elastic.At{Position: elastic.Position{Step: c.step, Phase: elastic.Computing}})
		s.step(c, elastic.Stepped{Generation: g})
		if admits {
			s.step(c, elastic.Admits{Generation: g})
		}
	}
	if step := s.procs[v.Members[0]-1].step; step > s.done {
		s.longest = max(s.longest, s.Now-s.Disturbed)
		s.done, s.Disturbed = step, s.Now
	}
}

// fault lets something go wrong, if somebody with the parameters remains.
func (s *simulation) fault() {
	c, o := s.procs[s.Rand.IntN(len(s.procs))], s.Rand.IntN(len(s.Links))
	holders := 0
	for _, m := range s.procs {
		if m != c && m.has && !m.dead && !m.paused && !m.hung && !m.stopped && s.may(m) {
			holders++
		}
	}
	if c.dead || c.paused || c.hung || c.stopped || holders == 0 || s.done == simSteps {
		return
	}
	what := []string{"kill", "stop", "rest", "cut", "cut>", "delay", "lose", "mute",
		"hang"}[s.Rand.IntN(9)]
	parts := slices.Contains([]string{"rest", "cut", "cut>", "mute"}, what)
	if parts && s.hangs || what == "hang" && (s.hangs || s.apart) {
		return // who hangs may be the one that has been chosen of two
	}
	s.faults--
	s.apart, s.hangs = s.apart || parts, s.hangs || what == "hang"
	s.happen(what, c, o, s.Between(0, 2*simTimeout))
}

// may reports whether a process is a member of the last generation.
func (s *simulation) may(c *simProcess) bool { return s.views[len(s.views)-1].Rank(c.id) >= 0 }

// happen lets something happen to a process, or to the ways between its host and another one.
func (s *simulation) happen(what string, c *simProcess, o int, d time.Duration) {
	s.Disturbed = s.Now
	there, back := &s.Links[c.host][o], &s.Links[o][c.host]
	switch what {
	case "kill":
		s.Say("kill %d", c.id)
		s.ends(c, true)
	case "stop", "rest": // the launcher kills who is stopped for three seconds
		d = min(d, 2900*time.Millisecond)
		s.Say("%s %d for %v", what, c.id, d.Round(time.Millisecond))
		c.paused, s.frozen[c.host] = true, what == "rest"
		s.After(d, func() {
			c.paused, s.frozen[c.host], c.froze, s.Disturbed = false, false, s.Now, s.Now
			if what == "rest" {
				s.thawed[c.host] = s.Now
			}
		})
	case "cut", "cut>":
		if c.host == o || there.Cut || back.Cut {
			return
		}
		s.Say("%s %d-%d", what, c.host+1, o+1)
		if s.Rand.IntN(2) == 0 {
			d = 0
		}
		s.Sever(d, []*sim.Link{there, back}[:len(strings.TrimSuffix(what, ">"))-len(what)+2]...)
	case "hang":
		s.Say("hang %d", c.id)
		c.hung = true
		s.After(simTimeout+joinTime, func() { s.ends(c, true) })
	case "mute":
		if c.host != o {
			s.Say("no data passes from %d to %d", c.host+1, o+1)
			s.mute[c.host][o] = true
		}
	case "delay", "lose":
		for _, way := range []*sim.Link{there, back} {
			way.Delay, way.Lossy = s.Between(0, simStep), what == "lose"
		}
	}
}

// run runs the job to its end.
func (s *simulation) run() error {
	for range 200_000 {
		if s.faults > 0 && s.Rand.IntN(60) == 0 {
			s.fault()
		}
		if !slices.ContainsFunc(s.procs, func(c *simProcess) bool { return c.has && !c.dead }) {
			break
		}
		moved, err := s.Step(s.moves())
		if err := cmp.Or(err, s.wrong); err != nil {
			return err
		}
		if !moved {
			return errors.New("nothing moves")
		}
		if s.Now-s.Disturbed > simBound {
			return fmt.Errorf("no step within %v", simBound)
		}
	}
	if s.done < simSteps {
		return fmt.Errorf("it ends after step %d", s.done)
	}
	return nil
}

// TestProcessesMeetWhateverFails: EURYALE_MEETING_SEED=seed runs one alone.
func TestProcessesMeetWhateverFails(t *testing.T) {
	generations, longest := 0, time.Duration(0)
	sim.Seeds(t, "EURYALE_MEETING_SEED", func(seed uint64, log *strings.Builder) error {
		s := drawn(seed, log)
		err := s.run()
		generations, longest = max(generations, len(s.views)), max(longest, s.longest)
		return err
	})
	t.Logf("%d generations and %v from a fault to the next step at most", generations, longest)
}

// TestScenarios: each file of testdata has a job, with a process on each host, and what happens.
func TestScenarios(t *testing.T) { sim.Scenarios(t, told) }

// told runs a scenario.
func told(t *testing.T, script string) string {
	var s *simulation
	for line := range strings.Lines(script) {
		words := strings.Fields(line)
		switch {
		case line[0] == '#' || len(words) == 0:
		case words[0] == "hosts":
			var hosts int
			sim.Scan(t, line, "hosts %d", &hosts)
			s = newSimulation(rand.New(rand.NewPCG(1, 1)), hosts, nil)
			s.Tale = &strings.Builder{}
		default:
			s.After(sim.Lasts(t, words[1]), func() {
				s.Disturbed = s.Now
				if s.Disturb(t, words[2], words[3:]) {
					return
				}
				var id, host int
				var d time.Duration
				sim.Scan(t, words[3], "%d", &id)
				switch words[2] {
				case "mute":
					sim.Scan(t, words[4], "%d", &host)
				case "stop", "rest":
					d = sim.Lasts(t, words[4])
				}
				s.happen(words[2], s.procs[id-1], max(host-1, 0), d)
			})
		}
	}
	if err := s.run(); err != nil {
		fmt.Fprintln(s.Tale, err)
	}
	return s.Tale.String()
}

// TestTheMeetingHasNoClockOrSocket: what it is told alone decides.
func TestTheMeetingHasNoClockOrSocket(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "meeting.go", nil, parser.ImportsOnly)
	require.NoError(t, err)
	for _, i := range file.Imports {
		path, _ := strconv.Unquote(i.Path.Value)
		require.Check(t, !slices.Contains([]string{"context", "os", "sync", "sync/atomic"}, path),
			"meeting.go imports %s", path)
	}
}
