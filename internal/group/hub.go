package group

import (
	"bufio"
	"encoding/binary"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/internal/spinwait"
)

// hub serves a group: it keeps what ranks tell, compares their calls, and tells the others.
// Every rank has one, which is idle until ranks connect.
type hub struct {
	mu sync.Mutex
	known
	rings []digestRing // of the ranks
	lines map[*line]bool
}

func newHub(size int) *hub {
	return &hub{known: newKnown(size), rings: make([]digestRing, size), lines: map[*line]bool{}}
}

// digestRing has digests of the last calls of a rank: of from to have, at most ringSlots.
type digestRing struct {
	from, have uint64
	digests    []uint64
}

// put adds the digests of a fact.
func (d *digestRing) put(f fact) {
	last := f.number + uint64(len(f.body))/8 - 1
	if f.number == 0 || last < f.number || last <= d.have {
		return
	}
	if d.digests == nil {
		d.digests = make([]uint64, ringSlots)
	}
	if f.number > d.have+1 {
		d.from = f.number
	}
	for seq := max(f.number, d.have+1); seq <= last; seq++ {
		d.digests[seq%ringSlots] = f.digest(int(seq - f.number))
	}
	d.have = last
}

// oldest returns the number of the first call whose digest is there.
func (d *digestRing) oldest() uint64 {
	if d.have < ringSlots {
		return d.from
	}
	return max(d.from, d.have-ringSlots+1)
}

// at returns the digest of a call up to have.
func (d *digestRing) at(seq uint64) uint64 {
	if seq < d.oldest() {
		return Unseen
	}
	return d.digests[seq%ringSlots]
}

// line is a rank's connection to a hub. All but conn and wake belong to the hub's lock.
type line struct {
	rank    int
	conn    net.Conn
	wake    chan struct{}
	over    chan struct{} // closed when the rank has left
	out     []fact
	agreed  uint64 // what the rank was told
	heard   bool
	settled bool
}

// tell queues facts. Facts that wait are few: a rank asks once it has its answer.
func (l *line) tell(facts ...fact) {
	l.out = append(l.out, facts...)
	l.hurry()
}

func (l *line) hurry() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

func (h *hub) tellAll(facts ...fact) {
	for l := range h.lines {
		l.tell(facts...)
	}
}

// enter makes a line of a connection, and tells the rank all that is known.
func (h *hub) enter(rank int, conn net.Conn) *line {
	l := &line{rank: rank, conn: conn, wake: make(chan struct{}, 1), over: make(chan struct{})}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lines[l] = true
	l.tell(h.facts()...)
	go h.write(l)
	return l
}

// serves reports whether a rank is connected.
func (h *hub) serves(rank int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for l := range h.lines {
		if l.rank == rank {
			return true
		}
	}
	return false
}

// misses reports whether a rank other than one is not connected, and has not closed either.
func (h *hub) misses(rank int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	there := slices.Clone(h.closed)
	there[rank] = true
	for l := range h.lines {
		there[l.rank] = true
	}
	return slices.Contains(there, false)
}

// endLine ends a line.
func (h *hub) endLine(l *line) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.lines, l)
	close(l.over)
}

// dismiss sends all ranks to the server of a term.
func (h *hub) dismiss(term uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tellAll(fact{kind: factBye, number: term})
}

// hangUp waits for the ranks to leave that are not lost, for d at most, and leaves those that stay.
func (h *hub) hangUp(d time.Duration, down func(rank int) bool) {
	for wait := spinwait.Patient(d); h.attended(down) && !wait.Over(); {
		time.Sleep(200 * time.Microsecond)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for l := range h.lines {
		l.conn.Close()
	}
}

// attended reports whether a rank is connected that is not lost.
func (h *hub) attended(down func(rank int) bool) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for l := range h.lines {
		if !down(l.rank) {
			return true
		}
	}
	return false
}

// write sends a rank what there is for it.
func (h *hub) write(l *line) {
	var b []byte
	for {
		select {
		case <-l.over:
			return
		case <-l.wake:
		}
		b = h.pending(l, b[:0])
		l.conn.SetWriteDeadline(time.Now().Add(silence))
		if _, err := l.conn.Write(b); err != nil {
			l.conn.Close() // its reader ends the line
			return
		}
	}
}

// pending appends what there is for a rank.
func (h *hub) pending(l *line, b []byte) []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	if l.agreed < h.agreed { // first: what comes after a goodbye is not heard
		l.agreed = h.agreed
		b = fact{kind: factAgreed, number: l.agreed}.append(b)
	}
	for _, f := range l.out {
		b = f.append(b)
	}
	l.out = nil
	return b
}

// converse takes what a rank tells until it leaves, and returns the term that it leaves for,
// 0 if it says none.
func (h *hub) converse(l *line, r *bufio.Reader) uint64 {
	defer h.endLine(l)
	for {
		f, err := readFact(r, len(h.begun))
		switch {
		case err != nil:
			return 0
		case f.kind == factBye:
			return f.number
		}
		h.hear(l, f)
	}
}

// hear takes a fact.
func (h *hub) hear(l *line, f fact) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch f.kind {
	case factDigests:
		h.rings[f.rank].put(f)
		h.addFact(fact{kind: factBegun, rank: f.rank, number: h.rings[f.rank].have})
		h.compare()
	case factAsk:
		l.tell(h.allBegun()...)
		l.tell(fact{kind: factAnswer, number: f.number})
	case factHeard:
		l.heard = true
		h.settle()
	case factBegun:
		h.addFact(f)
	case factAgreed:
		if h.addFact(f) {
			h.compare()
		}
	default:
		h.announce(f)
	}
}

// learn takes what the hub's own rank has to tell, without a connection that might be late.
func (h *hub) learn(facts []fact) {
	for _, f := range facts {
		h.hear(nil, f)
	}
}

// announce tells all ranks what is new.
func (h *hub) announce(f fact) {
	if !h.addFact(f) {
		return
	}
	if f.kind == factClosed { // who sees that must see this
		h.tellAll(fact{kind: factBegun, rank: f.rank, number: h.begun[f.rank]})
	}
	h.tellAll(f)
	switch {
	case f.kind == factClosed:
		h.settle()
	case f.kind == factLeaving && h.left == 0:
		h.count()
	}
}

// count decides whether all ranks leave together.
func (h *hub) count() {
	switch {
	case slices.Contains(h.leaving, gaveUp):
		h.announce(fact{kind: factLeft, number: apart})
	case slices.Min(h.leaving) == counted:
		h.announce(fact{kind: factLeft, number: together})
	}
}

// settle lets ranks see the report once every rank has told what it had begun. A rank that
// cannot tell holds it back for [settleTime].
func (h *hub) settle() {
	told := slices.Clone(h.closed)
	for l := range h.lines {
		told[l.rank] = told[l.rank] || l.heard
	}
	if h.report.kind == 0 || slices.Contains(told, false) {
		return
	}
	for l := range h.lines {
		if !l.settled {
			l.settled = true
			l.tell(h.allBegun()...)
			l.tell(fact{kind: factSettled})
		}
	}
}

// compare compares the calls that all ranks have told.
func (h *hub) compare() {
	if h.differs.kind != 0 {
		return
	}
	upTo, oldest := ^uint64(0), ^uint64(0)
	for r := range h.rings {
		upTo, oldest = min(upTo, h.rings[r].have), min(oldest, h.rings[r].oldest())
	}
	if h.agreed < upTo && h.agreed+1 < oldest { // no rank has these any more
		h.agreed = min(upTo, oldest-1)
	}
	for h.agreed < upTo {
		if !h.same(h.agreed + 1) {
			h.announce(h.difference(h.agreed + 1))
			break
		}
		h.agreed++
	}
	for l := range h.lines {
		if l.agreed < h.agreed {
			l.hurry()
		}
	}
}

// same reports whether a call is the same on all ranks that have its digest.
func (h *hub) same(seq uint64) bool {
	seen := Unseen
	for r := range h.rings {
		d := h.rings[r].at(seq)
		if d != Unseen && seen != Unseen && d != seen {
			return false
		}
		if d != Unseen {
			seen = d
		}
	}
	return true
}

func (h *hub) difference(seq uint64) fact {
	f := fact{kind: factDiffers, number: seq}
	for r := range h.rings {
		f.body = binary.LittleEndian.AppendUint64(f.body, h.rings[r].at(seq))
	}
	return f
}
