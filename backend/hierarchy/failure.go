package hierarchy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/rendezvous"
)

// A failure of one communicator must end all of them on every rank, also where
// ranks are idle or wait in another one. So the first rank that fails puts a
// report into the world's store, and a goroutine of every rank waits for one.
// The first report wins: all ranks name the same cause, and not each the one
// that the end of its own phase had.

// reason is why the ranks ended.
type reason uint8

const (
	aborted reason = iota + 1
	timedOut
	lost // a rank of the job is down
	mismatch
	closed
)

// report is what the first rank that fails tells the others.
type report struct {
	Reason       reason
	By           int // who reports
	Rank, Peer   int // who has failed, and who is to blame, -1 if unknown
	World        int // the rank of the world that was lost
	Text         string
	Mine, Theirs []byte // headers of Rank and Peer
}

// cause turns a report into the error it stands for.
func (r report) cause() error {
	switch r.Reason {
	case timedOut:
		return fmt.Errorf("%w: %s", backend.ErrTimeout, r.Text)
	case lost:
		return fmt.Errorf("%w: %w", backend.ErrAborted, &rendezvous.Failure{Rank: r.World, Cause: errors.New(r.Text)})
	case mismatch:
		return &backend.MismatchError{Rank: r.Rank, Peer: r.Peer, Mine: header(r.Mine), Theirs: header(r.Theirs)}
	case closed:
		return fmt.Errorf("%w: %s", backend.ErrClosed, r.Text)
	default:
		return fmt.Errorf("%w: %s", backend.ErrAborted, r.Text)
	}
}

// header decodes a header that came from the store.
func header(b []byte) backend.Header {
	if len(b) < backend.HeaderSize {
		return backend.Header{}
	}
	return backend.GetHeader(b)
}

func encoded(h backend.Header) []byte {
	b := make([]byte, backend.HeaderSize)
	h.Put(b)
	return b
}

// end records the first error of this rank, and reports whether it was.
func (c *Communicator) end(peer int, cause error) bool {
	return c.err.CompareAndSwap(nil, &backend.Error{Comm: c.Name(), Rank: c.Rank(), Peer: peer, Cause: cause})
}

// failure returns the sticky error as that of a call, or nil.
func (c *Communicator) failure(call string) error {
	err := c.err.Load()
	if err == nil {
		return nil
	}
	named := *err
	named.Call = call
	return &named
}

// seen returns the error of something that flat did alone. If that has ended
// flat, the others end with it.
func (c *Communicator) seen(err error, what string) error {
	var e *backend.Error
	if !c.layered() || !errors.As(err, &e) {
		return err
	}
	return c.failAs(what, nil, step{phase: Remainder}, err)
}

// fail ends all communicators because a phase of call k ended with err, and
// returns the error of the call.
func (c *Communicator) fail(k *call, at step, err error) error {
	return c.failAs(k.header.String(), &k.header, at, err)
}

// failAs is fail for a call that is no collective if h is nil. It returns when all
// communicators have ended, whoever has ended them: a gate must not open before.
func (c *Communicator) failAs(what string, h *backend.Header, at step, err error) error {
	c.ending.Lock()
	defer c.ending.Unlock()
	if c.err.Load() != nil {
		return c.failure(what)
	}
	r := c.describe(at, err)
	c.yield(r, at.phase, err)
	if f := c.world.Failure(); f != nil && r.Reason == aborted {
		r, err = c.losing(f), f
	}
	if r.Reason == mismatch {
		c.translate(&r, h)
	}
	cause := fmt.Errorf("%v: %w", at, err)
	if r.Reason == aborted && !errors.Is(err, backend.ErrAborted) {
		cause = fmt.Errorf("%w: %w", backend.ErrAborted, cause)
	}
	if first := c.publish(r); first.By != c.Rank() || r.Reason == mismatch {
		r, cause = first, first.cause()
	}
	c.end(r.Peer, cause)
	c.abort(cause)
	return c.failure(what)
}

// describe makes the report of an error of a phase.
func (c *Communicator) describe(at step, err error) report {
	r := report{By: c.Rank(), Rank: c.Rank(), Peer: -1, Text: fmt.Sprintf("rank %d: %v: %v", c.Rank(), at, err)}
	var e *backend.Error
	if errors.As(err, &e) && e.Peer >= 0 {
		r.Peer = c.rankOf(at.phase, e.Peer)
	}
	var f *rendezvous.Failure
	var m *backend.MismatchError
	switch {
	case errors.As(err, &f):
		r = c.losing(f)
		r.By = c.Rank()
	case errors.As(err, &m):
		r.Reason, r.Rank, r.Peer = mismatch, c.rankOf(at.phase, m.Rank), c.rankOf(at.phase, m.Peer)
		r.Mine, r.Theirs = encoded(m.Mine), encoded(m.Theirs)
	case errors.Is(err, backend.ErrTimeout):
		r.Reason = timedOut
	case errors.Is(err, backend.ErrClosed):
		r.Reason = closed
	default:
		r.Reason = aborted
	}
	return r
}

// rankOf returns the rank here of a rank of a phase's communicator.
func (c *Communicator) rankOf(p Phase, rank int) int {
	switch p {
	case Reduce, Gather:
		return c.plan.Layout.Rank(c.place.machine, rank)
	case Exchange, Spread:
		return c.plan.Layout.Rank(rank, c.place.device)
	}
	return rank
}

// hearsay is how long a rank waits to hear the reason of those who know better:
// one that was aborted by a peer, for the peer's; one that has waited in vain for
// a peer, longer in each phase, for that of a rank that waited in a phase before.
const hearsay = 100 * time.Millisecond

func (c *Communicator) yield(r report, p Phase, err error) {
	wait := hearsay
	switch {
	case r.Reason == timedOut && p > Reduce && p != Remainder:
		wait *= time.Duration(p - Reduce)
	case r.Reason != aborted || !errors.Is(err, backend.ErrAborted):
		return
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.news:
	case <-c.world.Down():
	}
}

// losing is the report of a lost rank, which every rank learns from its world.
func (c *Communicator) losing(f *rendezvous.Failure) report {
	return report{Reason: lost, By: -1, Rank: c.Rank(), Peer: slices.Index(c.ranks, f.Rank), World: f.Rank, Text: f.Cause.Error()}
}

// translateTime bounds how long a rank waits to hear what another one called.
const translateTime = 500 * time.Millisecond

// translate puts the callers' headers in place of those of a phase: every rank
// that sees a mismatch says what it called.
func (c *Communicator) translate(r *report, own *backend.Header) {
	key := func(rank int) string { return fmt.Sprintf("%s/call/%d", c.key, rank) }
	ctx, cancel := context.WithTimeout(c.ctx, translateTime)
	defer cancel()
	if own != nil {
		// If this fails the others name the phase's header.
		_ = c.world.Store.Set(ctx, key(c.Rank()), encoded(*own))
	}
	for _, side := range []struct {
		rank   int
		header *[]byte
	}{{r.Rank, &r.Mine}, {r.Peer, &r.Theirs}} {
		if called, err := c.world.Store.Get(ctx, key(side.rank)); err == nil {
			*side.header = called
		}
	}
}

// publishTime bounds how long an end waits for the store: all ranks must know
// within a second.
const publishTime = 250 * time.Millisecond

// publish puts a report into the store and returns the first one that is there.
func (c *Communicator) publish(r report) report {
	text, err := json.Marshal(r)
	if err != nil {
		return r
	}
	ctx, cancel := context.WithTimeout(context.Background(), publishTime)
	defer cancel()
	current, _, err := c.world.Store.CompareAndSwap(ctx, c.key+"/end", nil, text)
	if err != nil {
		return r // the store is lost, which ends the others as well
	}
	return parsed(current)
}

func parsed(text []byte) report {
	var r report
	if err := json.Unmarshal(text, &r); err != nil {
		return report{Reason: aborted, By: -1, Rank: -1, Peer: -1, Text: "another rank failed, but its report cannot be read: " + err.Error()}
	}
	return r
}

// abort ends every communicator of this rank, all at once: on a GPU each may take
// a while, and the peers of all must know within a second.
func (c *Communicator) abort(cause error) {
	c.cancel()
	var all sync.WaitGroup
	for _, inner := range c.Unwrap() {
		all.Go(func() { inner.Abort(cause) })
	}
	all.Wait()
}

// Abort implements [backend.Communicator].
func (c *Communicator) Abort(cause error) {
	if !c.layered() {
		c.flat.Abort(cause)
		return
	}
	if cause == nil {
		cause = errors.New("no cause given")
	}
	c.ending.Lock()
	defer c.ending.Unlock()
	if !c.end(c.Rank(), fmt.Errorf("%w: %w", backend.ErrAborted, cause)) {
		return
	}
	c.publish(report{Reason: aborted, By: c.Rank(), Rank: c.Rank(), Peer: c.Rank(), Text: fmt.Sprintf("rank %d aborted: %v", c.Rank(), cause)})
	c.abort(cause)
}

// listen waits for a report until there is an error here.
func (c *Communicator) listen() {
	for c.ctx.Err() == nil {
		text, err := c.world.Store.Get(c.ctx, c.key+"/end")
		f := c.world.Failure()
		switch {
		case err == nil:
			c.hear(parsed(text))
			return
		case f != nil:
			c.hear(c.losing(f))
			return
		case !errors.Is(err, context.DeadlineExceeded):
			return // this rank has ended or closed, or rank 0, who has the store, has left
		}
	}
}

// graceTime is how long calls that every rank has begun may go on after another rank
// has ended the group, which may have done them before: its report comes another way
// than their data, and may come first.
const graceTime = 20 * time.Millisecond

func (c *Communicator) grace() {
	timer := time.NewTimer(graceTime)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.ctx.Done():
	}
}

// hear ends all communicators with what another rank has reported.
func (c *Communicator) hear(r report) {
	if r.By == c.Rank() {
		return // who is at it
	}
	close(c.news)
	if r.Reason != mismatch {
		c.grace()
	}
	c.ending.Lock()
	defer c.ending.Unlock()
	if cause := r.cause(); c.end(r.Peer, cause) {
		c.abort(cause)
	}
}

// lookEvery is how often a rank looks for failed phases on a device.
const lookEvery = 10 * time.Millisecond

// watch looks for failed phases on queues that go on after a failure, until there
// is an error: perhaps nobody joins the call, or a phase that waits for peers is
// joined before the one that has failed.
func (c *Communicator) watch() {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-ticker.C:
			c.look()
		}
	}
}

// look looks at the calls that may be under way, up to the first that is.
func (c *Communicator) look() {
	if !c.mu.TryLock() {
		return // a call is being started, which will find out by itself
	}
	recent := slices.Clone(c.recent)
	c.mu.Unlock()
	for _, e := range recent {
		if !e.call.over && e.call.pending() {
			return
		}
		e.call.over = true
	}
}

// pending reports whether a call is under way. One whose phase has failed is not.
func (k *call) pending() (some bool) {
	for _, b := range k.works {
		err := b.work.Join(k.c.past)
		switch {
		case errors.Is(err, context.Canceled):
			some = true
		case err != nil:
			k.c.fail(k, b.at, err)
			return false
		}
	}
	return some
}
