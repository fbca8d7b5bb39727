package rendezvous

import (
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/sim"
)

// The simulation moves the ranks of a job, or the processes of an elastic one and its register, one
// move at a time, by a seed. Links between hosts are slow, lose packets, and are cut one way or
// both, for a while or for good; some take connections and no data. Processes come late, twice,
// from other jobs, stop and go on, die, and leave one after the other. Clocks begin anywhere.
const (
	simTimeout = 5 * time.Second
	// simKeep is when a system gives up a connection over which nothing comes.
	simKeep = 10 * time.Second
	simSlow = 50 * time.Millisecond
	// simShow is how long a rank waits before it says for whom.
	simShow = simTimeout / 4
	// simBound is how long after the last fault all processes have ended.
	simBound = 4*simTimeout + simKeep + 20*linger
)

// packet is a frame on its way, nil for the end of a connection.
type packet struct {
	frame *frame
	sent  time.Duration
}

// The ends of a connection.
const (
	toServer = iota
	toClient
)

// simConn is a connection of a client to a server.
type simConn struct {
	server *simServer
	client *simClient
	member *member
	to     [2][]packet
	closed [2]bool // the end that packets come to
}

// simServer drives a core.
type simServer struct {
	core
	rank   *simRank
	local  map[*wait]func(value []byte)
	stops  time.Duration // when it began to end
	failed time.Duration // when it knew of a failure
	moves  time.Duration // when it asked others to move to its successor
	asked  int           // ranks to serve next
	gone   bool
}

// simClient drives a caller.
type simClient struct {
	caller
	rank  *simRank
	conn  *simConn
	then  map[*request]func(c *request)
	found bool     // whether there is a next is known
	next  simStore // nil for none
	waits []func()
}

// simStore is a Store whose calls call back. What they return gives them up.
type simStore interface {
	get(s *simulation, key string, then func(value []byte, err error)) (giveUp func())
	set(s *simulation, key string, value []byte, then func(err error))
	swap(s *simulation, key, value string, then func(there string, won bool, err error)) func()
	all(s *simulation, k kind, g gathering, then func(body []byte, err error)) func()
	close(s *simulation)
	news() time.Duration // how long to wait until it takes news
}

// simTimer is what its process does after a while.
type simTimer struct {
	at time.Duration
	do func()
}

// simRank is a process: a rank of a job, or a process of an elastic one.
type simRank struct {
	id       identity
	host     int
	came     time.Duration
	joined   time.Duration // when it had a store
	server   *simServer    // nil for none
	store    simStore      // nil before it has joined
	timers   []simTimer
	dead     bool
	paused   bool
	froze    time.Duration // when it was stopped last
	reported time.Duration // when the server had its last report
	ended    error         // how its part ended
	failure  *Failure      // that it has heard of
	read     int           // entries of the log that it has read
	writes   int           // entries that it will write
	round    int           // of all-gathers
	shows    bool          // for whom it waits
	since    time.Duration // when it has begun the round
}

type simulation struct {
	*sim.Sim
	register bool
	calm     bool // nothing happens before rank 0 leaves, and the links are slow
	noPort   bool // a rank could not serve
	stay     bool // who has done its part stays until it is told to leave
	size     int
	rounds   int
	faults   int
	origin   time.Time
	server   *simServer // of rank 0, or the register
	servers  []*simServer
	ranks    []*simRank
	conns    []*simConn
	mute     map[int]bool // hosts whose links take connections and no data

	log     []string                 // what the entries of the log are, as first seen
	wrote   map[string]int           // where the entries are that processes have written
	entered map[string]time.Duration // when values of all-gathers were set
	blamed  map[int]bool             // ranks that may be named in a failure
	failure *Failure                 // the first that anybody has heard of
	failed  time.Duration            // when
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
	register := rng.IntN(2) == 0
	s := newSimulation(rng, size, hosts, register, log)
	for r := 1; r < size; r++ {
		s.come(testIdentity(r, s.server.me.size), rng.IntN(hosts))
	}
	s.faults = rng.IntN(6)
	if !register && rng.IntN(3) == 0 {
		s.calm = true
		for i := range s.Links {
			for j := range s.Links[i] {
				s.Links[i][j].Delay = s.Between(0, 8*simSlow)
			}
		}
	}
	return s
}

func newSimulation(rng *rand.Rand, size, hosts int, register bool,
	log *strings.Builder) *simulation {
	s := &simulation{Sim: sim.New(rng, hosts, log), register: register, size: size, rounds: 4,
		mute: map[int]bool{}, wrote: map[string]int{}, entered: map[string]time.Duration{},
		blamed: map[int]bool{}, origin: time.Unix(rng.Int64N(1e9), 0)}
	me := testIdentity(0, size)
	if register {
		me.size, me.lasting = maxRanks, true
	}
	r := s.start(me, 0, 0, s.live)
	s.server = s.serves(r)
	r.store = s.server
	return s
}

// serves makes a process a server.
func (s *simulation) serves(r *simRank) *simServer {
	r.server = &simServer{core: newCore(r.id, s.register), rank: r,
		local: map[*wait]func([]byte){}}
	s.servers = append(s.servers, r.server)
	return r.server
}

// start begins a process after a while.
func (s *simulation) start(id identity, host int, after time.Duration,
	begin func(*simRank)) *simRank {
	r := &simRank{id: id, host: host, came: s.Now + after, writes: 1 + s.Rand.IntN(4)}
	s.ranks = append(s.ranks, r)
	r.timers = []simTimer{{r.came, func() { begin(r) }}}
	return r
}

// come lets a process of an identity come in a while. Another one may come that has the same, or
// one of another job, version or size.
func (s *simulation) come(id identity, host int) {
	s.start(id, host, s.Between(0, time.Second), s.join)
	if s.Rand.IntN(10) == 0 {
		how := []string{"twice", "job", "version", "size"}[s.Rand.IntN(4)]
		s.stray(id, how, host, s.Between(0, time.Second))
	}
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
	s.start(id, host, after, s.join)
}

// after lets a process do something in a while.
func (s *simulation) after(r *simRank, d time.Duration, do func()) {
	r.timers = append(r.timers, simTimer{s.Now + d, do})
}

// later is after, unless the part of the process has ended by then.
func (s *simulation) later(r *simRank, d time.Duration, do func()) {
	s.after(r, d, func() {
		if r.ended == nil {
			do()
		}
	})
}

// connect connects a process to a server, unless there is no way within a time, or the server
// refuses it.
func (s *simulation) connect(r *simRank, v *simServer, most time.Duration,
	then func(c *simClient, err error)) {
	there, back := &s.Links[r.host][v.rank.host], &s.Links[v.rank.host][r.host]
	takes := 3 * (there.Delay + back.Delay) // for TCP, and for the proofs
	if there.Cut || back.Cut || s.mute[r.host] || takes > most {
		s.after(r, most, func() { then(nil, errors.New("no answer")) })
		return
	}
	s.after(r, takes-back.Delay, func() {
		if v.gone || v.rank.dead || v.rank.paused {
			then(nil, errors.New("connection refused"))
			return
		}
		c := &simClient{caller: newCaller(r.id, v.me), rank: r, then: map[*request]func(*request){}}
		var err error
		s.told(v, func() {
			c.conn = &simConn{server: v, client: c}
			if c.conn.member, err = v.admit(r.id); err == nil {
				s.conns = append(s.conns, c.conn)
			}
		})
		if err != nil {
			s.told(v, func() { v.turnAway("a host", r.id, err) })
			then(nil, err)
			return
		}
		if back.Delay == 0 {
			then(c, nil)
			return
		}
		s.after(r, back.Delay, func() { then(c, nil) })
	})
}

// told gives an event to a core, and carries out what it says.
func (s *simulation) told(v *simServer, event func()) {
	v.now = s.origin.Add(s.Now)
	event()
	if v.failed == 0 && v.values[downKey] != nil {
		v.failed = s.Now
	}
	if v.moves == 0 && v.phase == moving {
		v.moves = s.Now
	}
	todo := v.todo
	v.todo = nil
	for _, a := range todo {
		switch a := a.(type) {
		case send:
			s.send(v, a)
		case drop:
			s.hangUp(s.connOf(a.from), toServer)
		case answer:
			then := v.local[a.to]
			if delete(v.local, a.to); then == nil {
				s.fail("a call of rank %d is answered twice", v.rank.id.rank)
				return
			}
			s.after(v.rank, 0, func() { then(a.value) })
		case remind:
			s.after(v.rank, a.after, func() { s.told(v, func() { v.due(a.turn) }) })
		case spread:
			s.after(v.rank, spreadTime, func() { s.told(v, func() { v.spreads(a.call) }) })
		case end:
			s.over(v)
		}
	}
}

func (s *simulation) send(v *simServer, a send) {
	s.Logf("%d -> %d: kind %d, id %d", v.rank.id.rank, a.to.rank, a.frame.kind, a.frame.id)
	if v.members[a.to.rank] != a.to {
		s.fail("the server sends to rank %d, which has left", a.to.rank)
	}
	if a.frame.kind == kindServe {
		v.asked++
	}
	s.push(s.connOf(a.to), toClient, &a.frame)
	if a.reports {
		s.after(v.rank, s.Between(0, time.Millisecond), func() {
			s.told(v, func() { v.wrote(a.to, a.frame.kind) })
		})
	}
}

// over ends a server.
func (s *simulation) over(v *simServer) {
	v.gone = true
	most := linger + time.Duration(v.asked+1)*newsTime + handshakeTime + simSlow
	if took := s.Now - v.stops; took > most && v.rank.froze < v.stops {
		s.fail("the server has taken %v to end", took)
	}
	for _, c := range s.conns {
		if c.server == v {
			s.hangUp(c, toServer)
		}
	}
	s.After(2*newsTime, func() { s.watched(v) })
}

// watched checks that the ranks that a server has left behind are watched by another one.
func (s *simulation) watched(v *simServer) {
	var all, unwatched []int
	hindered := func(r *simRank) bool { // when it had to move, or to serve
		return r.dead || r.paused || r.froze > s.Now-2*newsTime-handshakeTime
	}
	for _, c := range s.conns {
		r, at := c.client.rank, c.client.next
		if c.server != v || r.ended != nil || hindered(r) {
			continue
		}
		all = append(all, r.id.rank)
		next, follows := at.(*simClient)
		serves, leads := at.(*simServer)
		switch {
		case at == nil, leads && len(serves.ranks) == 1:
			unwatched = append(unwatched, r.id.rank)
		case follows && hindered(next.conn.server.rank):
			return
		}
	}
	if s.failure == nil && !s.noPort && !s.parted() && len(all) > 1 && unwatched != nil {
		s.fail("nobody watches ranks %d of %d", unwatched, all)
	}
}

// parted reports whether a way between hosts has ever been cut.
func (s *simulation) parted() bool {
	return len(s.mute) > 0 || slices.ContainsFunc(s.Links, func(from []sim.Link) bool {
		return slices.ContainsFunc(from, func(l sim.Link) bool { return l.Since > 0 })
	})
}

func (s *simulation) connOf(m *member) *simConn {
	return s.conns[slices.IndexFunc(s.conns, func(c *simConn) bool { return c.member == m })]
}

// push sends a frame over a connection, nil for its end.
func (s *simulation) push(c *simConn, to int, f *frame) {
	c.to[to] = append(c.to[to], packet{f, s.Now})
}

// hangUp ends a connection at one end.
func (s *simulation) hangUp(c *simConn, at int) {
	if !c.closed[at] {
		c.closed[at] = true
		s.push(c, 1-at, nil)
	}
}

// tells gives an event to a caller, and carries out what it says.
func (s *simulation) tells(c *simClient, event func()) {
	c.now = s.origin.Add(s.Now)
	event()
	todo := c.todo
	c.todo = nil
	for _, a := range todo {
		switch a := a.(type) {
		case push:
			s.push(c.conn, toServer, &a.frame)
		case finish:
			then := c.then[a.call]
			if delete(c.then, a.call); then == nil {
				s.fail("a call of rank %d ends twice", c.rank.id.rank)
				return
			}
			s.after(c.rank, 0, func() { then(a.call) })
		case follow:
			s.follow(c, a.frame)
		case hand:
			s.after(c.rank, 0, func() { s.hand(c, a) })
		case pass:
			s.pass(c, a)
		case patience:
			s.after(c.rank, a.most, func() { s.tells(c, func() { c.endAll(a.why) }) })
		case hangUp:
			s.hangUp(c.conn, toClient)
			s.closeNext(c)
			s.callsEnd(c)
		}
	}
}

// follow finds the successor of a server, or makes the rank it.
func (s *simulation) follow(c *simClient, f frame) {
	u := unpacker{rest: f.body}
	if c.next != nil { // this rank was to serve, and was too slow
		c.next.close(s)
	}
	c.found, c.next = false, nil
	found := func(next simStore, addr string) {
		if f.kind < c.follows {
			if next != nil {
				next.close(s)
			}
			return
		}
		c.found = true
		if c.next = next; next != nil {
			s.tells(c, func() { c.caller.found(addr) })
		}
		for _, waits := range c.waits {
			waits()
		}
	}
	if f.kind == kindServe && s.Tale == nil && s.Rand.IntN(8) == 0 {
		s.noPort = true
		s.after(c.rank, 0, func() { found(nil, "") })
	} else if f.kind == kindServe {
		v := s.serves(c.rank)
		v.expected = int(u.int())
		s.after(c.rank, s.Between(0, simSlow), func() { found(v, strconv.Itoa(len(s.servers)-1)) })
	} else {
		i, _ := strconv.Atoi(u.string())
		s.connect(c.rank, s.servers[i], handshakeTime, func(next *simClient, err error) {
			if err != nil {
				s.Logf("rank %d does not follow: %v", c.rank.id.rank, err)
				found(nil, "")
				return
			}
			found(next, "")
		})
	}
}

// whenFound does something once it is known whether there is a successor.
func (s *simulation) whenFound(c *simClient, do func()) {
	if c.follows > 0 && !c.found {
		c.waits = append(c.waits, do)
		return
	}
	do()
}

// hand gives the successor a last report.
func (s *simulation) hand(c *simClient, h hand) {
	s.whenFound(c, func() {
		if c.next == nil || c.quit {
			return
		}
		c.next.set(s, reportKey(c.rank.id.rank), h.value, func(err error) {
			if err == nil {
				s.tells(c, func() { c.handed(h) })
			}
		})
	})
}

// pass tells the successor of a failure.
func (s *simulation) pass(c *simClient, p pass) {
	done := false
	passed := func() {
		if !done {
			done = true
			s.tells(c, func() { c.passed(p.failure, p.call) })
		}
	}
	s.after(c.rank, p.most, passed)
	s.whenFound(c, func() {
		if c.next == nil {
			passed()
			return
		}
		c.next.swap(s, downKey, string(p.failure.encode()), func(string, bool, error) {
			c.next.get(s, downKey, func([]byte, error) { passed() })
		})
	})
}

// call is a request of a client. If the successor has the key, again is done.
func (c *simClient) call(s *simulation, k kind, key string, body []byte, again func(next simStore),
	then func(u unpacker, err error)) (giveUp func()) {
	asked := &request{kind: k, key: key}
	c.then[asked] = func(*request) {
		answer := func() {
			switch {
			case asked.moved && c.next != nil:
				again(c.next)
			case asked.err == nil && asked.reply.kind == kindFailed:
				then(unpacker{}, errors.New(string(asked.reply.body)))
			default:
				then(unpacker{rest: asked.reply.body}, asked.err)
			}
		}
		if asked.moved {
			s.whenFound(c, answer)
		} else {
			answer()
		}
	}
	s.tells(c, func() { c.sendRequest(asked, body) })
	return func() { s.tells(c, func() { c.giveUp(asked, timeoutError{simTimeout}) }) }
}

func (c *simClient) get(s *simulation, key string, then func([]byte, error)) func() {
	return c.call(s, kindGet, key, packString(nil, key),
		func(next simStore) { next.get(s, key, then) },
		func(u unpacker, err error) { then(u.rest, err) })
}

func (c *simClient) set(s *simulation, key string, value []byte, then func(error)) {
	c.call(s, kindSet, key, packBytes(packString(nil, key), value),
		func(next simStore) { next.set(s, key, value, then) },
		func(_ unpacker, err error) { then(err) })
}

func (c *simClient) swap(s *simulation, key, value string,
	then func(there string, won bool, err error)) func() {
	body := packBytes(packBytes(packString(nil, key), nil), []byte(value))
	return c.call(s, kindSwap, key, body,
		func(next simStore) { next.swap(s, key, value, then) },
		func(u unpacker, err error) { won := u.int() == 1; then(u.string(), won, err) })
}

func (c *simClient) all(s *simulation, k kind, g gathering, then func([]byte, error)) func() {
	return c.call(s, k, "", g.pack(0), nil,
		func(u unpacker, err error) { then(u.rest, err) })
}

func (c *simClient) close(s *simulation) {
	s.tells(c, c.shut)
	s.closeNext(c)
}

// callsEnd checks that a call ends that is made after the connection has ended.
func (s *simulation) callsEnd(c *simClient) {
	s.later(c.rank, 0, func() {
		ended := false
		c.call(s, kindPeek, "", nil, nil, func(unpacker, error) { ended = true })
		s.later(c.rank, time.Second, func() {
			if !ended && c.rank.froze < s.Now-time.Second {
				s.fail("a call of rank %d hangs after its connection has ended", c.rank.id.rank)
			}
		})
	})
}

// closeNext closes the successor of a client that is closed.
func (s *simulation) closeNext(c *simClient) {
	if c.quit && c.over != nil {
		s.whenFound(c, func() {
			if c.next != nil {
				c.next.close(s)
			}
		})
	}
}

func (c *simClient) news() time.Duration { return c.newsTime() }

// wait is a call of the process of a server, which waits.
func (v *simServer) wait(s *simulation, w *wait, then func([]byte, error)) (giveUp func()) {
	v.local[w] = func(value []byte) {
		if value == nil {
			then(nil, timeoutError{simTimeout})
			return
		}
		then(value, nil)
	}
	s.told(v, func() { v.await(w) })
	return func() { s.told(v, func() { v.cancel(w) }) }
}

func (v *simServer) get(s *simulation, key string, then func([]byte, error)) func() {
	return v.wait(s, &wait{get: key}, then)
}

func (v *simServer) set(s *simulation, key string, value []byte, then func(error)) {
	if key != reportKey(v.rank.id.rank) {
		s.told(v, func() { v.put(key, value) })
		s.after(v.rank, 0, func() { then(nil) })
		return
	}
	w := &wait{}
	v.local[w] = func([]byte) { then(nil) }
	s.told(v, func() { v.core.leaveReport(w, value) })
}

func (v *simServer) swap(s *simulation, key, value string, then func(string, bool, error)) func() {
	s.told(v, func() {
		there, won := v.core.swap(key, nil, []byte(value))
		s.after(v.rank, 0, func() { then(string(there), won, nil) })
	})
	return func() {}
}

func (v *simServer) all(s *simulation, k kind, g gathering, then func([]byte, error)) func() {
	if k == kindPeek {
		s.after(v.rank, 0, func() { then(v.pack(g, 0), nil) })
		return func() {}
	}
	s.entered[rankKey(g.key, g.rank)] = s.Now
	s.told(v, func() { v.put(rankKey(g.key, g.rank), g.value) })
	return v.wait(s, &wait{all: &g}, then)
}

func (v *simServer) close(s *simulation) {
	if v.phase == serving {
		v.stops = s.Now
	}
	s.told(v, v.stop)
}

func (v *simServer) news() time.Duration { return newsTime }

// join connects a process, as often as it takes.
func (s *simulation) join(r *simRank) { s.try(r, &tries{wait: handshakeTime}) }

// try is an attempt of a process to connect.
func (s *simulation) try(r *simRank, t *tries) {
	left := r.came + simTimeout - s.Now
	s.connect(r, s.server, min(t.wait, left), func(c *simClient, err error) {
		over := s.Now-r.came >= simTimeout
		switch {
		case err == nil:
			r.store, r.joined = c, s.Now
			s.live(r)
		case !t.failed(err, simTimeout, over):
			s.ends(r, err)
		case over:
			if !s.server.gone && !s.mute[r.host] {
				s.named(r, 0)
			}
			if s.Now-r.came > simTimeout+retryTime+simSlow && r.froze == 0 {
				s.fail("rank %d has looked for rank 0 for %v", r.id.rank, s.Now-r.came)
			}
			s.ends(r, notFound(timeoutError{simTimeout}, t.last))
		default:
			s.after(r, retryTime, func() { s.try(r, t) })
		}
	})
}

// live lets a process do what it does: it watches for failures, takes part in all-gathers, reads
// the log and writes to it.
func (s *simulation) live(r *simRank) {
	if !s.register {
		r.store.get(s, downKey, func(value []byte, err error) {
			var f *Failure
			if errors.As(err, &f) {
				s.hears(r, f)
			} else if err == nil {
				s.hears(r, decodeFailure(value))
			}
		})
		s.gather(r)
	}
	s.reads(r)
	s.writes(r, 0)
}

// ends ends the part of a process.
func (s *simulation) ends(r *simRank, why error) {
	s.Say("rank %d: %v", r.id.rank, why)
	r.ended = why
	if why == ErrClosed && s.failure != nil && s.Now > s.failed+2*newsTime && !s.apart(r) {
		s.fail("rank %d has not heard of %v", r.id.rank, s.failure)
	}
}

// leave is ends for a process that has joined.
func (s *simulation) leave(r *simRank, why error) {
	s.ends(r, why)
	r.store.close(s)
}

// hears checks a failure that a rank hears of, which then leaves.
func (s *simulation) hears(r *simRank, f *Failure) {
	if r.ended != nil || r.failure != nil {
		return
	}
	s.Logf("rank %d hears: %v", r.id.rank, f)
	r.failure = f
	if s.failure == nil {
		s.failure, s.failed = f, s.Now
	}
	s.named(r, f.Rank)
	if f.Error() != s.failure.Error() && !s.apart(r) {
		s.fail("rank %d hears of %v, the first was %v", r.id.rank, f, s.failure)
	}
	if strings.Contains(f.Error(), errToken.Error()) {
		s.fail("an unauthenticated client has ended the job: %v", f)
	}
	for _, other := range s.ranks {
		switch {
		case f.Rank != other.id.rank || !strings.Contains(f.Error(), "killed"):
		case r.host > 0 && s.blamed[r.id.rank]: // it did not come there
		case other.reported > 0 && s.Now-other.reported < reportTime-time.Second:
			s.fail("rank %d hears of %v, against its last report", r.id.rank, f)
		}
	}
	if v := r.server; v != nil && v.failed > 0 && s.Now < v.failed+spreadTime && !v.gone {
		for _, m := range v.connected() {
			if !m.told && s.connOf(m).client.rank.joined < v.failed {
				s.fail("rank %d, which serves, hears of %v before rank %d", r.id.rank, f, m.rank)
			}
		}
	}
	s.later(r, s.Between(0, time.Second), func() { s.leave(r, f) })
}

// apart reports whether something has happened to a rank, or to rank 0, so that it may hear of
// another failure than others.
func (s *simulation) apart(r *simRank) bool {
	return s.blamed[r.id.rank] || s.server.rank.dead || s.server.rank.froze > 0 ||
		s.server.rank.paused
}

// named checks that nobody is to blame who has done nothing.
func (s *simulation) named(r *simRank, blamed int) {
	if !s.blamed[blamed] {
		s.fail("rank %d blames rank %d, to which nothing has happened", r.id.rank, blamed)
	}
}

func (s *simulation) reads(r *simRank) {
	i := r.read
	done := false
	giveUp := r.store.get(s, fmt.Sprint("log/", i), func(value []byte, err error) {
		switch {
		case r.ended != nil:
		case errors.As(err, new(timeoutError)):
			s.reads(r)
		case err == nil && done:
			s.fail("process %d gets entry %d twice", r.id.rank, i)
		case err == nil:
			done = true
			s.sees(r, i, string(value))
			r.read++
			s.reads(r)
		case s.register:
			s.ends(r, err)
		}
	})
	if s.Rand.IntN(4) == 0 { // it gives up, and asks again
		s.later(r, s.Between(0, time.Second), giveUp)
	}
}

// sees compares an entry of the log with what others have seen.
func (s *simulation) sees(r *simRank, i int, entry string) {
	for len(s.log) <= i { // nobody has read it yet
		s.log = append(s.log, entry)
	}
	if s.log[i] != entry {
		s.fail("process %d sees %q as entry %d, others %q", r.id.rank, entry, i, s.log)
	}
}

func (s *simulation) writes(r *simRank, i int) {
	if r.writes == 0 {
		return
	}
	entry := fmt.Sprintf("%d.%d", r.id.rank, r.writes)
	r.store.swap(s, fmt.Sprint("log/", i), entry, func(there string, won bool, err error) {
		if err != nil || r.ended != nil {
			return
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
		s.later(r, s.Between(0, 100*time.Millisecond), func() { s.writes(r, i+1) })
	})
}

// gather takes part in the all-gather of a round. Join has the first one.
func (s *simulation) gather(r *simRank) {
	if r.since = s.Now; r.round == s.rounds {
		if s.stay {
			return
		}
		stays := s.Between(0, linger/2)
		if s.Rand.IntN(4) == 0 {
			stays *= 20
		}
		s.later(r, stays, func() { s.leave(r, ErrClosed) })
		return
	}
	round := r.round
	s.shows(r, round)
	g := gathering{key: fmt.Sprint("round/", round), size: s.size, rank: r.id.rank,
		value: fmt.Append(nil, r.id.rank, ".", round)}
	giveUp := r.store.all(s, kindGather, g, func(body []byte, err error) {
		var f *Failure
		switch {
		case r.ended != nil || r.round != round || r.failure != nil:
		case err == nil:
			s.passes(r, g, body)
		case errors.As(err, new(timeoutError)):
			s.late(r, g, err)
		case errors.As(err, &f):
			s.hears(r, f)
		default:
			s.leave(r, err)
		}
	})
	s.later(r, simTimeout, giveUp)
}

// left is the rank from which a rank would get data next.
func (s *simulation) left(rank int) int { return (rank + s.size - 1) % s.size }

// shows lets a rank show for whom it waits, once it has waited for a while.
func (s *simulation) shows(r *simRank, round int) {
	if s.Tale != nil {
		return
	}
	s.later(r, simShow, func() {
		if r.round == round && r.failure == nil {
			r.shows = true
			r.store.set(s, waitsPrefix+strconv.Itoa(r.id.rank),
				[]byte(encodeRanks([]int{s.left(r.id.rank)})), func(error) {})
		}
	})
}

// seeks checks whom a rank names that follows the waits of others: no one that has waited for long
// in the same round, unless all wait.
func (s *simulation) seeks(r *simRank, round int) {
	began, search := s.Now, newSearch(r.id.rank, []int{s.left(r.id.rank)})
	var ask func()
	ask = func() {
		level := search.level()
		if len(level) > 0 {
			g := gathering{key: strings.TrimSuffix(waitsPrefix, "/"), size: s.size, members: level}
			r.store.all(s, kindPeek, g, func(body []byte, err error) {
				u := unpacker{rest: body}
				for _, rank := range level {
					search.answered(rank, decodeRanks(string(u.bytes()), s.size))
				}
				if err == nil {
					ask()
				}
			})
			return
		}
		// of those that have come, all are asked unless one does not wait
		first := s.entered[rankKey(fmt.Sprint("round/", round), s.left(r.id.rank))]
		if len(search.missing) == 0 && len(search.asked) < s.size && first > 0 {
			s.fail("rank %d has asked only %v", r.id.rank, search.asked)
		}
		for _, rank := range search.missing {
			at := s.entered[rankKey(fmt.Sprint("round/", round), rank)]
			if at > 0 && at < began-2*simShow && !s.blamed[rank] {
				s.fail("rank %d misses rank %d, which waits itself", r.id.rank, rank)
			}
		}
	}
	ask()
}

// passes checks what an all-gather has given to a rank.
func (s *simulation) passes(r *simRank, g gathering, body []byte) {
	u := unpacker{rest: body}
	for rank := range g.size {
		if want := fmt.Append(nil, rank, ".", r.round); !bytes.Equal(u.bytes(), want) {
			s.fail("rank %d: another value of rank %d in round %d", r.id.rank, rank, r.round)
		}
	}
	if r.shows {
		r.shows = false
		r.store.set(s, waitsPrefix+strconv.Itoa(r.id.rank), nil, func(error) {})
	}
	r.round++
	s.later(r, s.Between(0, 100*time.Millisecond), func() { s.gather(r) })
}

// late ends a round for which a rank has waited too long: it asks who is missing.
func (s *simulation) late(r *simRank, g gathering, err error) {
	began := s.Now
	if s.Tale == nil {
		s.seeks(r, r.round)
	}
	giveUp := r.store.all(s, kindPeek, g, func(body []byte, lookErr error) {
		if r.ended != nil || r.failure != nil {
			return
		}
		var there [][]byte
		if u := (unpacker{rest: body}); lookErr == nil {
			for range g.size {
				there = append(there, u.bytes())
			}
		} else {
			err = fmt.Errorf("rendezvous: rank %d: join: %w", r.id.rank, unanswered{err})
		}
		if _, err = g.outcome("join", there, true, err); err == nil {
			s.passes(r, g, body)
			return
		}
		missing := &MissingError{}
		errors.As(err, &missing)
		for rank := range there {
			if (there[rank] == nil) != slices.Contains(missing.Ranks, rank) {
				s.fail("rank %d says of rank %d: %v", r.id.rank, rank, err)
			}
			if at := s.entered[rankKey(g.key, rank)]; there[rank] == nil && at > 0 && at < began {
				s.fail("rank %d misses rank %d, which has entered", r.id.rank, rank)
			}
		}
		s.gives(r, err)
	})
	s.later(r, newsTime, giveUp)
}

// gives lets a rank give up, and tell the others why.
func (s *simulation) gives(r *simRank, err error) {
	f := (&World{Rank: r.id.rank}).failureOf(err)
	s.named(r, f.Rank)
	giveUp := r.store.swap(s, downKey, string(f.encode()), func(string, bool, error) {
		if r.ended == nil {
			s.leave(r, err)
		}
	})
	s.later(r, r.store.news(), giveUp)
	if waited := s.Now - r.since; waited > simTimeout+newsTime+simSlow && r.froze < r.since {
		s.fail("rank %d has waited %v", r.id.rank, waited)
	}
}

// arrives is a packet at an end of a connection.
func (s *simulation) arrives(c *simConn, at int) {
	p := c.to[at][0]
	c.to[at] = c.to[at][1:]
	v, err := c.server, errors.New("EOF")
	switch {
	case c.closed[at]:
	case at == toClient && p.frame == nil:
		s.tells(c.client, func() { c.client.broke(err, nil) })
	case at == toClient:
		s.tells(c.client, func() { c.client.heard(*p.frame) })
	case p.frame == nil || p.frame.kind == kindBye:
		if p.frame != nil {
			err = nil
		}
		s.Logf("%d: rank %d has left: %v", v.rank.id.rank, c.member.rank, err)
		s.told(v, func() { v.left(c.member, err) })
	default:
		s.Logf("%d <- %d: kind %d, id %d", v.rank.id.rank, c.member.rank, p.frame.kind, p.frame.id)
		g, _, err := unpackGathering(p.frame.body)
		if p.frame.kind == kindGather && err == nil {
			s.entered[rankKey(g.key, g.rank)] = s.Now
		}
		s.told(v, func() {
			if err := v.hear(c.member, *p.frame); err != nil {
				s.fail("rank %d: %v", c.member.rank, err)
			}
		})
	}
}

// moves returns what may happen next.
func (s *simulation) moves() (moves []sim.Move) {
	may := func(at time.Duration, do func()) {
		moves = append(moves, sim.Move{At: at, Do: func() error { do(); return s.wrong }})
	}
	for _, c := range s.conns {
		if c.closed[0] && c.closed[1] {
			continue
		}
		ends := [2]*simRank{c.server.rank, c.client.rank}
		a, b := ends[toServer].host, ends[toClient].host
		ways := [2]*sim.Link{&s.Links[b][a], &s.Links[a][b]}
		for at, end := range ends {
			if len(c.to[at]) > 0 && !end.dead && !end.paused && !s.mute[b] {
				if when := ways[at].Arrives(c.to[at][0].sent); when < sim.Never {
					may(when, func() { s.arrives(c, at) })
				}
			}
		}
		if ways[0].Cut || ways[1].Cut {
			may(max(ways[0].Since, ways[1].Since)+simKeep, func() {
				for at := range c.to { // both systems have given it up
					c.to[at] = []packet{{nil, s.Now}}
					if s.arrives(c, at); !c.closed[at] {
						c.closed[at] = true
					}
				}
			})
		}
	}
	for _, r := range s.ranks {
		if r.dead || r.paused {
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
	if r.dead || r.paused || r.ended != nil || r == s.server.rank && s.register {
		return
	}
	s.faults--
	s.Disturbed = s.Now
	d := s.Between(0, 3*simTimeout)
	kind := s.Rand.IntN(9)
	if s.moving() && s.Rand.IntN(2) == 0 {
		kind = []int{0, 1, 7, 7}[s.Rand.IntN(4)]
		d /= 5
	}
	ofLinks := kind > 1 && kind < 6 || kind == 8
	for _, other := range s.ranks {
		if other == r || other.host == r.host && ofLinks || r == s.server.rank && kind == 1 {
			s.blamed[other.id.rank] = true
		}
	}
	s.blamed[0] = s.blamed[0] || kind > 0 // whom a rank blames that is cut off itself
	switch {
	case kind == 0:
		s.kill(r)
	case kind == 1:
		s.pause(r, d)
	case kind == 2:
		there.Delay, back.Delay = s.Between(0, simSlow), s.Between(0, simSlow)
		there.Lossy = s.Rand.IntN(2) == 0
	case kind == 6 && !s.server.rank.dead:
		s.Logf("an unauthenticated client comes")
		s.told(s.server, func() { s.server.turnAway("a host", identity{}, errToken) })
	case kind == 7 && r.store != nil:
		s.leaveReport(r, s.Between(0, time.Second))
	case kind == 8 && r.host > 0:
		s.mutes(r.host)
	case kind > 2 && kind < 6 && r.host > 0 && !there.Cut && !back.Cut:
		if s.Rand.IntN(2) == 0 {
			d = 0
		}
		s.Logf("cut host %d, kind %d, for %v", r.host, kind, d)
		s.Sever(d, [][]*sim.Link{{there, back}, {there}, {back}}[kind-3]...)
	}
}

// moving reports whether ranks may move to a successor of rank 0.
func (s *simulation) moving() bool {
	v := s.server
	return v.phase == leading || v.phase >= moving && v.moves > 0 && s.Now < v.moves+handshakeTime
}

// mutes lets the links of a host take connections and no data.
func (s *simulation) mutes(host int) {
	s.Say("no data passes the links of host %d", host+1)
	s.mute[host] = true
}

// pause stops a process for a while.
func (s *simulation) pause(r *simRank, d time.Duration) {
	s.Say("stop %d for %v", r.id.rank, d.Round(time.Millisecond))
	r.paused = true
	s.After(d, func() { r.paused, r.froze, s.Disturbed = false, s.Now, s.Now })
}

// leaveReport lets a rank say that another one is to blame for its end, and end in a while.
func (s *simulation) leaveReport(r *simRank, after time.Duration) {
	f := &Failure{Rank: 0, Cause: fmt.Errorf("last report of rank %d", r.id.rank)}
	sent := s.Now
	then := func(err error) {
		if err == nil && r.ended == nil {
			r.reported = sent
			s.later(r, after, func() { s.kill(r) })
		}
	}
	if r == s.server.rank {
		f.Rank = s.size - 1
	}
	s.blamed[f.Rank] = true
	r.store.set(s, reportKey(r.id.rank), f.lastReport(0), then)
}

// kill ends a process. That of an elastic job is replaced.
func (s *simulation) kill(r *simRank) {
	s.Say("kill %d", r.id.rank)
	r.dead = true
	s.noticed(r)
	for _, c := range s.conns {
		if c.client.rank == r {
			s.hangUp(c, toClient)
		}
		if c.server.rank == r {
			s.hangUp(c, toServer)
		}
	}
	if s.register {
		s.come(testIdentity(len(s.ranks), s.server.me.size), r.host)
		return
	}
	id := r.id
	id.ended, id.build = "signal 9", "a launcher's"
	s.After(s.Between(0, time.Second), func() { // its launcher says so
		if s.server.rank.dead || s.server.gone {
			return
		}
		failed, joined := s.server.failed > 0, r.store != nil
		s.told(s.server, func() {
			if _, err := s.server.admit(id); err != nil {
				s.server.turnAway("a launcher", id, err)
			} else {
				s.server.core.ended(id)
			}
		})
		if joined && !failed && s.server.failed > 0 {
			s.fail("the word of a launcher ends the job: rank %d had joined", id.rank)
		}
	})
}

// noticed checks soon that those who were connected with a rank by a server know of its end.
func (s *simulation) noticed(r *simRank) {
	killed := s.Now
	for _, c := range s.conns {
		v, way := c.server, &s.Links[r.host][c.server.rank.host]
		// it moves, as far as it has had time to
		late := v.phase >= parting && v.moves > 0 && s.Now < v.moves+handshakeTime && !c.client.quit
		if s.register || c.client.rank != r || (c.closed[0] || c.closed[1]) && !late ||
			v.failed > 0 || v.phase == lingering || v.phase >= parting && !late ||
			c.member == v.leader || c.client.moved {
			continue
		}
		s.After(3*time.Second, func() {
			if v.rank.dead || v.rank.paused || v.rank.froze > killed || s.mute[r.host] || way.Cut ||
				way.Since > killed {
				return
			}
			if v.phase >= parting && v.moves == 0 && v.failed == 0 {
				return // nobody could serve
			}
			if v.failed == 0 && !late {
				s.fail("nobody has noticed the end of rank %d", r.id.rank)
			}
			for _, other := range s.ranks {
				if other.came < killed-time.Second && other.ended == nil && other.failure == nil &&
					!s.blamed[other.id.rank] && other.store != nil {
					s.fail("rank %d does not know of the end of rank %d", other.id.rank, r.id.rank)
				}
			}
		})
	}
}

// run runs the job to its end.
func (s *simulation) run() error {
	for range 100_000 {
		if s.faults > 0 && (!s.calm && s.Rand.IntN(40) == 0 ||
			s.moving() && s.Rand.IntN(4) == 0) {
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
	if key := fmt.Sprint("log/", len(s.log)); s.register && s.server.values[key] != nil {
		return fmt.Errorf("%s is set, and nobody has seen it", key)
	}
	for _, v := range s.servers {
		if !s.register && !v.rank.dead && !v.gone {
			return fmt.Errorf("the server of rank %d does not end", v.rank.id.rank)
		}
	}
	for _, c := range s.conns {
		if c := c.client; (c.quit || c.moved) && c.over == nil && !c.rank.dead {
			return fmt.Errorf("rank %d does not leave its server", c.rank.id.rank)
		}
	}
	for _, r := range s.ranks {
		unread := r.read < len(s.log) || r.writes > 0
		switch {
		case r.dead || s.mute[r.host] && s.register:
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
			s.Tale, s.stay = &strings.Builder{}, len(words) > 2
			for r := range size {
				s.blamed[r] = true
			}
		case words[2] == "comes":
			var r int
			sim.Scan(t, words[3], "%d", &r)
			id := testIdentity(r, s.size)
			if after := sim.Lasts(t, words[1]); len(words) > 4 {
				s.stray(id, words[4], r, after)
			} else {
				s.start(id, r, after, s.join)
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
		s.leaveReport(r, time.Second)
	case "mutes":
		s.mutes(r.host)
	case "leaves":
		s.leave(r, ErrClosed)
	case "dissolves": // rank 0
		s.told(s.server, s.server.dissolve)
		s.leave(r, ErrClosed)
		s.Say("its server has ended: %t", s.server.gone)
	default:
		t.Fatalf("%s is no event", what)
	}
}

// TestJobsMeetWhateverFails: EURYALE_RENDEZVOUS_SEED=seed runs one alone.
func TestJobsMeetWhateverFails(t *testing.T) {
	sim.Seeds(t, "EURYALE_RENDEZVOUS_SEED", func(seed uint64, log *strings.Builder) error {
		return drawn(seed, log).run()
	})
}

// TestTheCoresHaveNoClockSocketOrGoroutine: what they are told alone decides.
func TestTheCoresHaveNoClockSocketOrGoroutine(t *testing.T) {
	pure := []string{"bytes", "errors", "fmt", "maps", "slices", "time"}
	for _, name := range []string{"core.go", "caller.go"} {
		file := require.Value(parser.ParseFile(token.NewFileSet(), name, nil, 0))(t)
		for _, i := range file.Imports {
			path, _ := strconv.Unquote(i.Path.Value)
			require.Check(t, slices.Contains(pure, path), "%s imports %s", name, path)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt, *ast.SelectStmt:
				t.Errorf("%s has a %T", name, n)
			case *ast.SelectorExpr:
				of, ok := n.X.(*ast.Ident)
				require.Check(t, !ok || of.Name != "time" || n.Sel.Name == "Duration" ||
					n.Sel.Name == "Time", "%s uses time.%s", name, n.Sel.Name)
			}
			return true
		})
	}
}
