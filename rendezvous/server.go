package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/internal/spinwait"
)

const (
	// waiting bounds the concurrent Gets of one rank.
	waiting = 1024
	// linger is how long a server waits for the others to leave first, if no rank has failed.
	linger = 2 * time.Second
	// spreadTime is how long rank 0 reports a failure to the others before it learns of it itself:
	// its program may then end at once, and the store with it.
	spreadTime = 200 * time.Millisecond
)

// server holds the store of a job, in the process of rank 0.
type server struct {
	gate
	token   string
	me      identity
	timeout time.Duration
	table   *table
	gone    chan struct{} // signals that a member has left
	// in a Register, lost replaces downKey: it is told which member's connection has ended.
	// Otherwise nil
	lost func(rank int)

	mu       sync.Mutex
	ranks    map[int]identity // admitted ranks
	members  map[*member]bool // connected ranks
	refused  error            // of the last connection turned away, for messages
	expected int              // number of members to come; 0 if unknown
	closing  bool             // from now on, lost connections are not failures
}

// member is a rank that is connected.
type member struct {
	identity
	link   *link
	wills  wills
	gets   sync.WaitGroup
	mu     sync.Mutex
	ends   map[uint64]context.CancelFunc // of the Gets in progress
	told   chan struct{}                 // closed once a failure was sent to the member
	untold chan struct{}                 // told, until the failure is being sent
	serves chan string                   // the address where it serves, once asked to
	leave  context.CancelFunc            // ends all of its Gets
	ctx    context.Context
}

// serve holds a store on ln, which it owns. lost is for a Register, nil for the store of a job.
func serve(ln net.Listener, token string, me identity, timeout time.Duration,
	lost func(rank int)) *server {
	s := &server{
		lost:  lost,
		token: token, me: me, timeout: timeout, table: newTable(), gone: make(chan struct{}, 1),
		ranks: map[int]identity{me.rank: me}, members: map[*member]bool{},
	}
	s.start(ln, s.take)
	return s
}

// take serves a connection.
func (s *server) take(conn net.Conn) {
	m, err := s.welcome(conn)
	s.strangers.giveUp(conn)
	if err != nil || m == nil {
		conn.Close()
		return
	}
	s.depart(m, s.converse(m))
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// welcome makes a member of a connection.
func (s *server) welcome(conn net.Conn) (m *member, err error) {
	stop := context.AfterFunc(s.over, func() { conn.Close() })
	defer stop()
	id, err := s.receive(conn, s.token, s.me, func(id identity, welcome frame) (err error) {
		if !s.strangers.giveUp(conn) {
			return errors.New("it was dropped for newer connections just when it had proven the " +
				"token")
		}
		conn.SetDeadline(time.Time{})
		m, err = s.admit(conn, id, welcome)
		return err
	})
	if err != nil {
		s.turnAway(conn, id, err)
	}
	return m, err
}

// admit decides about a client that has proven the token. A launcher that only reports
// the end of a rank does not become a member.
func (s *server) admit(conn net.Conn, id identity, welcome frame) (*member, error) {
	if err := s.me.match(id); err != nil {
		return nil, err
	}
	if id.ended != "" {
		return nil, s.hearEnd(conn, id, welcome)
	}
	failure := s.failure()
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.ranks[id.rank]; ok && s.lost != nil {
		return nil, &refusal{fmt.Sprintf("process %d has taken part in the elastic job already: "+
			"it joins once, and trains once", id.rank)}
	}
	if first, ok := s.ranks[id.rank]; ok {
		return nil, &refusal{fmt.Sprintf("two processes say that they are rank %d: process %d on "+
			"%s and process %d on %s: give every process its own RANK",
			id.rank, first.pid, first.host, id.pid, id.host)}
	}
	if s.closing && failure != nil { // too late to be told as a member
		return nil, &refusal{decodeFailure(failure).Error()}
	}
	if s.closing {
		return nil, fmt.Errorf("rank 0, which serves the store, has left the job: %w", ErrClosed)
	}
	m := &member{identity: id, link: newLink(conn, s.timeout),
		ends: map[uint64]context.CancelFunc{}, told: make(chan struct{}), serves: make(
			chan string, 1)}
	m.untold = m.told
	m.ctx, m.leave = context.WithCancel(s.over)
	m.link.out <- welcome // the queue is new, so there is room
	s.ranks[id.rank] = id
	s.members[m] = true
	if len(s.members) == s.expected {
		s.seal()
	}
	return m, nil
}

// hearEnd handles a report that the process of a rank has ended, which is a failure if
// the rank had not joined.
func (s *server) hearEnd(conn net.Conn, id identity, welcome frame) error {
	s.mu.Lock()
	_, joined := s.ranks[id.rank]
	s.mu.Unlock()
	err := welcome.writeTo(conn) // before the failure, which may end this process
	if !joined {
		s.fail(&Failure{Rank: id.rank, Cause: endedEarly(id.ended)})
	}
	return err
}

// turnAway records a connection that did not become a member. If it proved the token, the job
// fails; a stranger has no effect.
func (s *server) turnAway(conn net.Conn, id identity, err error) {
	s.mu.Lock()
	s.refused = telling(s.over, s.refused, fmt.Errorf("a connection from %v: %w", conn.RemoteAddr(),
		err))
	s.mu.Unlock()
	if lasting(err) && id.ended == "" && s.lost == nil {
		s.fail(&Failure{Rank: id.rank, Cause: err, Declared: true})
	}
}

// fail publishes a failure, if it is the first.
func (s *server) fail(f *Failure) {
	s.mu.Lock()
	closing := s.closing
	s.mu.Unlock()
	if closing {
		return
	}
	s.table.compareAndSwap(downKey, nil, f.encode())
}

// turnedAway returns the error of a connection that did not become a member, or nil. If there were
// several, it prefers the last one without the token, then the last one.
func (s *server) turnedAway() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refused
}

// seal stops accepting connections: all ranks have joined.
func (s *server) seal() { s.ln.Close() }

// sealAfter makes the server seal itself once a number of ranks have joined.
func (s *server) sealAfter(ranks int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.expected = ranks
}

// depart removes a member. err is nil if it said goodbye; otherwise the rank is lost.
func (s *server) depart(m *member, err error) {
	switch {
	case s.lost != nil:
		s.lost(m.rank)
	case err != nil:
		s.fail(m.wills.instead(m.loss(err)))
	}
	m.leave()
	m.link.end(ErrClosed)
	m.gets.Wait()
	<-m.link.written
	s.mu.Lock()
	delete(s.members, m)
	s.mu.Unlock()
	select {
	case s.gone <- struct{}{}:
	default: // already signalled
	}
}

// converse serves a member until it says goodbye.
func (s *server) converse(m *member) error {
	for {
		f, err := readFrame(m.link.conn, maxBody)
		if err != nil {
			if cause := context.Cause(m.link.over); cause != nil {
				return cause
			}
			return err
		}
		switch f.kind {
		case kindBye:
			return nil
		case kindCancel:
			m.cancel(f.id)
		case kindServing:
			err = m.serving(f)
		case kindGet:
			err = s.get(m, f)
		case kindGather, kindPeek:
			err = s.gather(m, f)
		case kindSet, kindAdd, kindSwap:
			body, failed := s.do(m, f)
			err = m.answer(f.id, body, failed)
		default:
			err = fmt.Errorf("received a frame of kind %d, which no rank sends here", f.kind)
		}
		if err != nil {
			return err
		}
	}
}

// serving handles the answer to kindServe.
func (m *member) serving(f frame) error {
	u := unpacker{rest: f.body}
	addr := u.string()
	if err := u.done(); err != nil {
		return err
	}
	select {
	case m.serves <- addr:
		return nil
	default:
		return errors.New("received two addresses of one server")
	}
}

// answer sends the result of a request. It returns errors of the connection.
func (m *member) answer(id uint64, body []byte, err error) error {
	f := frame{kind: kindDone, id: id, body: body}
	if err != nil {
		f = frame{kind: kindFailed, id: id, body: packString(nil, err.Error())}
	}
	return m.link.send(context.Background(), f) // ends with the link
}

// do runs a request that does not wait.
func (s *server) do(m *member, f frame) ([]byte, error) {
	u := unpacker{rest: f.body}
	key := u.string()
	switch f.kind {
	case kindSet:
		value := u.bytes()
		if err := errors.Join(u.done(), checkPair(key, value)); err != nil {
			return nil, err
		}
		if key == willKey(m.rank) {
			m.wills.take(value)
			return nil, nil
		}
		s.table.set(key, copied(value))
		return nil, nil
	case kindAdd:
		delta := u.int()
		if err := errors.Join(u.done(), checkPair(key, nil)); err != nil {
			return nil, err
		}
		sum, err := s.table.add(key, delta)
		return packInt(nil, sum), err
	default:
		old, new := u.bytes(), u.bytes()
		if err := errors.Join(u.done(), checkPair(key, new)); err != nil {
			return nil, err
		}
		current, swapped := s.table.compareAndSwap(key, old, copied(new))
		return packBytes(packInt(nil, truth(swapped)), current), nil
	}
}

func truth(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// get starts a Get, which answers once the key is set.
func (s *server) get(m *member, f frame) error {
	u := unpacker{rest: f.body}
	key := u.string()
	if err := errors.Join(u.done(), checkPair(key, nil)); err != nil {
		return m.answer(f.id, nil, err)
	}
	return s.await(m, f, func(ctx context.Context) ([]byte, error) { return s.table.get(ctx, key) })
}

// await starts to wait for the answer to a request, until the rank cancels it.
func (s *server) await(m *member, f frame, wait func(ctx context.Context) ([]byte, error)) error {
	ctx, ok := m.begin(f.id)
	if !ok {
		return m.answer(f.id, nil, fmt.Errorf("a rank may wait for at most %d keys at once",
			waiting))
	}
	m.gets.Go(func() {
		defer m.cancel(f.id)
		value, err := wait(ctx)
		if err != nil {
			return // cancelled
		}
		answer := frame{kind: kindDone, id: f.id, body: value}
		if f.asks(downKey) {
			answer.sent = m.news()
		}
		m.link.send(m.ctx, answer) // the reader sees a lost connection too
	})
	return nil
}

// asks reports whether a frame is a Get of a key.
func (f frame) asks(key string) bool {
	return f.kind == kindGet && string(f.body) == string(packString(nil, key))
}

// news returns told the first time, then nil.
func (m *member) news() chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	told := m.untold
	m.untold = nil
	return told
}

// awaitSent waits until the failure was sent to all members, at most spreadTime.
func (s *server) awaitSent() {
	ctx, cancel := spinwait.WithPatience(s.over, spreadTime)
	defer cancel()
	for _, m := range s.connected() {
		select {
		case <-m.told:
		case <-m.link.over.Done():
		case <-ctx.Done():
		}
	}
}

// begin registers a Get.
func (m *member) begin(id uint64) (context.Context, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.ends) >= waiting || m.ends[id] != nil {
		return nil, false
	}
	ctx, cancel := context.WithCancel(m.ctx)
	m.ends[id] = cancel
	return ctx, true
}

// cancel ends a Get, if it is under way.
func (m *member) cancel(id uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if end := m.ends[id]; end != nil {
		end()
		delete(m.ends, id)
	}
}

// stop ends the server. It gives the members time to leave, hands over the failure detector to
// those that stay, says goodbye to them, and closes all connections.
func (s *server) stop() {
	s.seal()
	s.awaitLeavers(linger, 0, false)
	if s.lost == nil {
		s.handOver()
	}
	s.mu.Lock()
	s.closing = true
	s.mu.Unlock()
	var byes sync.WaitGroup
	ctx, cancel := context.WithTimeout(context.Background(), newsTime)
	defer cancel()
	for _, m := range s.connected() {
		byes.Go(func() {
			m.link.bye(ctx, packBytes(nil, s.failure()))
		})
	}
	// If bytes of a member are unread, closing resets its connection, and it might never
	// see the goodbye. So the member closes first.
	s.awaitLeavers(newsTime, 0, true)
	s.end()
	for _, m := range s.connected() {
		m.link.end(ErrClosed)
	}
	byes.Wait()
	s.running.Wait()
}

// awaitLeavers waits for at most d until at most stay members are left. After a failure it waits
// only if must is set.
func (s *server) awaitLeavers(d time.Duration, stay int, must bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for len(s.connected()) > stay && (must || s.failure() == nil) {
		select {
		case <-s.gone:
		case <-timer.C:
			return
		}
	}
}

// failure returns the published failure, or nil.
func (s *server) failure() []byte {
	s.table.mu.Lock()
	defer s.table.mu.Unlock()
	return s.table.values[downKey]
}

func (s *server) connected() []*member {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []*member
	for m := range s.members {
		all = append(all, m)
	}
	return all
}

// hostStore is the store of rank 0.
type hostStore struct {
	*memStore
	server *server
}

func (s *server) open() Store { return &hostStore{s.table.open(), s} }

// Get reports a failure to rank 0 after the others: its program may then end at once, and the store
// with it.
func (h *hostStore) Get(ctx context.Context, key string) ([]byte, error) {
	value, err := h.memStore.Get(ctx, key)
	if err == nil && key == downKey {
		h.server.awaitSent()
	}
	return value, err
}

// Close ends rank 0's own calls at once and then stops the server.
func (h *hostStore) Close() error {
	if h.closed.Err() == nil {
		h.memStore.Close()
		h.server.stop()
	}
	return nil
}
