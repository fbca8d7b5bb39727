package tcp

import (
	"fmt"
	"runtime"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/internal/hosted"
	"github.com/euryale-ml/euryale/internal/group"
)

// wait says how a rank waits when none of its sockets can make progress.
type wait struct {
	spin  time.Duration // how long it polls before it sleeps
	yield bool          // ranks are goroutines of one process: let the others run
	polls poller
	since time.Time // of the wait; zero if there is none
	over  bool      // the group was seen to have ended
}

const (
	// spinTime is longer than a message takes between machines in one room, and shorter than a tick
	// of the scheduler.
	spinTime = 200 * time.Microsecond
	// nap bounds a sleep, and so how late the end of the group is noticed.
	nap = 5 * time.Millisecond
	// lostGrace is how long a rank that has lost a connection waits to be told why: the other rank
	// may have closed, say, which the job does not report. On a loaded machine such news takes
	// hundreds of milliseconds; the loss of a process is reported without this wait.
	lostGrace = 2 * time.Second
)

// newWait returns how a rank waits. With tunnels it sleeps at once, because their goroutines need
// the core.
func newWait(site *hosted.Site, encrypted bool) wait {
	ranks, inProcess, cores := site.Here()
	switch {
	case inProcess > 1:
		return wait{spin: time.Millisecond, yield: true}
	case ranks > cores || encrypted || alwaysTunnels:
		return wait{}
	}
	return wait{spin: spinTime}
}

// goOn ends a wait.
func (w *wait) goOn() { w.since = time.Time{} }

// pause waits a little for the sockets of a call, and returns why the group has ended, or nil.
func (e *engine) pause(k *hosted.Call) error {
	w, now := &e.wait, time.Now()
	if w.since.IsZero() {
		w.since = now
	}
	if now.Sub(w.since) < w.spin {
		if w.yield {
			runtime.Gosched()
		}
		return nil
	}
	if e.Member.Check(k.Header.Seq) != nil {
		// The others may have finished this call before the group ended: data that has arrived
		// since the last look may complete it.
		if w.over {
			return e.Failure(k)
		}
		w.over = true
		return nil
	}
	w.polls.reset()
	for p, l := range e.links {
		switch {
		case l == nil:
			continue
		case l.lost != nil:
			if l.grace.Over() {
				e.Member.Tell(group.Found{Report: e.lost(p)})
			}
			continue
		}
		w.polls.add(&l.sock, l.in.pending(), l.out.pending())
	}
	limit := nap
	if d := e.Member.Deadline(); !d.IsZero() {
		limit = max(0, min(limit, time.Until(d)))
	}
	if err := w.polls.wait(limit); err != nil {
		e.Member.Ends(e.Member.Broken(fmt.Errorf("wait for sockets: %w", err)))
	}
	return e.Failure(k)
}

// stragglers returns the ranks whose headers or operands have not come: they need to wait for
// nobody before they send these. If there are none, it returns the ranks with which data is still
// to be exchanged, such as a sum, which they may owe because they themselves miss an operand.
func (e *engine) stragglers() (ranks []int, sure bool) {
	var pending []int
	for p, l := range e.links {
		if l == nil {
			continue
		}
		wanted := backend.HeaderSize
		if r := &e.relay; r.from == everyone || r.from == p {
			wanted += r.asked * r.result.DType().Size()
		}
		if l.in.moved < wanted {
			ranks = append(ranks, p)
		}
		if l.in.pending() || l.out.pending() {
			pending = append(pending, p)
		}
	}
	if len(ranks) == 0 {
		return pending, false
	}
	return ranks, true
}

// lost reports that this rank has lost its connection to rank p.
func (e *engine) lost(p int) group.Report {
	return group.Report{Reason: group.Aborted, Peer: p, Text: fmt.Sprintf(
		"%s lost its connection to %s: %v", e.Part.Members.Rank(e.Rank()), e.Part.Members.Rank(p),
		e.links[p].lost)}
}
