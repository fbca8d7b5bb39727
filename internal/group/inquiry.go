package group

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/spinwait"
)

// inquiryTime bounds how long a rank whose time is up asks the job who is missing: everybody must
// know within a second. A process that gets no core meanwhile would take its own silence for the
// store's: see [spinwait.Patience].
const inquiryTime = 500 * time.Millisecond

// inquiry is the question who keeps the others from going on, asked in one wait.
type inquiry struct {
	call   uint64
	asked  time.Time
	answer atomic.Pointer[[]int] // ranks of the job
}

// asks asks, once in a wait, and fills in the answer once it is there. m.mu is held.
func (m *Member) asks(now time.Time, wants uint64) {
	absent := m.jobRanks(m.arbiter.Absent())
	old := m.inquiry == nil || m.inquiry.call != wants ||
		m.inquiry.answer.Load() != nil && now.Sub(m.inquiry.asked) > 2*inquiryTime
	if old && len(absent) > 0 {
		q := &inquiry{call: wants, asked: now}
		m.inquiry = q
		go func() {
			ctx, cancel := spinwait.WithPatience(context.Background(), inquiryTime)
			defer cancel()
			missing := m.World.Missing(ctx, absent)
			q.answer.Store(&missing)
		}()
	}
	if q := m.inquiry; q != nil && q.call == wants {
		if missing := q.answer.Load(); missing != nil {
			m.look.Missing = *missing
		} else {
			m.look.Asks = true // the end of the question is an answer, too
		}
	}
}

// shows has the others see for whom this rank waits. m.mu is held.
func (m *Member) shows() {
	if absent := m.arbiter.Absent(); len(absent) > 0 && m.arbiter.State() == Working {
		m.World.Waits(m.jobRanks(absent))
	}
}

func (m *Member) jobRanks(ranks []int) []int {
	of := make([]int, len(ranks))
	for i, r := range ranks {
		of[i] = jobRank(m.Members, r)
	}
	return of
}

// leaveReport has the job know whom the error blames before the program has it, which may end the
// process at once: see [rendezvous.World.LeaveReport]. Ranks that do not hear of it are not served
// by this one's detector.
func (m *Member) leaveReport(err *backend.Error) {
	_ = m.World.LeaveReport(err, publishTime)
}
