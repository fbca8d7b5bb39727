package rendezvous

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// core is a store and the server of a job, as a pure state machine: its methods are told what
// happens, and note in todo what is to be done. It has no clock, socket or goroutine, so that the
// simulation of sim_test.go can move it. A [table] drives it.
//
//	          stop                    nobody is left, a failure, or linger
//	serving --------> lingering ------------------------------------------+
//	                                                                      |
//	          nobody else is left, a failure, or handshakeTime            v
//	parting <-------------------------------------------- moving <----- leading
//	   |  nobody is left, or newsTime                      it serves
//	   v
//	 gone
type core struct {
	me       identity
	register bool // of an elastic job, which survives the end of its processes
	pure

	values map[string][]byte
	waits  map[string][]*wait // by the first of their keys that is not set

	ranks    map[int]identity // that have been admitted
	members  map[int]*member  // of these, the connected ones, by rank
	refused  error            // of the last connection turned away, for messages
	expected int              // of a successor: how many members come from the server before
	reports  lastReports      // of this rank
	held     []*held
	packing  packing // of which packed is the answer
	packed   []byte

	phase  phase
	turn   int     // counts phases
	late   bool    // the time of the phase is up
	alone  bool    // nobody is waited for: see [World.Dissolve]
	leader *member // that was asked last to serve
}

// packing is an answer to an all-gather of all ranks. It is the same for each, and packed once:
// 4,096 of them would take 4 GB.
type packing struct {
	key        string
	size, from int
}

// phase is how far a server is from its end.
type phase int

const (
	serving   phase = iota
	lingering       // the others may leave first
	leading         // a member is asked to serve the failure detector
	moving          // the others move to it
	parting         // all have been told that the server leaves
	gone
)

// action is what the driver of a state machine does.
type action any

// pure is what a state machine and its driver tell each other.
type pure struct {
	now  time.Time // of the present event
	todo []action
}

func (p *pure) do(a action) { p.todo = append(p.todo, a) }

type (
	// send sends a frame to a member. If it reports, wrote is called once it is written.
	send struct {
		to      *member
		frame   frame
		reports bool
	}
	// drop closes the connection of a member.
	drop struct{ from *member }
	// answer answers a call of this process.
	answer struct {
		to    *wait
		value []byte
	}
	// seal takes no more connections.
	seal struct{}
	// remind calls due after a while.
	remind struct {
		after time.Duration
		turn  int
	}
	// spread calls spreads after spreadTime, which is patient.
	spread struct{ call *held }
	// end closes all connections.
	end struct{}
)

// member is a rank that is connected.
type member struct {
	identity
	reports lastReports
	waits   map[uint64]*wait
	told    bool  // a failure has been sent to it
	unsent  int   // last reports that have not been sent to it yet
	served  bool  // it has said where it serves
	moved   bool  // it has come from the server before, which watches it until then
	link    *link // the driver's
}

// wait is a call that is answered once keys are set.
type wait struct {
	get  string     // the key, or
	all  *gathering // those of a gathering
	log  string     // of which get is an entry; those behind it are asked for, too
	from int        // an index of all, or of the log: what is before is not asked for
	next int        // an index of all: the values before are set
	by   *member    // nil for this process
	id   uint64     // of the request

	value []byte        // the driver's: the answer to this process
	done  chan struct{} // the driver's: closed with the answer
}

// held is an answer to this process that waits until other ranks have what it is about.
type held struct {
	answer
	has func(m *member) bool
}

func newCore(me identity, register bool) core {
	return core{me: me, register: register, values: map[string][]byte{},
		waits: map[string][]*wait{}, ranks: map[int]identity{me.rank: me},
		members: map[int]*member{}}
}

// put stores a value and answers who waits for it.
func (c *core) put(key string, value []byte) {
	c.values[key] = value
	parked := c.waits[key]
	delete(c.waits, key)
	for _, w := range parked {
		c.await(w)
	}
	if key == downKey {
		c.advance()
	}
}

func (c *core) swap(key string, old, new []byte) (current []byte, swapped bool) {
	current, isSet := c.values[key]
	if isSet != (old != nil) || !bytes.Equal(current, old) {
		return current, false
	}
	c.put(key, new)
	return new, true
}

// key returns the key that a wait waits for next, "" if all are set.
func (w *wait) key() string {
	switch {
	case w.all == nil && w.next == 0:
		return w.get
	case w.all == nil || w.next == w.all.count():
		return ""
	}
	return rankKey(w.all.key, w.all.member(w.next))
}

// await answers a call once its keys are set.
func (c *core) await(w *wait) {
	var of packing
	if w.all != nil && w.all.members == nil {
		of = packing{w.all.key, w.all.size, w.from}
	}
	if of.key != "" && of == c.packing { // all its keys are set
		w.next = w.all.count()
	}
	for key := w.key(); key != ""; key = w.key() {
		if _, ok := c.values[key]; !ok {
			c.waits[key] = append(c.waits[key], w)
			return
		}
		w.next++
	}
	value := c.values[w.get]
	switch {
	case of.key != "":
		if of != c.packing {
			c.packing, c.packed = of, c.pack(*w.all, w.from)
		}
		value = c.packed
	case w.all != nil:
		value = c.pack(*w.all, w.from)
	case w.log != "":
		value = c.entries(w.log, w.from)
	}
	switch {
	case w.by != nil:
		delete(w.by.waits, w.id)
		news := w.get == downKey && !w.by.told
		c.do(send{w.by, frame{kind: kindDone, id: w.id, body: value}, news})
	case w.get == downKey:
		// A failure is reported to rank 0 after the others: its program may then end at once, and
		// the store with it.
		c.hold(w, value, func(m *member) bool { return m.told })
	default:
		c.do(answer{w, value})
	}
}

// cancel ends a wait, with a nil value for one of this process, unless it is answered. A failure
// that is known is never dropped.
func (c *core) cancel(w *wait) {
	if i := slices.IndexFunc(c.held, func(h *held) bool { return h.to == w }); i >= 0 {
		c.spreads(c.held[i])
	}
	key := w.key()
	if key == "" {
		return
	}
	c.waits[key] = slices.DeleteFunc(c.waits[key], func(other *wait) bool { return other == w })
	if len(c.waits[key]) == 0 {
		delete(c.waits, key) // it may never be set
	}
	if w.by != nil {
		delete(w.by.waits, w.id)
	} else {
		c.do(answer{w, nil})
	}
}

// hold answers a call of this process once all members have something, after spreadTime at the
// latest.
func (c *core) hold(w *wait, value []byte, has func(*member) bool) {
	h := &held{answer{w, value}, has}
	c.held = append(c.held, h)
	c.settle()
	if slices.Contains(c.held, h) {
		c.do(spread{h})
	}
}

// settle gives the answers that need not be held any more.
func (c *core) settle() {
	for _, h := range slices.Clone(c.held) {
		missing := func(m *member) bool { return !h.has(m) }
		if c.phase == gone || !slices.ContainsFunc(c.connected(), missing) {
			c.spreads(h)
		}
	}
}

// spreads gives an answer that is held.
func (c *core) spreads(h *held) {
	if i := slices.Index(c.held, h); i >= 0 {
		c.held = slices.Delete(c.held, i, i+1)
		c.do(h.answer)
	}
}

// wrote hears that a frame that reports was sent to a member.
func (c *core) wrote(m *member, k kind) {
	if k == kindLastReport {
		m.unsent--
	} else {
		m.told = true
	}
	c.settle()
}

// leaveReport sends the last report of the rank that serves the members to all of them, and to
// those that come: they could not tell its end from a loss. The call is answered once it was sent
// to all.
func (c *core) leaveReport(w *wait, value []byte) {
	c.reports.takeReport(value, c.now)
	for _, m := range c.connected() {
		m.unsent++
		c.do(send{m, frame{kind: kindLastReport, body: value}, true})
	}
	c.hold(w, value, func(m *member) bool { return m.unsent == 0 })
}

// connected returns the members in the order of their ranks.
func (c *core) connected() []*member {
	return slices.SortedFunc(maps.Values(c.members),
		func(a, b *member) int { return a.rank - b.rank })
}

// admit decides about a client that has proven the token.
func (c *core) admit(id identity) (*member, error) {
	if err := c.me.match(id); err != nil {
		return nil, err
	}
	if id.ended != "" {
		return nil, nil // a launcher only reports this: see end
	}
	failure := c.values[downKey]
	first, taken := c.ranks[id.rank]
	switch {
	case taken && c.register:
		return nil, &refusal{fmt.Sprintf("process %d has taken part in the elastic job already: "+
			"it joins once, and trains once", id.rank)}
	case taken:
		return nil, &refusal{fmt.Sprintf("two processes say that they are rank %d: process %d on "+
			"%s and process %d on %s: give every process its own RANK",
			id.rank, first.pid, first.host, id.pid, id.host)}
	case c.phase >= parting && failure != nil: // too late to be told as a member
		return nil, &refusal{decodeFailure(failure).Error()}
	case c.phase >= parting:
		return nil, fmt.Errorf("rank 0, which serves the store, has left the job: %w", ErrClosed)
	}
	m := &member{identity: id, waits: map[uint64]*wait{}}
	c.ranks[id.rank], c.members[id.rank] = id, m
	if value := c.reports.value(c.now); value != nil {
		c.do(send{m, frame{kind: kindLastReport, body: value}, false})
	}
	if len(c.members) == c.expected {
		c.do(seal{})
	}
	return m, nil
}

// ended hears that the process of a rank has ended, which is a failure if the rank had not joined.
func (c *core) ended(id identity) {
	if _, joined := c.ranks[id.rank]; !joined {
		c.fail(&Failure{Rank: id.rank, Cause: endedEarly(id.ended)})
	}
}

// turnAway records a connection that did not become a member. If it proved the token, the job
// fails; an unauthenticated client has no effect.
func (c *core) turnAway(from string, id identity, err error) {
	c.refused = telling(c.phase == gone, c.refused, fmt.Errorf("a connection from %s: %w", from,
		err))
	if lasting(err) && id.ended == "" && !c.register {
		c.fail(&Failure{Rank: id.rank, Cause: err, Declared: true})
	}
}

// fail publishes a failure, if it is the first.
func (c *core) fail(f *Failure) {
	if c.phase < parting {
		c.swap(downKey, nil, f.encode())
	}
}

// left removes a member. err is nil if it said goodbye; otherwise the rank is lost.
func (c *core) left(m *member, err error) {
	for _, w := range m.waits {
		c.cancel(w)
	}
	delete(c.members, m.rank)
	c.do(drop{m})
	if err != nil && !c.register && (c.expected == 0 || m.moved) {
		c.fail(m.reports.instead(m.loss(err), c.now))
	}
	c.settle()
	c.advance()
}

// hear handles a frame of a member. An error ends its connection.
func (c *core) hear(m *member, f frame) error {
	u := unpacker{rest: f.body}
	switch f.kind {
	case kindCancel:
		if w := m.waits[f.id]; w != nil {
			c.cancel(w)
		}
	case kindServing:
		addr := u.string()
		if err := u.done(); err != nil {
			return err
		}
		return c.serves(m, addr)
	case kindGet:
		key := u.string()
		c.beginWait(m, f, &wait{get: key}, errors.Join(u.done(), checkPair(key, nil)))
	case kindEntries:
		key, i := u.string(), int(u.int())
		c.beginWait(m, f, &wait{get: rankKey(key, i), log: key, from: i},
			errors.Join(u.done(), checkPair(rankKey(key, i), nil)))
	case kindGather, kindPeek:
		c.answerGathering(m, f)
	case kindSet, kindSwap, kindAppend:
		body, err := c.request(m, f)
		c.reply(m, f.id, body, err)
	default:
		return fmt.Errorf("received a frame of kind %d, which no rank sends here", f.kind)
	}
	return nil
}

// reply sends the result of a request.
func (c *core) reply(m *member, id uint64, body []byte, err error) {
	f := frame{kind: kindDone, id: id, body: body}
	if err != nil {
		f = frame{kind: kindFailed, id: id, body: packString(nil, err.Error())}
	}
	c.do(send{m, f, false})
}

// request runs a request that does not wait.
func (c *core) request(m *member, f frame) ([]byte, error) {
	u := unpacker{rest: f.body}
	key := u.string()
	var old, value []byte
	i := 0
	switch f.kind {
	case kindSwap:
		old = u.bytes()
	case kindAppend:
		i = int(u.int())
	}
	value = u.bytes()
	err := errors.Join(u.done(), checkPair(key, value))
	switch {
	case err != nil:
		return nil, err
	case f.kind == kindSwap:
		current, swapped := c.swap(key, old, copied(value))
		return packBytes(packInt(nil, map[bool]int64{true: 1}[swapped]), current), nil
	case f.kind == kindAppend:
		return packInt(nil, int64(c.append(key, i, copied(value)))), nil
	case key == reportKey(m.rank):
		m.moved = true
		m.reports.takeReport(value, c.now)
	default:
		c.put(key, copied(value))
	}
	return nil, nil
}

// beginWait starts a wait of a member, unless its request has an error.
func (c *core) beginWait(m *member, f frame, w *wait, err error) {
	if err == nil && (len(m.waits) >= waiting || m.waits[f.id] != nil) {
		err = fmt.Errorf("a rank may wait for at most %d keys at once", waiting)
	}
	if err != nil {
		c.reply(m, f.id, nil, err)
		return
	}
	w.by, w.id = m, f.id
	m.waits[f.id] = w
	c.await(w)
}

// answerGathering answers a rank's request for a gathering, once all values are there if the
// request waits.
func (c *core) answerGathering(m *member, f frame) {
	g, from, err := unpackGathering(f.body)
	if err == nil && f.kind == kindGather && g.value != nil {
		if _, first := c.swap(rankKey(g.key, g.rank), nil, copied(g.value)); !first {
			err = errUsed
		}
	}
	if f.kind == kindPeek && err == nil {
		c.reply(m, f.id, c.pack(g, from), nil)
		return
	}
	c.beginWait(m, f, &wait{all: &g, from: from, next: from}, err)
}

// pack packs the values of a gathering from index from on, as many as fit into an answer.
func (c *core) pack(g gathering, from int) (body []byte) {
	for i := from; i < g.count() && len(body) < maxValue; i++ {
		body = packBytes(body, c.values[rankKey(g.key, g.member(i))])
	}
	return body
}

// append stores the next entry of a log, from entry i on.
func (c *core) append(key string, i int, value []byte) int {
	for c.values[rankKey(key, i)] != nil {
		i++
	}
	c.put(rankKey(key, i), value)
	return i
}

// entries packs the entries of a log from entry i on, as many as fit into an answer.
func (c *core) entries(key string, i int) (body []byte) {
	value, ok := c.values[rankKey(key, i)]
	for ; ok && (body == nil || len(body)+len(value) < maxValue); i++ {
		body = packBytes(body, value)
		value, ok = c.values[rankKey(key, i+1)]
	}
	return body
}

// stop begins the end of the server. It gives the members time to leave, hands over the failure
// detector to those that stay, says goodbye to them, and closes all connections.
func (c *core) stop() {
	if c.phase == serving {
		c.do(seal{})
		c.enter(lingering, linger)
		c.advance()
	}
}

// dissolve says that the members need neither time nor a server any more.
func (c *core) dissolve() {
	c.alone = true
	c.advance()
}

// enter begins a phase, which ends after most.
func (c *core) enter(p phase, most time.Duration) {
	c.phase, c.late = p, false
	c.turn++
	c.do(remind{most, c.turn})
}

// due hears that the time of a phase is up.
func (c *core) due(turn int) {
	if turn == c.turn {
		c.late = true
		c.advance()
	}
}

// advance goes on to the next phase of the end, if nothing holds it up.
func (c *core) advance() {
	members, late := len(c.members), c.late || c.alone
	failed := late || c.values[downKey] != nil
	switch {
	case c.phase == lingering && (members == 0 || failed),
		c.phase == leading && (c.members[c.leader.rank] != c.leader || failed):
		c.lead()
	case c.phase == moving && (members <= 1 || failed):
		c.parts()
	case c.phase == parting && (members == 0 || late):
		c.phase = gone
		c.settle()
		c.do(end{})
	}
}

// lead asks the lowest rank that was not asked yet to serve the failure detector for the others, if
// there are others to watch. A rank that does not answer is skipped, and moves like the others.
func (c *core) lead() {
	rest := c.connected()
	if c.leader != nil {
		rest = slices.DeleteFunc(rest, func(m *member) bool { return m.rank <= c.leader.rank })
	}
	if len(rest) == 0 || len(c.members) == 1 || c.register || c.alone ||
		c.values[downKey] != nil {
		c.parts()
		return
	}
	c.leader = rest[0]
	others := packInt(nil, int64(len(c.members)-1))
	c.do(send{c.leader, frame{kind: kindServe, body: others}, false})
	c.enter(leading, newsTime)
}

// serves hears where a member serves the failure detector.
func (c *core) serves(m *member, addr string) error {
	if m.served {
		return errors.New("received two addresses of one server")
	}
	m.served = true
	if c.phase != leading || m != c.leader {
		return nil // too late
	}
	for _, other := range c.connected() {
		if other != m {
			c.do(send{other, frame{kind: kindMove, body: packString(nil, addr)}, false})
		}
	}
	c.enter(moving, handshakeTime) // to connect: until they have, nobody else watches them
	c.advance()
	return nil
}

// parts says goodbye to the members. If bytes of one are unread, closing resets its connection, and
// it might never see the goodbye. So the member closes first.
func (c *core) parts() {
	c.enter(parting, newsTime)
	for _, m := range c.connected() {
		c.do(send{m, frame{kind: kindBye, body: packBytes(nil, c.values[downKey])}, false})
	}
	c.advance()
}
