package group

import (
	"fmt"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/rendezvous"
)

const (
	// ReportGrace is how long a rank whose own finding may only follow from another
	// one's waits for a better report: a rank that leaves because of a third one tells
	// the job, and the news take a while.
	ReportGrace = 100 * time.Millisecond
	// finishGrace is how long calls that every rank has begun may go on after another
	// rank has ended the group: that rank may have done them before.
	finishGrace = 50 * time.Millisecond
	// earlierGrace is the same for calls before those that differ: a rank under load, whose part
	// the others have long had, may not have sent it to all yet.
	earlierGrace = 250 * time.Millisecond
)

// State is where a group is in its life, as one rank sees it.
type State uint8

// The states. A group only moves down this list, except that what is heard in Doubting
// may lead to Finishing.
const (
	Working  State = iota
	Doubting       // this rank has found an end, and waits for a better report
	// another rank has reported an end: calls that every rank has begun may still finish
	Finishing
	Ended
)

// Event is what a rank learns of its group: [Look], [Found], [Down], [Abort] or [Close].
type Event interface {
	apply(m *Arbiter, now time.Time) *End
}

// The events.
type (
	// Look is what the rank sees when it looks at the others. Reported must be read before
	// Closed, and Closed before Begun: a rank that closes or reports has shown before what
	// it has begun.
	Look struct {
		// number of the first call that is not done and compared here; 0 if all are
		Wants    uint64
		Reported *Report // of another rank, nil if there is none
		Closed   []bool
		Begun    []uint64 // the number of the last call that each rank has begun
		// What follows is wanted once [Arbiter.Deadline] has passed.
		Stopped    []rendezvous.Process
		Stragglers []int // ranks whose part of the call has not come, and
		Sure       bool  // that they wait for nobody before they send it
		// Asks says that the job is being asked who keeps the ranks of [Arbiter.Absent] from going
		// on, and Missing is the answer, in ranks of the job: see [rendezvous.World.Missing]. None
		// is no answer.
		Asks    bool
		Missing []int
	}
	// Found is an end that this rank has found: calls that differ, an engine that has
	// failed. If Doubt is not 0 the end may follow from another one, whose report replaces
	// it if it comes within that time. Cause is what this rank's own error wraps, nil for
	// what the Report says.
	Found struct {
		Report Report
		Doubt  time.Duration
		Cause  error
	}
	// Down is the loss of a rank of the job.
	Down struct{ Failure *rendezvous.Failure }
	// Abort is a call of Abort on this rank.
	Abort struct{ Cause error }
	// Close is a call of Close on this rank.
	Close struct{}
)

// End is how the group ends for this rank.
type End struct {
	Report  Report
	Cause   error // of this rank's [backend.Error]
	Publish bool  // the others must be told the Report
	Yields  bool  // to a report of another rank that was first
}

// Arbiter decides when a group ends for one rank, and who is to blame. It has no clock and
// starts nothing: [Member] tells it what happens, and when.
type Arbiter struct {
	rank    int
	members backend.Members
	timeout time.Duration

	state  State
	reason End       // why the group ends when until has passed; of Doubting and Finishing
	until  time.Time // of Doubting and Finishing
	// the last call that every rank had begun, and that does not differ, when Finishing began
	common uint64

	wants uint64        // of the last Look
	since time.Time     // when the rank began to want it
	grace time.Duration // that it waits beyond the timeout
	heeds bool          // grace has ReportGrace in it
	// absent are the ranks that it waits for, from patience on, for want of a better answer.
	absent   []int
	patience time.Duration
	said     bool // that it waits for long
}

// NewArbiter returns the arbiter of a rank of a group in which a rank waits for others, or
// for its device, no longer than timeout.
func NewArbiter(rank int, members backend.Members, timeout time.Duration) Arbiter {
	return Arbiter{rank: rank, members: members, timeout: timeout,
		patience: min(timeout/8, time.Second)}
}

// Absent returns the ranks of the group that this one has waited for longer than patience: an
// eighth of the timeout, a second at most. It is nil if there are none.
func (m *Arbiter) Absent() []int { return m.absent }

// Impatient reports whether the rank has waited so long.
func (m *Arbiter) Impatient(now time.Time) bool {
	return m.state == Working && m.wants > 0 && now.Sub(m.since) >= m.patience
}

// State returns the state.
func (m *Arbiter) State() State { return m.state }

// Deadline returns when the next Look must come at the latest, zero if time alone changes
// nothing.
func (m *Arbiter) Deadline() time.Time {
	switch {
	case m.state == Doubting || m.state == Finishing:
		return m.until
	case m.state == Working && m.wants > 0:
		return m.since.Add(m.timeout + m.grace)
	}
	return time.Time{}
}

// Step takes what has happened. It returns the end of the group the first time that there
// is one, and nil otherwise.
func (m *Arbiter) Step(now time.Time, e Event) *End {
	if m.state == Ended {
		return nil
	}
	end := e.apply(m, now)
	if end == nil && m.state == Doubting && !now.Before(m.until) {
		end = &m.reason
	}
	if end != nil {
		m.state = Ended
		if end.Publish {
			end.Report.Rank = m.rank
		}
	}
	return end
}

// Heeds reports whether a report that another rank has published first takes the place of the end:
// always, where the end is a finding that yields; of a loss, if the rank that is lost has published
// it.
func (e *End) Heeds(first Report) bool {
	return e.Publish && first.Rank != e.Report.Rank && (e.Yields || first.explains(e.Report))
}

// told returns the end that this rank tells the others.
func (m *Arbiter) told(f Found) *End {
	f.Report.Rank = m.rank
	if f.Cause == nil {
		f.Cause = f.Report.Cause(m.members)
	}
	return &End{Report: f.Report, Cause: f.Cause, Publish: true, Yields: true}
}

// apply waits for a better reason if there is doubt, unless there is a reason already.
func (f Found) apply(m *Arbiter, now time.Time) *End {
	if f.Doubt == 0 {
		return m.told(f)
	}
	if m.state == Working {
		m.state, m.until, m.reason = Doubting, now.Add(f.Doubt), *m.told(f)
	}
	return nil
}

func (d Down) apply(m *Arbiter, _ time.Time) *End {
	return &End{Report: LostRank(m.members, d.Failure), Cause: fmt.Errorf("%w: %w",
		backend.ErrAborted, d.Failure), Publish: true}
}

func (a Abort) apply(m *Arbiter, _ time.Time) *End {
	return &End{Report: AbortedBy(m.members, m.rank, a.Cause), Cause: fmt.Errorf("%w: %w",
		backend.ErrAborted, a.Cause), Publish: true}
}

func (Close) apply(m *Arbiter, _ time.Time) *End {
	return &End{Report: Report{Reason: Closed, Rank: m.rank, Peer: -1},
		Cause: fmt.Errorf("%w: Close was called on this rank", backend.ErrClosed)}
}

func (l Look) apply(m *Arbiter, now time.Time) *End {
	if l.Wants != m.wants || l.Wants == 0 {
		m.wants, m.since, m.grace, m.heeds = l.Wants, now, 0, false
	}
	m.absent = nil
	switch {
	case m.state == Finishing:
		return m.finish(now, l)
	case l.Reported != nil:
		m.state, m.until, m.common = Finishing, now.Add(finishGrace), l.common()
		m.reason = End{Report: *l.Reported, Cause: l.Reported.Cause(m.members)}
		if l.Reported.Reason == Mismatch {
			m.until, m.common = now.Add(earlierGrace), min(m.common, l.Reported.before())
		}
		return m.finish(now, l)
	case l.Wants > 0:
		return m.wait(now, l)
	}
	return nil
}

// longWait is how long a rank waits for another before it says so.
const longWait = 20 * time.Second

// Awaited returns the ranks that this one has waited for so long that the user should know, and
// for how long, before the timeout ends the job. It does so once in the life of a group: a rank
// that evaluates alone for half a minute does it again.
func (m *Arbiter) Awaited(now time.Time, l *Look) (ranks []int, waited time.Duration) {
	waited = now.Sub(m.since)
	least := max(longWait, m.timeout/3)
	if m.said || m.state != Working || m.wants == 0 || waited < least || least >= m.timeout {
		return nil, 0
	}
	for p, begun := range l.Begun {
		if p != m.rank && begun < m.wants {
			ranks = append(ranks, p)
		}
	}
	m.said = ranks != nil
	return ranks, waited
}

// finish ends the group once the calls that every rank has begun are done.
func (m *Arbiter) finish(now time.Time, l Look) *End {
	done := l.Wants == 0 || l.Wants > m.common
	if done || !now.Before(m.until) {
		return &m.reason
	}
	return nil
}

// askPause is for how long a rank whose time is up waits at once for the answer who is missing.
const askPause = 5 * time.Millisecond

// wait judges the ranks that this one waits for. One that is absent may itself be waiting in the
// call before, for a part that has come here and not there, and then it knows better whom to blame:
// this rank gives it ReportGrace. Not if another rank is ahead: it has ended this call, so all have
// begun it, and who is absent is not heard; nor if a process is seen to be stopped. Whoever waits
// in another group is found by asking.
func (m *Arbiter) wait(now time.Time, l Look) *End {
	var absent []int // once it has waited for long
	impatient, overdue := m.Impatient(now), now.Sub(m.since) >= m.timeout+m.grace
	sure := false
	for p, begun := range l.Begun {
		sure = sure || p != m.rank && begun > l.Wants
		if p == m.rank || begun >= l.Wants {
			continue
		}
		if l.Closed[p] {
			Found{Report: ClosedWithout(m.members, p), Doubt: ReportGrace}.apply(m, now)
		}
		if impatient {
			absent = append(absent, p)
		}
	}
	if len(absent) == 0 {
		absent, sure = l.Stragglers, l.Sure
	}
	if impatient {
		m.absent = absent
	}
	sure = sure || len(l.Stopped) > 0
	switch {
	case m.state == Doubting || !overdue:
		return nil
	case len(absent) == 0:
		return m.told(Found{Report: Stuck(m.timeout)})
	case !sure && !m.heeds:
		m.grace, m.heeds = m.grace+ReportGrace, true
		return nil
	case l.Asks && len(l.Stopped) == 0:
		m.grace += askPause
		return nil
	case len(l.Missing) > 0:
		return m.told(Found{Report: Missing(l.Stopped, m.members, l.Missing, m.timeout)})
	}
	return m.told(Found{Report: Absent(l.Stopped, m.members, absent, m.timeout)})
}

// common returns the number of the last call that every rank has begun.
func (l Look) common() uint64 {
	least := ^uint64(0)
	for _, n := range l.Begun {
		least = min(least, n)
	}
	return least
}
