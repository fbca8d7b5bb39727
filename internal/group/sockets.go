package group

import (
	"bufio"
	"context"
	"encoding/binary"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/spinwait"
	"github.com/euryale-ml/euryale/rendezvous"
)

const (
	// batch is after how many calls a rank tells of them at once, and pace how often it does
	// while calls are under way.
	batch = 64
	pace  = 2 * time.Millisecond
	// lull is after how long without a call a rank waits for the next without looking.
	lull = 10 * time.Millisecond
	// askTime is how often a rank asks, that waits, what the others have begun, and silence
	// how long it waits at most for an answer before it takes the server for lost.
	askTime = 50 * time.Millisecond
	silence = 2 * time.Second
	// settleTime is how long a report waits for what every rank had begun before it: a rank
	// that is stopped never tells.
	settleTime = 50 * time.Millisecond
	// partTime is how long Release waits for others, see [spinwait.Patience].
	partTime = 250 * time.Millisecond
	// summonTime is how often a server looks for ranks that follow one before it.
	summonTime = time.Second
)

// Sockets is a Board over connections, for ranks on any machines.
//
// One rank serves: its hub keeps what all tell, compares the calls, and passes on what is
// new. Rank 0 does in term 0; whoever loses the server of term t goes to that of t+1, which
// is rank t+1, and so on in a circle. A rank that is asked to serve, or hears of a later
// term, follows and takes those along that it serves itself. So all meet again, at the lowest
// rank that lives. Each tells the new server all it knows.
//
// A call costs its rank no system call: up to 64 calls, or those of 2 ms, are told together, a
// digest for each, and at once when somebody waits for them (Compare). Headers follow only
// where digests differ; what each rank has begun is asked for only where calls stall.
//
// Locks: mu and the hub's are never held together; the ring's is the last.
type Sockets struct {
	world    *rendezvous.World
	name     string
	members  []int
	rank     int
	addrs    []string
	listener *rendezvous.Listener
	hub      *hub

	calls    callRing
	posted   atomic.Uint64
	wanted   atomic.Uint64 // Compare has been asked for calls up to this one
	agreed   atomic.Uint64
	differs  atomic.Bool
	asleep   atomic.Bool // nothing is looked for until a nudge
	waits    atomic.Bool // somebody has looked for what is not there
	released atomic.Bool
	nudged   chan struct{}

	life    context.Context // ends when this rank is off the board
	end     context.CancelFunc
	stop    chan struct{} // closed by Release
	done    chan struct{} // closed when the pump has stopped
	left    chan struct{} // closed when it is known whether all leave together
	opened  bool
	silence time.Duration

	mu       sync.Mutex
	seen     known
	unheard  []bool // ranks that have not answered as servers, and have not connected since
	mine     fact   // the report of this rank, until there is one of the group
	out      []fact
	term     uint64
	settled  bool
	reported time.Time
	asked    uint64
	answered uint64
	news     time.Time // when calls were compared last, or a question answered
}

var _ Board = (*Sockets)(nil)

// NewSockets returns the board of rank members[rank] of a job in a group. The name is the
// group's, with its generation. The ranks exchange their Addr and call Open.
func NewSockets(w *rendezvous.World, name string, members []int, rank int) (*Sockets, error) {
	size := len(members)
	b := &Sockets{
		world: w, name: "board " + name, members: members, rank: rank, hub: newHub(size),
		seen: newKnown(size), unheard: make([]bool, size),
		nudged: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{}),
		left:    make(chan struct{}),
		silence: min(silence, w.Timeout/4),
	}
	b.life, b.end = context.WithCancel(context.Background())
	var err error
	if b.listener, err = w.Listen(b.name, b.serve); err != nil {
		return nil, err
	}
	return b, nil
}

// Addr returns where the other ranks reach this one.
func (b *Sockets) Addr() string { return b.listener.Addr() }

// Open connects the rank to the others, whose Addr are in order of their ranks. It does not
// wait for them.
func (b *Sockets) Open(addrs []string) {
	b.addrs, b.opened = addrs, true
	go b.pump()
	go b.summon()
}

// callRing has the last calls of this rank.
type callRing struct {
	mu      sync.Mutex
	posted  uint64
	digests [ringSlots]uint64 // 0 says that the rank does not compare the call
	headers [ringSlots][backend.HeaderSize]byte
}

func (c *callRing) put(h *backend.Header, compared bool) {
	at := h.Seq % ringSlots
	c.mu.Lock()
	c.digests[at] = 0
	if compared {
		c.digests[at] = h.Put(&c.headers[at])
	}
	c.posted = h.Seq
	c.mu.Unlock()
}

// since returns the digests of the calls after one, as far as they are there, and the number
// of the last call.
func (c *callRing) since(seq uint64) (fact, uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.posted > ringSlots {
		seq = max(seq, c.posted-ringSlots)
	}
	f := fact{kind: factDigests, number: seq + 1}
	for ; seq < c.posted; seq++ {
		f.body = binary.LittleEndian.AppendUint64(f.body, c.digests[(seq+1)%ringSlots])
	}
	return f, c.posted
}

// header returns the header of a call, that of no call if the rank does not compare it.
func (c *callRing) header(seq uint64) (fact, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if seq > c.posted || seq+ringSlots <= c.posted {
		return fact{}, false
	}
	f := fact{kind: factHeader, number: seq, body: make([]byte, backend.HeaderSize)}
	if c.digests[seq%ringSlots] != 0 {
		copy(f.body, c.headers[seq%ringSlots][:])
	}
	return f, true
}

// nudge has the pump look now.
func (b *Sockets) nudge() {
	select {
	case b.nudged <- struct{}{}:
	default:
	}
}

// await notes that somebody waits.
func (b *Sockets) await() {
	b.waits.Store(true)
	if b.asleep.Load() && b.asleep.CompareAndSwap(true, false) {
		b.nudge()
	}
}

// Post implements [Board].
func (b *Sockets) Post(h *backend.Header, compared bool) {
	b.calls.put(h, compared)
	b.posted.Store(h.Seq)
	if h.Seq%batch == 0 || h.Seq <= b.wanted.Load() || b.asleep.Load() &&
		b.asleep.CompareAndSwap(true, false) {
		b.nudge()
	}
}

// Compare implements [Board].
func (b *Sockets) Compare(upTo uint64) (uint64, *Difference) {
	n := b.agreed.Load()
	if n >= upTo {
		return n, nil
	}
	if b.wanted.Load() < upTo {
		b.wanted.Store(upTo)
		b.nudge()
	}
	b.await()
	if !b.differs.Load() {
		return n, nil
	}
	return n, b.difference(upTo)
}

// difference returns the first difference, if it is known in full and not after call upTo.
func (b *Sockets) difference(upTo uint64) *Difference {
	b.mu.Lock()
	defer b.mu.Unlock()
	k := &b.seen
	if k.differs.number > upTo {
		return nil
	}
	digests := make([]uint64, len(b.members))
	for p := range digests {
		digests[p] = k.differs.digest(p)
	}
	return Differ(digests, func(r int) *[backend.HeaderSize]byte {
		for p, h := range k.headers { // perhaps r has closed, but another rank calls the same
			if h.kind != 0 && digests[p] == digests[r] {
				return (*[backend.HeaderSize]byte)(h.body)
			}
		}
		return nil
	})
}

// Begun implements [Health].
func (b *Sockets) Begun(r int) uint64 {
	switch {
	case b.released.Load():
		return 0
	case r == b.rank:
		return b.posted.Load()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return max(b.seen.begun[r], b.agreed.Load())
}

// Closed implements [Health].
func (b *Sockets) Closed(r int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.seen.closed[r] && !b.released.Load()
}

// tell has the others know a fact of this rank, at once.
func (b *Sockets) tell(f fact) {
	f.rank = b.rank
	b.mu.Lock()
	if b.seen.addFact(f) {
		b.out = append(b.out, f)
	}
	b.mu.Unlock()
	b.nudge()
}

// Close implements [Health].
func (b *Sockets) Close() { b.tell(fact{kind: factClosed}) }

// Publish implements [Health]. The server decides which report was first.
func (b *Sockets) Publish(r Report) {
	b.mu.Lock()
	if first(&b.mine, fact{kind: factReport, body: packReport(r)}) && b.seen.report.kind == 0 {
		b.out = append(b.out, b.mine)
	}
	b.mu.Unlock()
	b.nudge()
}

// Reported implements [Health].
func (b *Sockets) Reported() (Report, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.released.Load() || b.seen.report.kind == 0 || !b.settled &&
		time.Since(b.reported) < settleTime {
		return Report{}, false
	}
	return unpackReport(b.seen.report.body), true
}

// Heard implements [Health].
func (b *Sockets) Heard() (Report, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.released.Load() || b.seen.report.kind == 0 {
		return Report{}, false
	}
	return unpackReport(b.seen.report.body), true
}

// Note implements [Board].
func (b *Sockets) Note(round uint64, note []byte) {
	b.tell(fact{kind: factNote, number: round,
		body: slices.Clone(note[:min(len(note), NoteBytes)])})
}

// Noted implements [Board].
func (b *Sockets) Noted(r int, round uint64) ([]byte, bool) {
	b.mu.Lock()
	f := b.seen.notes[r][round%2]
	b.mu.Unlock()
	if f.kind == 0 || f.number != round {
		b.await()
		return nil, false
	}
	return append(slices.Clone(f.body), make([]byte, NoteBytes-len(f.body))...), true
}

// Leave implements [Board]. A rank that hears no verdict leaves alone.
func (b *Sockets) Leave(limit time.Duration) bool {
	b.tell(fact{kind: factLeaving, number: counted})
	for _, wait := range []time.Duration{limit, b.silence} {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		select {
		case <-b.left:
			b.mu.Lock()
			defer b.mu.Unlock()
			return b.seen.left == together
		case <-b.world.Down():
			return false
		case <-timer.C:
		}
		b.tell(fact{kind: factLeaving, number: gaveUp})
	}
	return false
}

// Release implements [Board]. If this rank serves, the others go to the next one first, unless the
// world is dissolved.
func (b *Sockets) Release() error {
	b.hub.learn(b.last()) // before anybody is sent elsewhere, as is who comes now
	if b.released.Swap(true) {
		return nil
	}
	close(b.stop)
	part := partTime
	if b.world.Dissolved() {
		part = 0
	}
	if b.opened {
		if !spinwait.Patient(2 * part).Await(b.done) {
			b.end()
		}
		<-b.done
	}
	b.hub.dismiss(b.elsewhere())
	b.hub.hangUp(part, b.down)
	b.end()
	return b.listener.Close()
}

// last returns what this rank has to tell, its calls first.
func (b *Sockets) last() []fact {
	calls, _ := b.calls.since(b.agreed.Load())
	calls.rank = b.rank
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]fact{calls}, b.facts()...)
}

// facts returns what this rank knows. b.mu is held.
func (b *Sockets) facts() []fact {
	all := b.seen.facts()
	if b.seen.report.kind == 0 && b.mine.kind != 0 {
		all = append(all, b.mine)
	}
	return all
}

// elsewhere returns the first term from this rank's on in which another rank serves.
func (b *Sockets) elsewhere() uint64 {
	term := b.later() - 1
	if b.server(term) == b.rank {
		term++
	}
	return term
}

// later returns the term after this rank's.
func (b *Sockets) later() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.term + 1
}

// server returns the rank that serves in a term.
func (b *Sockets) server(term uint64) int { return int(term % uint64(len(b.members))) }

// hears notes whether a rank has been heard of.
func (b *Sockets) hears(rank int, heard bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.unheard[rank] = !heard
}

// misses reports whether a rank is lost, or did not answer when it was heard of last.
func (b *Sockets) misses(rank int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.unheard[rank] || b.down(rank)
}

// down reports whether the job has lost a rank: nobody who leaves waits for that one.
func (b *Sockets) down(rank int) bool {
	f := b.world.Failure()
	return f != nil && f.Rank == b.members[rank]
}

// follow goes to the server of a term, if it is a later one, with all that follow this rank.
// It returns the term in which the rank is now.
func (b *Sockets) follow(term uint64) uint64 {
	b.mu.Lock()
	later := raise(&b.term, term)
	now := b.term
	b.mu.Unlock()
	if later {
		b.nudge()
		if b.server(now) != b.rank {
			b.hub.dismiss(now)
		}
	}
	return now
}

// serve takes a connection of a rank of the job.
func (b *Sockets) serve(jobRank int, conn net.Conn) {
	defer conn.Close()
	rank := slices.Index(b.members, jobRank)
	stop := context.AfterFunc(b.life, func() { conn.Close() })
	defer stop()
	r := bufio.NewReader(conn)
	conn.SetReadDeadline(time.Now().Add(b.silence))
	f, err := readFact(r, len(b.members))
	if err != nil || conn.SetReadDeadline(time.Time{}) != nil {
		return
	}
	if f.kind == factBye {
		b.follow(f.number)
	}
	if f.kind != factHello || rank < 0 {
		return
	}
	b.hears(rank, true)
	l := b.hub.enter(rank, conn)
	if now := b.follow(f.number); b.server(now) != b.rank || b.released.Load() {
		b.hub.dismiss(max(now, f.number+1))
	}
	b.follow(b.hub.converse(l, r))
}

// summon finds the ranks that still follow a server before this one: they were stopped, say.
func (b *Sockets) summon() {
	tick := time.NewTicker(summonTime)
	defer tick.Stop()
	for {
		select {
		case <-b.life.Done():
			return
		case <-tick.C:
		}
		term := b.later() - 1
		for p := range b.members {
			if term == 0 || b.server(term) != b.rank || p == b.rank || b.hub.serves(p) {
				continue
			}
			if conn, err := b.dial(p, summonTime); err == nil {
				conn.SetWriteDeadline(time.Now().Add(summonTime))
				conn.Write(fact{kind: factBye, number: term}.append(nil))
				conn.Close()
			}
		}
	}
}

func (b *Sockets) dial(r int, wait time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(b.life, wait)
	defer cancel()
	return b.world.Dial(ctx, b.name, b.members[r], b.addrs[r])
}
