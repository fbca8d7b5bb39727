package elastic

import (
	"maps"
	"slices"
)

// State is what a process is doing.
type State uint8

// The states.
const (
	Gathering  State = iota // it has stopped, and waits for the next generation
	Connecting              // to the members of its generation
	CatchingUp              // applies a step, hands its state over, or receives one
	Training
	Stopped // it takes no part any more
)

// Event is what a process learns.
type Event interface{ apply(p *Process) []Action }

// The events. An event of a past generation changes nothing. All processes hear of what they
// tell each other in one order, in which a process is dead after all that it has said.
type (
	// At is where the state of this process is now: it has reduced a step, applied one, or received
	// the state before one.
	At struct{ Position Position }
	// Connected says that all members of a generation are connected, as far as this one knows.
	Connected struct{ Generation int }
	// CaughtUp says that this process has the state before its generation's step, and has handed it
	// to whom it had to.
	CaughtUp struct{ Generation int }
	// Stepped says that a step of the generation is complete, with all that follows it.
	Stepped struct{ Generation int }
	// Broken says that a call or the connection of a generation has failed, and that this process
	// has stopped: its position does not change until the next generation.
	Broken struct {
		Generation int
		Blame
	}
	// Admits says that all members have agreed in the barrier of a step to let replacements in
	// after it. This process has applied the step, and stopped.
	Admits struct{ Generation int }
	// Retires is Admits of a process that was told to end: the others go on without it once one of
	// them has the state of the training.
	Retires struct{ Generation int }
	// Done says that this process has done its last step, and has stopped.
	Done struct{ Generation int }

	// Probed says which members of a generation this process cannot reach, although they are not
	// known to be dead.
	Probed struct {
		Generation int
		Unreached  []ID
	}

	// Revoked says that a member has found a generation broken.
	Revoked struct{ Generation int }
	// Posted is where a member of a generation has stopped, or that a replacement is ready, and
	// what it says of the others.
	Posted struct {
		Generation int
		ID         ID
		Position   Position
		Report
	}
	// Decided is the next generation.
	Decided struct{ View View }
	// Dead is a process that has ended.
	Dead struct{ ID ID }
	// Lives says that a member knows that others wait for it to stop: it is busy.
	Lives struct {
		Generation int
		ID         ID
	}
	// Holds says that a member that has entered the generation without the state of the training
	// has it: see Hold.
	Holds struct {
		Generation int
		ID         ID
	}
	// Took says that a process is made for one of several parts of the model.
	Took struct {
		ID          ID
		Part, Parts int
	}
	// Lingers says that others have waited a while for this process to stop, and it has not.
	Lingers struct{ Generation int }
	// GraceOver says that members which have not posted where they have stopped, and do not live,
	// had time enough, and LateOver that also those had that live.
	GraceOver struct{ Generation int }
	LateOver  struct{ Generation int }
	// GiveUp says that the members have waited long enough for more processes.
	GiveUp struct{ Generation int }
)

// Action is what the driver has to do. Until the actions of an event are on their way, it passes no
// other event.
type Action interface{ action() }

// The actions.
type (
	// Revoke tells the members that a generation is broken.
	Revoke struct{ Generation int }
	// Interrupt ends the calls of a generation on this process. Broken follows.
	Interrupt struct{ Generation int }
	// Await says that a member has stopped, and waits for this process. Lingers follows in a while.
	Await struct{ Generation int }
	// Live tells the members of a generation that this process lives.
	Live struct{ Generation int }
	// Hold tells who observes a generation that this process has the state of the training now, so
	// that another one that has it is not the only one.
	Hold struct{ Generation int }
	// Probe finds out which members of a view this process cannot reach. Probed follows.
	Probe struct{ View View }
	// Post tells the members of a generation where this process has stopped, or, with the Phase
	// Empty, that it is ready. GraceOver and LateOver follow in a while after the first one in a
	// generation.
	Post struct {
		Generation int
		Position   Position
		Report
	}
	// Propose puts a view into the register. Decided follows, with the first view of its generation
	// that was put there.
	Propose struct{ View View }
	// Connect connects this process to the members of a generation. Between Connected and CaughtUp
	// it applies the step before View.Next, if it has reduced and not applied that, and rank 0
	// hands its state over to View.Fresh. Then it goes on with step View.Next.
	Connect struct{ View View }
	// Stop ends the process's part in the job.
	Stop struct{ Why Reason }
)

func (Revoke) action()    {}
func (Interrupt) action() {}
func (Await) action()     {}
func (Live) action()      {}
func (Hold) action()      {}
func (Probe) action()     {}
func (Post) action()      {}
func (Propose) action()   {}
func (Connect) action()   {}
func (Stop) action()      {}

// Reason says why a process stops.
type Reason uint8

// The reasons.
const (
	Finished   Reason = iota // the last step is done
	LeftBehind               // the others go on without it
	TooFew                   // fewer processes are alive than Limits.Least
	StateLost                // no process with the state of the training is alive
	Failing                  // the members cannot take a step together, and it is not clear why
	Retired                  // it was told to end, and the others go on
	Surplus                  // there are not enough others for another replica
)

// Report is what a process says of the others when it stops.
type Report struct {
	Unreached []ID `json:",omitempty"` // it cannot reach them: see Probed
	Idle      bool `json:",omitempty"` // it has completed no step of the generation: see Stepped
	Blame
}

// Blame says which member is at fault as far as a process can tell, and why; 0 if it cannot.
type Blame struct {
	Blames ID     `json:",omitempty"`
	Why    string `json:",omitempty"`
}

// Limits bound the number of members.
type Limits struct{ Least, Most int }

// Process is one process of a job.
type Process struct {
	id     ID
	limits Limits

	state State
	view  View // of the generation; the last one that a replacement has heard of
	rank  int  // in it, -1 for none
	at    Position

	dead      map[ID]bool
	posted    map[ID]Posted // in the generation
	blame     Blame         // as it stopped in the generation
	stepped   bool          // it has completed a step of the generation
	lives     map[ID]bool   // members that reported being alive in this generation: see Lives
	holds     map[ID]bool   // members that reported having the state: see Holds
	graceOver bool
	lateOver  bool
	revoked   bool // all members hear that the generation has ended: see Revoke
	awaits    bool // it has said that it lives, and waits for others: see Await
	settled   int  // all ranks below this one have posted, or are dead
	proposed  bool
	behind    bool // the others have gone on
}

// NewProcess returns a member of the first generation, and what it does first.
func NewProcess(id ID, limits Limits, first View) (*Process, []Action) {
	p := newProcess(id, limits, first)
	p.at = Position{Phase: Computing}
	return p, p.enter(first)
}

// NewReplacement returns a process that is ready to join a job in the present generation, and what
// it does first.
func NewReplacement(id ID, limits Limits, present View) (*Process, []Action) {
	p := newProcess(id, limits, present)
	return p, p.gatherMembers()
}

func newProcess(id ID, limits Limits, view View) *Process {
	return &Process{id: id, limits: limits, view: view, rank: view.Rank(id), dead: map[ID]bool{},
		posted: map[ID]Posted{}, lives: map[ID]bool{}, holds: map[ID]bool{}}
}

// Divide says that the model has parts, and which one this process is made for. It comes before all
// events.
func (p *Process) Divide(parts, part int) {
	p.view, p.at.Part = p.view.divided(parts), part
}

// Step takes an event and returns what to do, in this order.
func (p *Process) Step(e Event) []Action {
	if p.state == Stopped {
		return nil
	}
	return e.apply(p)
}

// State returns what the process is doing.
func (p *Process) State() State { return p.state }

// View returns the generation of the process.
func (p *Process) View() View { return p.view }

// Waits reports whether replacements are ready, so that the members should agree to admit them in
// the barrier of the step that is under way.
func (p *Process) Waits() bool { return p.grows(p.limits.Most) }

// Ready reports whether replacements are ready, also if all members are there.
func (p *Process) Ready() bool { return p.grows(len(p.view.Members) + len(p.posted)) }

// grows reports whether replacements are ready with whom there are more members, of so many.
func (p *Process) grows(most int) bool {
	next := View{Parts: p.view.Parts}
	for r, id := range p.view.Members {
		if !p.dead[id] {
			next.add(id, p.view.At[r])
		}
	}
	members := next.Members
	for _, id := range p.replacements() {
		if p.reaches(id, members) {
			next.add(id, p.posted[id].Position)
		}
	}
	next.limit(most)
	return p.state == Training && len(next.Members) > len(members)
}

// enter begins a generation that the process is a member of. One of too few members waits for more.
func (p *Process) enter(v View) []Action {
	p.hear(v)
	if !p.enough(v) {
		return p.gatherMembers()
	}
	p.state = Connecting
	if len(p.alive(v.Members)) < len(v.Members) {
		return []Action{Connect{v}, Interrupt{v.Generation}}
	}
	return []Action{Connect{v}}
}

// enough reports whether a generation has members enough to train.
func (p *Process) enough(v View) bool {
	return v.Ending || len(v.Members) >= max(p.limits.Least, v.Parts)
}

// hear makes a generation the present one.
func (p *Process) hear(v View) {
	p.view, p.graceOver, p.lateOver, p.proposed = v, false, false, false
	p.rank, p.revoked, p.awaits, p.settled = v.Rank(p.id), false, false, 0
	p.posted, p.lives, p.holds = map[ID]Posted{}, map[ID]bool{}, map[ID]bool{}
	p.blame, p.stepped = Blame{}, false
}

// member reports whether the process is a member of the present generation, and no replacement.
func (p *Process) member() bool { return p.rank >= 0 }

// gatherMembers stops, finds out whom it can reach, posts that, and waits for the next generation.
func (p *Process) gatherMembers() []Action {
	if p.behind {
		return p.stop(LeftBehind)
	}
	p.state = Gathering
	return []Action{Probe{p.view}}
}

// decide proposes the next generation once every member has posted where it has stopped, has died,
// or had time enough.
func (p *Process) decide() []Action {
	switch _, ready := p.posted[p.id]; {
	case p.state != Gathering || p.proposed:
		return nil
	case !p.member():
		return p.waitInVain()
	case !ready:
		return nil
	}
	next, complete, silent := p.present()
	if !complete {
		return nil
	}
	whole := next.Whole()
	if whole && p.choose(&next) {
		return p.stop(Failing)
	}
	switch {
	case !whole && next.Ending:
		return p.stop(Finished)
	case !whole && silent: // it may have a state: it goes on, or it dies
		return nil
	case !whole:
		return p.stop(StateLost)
	case p.at.Retiring && next.Rank(p.id) < 0 && !p.enough(next): // the others wait for more
		return p.stop(Retired)
	case !p.enough(next) && next.Fault == 0, !next.Whole(): // others come, or links are mended
		return nil
	}
	p.proposed = true
	return []Action{Propose{next}}
}

// present returns the next generation, of those present members that go on. It is complete unless
// it must wait for a member; silent says that a member is alive and did not answer in time.
func (p *Process) present() (next View, complete, silent bool) {
	next = View{Generation: p.view.Generation + 1, Ending: p.view.Ending, Parts: p.view.Parts}
	for members := p.view.Members; p.settled < len(members); p.settled++ {
		id := members[p.settled]
		if _, ok := p.posted[id]; !ok && !p.dead[id] {
			break
		}
	}
	if p.settled < len(p.view.Members) && !p.graceOver {
		return next, false, false
	}
	var retires View
	for _, id := range p.view.Members {
		post, ok := p.posted[id]
		switch {
		case post.Position.Leaving:
			next.Ending = true
		case p.dead[id]:
		case !ok && (!p.graceOver || p.lives[id] && !p.lateOver):
			return next, false, false
		case !ok:
			silent = true
		case post.Position.Retiring:
			post.Position.Retiring = false
			retires.add(id, post.Position)
		default:
			next.add(id, post.Position)
		}
	}
	for r := 0; r < len(retires.At) && !silent && !next.Whole(); r++ {
		if at := retires.At[r]; at.Phase != Empty && !next.has(at.Part) {
			next.add(retires.Members[r], at) // it hands its state over first
		}
	}
	if next.Ending && next.Parts > 0 { // nobody hands a state over that nobody has
		next.keep(slices.DeleteFunc(slices.Clone(next.Members), func(id ID) bool {
			return !next.has(next.At[next.Rank(id)].Part)
		}))
	}
	next.order()
	return next, true, silent
}

// waitInVain stops a replacement that nobody can let in.
func (p *Process) waitInVain() []Action {
	switch {
	case slices.ContainsFunc(p.view.Members, func(id ID) bool {
		return p.posted[id].Position.Leaving
	}):
		return p.stop(Finished)
	case len(p.alive(p.view.Members)) == 0:
		return p.stop(StateLost)
	}
	return nil
}

// lost returns the members that had a part of the model that none has any more.
func (p *Process) lost() (had []ID) {
	left := View{Parts: p.view.Parts}
	for id, post := range p.posted {
		if !p.dead[id] {
			left.add(id, post.Position)
		}
	}
	for r, at := range p.view.At {
		if !left.has(at.Part) && (had == nil || at.Part == p.view.At[p.view.Rank(had[0])].Part) {
			had = append(had, p.view.Members[r])
		}
	}
	return had
}

// alive returns the processes that are not known to be dead.
func (p *Process) alive(ids []ID) []ID {
	return slices.DeleteFunc(slices.Clone(ids), func(id ID) bool { return p.dead[id] })
}

// leavesBehind returns the members that are alive, had a step left, and are not in the next
// generation.
func (p *Process) leavesBehind(next View) []ID {
	return slices.DeleteFunc(p.alive(p.view.Members), func(id ID) bool {
		return next.Rank(id) >= 0 || p.posted[id].Position.Leaving
	})
}

// awaited returns the members that are alive and have not stopped although another one waits for
// that, and whether one that waits has the state of the training.
func (p *Process) awaited() (ids []ID, whole bool) {
	waits := false
	for id, post := range p.posted {
		if at := post.Position; p.view.Rank(id) >= 0 && !at.Leaving {
			waits, whole = true, whole || at.Phase != Empty && !p.dead[id]
		}
	}
	if !waits {
		return nil, false
	}
	return slices.DeleteFunc(p.alive(p.view.Members), func(id ID) bool {
		_, stopped := p.posted[id]
		return stopped
	}), whole
}

// replacements returns those that are alive and ready, the oldest first.
func (p *Process) replacements() []ID {
	ids := p.alive(slices.Sorted(maps.Keys(p.posted)))
	return slices.DeleteFunc(ids, func(id ID) bool { return p.view.Rank(id) >= 0 })
}

func (p *Process) stop(why Reason) []Action {
	p.state = Stopped
	return []Action{Stop{why}}
}

// current reports whether an event is of the generation, and the process has not stopped in it.
func (p *Process) current(generation int) bool {
	return generation == p.view.Generation && p.state != Gathering
}

func (e At) apply(p *Process) []Action {
	if p.state == CatchingUp || p.state == Training {
		e.Position.Part = p.at.Part
		p.at = e.Position
	}
	return nil
}

func (e Connected) apply(p *Process) []Action {
	if !p.current(e.Generation) || p.state != Connecting {
		return nil
	}
	p.state = CatchingUp
	return nil
}

func (e CaughtUp) apply(p *Process) []Action {
	if !p.current(e.Generation) || p.state != CatchingUp {
		return nil
	}
	p.state, p.at = Training, Position{Step: p.view.Next(), Phase: Computing, Part: p.at.Part}
	return nil
}

func (e Stepped) apply(p *Process) []Action {
	first := !p.stepped && p.current(e.Generation)
	p.stepped = p.stepped || first
	if first && p.view.New(p.id) {
		return []Action{Hold(e)}
	}
	return nil
}

func (e Broken) apply(p *Process) []Action {
	if !p.current(e.Generation) {
		return nil
	}
	p.blame = e.Blame
	if p.revoked {
		return p.gatherMembers()
	}
	return append([]Action{Revoke{e.Generation}}, p.gatherMembers()...)
}

func (e Probed) apply(p *Process) (actions []Action) {
	if e.Generation != p.view.Generation || p.state != Gathering {
		return nil
	}
	report := Report{e.Unreached, p.member() && !p.stepped, p.blame}
	before, ready := p.posted[p.id]
	if !ready || !slices.Equal(before.Unreached, e.Unreached) {
		p.posted[p.id] = Posted{e.Generation, p.id, p.at, report}
		actions = append(actions, Post{e.Generation, p.at, report})
	}
	if len(e.Unreached) > 0 { // the link may be mended
		actions = append(actions, Probe{p.view})
	}
	return append(actions, p.decide()...)
}

func (e Admits) apply(p *Process) []Action {
	if !p.current(e.Generation) {
		return nil
	}
	return p.gatherMembers()
}

func (e Retires) apply(p *Process) []Action {
	if !p.current(e.Generation) {
		return nil
	}
	p.at.Retiring = true
	return p.gatherMembers()
}

func (e Done) apply(p *Process) []Action {
	if !p.current(e.Generation) {
		return nil
	}
	p.at.Leaving = true
	return append([]Action{Post{e.Generation, p.at, Report{}}}, p.stop(Finished)...)
}

func (e Revoked) apply(p *Process) []Action {
	if !p.current(e.Generation) {
		return nil
	}
	p.revoked = true
	return []Action{Interrupt(e)}
}

func (e Posted) apply(p *Process) []Action {
	if e.Generation != p.view.Generation {
		return nil
	}
	p.posted[e.ID] = e
	if _, ready := p.posted[p.id]; !ready && p.member() && p.view.Rank(e.ID) >= 0 &&
		!e.Position.Leaving {
		if p.awaits {
			return nil
		}
		p.awaits = true
		return []Action{Await{e.Generation}} // also to let replacements in
	}
	return p.decide()
}

func (e Lingers) apply(p *Process) []Action {
	if _, ready := p.posted[p.id]; e.Generation != p.view.Generation || ready || p.lives[p.id] {
		return nil
	}
	p.lives[p.id] = true
	return []Action{Live(e)}
}

func (e Lives) apply(p *Process) []Action {
	if e.Generation == p.view.Generation {
		p.lives[e.ID] = true
	}
	return nil
}

func (e Holds) apply(p *Process) []Action {
	if e.Generation == p.view.Generation {
		p.holds[e.ID] = true
	}
	return nil
}

func (e Took) apply(p *Process) []Action {
	p.view = p.view.divided(e.Parts)
	return nil
}

func (e Decided) apply(p *Process) []Action {
	switch {
	case e.View.Generation <= p.view.Generation:
		return nil
	case e.View.Rank(p.id) >= 0:
		return p.enter(e.View)
	case !p.member():
		p.hear(e.View)
		return p.gatherMembers()
	case p.state != Gathering: // its calls end first
		p.behind = true
		return []Action{Interrupt{p.view.Generation}}
	case p.at.Retiring:
		return p.stop(Retired)
	case e.View.Ending && p.at.Phase == Empty:
		return p.stop(Finished)
	}
	if _, ready := p.posted[p.id]; ready && e.View.Parts > 0 && e.View.Fault != p.id &&
		p.reaches(p.id, e.View.Members) {
		return p.stop(Surplus)
	}
	return p.stop(LeftBehind)
}

func (e Dead) apply(p *Process) []Action {
	p.dead[e.ID] = true
	if p.state != Gathering && p.view.Rank(e.ID) >= 0 {
		p.revoked = true
		return []Action{Interrupt{p.view.Generation}} // of calls that wait for it
	}
	return p.decide()
}

func (e GraceOver) apply(p *Process) []Action {
	if e.Generation != p.view.Generation {
		return nil
	}
	p.graceOver = true
	return p.decide()
}

func (e LateOver) apply(p *Process) []Action {
	if e.Generation != p.view.Generation {
		return nil
	}
	p.lateOver = true
	return p.decide()
}

func (e GiveUp) apply(p *Process) []Action {
	if p.state != Gathering || e.Generation != p.view.Generation || !p.member() {
		return nil
	}
	return p.stop(TooFew)
}
