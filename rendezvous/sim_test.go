package rendezvous

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/sim"
)

// The simulation moves the server of a job, or of the register of an elastic one, and the processes
// that use it, one move at a time, by a seed. Links between hosts are slow, lose packets, and are
// cut one way or both, for a while or for good. Processes come late, twice, from other jobs, stop
// and go on, and die. Clocks begin anywhere.
const (
	simTimeout = 5 * time.Second
	// simKeep is when a system gives up a connection over which nothing comes.
	simKeep = 10 * time.Second
	simSlow = 50 * time.Millisecond
	// simBound is how long after the last fault all processes have ended.
	simBound = 4*simTimeout + simKeep + linger + 4*newsTime
)

// packet is a frame on its way, or nil for the end of a connection.
type packet struct {
	frame *frame
	sent  time.Duration
}

// simConn is a connection of a process to the server.
type simConn struct {
	peer   *simRank
	member *member
	to     [2][]packet // the server, the peer
	closed [2]bool     // by the server, the peer
}

// simTimer is what its process does after a while.
type simTimer struct {
	at time.Duration
	do func()
}

// simRank is a process: a rank of a job, or a process of an elastic one.
type simRank struct {
	id      identity
	host    int
	came    time.Duration
	conn    *simConn // nil for the server
	timers  []simTimer
	calls   map[uint64]func(frame)
	last    uint64
	dead    bool
	paused  bool
	willed  time.Duration // when the server had its will
	ended   error         // how its part ended
	failure *Failure      // that it has heard of
	read    int           // entries of the log that it has read
	writes  int           // entries that it will write
	round   int           // of all-gathers
}

type simulation struct {
	*sim.Sim
	core     core
	register bool
	origin   time.Time
	server   *simRank
	ranks    []*simRank
	conns    []*simConn
	local    map[*wait]func([]byte)
	faults   int
	rounds   int

	log     []string       // what the entries of the log are, as first seen
	wrote   map[string]int // where the entries are that processes have written
	sums    map[string]bool
	entered map[string]time.Duration // when values of all-gathers were set
	blamed  map[int]bool             // ranks that may be named in a failure
	failure *Failure                 // the first that anybody has heard of
	failed  time.Duration            // when the server knew it
	stops   time.Duration            // when the server began to end
	asked   int                      // ranks to serve
	froze   time.Duration            // when it was stopped last
	gone    bool                     // the server has ended
	wrong   error
}

func (s *simulation) fail(format string, args ...any) {
	if s.wrong == nil {
		s.wrong = fmt.Errorf(format, args...)
	}
}

// drawn is a job of a seed.
func drawn(seed uint64, log *strings.Builder) *simulation {
	rng := rand.New(rand.NewPCG(seed, 58))
	size := 2 + rng.IntN(5)
	hosts := 1 + rng.IntN(size)
	s := newSimulation(rng, size, hosts, rng.IntN(2) == 0, log)
	for r := 1; r < size; r++ {
		s.come(testIdentity(r, s.core.me.size), rng.IntN(hosts))
	}
	s.faults = rng.IntN(6)
	return s
}

func newSimulation(rng *rand.Rand, size, hosts int, register bool,
	log *strings.Builder) *simulation {
	s := &simulation{Sim: sim.New(rng, hosts, log), register: register, rounds: 4,
		local: map[*wait]func([]byte){}, wrote: map[string]int{}, sums: map[string]bool{},
		blamed: map[int]bool{}, entered: map[string]time.Duration{}}
	s.origin = time.Unix(rng.Int64N(1e9), 0)
	me := testIdentity(0, size)
	if register {
		me.size, me.lasting = maxRanks, true
	}
	s.core = newCore(me, register)
	s.server = s.start(me, 0, 0)
	return s
}

// start begins a process after a while.
func (s *simulation) start(id identity, host int, after time.Duration) *simRank {
	r := &simRank{id: id, host: host, calls: map[uint64]func(frame){}, writes: 1 + s.Rand.IntN(4)}
	s.ranks = append(s.ranks, r)
	r.came = s.Now + after
	r.timers = []simTimer{{r.came, func() { s.begin(r) }}}
	return r
}

// come lets a process of an identity come in a while. Another one may come that has the same, or
// one of another job, version or size.
func (s *simulation) come(id identity, host int) {
	r := s.start(id, host, s.Between(0, time.Second))
	r.conn = s.dialled(r)
	if s.register || s.Rand.IntN(10) > 0 {
		return
	}
	how := []string{"twice", "job", "version", "size"}[s.Rand.IntN(4)]
	s.stray(id, how, host, s.Between(0, time.Second))
}

// stray lets another process come with the number of a rank.
func (s *simulation) stray(id identity, how string, host int, after time.Duration) {
	s.blamed[id.rank] = true
	id.pid = 7
	switch how {
	case "job":
		id.job = "k"
	case "version":
		id.protocol++
	case "size":
		id.size++
	}
	r := s.start(id, host, after)
	r.conn = s.dialled(r)
}

func (s *simulation) dialled(r *simRank) *simConn {
	c := &simConn{peer: r}
	s.conns = append(s.conns, c)
	return c
}

func (r *simRank) runs() bool { return !r.dead && !r.paused && r.ended == nil }

// after lets a process do something in a while.
func (s *simulation) after(r *simRank, d time.Duration, do func()) {
	r.timers = append(r.timers, simTimer{s.Now + d, do})
}

// tell gives an event to the core, and carries out what it says.
func (s *simulation) tell(event func()) {
	s.core.now = s.origin.Add(s.Now)
	event()
	if s.failed == 0 && s.core.values[downKey] != nil {
		s.failed = s.Now
	}
	todo := s.core.todo
	s.core.todo = nil
	for _, a := range todo {
		s.carry(a)
	}
}

func (s *simulation) carry(a action) {
	switch a := a.(type) {
	case send:
		s.Logf("server: kind %d, id %d to %d", a.frame.kind, a.frame.id, a.to.rank)
		if s.core.members[a.to.rank] != a.to {
			s.fail("the server sends to rank %d, which has left", a.to.rank)
		}
		if a.frame.kind == kindServe {
			s.asked++
		}
		s.push(s.connOf(a.to), 1, &a.frame)
		if a.reports {
			s.after(s.server, s.Between(0, time.Millisecond), func() {
				s.tell(func() { s.core.wrote(a.to, a.frame.kind) })
			})
		}
	case drop:
		s.hangUp(s.connOf(a.from), 0)
	case answer:
		s.local[a.to](a.value)
	case remind:
		s.after(s.server, a.after, func() { s.tell(func() { s.core.due(a.turn) }) })
	case spread:
		s.after(s.server, spreadTime, func() { s.tell(func() { s.core.spreads(a.call) }) })
	case end:
		s.gone = true
		most := linger + time.Duration(s.asked+2)*newsTime + simSlow
		if took := s.Now - s.stops; took > most && s.froze < s.stops {
			s.fail("the server has taken %v to end", took)
		}
		for _, c := range s.conns {
			s.hangUp(c, 0)
		}
	}
}

func (s *simulation) connOf(m *member) *simConn {
	return s.conns[slices.IndexFunc(s.conns, func(c *simConn) bool { return c.member == m })]
}

// push sends a frame to the server (0) or to the peer (1) of a connection, nil for its end.
func (s *simulation) push(c *simConn, to int, f *frame) {
	c.to[to] = append(c.to[to], packet{f, s.Now})
}

// hangUp ends a connection at the end of the server (0) or of the peer (1).
func (s *simulation) hangUp(c *simConn, by int) {
	if c.member != nil && !c.closed[by] {
		c.closed[by] = true
		s.push(c, 1-by, nil)
	}
}

// call sends a request of a process, and hears its answer.
func (s *simulation) call(r *simRank, k kind, body []byte, then func(f frame)) (id uint64) {
	r.last++
	r.calls[r.last] = then
	s.push(r.conn, 0, &frame{kind: k, id: r.last, body: body})
	return r.last
}

// get waits for a value, in the process of the server or in another one.
func (s *simulation) get(r *simRank, key string, then func(value []byte)) {
	if r != s.server {
		s.call(r, kindGet, packString(nil, key), func(f frame) { then(f.body) })
		return
	}
	w := &wait{get: key}
	s.local[w] = func(value []byte) { s.after(r, 0, func() { then(value) }) }
	s.tell(func() { s.core.await(w) })
}

// swap is compare and swap, for a key that is not set.
func (s *simulation) swap(r *simRank, key string, value string, then func(there string, won bool)) {
	if r == s.server {
		s.tell(func() {
			there, won := s.core.swap(key, nil, []byte(value))
			s.after(r, 0, func() { then(string(there), won) })
		})
		return
	}
	body := packBytes(packBytes(packString(nil, key), nil), []byte(value))
	s.call(r, kindSwap, body, func(f frame) {
		u := unpacker{rest: f.body}
		won := u.int() == 1
		then(u.string(), won)
	})
}

// begin is the first step of a process: it connects, which takes until both ways are open.
func (s *simulation) begin(r *simRank) {
	if r == s.server {
		s.live(r)
		return
	}
	there, back := &s.Links[r.host][0], &s.Links[0][r.host]
	switch {
	case s.Now-r.came > simTimeout:
		if !s.gone {
			s.named(r, 0)
		}
		s.ends(r, notFound(timeoutError{simTimeout}, errors.New("no answer")))
	case there.Cut || back.Cut || s.server.paused || s.server.dead || s.gone:
		s.after(r, retryTime, func() { s.begin(r) })
	default:
		s.after(r, 3*(there.Delay+back.Delay), func() { s.admit(r) })
	}
}

// ends ends the part of a process.
func (s *simulation) ends(r *simRank, why error) {
	s.Say("rank %d: %v", r.id.rank, why)
	r.ended = why
}

func (s *simulation) admit(r *simRank) {
	if s.gone || s.server.dead || s.server.paused {
		s.begin(r)
		return
	}
	var err error
	s.tell(func() { r.conn.member, err = s.core.admit(r.id) })
	if err != nil {
		s.tell(func() { s.core.turnAway("a host", r.id, err) })
		s.ends(r, err)
		return
	}
	s.live(r)
}

// live lets a process do what it does: it watches for failures, reads the log and writes to it,
// counts, and takes part in all-gathers.
func (s *simulation) live(r *simRank) {
	if !s.register {
		s.get(r, downKey, func(value []byte) { s.hears(r, decodeFailure(value)) })
		s.gather(r)
	}
	s.reads(r)
	s.writes(r, 0)
}

// hears checks a failure that a rank hears of, which then leaves.
func (s *simulation) hears(r *simRank, f *Failure) {
	if r.ended != nil {
		return
	}
	s.Logf("rank %d hears: %v", r.id.rank, f)
	r.failure = f
	if s.failure == nil {
		s.failure = f
	}
	if f.Error() != s.failure.Error() {
		s.fail("rank %d hears of %v, the first was %v", r.id.rank, f, s.failure)
	}
	s.named(r, f.Rank)
	if strings.Contains(f.Error(), errToken.Error()) {
		s.fail("a stranger has ended the job: %v", f)
	}
	for _, other := range s.ranks {
		if early := endedEarly("signal 9"); f.Rank == other.id.rank && other.conn != nil &&
			other.conn.member != nil && f.Cause.Error() == early.Error() {
			s.fail("rank %d hears of %v, and it had joined", r.id.rank, f)
		}
		if f.Rank == other.id.rank && !f.Declared && other.willed > 0 &&
			s.failed-other.willed < willTime-time.Second {
			s.fail("rank %d hears of %v, against its will", r.id.rank, f)
		}
	}
	if r == s.server && s.Now < s.failed+spreadTime {
		for _, m := range s.core.connected() {
			if !m.told {
				s.fail("rank 0 hears of %v before rank %d", f, m.rank)
			}
		}
	}
	s.after(r, s.Between(0, time.Second), func() {
		if r.ended == nil {
			s.leave(r, f)
		}
	})
}

// named checks that nobody is to blame who has done nothing.
func (s *simulation) named(r *simRank, blamed int) {
	if !s.blamed[blamed] {
		s.fail("rank %d blames rank %d, to which nothing has happened", r.id.rank, blamed)
	}
}

func (s *simulation) reads(r *simRank) {
	i, last := r.read, r.last
	if r != s.server && s.Rand.IntN(4) == 0 { // it gives up, and asks again
		s.after(r, s.Between(0, time.Second), func() {
			if r.read == i {
				r.calls[last+1] = func(frame) {}
				s.push(r.conn, 0, &frame{kind: kindCancel, id: last + 1})
				s.reads(r)
			}
		})
	}
	s.get(r, fmt.Sprint("log/", i), func(value []byte) {
		if i != r.read {
			s.fail("process %d gets entry %d twice", r.id.rank, i)
		}
		s.sees(r, i, string(value))
		r.read++
		s.reads(r)
	})
}

// sees compares an entry of the log with what others have seen.
func (s *simulation) sees(r *simRank, i int, entry string) {
	if i == len(s.log) {
		s.log = append(s.log, entry)
	}
	if i > len(s.log) || s.log[i] != entry {
		s.fail("process %d sees %q as entry %d, others %q", r.id.rank, entry, i, s.log)
	}
}

func (s *simulation) writes(r *simRank, i int) {
	if r.writes == 0 {
		return
	}
	entry := fmt.Sprintf("%d.%d", r.id.rank, r.writes)
	s.swap(r, fmt.Sprint("log/", i), entry, func(there string, won bool) {
		for len(s.log) <= i { // nobody has read it yet
			s.log = append(s.log, there)
		}
		s.sees(r, i, there)
		if won != (there == entry) {
			s.fail("process %d writes %q, there is %q, it has won: %t", r.id.rank, entry, there,
				won)
		}
		if won {
			s.wrote[entry] = i
			r.writes--
		}
		s.after(r, s.Between(0, 100*time.Millisecond), func() { s.writes(r, i+1) })
	})
}

// gather takes part in the all-gather of a round. Join has the first one.
func (s *simulation) gather(r *simRank) {
	if r.round == s.rounds {
		stays := s.Between(0, linger/2)
		if s.Rand.IntN(4) == 0 {
			stays *= 20
		}
		s.after(r, stays, func() {
			if r.ended == nil {
				s.leave(r, ErrClosed)
			}
		})
		return
	}
	round := r.round
	g := gathering{key: fmt.Sprint("round/", round), size: s.core.me.size, rank: r.id.rank,
		value: fmt.Append(nil, r.id.rank, ".", round)}
	id := s.ask(r, kindGather, g, func(body []byte) {
		if r.round == round && r.ended == nil {
			s.passes(r, g, body)
		}
	})
	s.after(r, simTimeout, func() {
		if r.round == round && r.ended == nil && r.failure == nil {
			s.late(r, g, id)
		}
	})
}

// ask asks for the values of a gathering, in the process of the server or in another one. It
// returns the number of the request.
func (s *simulation) ask(r *simRank, k kind, g gathering, then func(body []byte)) uint64 {
	if r != s.server {
		return s.call(r, k, g.pack(0), func(f frame) { then(f.body) })
	}
	w := &wait{all: &g}
	s.local[w] = func(value []byte) { s.after(r, 0, func() { then(value) }) }
	s.tell(func() {
		if k == kindPeek {
			s.core.do(answer{w, s.core.pack(g, 0)})
			return
		}
		s.entered[rankKey(g.key, 0)] = s.Now
		s.core.put(rankKey(g.key, 0), g.value)
		s.core.await(w)
	})
	return 0
}

// passes checks what an all-gather has given to a rank.
func (s *simulation) passes(r *simRank, g gathering, body []byte) {
	u := unpacker{rest: body}
	for rank := range g.size {
		if want := fmt.Append(nil, rank, ".", r.round); !bytes.Equal(u.bytes(), want) {
			s.fail("rank %d: another value of rank %d in round %d", r.id.rank, rank, r.round)
		}
	}
	r.round++
	s.after(r, s.Between(0, 100*time.Millisecond), func() { s.gather(r) })
}

// late ends a round for which a rank has waited too long: it asks who is missing.
func (s *simulation) late(r *simRank, g gathering, id uint64) {
	round, began := r.round, s.Now
	if r != s.server {
		r.calls[id] = func(frame) {} // it may be on its way
		s.push(r.conn, 0, &frame{kind: kindCancel, id: id})
	}
	err := error(timeoutError{simTimeout})
	s.ask(r, kindPeek, g, func(body []byte) {
		if r.round != round || r.ended != nil {
			return
		}
		u := unpacker{rest: body}
		there := make([][]byte, g.size)
		for rank := range there {
			there[rank] = u.bytes()
		}
		if _, err = g.outcome("join", there, true, err); err == nil {
			s.passes(r, g, body)
			return
		}
		var missing *MissingError
		if errors.As(err, &missing) {
			for _, rank := range missing.Ranks {
				if at := s.entered[rankKey(g.key, rank)]; at > 0 && at < began {
					s.fail("rank %d misses rank %d, which has entered", r.id.rank, rank)
				}
			}
		}
		s.gives(r, err)
	})
	s.after(r, newsTime, func() {
		if r.round == round && r.ended == nil {
			s.gives(r, unanswered{err})
		}
	})
}

// gives lets a rank give up, and tell the others why.
func (s *simulation) gives(r *simRank, err error) {
	f := (&World{Rank: r.id.rank}).failureOf(err)
	s.named(r, f.Rank)
	leave := func() {
		if r.ended == nil {
			s.leave(r, err)
		}
	}
	s.swap(r, downKey, string(f.encode()), func(string, bool) { leave() })
	s.after(r, newsTime, leave)
}

// leave ends the part of a rank with a goodbye.
func (s *simulation) leave(r *simRank, why error) {
	s.ends(r, why)
	if r == s.server {
		s.stops = s.Now
		s.tell(s.core.stop)
		return
	}
	s.push(r.conn, 0, &frame{kind: kindBye})
}

// arrives is a packet at the server (0) or at the peer of a connection (1).
func (s *simulation) arrives(c *simConn, at int) {
	p := c.to[at][0]
	c.to[at] = c.to[at][1:]
	switch {
	case c.closed[at] || c.member == nil:
	case at == 0 && (p.frame == nil || p.frame.kind == kindBye):
		err := error(nil)
		if p.frame == nil {
			err = errors.New("EOF")
		}
		s.Logf("server: rank %d has left: %v", c.member.rank, err)
		s.tell(func() { s.core.left(c.member, err) })
	case at == 0:
		if g, _, err := unpackGathering(p.frame.body); p.frame.kind == kindGather && err == nil {
			s.entered[rankKey(g.key, g.rank)] = s.Now
		}
		s.Logf("server: kind %d, id %d from %d", p.frame.kind, p.frame.id, c.member.rank)
		s.tell(func() {
			if err := s.core.hear(c.member, *p.frame); err != nil {
				s.fail("rank %d: %v", c.member.rank, err)
			}
		})
	case p.frame == nil || c.peer.ended != nil:
		if c.peer.ended == nil {
			s.named(c.peer, 0)
			s.ends(c.peer, s.server.id.loss(errors.New("EOF")))
		}
		if p.frame == nil {
			s.hangUp(c, 1)
		}
	case p.frame.kind == kindBye:
		u := unpacker{rest: p.frame.body}
		if failure := u.bytes(); failure != nil {
			s.hears(c.peer, decodeFailure(failure))
			s.ends(c.peer, c.peer.failure)
		} else {
			s.ends(c.peer, ErrClosed)
		}
		s.hangUp(c, 1)
	case p.frame.kind == kindServe && s.Rand.IntN(4) > 0:
		s.push(c, 0, &frame{kind: kindServing, body: packString(nil, "there")})
	case p.frame.kind == kindServe:
	case p.frame.kind == kindMove:
		s.leave(c.peer, ErrClosed)
	default:
		then := c.peer.calls[p.frame.id]
		if delete(c.peer.calls, p.frame.id); then == nil {
			s.fail("rank %d gets answer %d twice", c.peer.id.rank, p.frame.id)
		} else if p.frame.kind == kindDone {
			then(*p.frame)
		} else {
			s.fail("rank %d: %q", c.peer.id.rank, p.frame.body)
		}
	}
}

// moves returns what may happen next.
func (s *simulation) moves() (moves []sim.Move) {
	may := func(at time.Duration, do func()) {
		moves = append(moves, sim.Move{At: at, Do: func() error { do(); return s.wrong }})
	}
	for _, c := range s.conns {
		host := c.peer.host
		ways := [2]*sim.Link{&s.Links[host][0], &s.Links[0][host]}
		for at, end := range [2]*simRank{s.server, c.peer} {
			if len(c.to[at]) > 0 && !end.dead && !end.paused {
				if when := ways[at].Arrives(c.to[at][0].sent); when < sim.Never {
					may(when, func() { s.arrives(c, at) })
				}
			}
		}
		if c.member != nil && (ways[0].Cut || ways[1].Cut) && !(c.closed[0] && c.closed[1]) {
			since := max(ways[0].Since, ways[1].Since)
			may(since+simKeep, func() {
				for at := range c.to { // both systems have given it up
					if !c.closed[at] {
						c.to[at] = []packet{{nil, s.Now}}
						s.arrives(c, at)
					}
				}
			})
		}
	}
	for _, r := range s.ranks {
		if r.dead || r.paused || r.ended != nil && r != s.server {
			continue
		}
		for i, t := range r.timers {
			may(t.at, func() { r.timers = slices.Delete(r.timers, i, i+1); t.do() })
		}
	}
	return moves
}

// fault lets something go wrong.
func (s *simulation) fault() {
	r := s.ranks[s.Rand.IntN(len(s.ranks))]
	there, back := &s.Links[r.host][0], &s.Links[0][r.host]
	if !r.runs() || r == s.server && s.register {
		return
	}
	s.faults--
	s.Disturbed = s.Now
	d := s.Between(0, 3*simTimeout)
	for _, other := range s.ranks {
		if other.host == r.host || r == s.server {
			s.blamed[other.id.rank] = true
		}
	}
	s.blamed[0] = true // whom a rank blames that is cut off itself
	switch kind := s.Rand.IntN(8); {
	case kind == 0:
		s.kill(r)
	case kind == 6 && !s.server.dead:
		s.Logf("a stranger comes")
		s.tell(func() { s.core.turnAway("a host", identity{}, errToken) })
	case kind == 7 && r.conn != nil && r.conn.member != nil:
		s.bequeath(r, s.Between(0, willTime/2))
	case kind == 1:
		s.pause(r, d)
	case kind == 2:
		there.Delay, back.Delay = s.Between(0, simSlow), s.Between(0, simSlow)
		there.Lossy = s.Rand.IntN(2) == 0
	case kind > 2 && kind < 6 && r.host > 0 && !there.Cut && !back.Cut:
		if s.Rand.IntN(2) == 0 {
			d = 0
		}
		s.Logf("cut host %d, kind %d, for %v", r.host, kind, d)
		s.Sever(d, [][]*sim.Link{{there, back}, {there}, {back}}[kind-3]...)
	}
}

// pause stops a process for a while.
func (s *simulation) pause(r *simRank, d time.Duration) {
	s.Say("stop %d for %v", r.id.rank, d.Round(time.Millisecond))
	r.paused = true
	s.After(d, func() {
		if r.paused, s.Disturbed = false, s.Now; r == s.server {
			s.froze = s.Now
		}
	})
}

// bequeath lets a rank say that rank 0 is to blame for its end, and end in a while.
func (s *simulation) bequeath(r *simRank, after time.Duration) {
	f := &Failure{Rank: 0, Cause: fmt.Errorf("will of rank %d", r.id.rank)}
	body := packBytes(packString(nil, willKey(r.id.rank)), f.encode())
	s.call(r, kindSet, body, func(frame) {
		r.willed = s.Now
		s.after(r, after, func() { s.kill(r) })
	})
}

// noticed checks soon that the server has noticed the end of a rank.
func (s *simulation) noticed(r *simRank) {
	killed, way := s.Now, &s.Links[r.host][0]
	s.After(2*time.Second, func() {
		if s.failed == 0 && s.server.runs() && s.froze < killed && !way.Cut && way.Since < killed {
			s.fail("nobody has noticed the end of rank %d", r.id.rank)
		}
	})
}

// kill ends a process. That of an elastic job is replaced.
func (s *simulation) kill(r *simRank) {
	s.Say("kill %d", r.id.rank)
	r.dead = true
	for _, c := range s.conns {
		if c.peer == r {
			s.hangUp(c, 1)
		} else if r == s.server {
			s.hangUp(c, 0)
		}
	}
	if s.register {
		s.come(testIdentity(len(s.ranks), s.core.me.size), r.host)
		return
	}
	if r.conn != nil && r.conn.member != nil && r.ended == nil && s.failed == 0 {
		s.noticed(r)
	}
	id := r.id
	id.ended, id.build = "signal 9", "a launcher's"
	s.After(s.Between(0, time.Second), func() { // its launcher says so
		if s.server.dead || s.gone {
			return
		}
		s.tell(func() {
			if _, err := s.core.admit(id); err != nil {
				s.core.turnAway("a launcher", id, err)
			} else {
				s.core.ended(id)
			}
		})
	})
}

// run runs the job to its end.
func (s *simulation) run() error {
	for range 100_000 {
		if s.faults > 0 && s.Rand.IntN(40) == 0 {
			s.fault()
		}
		if s.Now-s.Disturbed > simBound {
			break
		}
		moved, err := s.Step(s.moves())
		if err != nil {
			return err
		}
		if !moved {
			break
		}
	}
	return s.checked()
}

// checked checks that the job has ended well.
func (s *simulation) checked() error {
	for entry, i := range s.wrote {
		if at := slices.Index(s.log, entry); at != i || slices.Index(s.log[at+1:], entry) >= 0 {
			return fmt.Errorf("entry %q was written as %d, it is %d", entry, i, at)
		}
	}
	if key := fmt.Sprint("log/", len(s.log)); s.register && s.core.values[key] != nil {
		return fmt.Errorf("%s is set, and nobody has seen it", key)
	}
	if !s.register && !s.server.dead && !s.gone {
		return errors.New("the server does not end")
	}
	for _, r := range s.ranks {
		unread := r.read < len(s.log) || r.writes > 0
		switch {
		case r.dead:
		case r.ended == nil && !s.register:
			return fmt.Errorf("rank %d hangs in round %d", r.id.rank, r.round)
		case r.ended == nil && unread:
			return fmt.Errorf("process %d has read %d of %d entries, and has %d to write",
				r.id.rank, r.read, len(s.log), r.writes)
		case errors.Is(r.ended, ErrClosed) && r.round < s.rounds && !s.blamed[r.id.rank]:
			return fmt.Errorf("rank %d ends in round %d without an error", r.id.rank, r.round)
		}
	}
	return nil
}

// TestScenarios: each file of testdata has a job and what happens to it. Rank r runs on host r + 1.
func TestScenarios(t *testing.T) { sim.Scenarios(t, simTale) }

// simTale runs a scenario.
func simTale(t *testing.T, script string) string {
	t.Helper()
	var s *simulation
	for line := range strings.Lines(script) {
		words := strings.Fields(line)
		switch {
		case line[0] == '#' || len(words) == 0:
		case words[0] == "ranks":
			var size int
			sim.Scan(t, line, "ranks %d", &size)
			s = newSimulation(rand.New(rand.NewPCG(1, 1)), size, size, false, nil)
			s.Tale = &strings.Builder{}
			for r := range size {
				s.blamed[r] = true
			}
		case words[2] == "comes":
			var r int
			sim.Scan(t, words[3], "%d", &r)
			id := testIdentity(r, s.core.me.size)
			if after := sim.Lasts(t, words[1]); len(words) > 4 {
				s.stray(id, words[4], r, after)
			} else {
				rank := s.start(id, r, after)
				rank.conn = s.dialled(rank)
			}
		default:
			s.After(sim.Lasts(t, words[1]), func() { s.happens(t, words[2], words[3:]) })
		}
	}
	if err := s.run(); err != nil {
		fmt.Fprintln(s.Tale, err)
	}
	return s.Tale.String()
}

// happens lets something happen to ranks, or to the ways between hosts.
func (s *simulation) happens(t *testing.T, what string, args []string) {
	t.Helper()
	if s.Disturb(t, what, args) {
		return
	}
	var id int
	sim.Scan(t, args[0], "%d", &id)
	r := s.ranks[slices.IndexFunc(s.ranks, func(r *simRank) bool { return r.id.rank == id })]
	switch what {
	case "dies":
		s.kill(r)
	case "stops":
		s.pause(r, sim.Lasts(t, args[1]))
	case "blames":
		s.bequeath(r, time.Second)
	default:
		t.Fatalf("%s is no event", what)
	}
}

// TestTheServerOfAStoreLosesNothing: EURYALE_RENDEZVOUS_SEED=seed runs one alone.
func TestTheServerOfAStoreLosesNothing(t *testing.T) {
	sim.Seeds(t, "EURYALE_RENDEZVOUS_SEED", func(seed uint64, log *strings.Builder) error {
		return drawn(seed, log).run()
	})
}
