package group

import (
	"cmp"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/spinwait"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Config says who a Member is.
type Config struct {
	Name    string
	Rank    int
	Members backend.Members
	World   *rendezvous.World
	Health  Health
	Timeout time.Duration // of every wait for another rank; 0 means the World's
	// Stragglers returns the ranks whose part of the call under way has not come, and whether they
	// wait for nobody before they send it. Check calls it once the time has passed. Nil is for an
	// engine that cannot tell.
	Stragglers func() (ranks []int, sure bool)
	// Ending is called when the group has ended here, before anybody sees the error. It
	// must not call the Member. Nil does nothing.
	Ending func()
}

// Member is one rank of a group, from the first call to Close. It keeps the first error.
type Member struct {
	Config
	err  atomic.Pointer[backend.Error]
	over chan struct{} // closed by the first error

	mu      sync.Mutex // guards what follows
	arbiter Arbiter
	look    Look // memory for the next one
	inquiry *inquiry

	left    chan struct{} // closed by Leave
	leave   sync.Once
	watched sync.WaitGroup
	splits  atomic.Int64 // so far
}

// NewMember returns a rank of a group that is well.
func NewMember(c Config) *Member {
	size := len(c.Members)
	return &Member{
		Config: c, arbiter: NewArbiter(c.Rank, c.Members, cmp.Or(c.Timeout, c.World.Timeout)),
		look: Look{Closed: make([]bool, size), Begun: make([]uint64, size)},
		over: make(chan struct{}), left: make(chan struct{}),
	}
}

// String names the rank: "rank 3 (2 of the group) of run-1/1.0".
func (m *Member) String() string { return m.Members.Rank(m.Rank) + " of " + m.Name }

// Err returns the error that ended the group for this rank, or nil.
func (m *Member) Err() error {
	if err := m.err.Load(); err != nil {
		return err
	}
	return nil
}

// Over is closed when the group has ended for this rank.
func (m *Member) Over() <-chan struct{} { return m.over }

// Failure returns the error of Err as that of a call, or nil.
func (m *Member) Failure(call string) error {
	err := m.err.Load()
	if err == nil {
		return nil
	}
	named := *err
	named.Call = call
	return &named
}

// Own reports whether err is the error of Err: an error of another group, which this one was split
// from, say, is not.
func (m *Member) Own(err error) bool {
	var sticky *backend.Error
	return errors.As(err, &sticky) && sticky.Comm == m.Name
}

// Check looks at the group, and returns why it has ended, or nil. wants is the number of the
// first call that is not done and compared here, 0 if all are.
func (m *Member) Check(wants uint64) error {
	if ranks, waited := m.observe(wants); ranks != nil && m.World.LongWait != nil {
		m.World.LongWait(m.Members.Ranks(ranks...), waited)
	}
	return m.Failure("")
}

// observe lets the arbiter look at the group, and returns what [Arbiter.Awaited] does.
func (m *Member) observe(wants uint64) (awaited []int, waited time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err.Load() != nil {
		return nil, 0
	}
	now := time.Now()
	m.see(now, wants)
	m.publishEnd(m.arbiter.Step(now, &m.look))
	m.shows()
	return m.arbiter.Awaited(now, &m.look)
}

// see fills in what there is to see. m.mu is held.
func (m *Member) see(now time.Time, wants uint64) {
	m.look = Look{Wants: wants, Closed: m.look.Closed, Begun: m.look.Begun}
	if r, ok := m.Health.Reported(); ok {
		heard := r // takes memory only where there is one
		m.look.Reported = &heard
	}
	for p := range m.look.Closed {
		m.look.Closed[p] = m.Health.Closed(p)
	}
	for p := range m.look.Begun {
		m.look.Begun[p] = m.Health.Begun(p)
	}
	if m.Stragglers != nil && m.arbiter.Impatient(now) {
		m.look.Stragglers, m.look.Sure = m.Stragglers()
	}
	if d := m.arbiter.Deadline(); !d.IsZero() && !now.Before(d) {
		m.look.Stopped = m.World.Stopped()
		m.asks(now, wants)
	}
}

// Deadline returns when Check may say something else for the only reason that time passes,
// zero if never.
func (m *Member) Deadline() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.arbiter.Deadline()
}

// Gone implements [Presence].
func (m *Member) Gone(r int) error {
	if err := m.Failure("split"); err != nil {
		return err
	}
	if report, ok := m.Health.Reported(); ok {
		return &backend.Error{Comm: m.Name, Members: m.Members, Rank: m.Rank, Peer: report.Peer,
			Call: "split", Cause: report.Cause(m.Members)}
	}
	if m.Health.Closed(r) {
		return ClosedWithout(m.Members, r).Cause(m.Members)
	}
	return nil
}

// Tell tells the arbiter what has happened.
func (m *Member) Tell(e Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.publishEnd(m.arbiter.Step(time.Now(), e))
}

// publishEnd publishes the end and records it: that of a rank that was first, if there was one.
// m.mu is held.
func (m *Member) publishEnd(publishEnd *End) {
	if publishEnd == nil {
		return
	}
	if m.Ending != nil {
		m.Ending()
	}
	peer, cause := publishEnd.Report.Peer, publishEnd.Cause
	if publishEnd.Publish {
		m.Health.Publish(publishEnd.Report)
		if first, ok := m.Health.Heard(); ok && publishEnd.Heeds(first) {
			peer, cause = first.Peer, first.Cause(m.Members)
		}
	}
	err := &backend.Error{Comm: m.Name, Members: m.Members, Rank: m.Rank, Peer: peer, Cause: cause}
	m.leaveReport(err)
	m.err.Store(err)
	close(m.over)
}

// Error makes a Found an error on its way to [Member.Ends].
func (f Found) Error() string { return f.Report.Text }

// Broken makes a [Found] of an error that the group cannot go on after, unless it is one, or
// the group's own.
func (m *Member) Broken(err error) error {
	if err == nil || m.Own(err) || errors.As(err, new(Found)) {
		return err
	}
	return Found{Report: Report{Reason: Aborted, Peer: m.Rank, Text: err.Error()}}
}

// Ends reports whether the group has ended with err: if err is a [Found] it ends so.
func (m *Member) Ends(err error) bool {
	var found Found
	if errors.As(err, &found) {
		m.Tell(found)
		return m.err.Load() != nil
	}
	return m.Own(err)
}

// Abort ends the group on all ranks.
func (m *Member) Abort(cause error) {
	m.Tell(Abort{cmp.Or(cause, errors.New("no cause given"))})
}

// Close ends the group for this rank, and shows the others that it has closed.
func (m *Member) Close() {
	m.Tell(Close{})
	m.Health.Close() // which may wake those of this rank who wait
}

// Leave ends the watch, and returns when it has ended.
func (m *Member) Leave() {
	m.leave.Do(func() { close(m.left) })
	m.watched.Wait()
}

// Watched is what runs the calls of a group, as the watchdog sees it.
type Watched interface {
	// Wants returns the number of the first call that is not done and compared here, 0 if
	// all are.
	Wants() uint64
	// Advance looks for calls that are done, compares calls, and returns what ends the
	// group: see [Member.Broken].
	Advance() error
	// Stop ends what the group does on the device. It is called once, when the watchdog sees
	// that the group has ended; not after Leave.
	Stop()
}

// How often the watchdog looks, with calls under way and without.
const (
	busyLook = 2 * time.Millisecond
	idleLook = 10 * time.Millisecond
)

// Watch starts to watch the group until Leave: it ends it when the job loses a rank and, with
// an Engine, when it cannot go on for another reason, also if nobody joins a call.
func (m *Member) Watch(e Watched) { m.watched.Go(func() { m.watch(e) }) }

func (m *Member) watch(e Watched) {
	down := m.World.Down()
	if e == nil {
		select {
		case <-m.left:
		case <-down:
			m.Tell(Down{m.World.Failure()})
		}
		return
	}
	timer := time.NewTimer(idleLook)
	defer timer.Stop()
	for {
		select {
		case <-m.left:
			return
		case <-down:
			m.Tell(Down{m.World.Failure()})
		case <-timer.C:
		}
		wants := e.Wants()
		if m.Check(wants) == nil && wants > 0 {
			m.Ends(e.Advance())
		}
		if m.Err() != nil {
			e.Stop()
			return
		}
		timer.Reset(idleLook)
		if wants > 0 {
			timer.Reset(busyLook)
		}
	}
}

// OverBoard returns the Gatherer over a board, whose calls the caller puts in order. It waits no
// longer than limit.
func (m *Member) OverBoard(b Board, limit time.Duration) Gatherer {
	round := uint64(0)
	return Framed(NoteBytes, func(note []byte) ([][]byte, error) {
		round++
		return m.gatherNotes(b, round, note, limit)
	})
}

func (m *Member) gatherNotes(b Board, round uint64, note []byte,
	limit time.Duration) ([][]byte, error) {
	b.Note(round, note)
	deadline := time.Now().Add(limit)
	notes := make([][]byte, len(m.Members))
	for p := range notes {
		for wait := (spinwait.Wait{}); ; wait.Pause() {
			closed := b.Closed(p) // before the look for its note, which it may have left
			theirs, ok := b.Noted(p, round)
			if ok {
				notes[p] = theirs
				break
			}
			if err := m.Failure(""); err != nil {
				return nil, err
			}
			switch {
			case closed:
				m.Tell(Found{Report: ClosedWithout(m.Members, p), Doubt: ReportGrace})
			case time.Now().After(deadline):
				m.Tell(Found{Report: Absent(m.World.Stopped(), m.Members, []int{p}, limit)})
			}
		}
	}
	return notes, nil
}
