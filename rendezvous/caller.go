package rendezvous

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// caller is a client of a [core] in another process, and as pure: a [client] drives it.
//
// A rank follows a server that leaves: it moves to the successor, or becomes it. Whoever hears of a
// failure then passes it on to those that have moved, before its own program can end.
type caller struct {
	pure
	me, server identity

	last    uint64
	calls   map[uint64]*request
	reports lastReports // of the server
	own     lastReports // of this rank
	silent  bool        // it did not answer a call that it answers at once, or was reported lost
	follows kind        // of the frame that has asked this rank to follow it last, 0 for none
	serves  bool        // this rank is the successor
	moved   bool        // this rank has left the server for its successor
	quit    bool        // this rank has left
	over    error       // why there are no more answers
}

// request is a call of the server under way.
type request struct {
	kind  kind
	key   string // empty for an all-gather
	id    uint64
	reply frame
	err   error
	moved bool          // the successor may have the key, or has to get it, too
	done  chan struct{} // the driver's: closed once there is a reply or an error
}

type (
	// push sends a frame to the server.
	push struct{ frame }
	// finish says that a call has a reply or an error.
	finish struct{ call *request }
	// follow finds the successor that a frame is about. If there is one, found is called.
	follow struct{ frame }
	// hand gives the successor the last report of this rank, or says that there is none. Once it
	// has that, handed is called.
	hand struct {
		report *lastReport
		value  []byte
		addr   string
	}
	// pass tells the successor of a failure, and calls passed, at the latest after a while.
	pass struct {
		failure *Failure
		call    *request
		most    time.Duration
	}
	// patience calls leaves after a while.
	patience struct {
		most time.Duration
		why  error
	}
	// hangUp closes the connection.
	hangUp struct{ why error }
)

func newCaller(me, server identity) caller {
	return caller{me: me, server: server, calls: map[uint64]*request{}}
}

// sendRequest sends a request.
func (c *caller) sendRequest(call *request, body []byte) {
	c.last++
	call.id = c.last
	c.calls[call.id] = call
	if u := (unpacker{rest: body}); call.kind == kindSet && u.string() == reportKey(c.me.rank) {
		c.own.takeReport(u.bytes(), c.now)
	}
	switch {
	case c.quit:
		c.finish(call, ErrClosed)
	case c.over != nil:
		c.finish(call, c.over)
	default:
		c.do(push{frame{kind: call.kind, id: call.id, body: body}})
	}
}

// finish ends a call. If the server has left, the successor has the keys of the failure detector.
// If this rank is that, those that have come need its last report as much as those that have not.
func (c *caller) finish(call *request, err error) {
	call.err = err
	call.moved = detects(call.key) && !c.quit &&
		(errors.Is(err, ErrClosed) || c.serves && call.kind == kindSet)
	delete(c.calls, call.id)
	c.do(finish{call})
}

// giveUp ends a call whose caller waits no longer, unless its answer has come.
func (c *caller) giveUp(call *request, why error) {
	if c.calls[call.id] != call {
		return
	}
	c.finish(call, why)
	if call.kind == kindGet || call.kind == kindGather || call.kind == kindEntries {
		c.do(push{frame{kind: kindCancel, id: call.id}})
	} else {
		c.silent = true
	}
}

// heard handles what the server sends.
func (c *caller) heard(f frame) {
	switch call := c.calls[f.id]; {
	case f.kind == kindBye:
		c.parting(f)
	case f.kind == kindLastReport:
		c.reports.takeReport(f.body, c.now)
	case (f.kind == kindServe || f.kind == kindMove) && c.follows < f.kind && !c.quit:
		c.follows = f.kind // who is too slow to serve moves, too
		c.do(follow{f})
	case f.kind == kindDone || f.kind == kindFailed:
		if c.silent = false; call == nil {
			return // the caller has stopped waiting
		}
		if call.reply = f; call.key == downKey && call.kind == kindGet && f.kind == kindDone {
			delete(c.calls, call.id)
			c.pass(decodeFailure(f.body), call)
			return
		}
		c.finish(call, nil)
	}
}

// parting handles the server's goodbye, which carries a failure, if any.
func (c *caller) parting(f frame) {
	u := unpacker{rest: f.body}
	if failure := u.bytes(); failure != nil {
		c.pass(decodeFailure(failure), nil)
		return
	}
	c.endAll(c.left())
}

// broke hears that the connection has ended, and the cause if this end has closed it.
func (c *caller) broke(err, closed error) {
	switch {
	case c.quit:
		c.endAll(ErrClosed) // the answer to this rank's goodbye
	case c.moved:
		c.endAll(c.left())
	case closed != nil:
		c.pass(&Failure{Rank: c.server.rank, Cause: closed}, nil)
	default:
		c.pass(c.reports.instead(c.server.loss(err), c.now), nil)
	}
}

// pass passes a failure on to the ranks that have moved to the successor. It is the answer to a
// call, or else ends all calls.
func (c *caller) pass(f *Failure, call *request) {
	if c.follows > 0 {
		c.do(pass{f, call, newsTime})
		return
	}
	c.passed(f, call)
}

// passed hears that a failure is known.
func (c *caller) passed(f *Failure, call *request) {
	if call != nil {
		c.finish(call, nil)
		return
	}
	c.endAll(f)
}

// endAll ends all calls.
func (c *caller) endAll(why error) {
	if c.over != nil {
		return
	}
	c.over = why
	c.endCalls(why)
	c.do(hangUp{why})
}

func (c *caller) endCalls(why error) {
	for _, id := range slices.Sorted(maps.Keys(c.calls)) {
		c.finish(c.calls[id], why)
	}
}

// found hears that the successor is found: at an address if it is this rank.
func (c *caller) found(addr string) {
	c.do(hand{c.own.last.Load(), c.own.value(c.now), addr})
}

// handed hears that the successor has a last report of this rank, and watches it from now on.
func (c *caller) handed(h hand) {
	switch {
	case c.own.last.Load() != h.report: // there is another one by now
		c.found(h.addr)
	case h.addr != "":
		c.serves = true
		c.do(push{frame{kind: kindServing, body: packString(nil, h.addr)}})
	default:
		c.moved = true
		c.leave(c.left())
	}
}

// shut ends this rank's use of the store.
func (c *caller) shut() {
	c.quit = true
	c.endCalls(ErrClosed)
	c.leave(ErrClosed)
}

// leave says goodbye and waits briefly for the server to take it.
func (c *caller) leave(why error) {
	c.do(push{frame{kind: kindBye}})
	c.do(patience{c.newsTime(), why})
}

// left is the error of a rank whose server has said goodbye.
func (c *caller) left() error {
	return fmt.Errorf("rank %d, which serves the store, has left the job: %w", c.server.rank,
		ErrClosed)
}

// newsTime returns how long to wait for the server to take news. If the server has been silent
// before, the wait is short: it is stopped, or cut off, and this rank must report that without
// delay.
func (c *caller) newsTime() time.Duration {
	if c.silent {
		return silentTime
	}
	return newsTime
}
