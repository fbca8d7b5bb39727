package hierarchy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/rendezvous"
)

// life is how all communicators of a rank end together, once. A failure of one must end
// all of them on every rank, also where ranks are idle or wait in another one. So the first
// rank that fails puts a report into the world's store, and a goroutine of every rank waits
// for one. The first report wins: all ranks name the same cause, and not each the one that
// the end of its own phase had.
type life struct {
	name    string
	rank    int
	members backend.Members
	world   *rendezvous.World
	key     string            // of the group in the world's store
	stop    func(cause error) // ends every communicator of this rank

	err    atomic.Pointer[backend.Error] // the first one, sticky
	ending sync.Mutex                    // held while the communicators are ended
	ctx    context.Context               // over once there is an error
	cancel context.CancelFunc
	heard  chan struct{} // closed when a report is in the store

	background sync.WaitGroup
}

const (
	// reportGrace is how long a rank waits for the report of a peer that knows better: one
	// that was aborted by a peer, for the peer's; one that has waited in vain for a peer,
	// longer in each phase, for that of a rank that waited in a phase before.
	reportGrace = 100 * time.Millisecond
	// finishGrace is how long calls that every rank has begun may go on after another rank
	// has ended the group, which may have done them before: its report comes another way
	// than their data, and may come first.
	finishGrace = 20 * time.Millisecond
	// publishTime bounds how long an end waits for the store: all ranks must know within a
	// second.
	publishTime = 250 * time.Millisecond
)

// newLife returns the life of a group of the world, whose members are not known yet.
func newLife(w *rendezvous.World, key string, flat backend.Communicator, stop func(error)) *life {
	l := &life{name: flat.Name(), rank: flat.Rank(), world: w, key: key, stop: stop, heard: make(chan struct{})}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l
}

// failure returns the first error as that of a call, or nil.
func (l *life) failure(call string) error {
	err := l.err.Load()
	if err == nil {
		return nil
	}
	named := *err
	named.Call = call
	return &named
}

// record records the first error, and reports whether it was.
func (l *life) record(peer int, cause error) bool {
	first := l.err.CompareAndSwap(nil, &backend.Error{Comm: l.name, Members: l.members, Rank: l.rank, Peer: peer, Cause: cause})
	l.cancel()
	return first
}

// finding is why a rank has to end the group.
type finding struct {
	report group.Report
	cause  error               // of this rank's error, unless calls differ
	grace  time.Duration       // how long to wait for a better report of another rank
	refine func(*group.Report) // completes the report of calls that differ
}

// fail ends the group because of what this rank has found, if it has not ended. It returns
// when all communicators have ended, whoever has ended them.
func (l *life) fail(find func() finding) {
	l.ending.Lock()
	defer l.ending.Unlock()
	if l.err.Load() != nil {
		return
	}
	found := find()
	r, cause := found.report, found.cause
	l.await(found.grace)
	if f := l.world.Failure(); f != nil && r.Reason == group.Aborted {
		r, cause = group.LostRank(l.members, f), fmt.Errorf("%w: %w", backend.ErrAborted, f)
	}
	if r.Reason == group.Mismatch {
		found.refine(&r)
		cause = r.Cause(l.members)
	}
	if first, own := l.publish(r); !own {
		r, cause = first, first.Cause(l.members)
	}
	l.record(r.Peer, cause)
	l.stop(l.failure("")) // which says whom it blames
}

// await waits until another rank has reported, or the time is over.
func (l *life) await(grace time.Duration) {
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-l.heard:
	case <-l.world.Down():
	}
}

// publish puts a report into the store, and returns the first one that is there.
func (l *life) publish(r group.Report) (first group.Report, own bool) {
	text, err := json.Marshal(r)
	if err != nil {
		return r, true
	}
	ctx, cancel := context.WithTimeout(context.Background(), publishTime)
	defer cancel()
	current, own, err := l.world.Store.CompareAndSwap(ctx, l.key+"/end", nil, text)
	if err != nil {
		return r, true // the store is lost, which ends the others as well
	}
	return parsed(current), own
}

func parsed(text []byte) group.Report {
	var r group.Report
	if err := json.Unmarshal(text, &r); err != nil {
		return group.Report{Reason: group.Aborted, Rank: -1, Peer: -1, Lost: -1, Text: "another rank failed, but its report cannot be read: " + err.Error()}
	}
	return r
}

// abort ends the group on all ranks.
func (l *life) abort(cause error) {
	l.ending.Lock()
	defer l.ending.Unlock()
	r := group.AbortedBy(l.members, l.rank, cause)
	if !l.record(r.Peer, fmt.Errorf("%w: %w", backend.ErrAborted, cause)) {
		return
	}
	l.publish(r)
	l.stop(cause)
}

// close ends the group on this rank: end closes every communicator.
func (l *life) close(end func() error) error {
	l.ending.Lock()
	err := func() error {
		defer l.ending.Unlock()
		l.record(-1, fmt.Errorf("%w: Close was called on this rank", backend.ErrClosed))
		return end()
	}()
	l.background.Wait()
	return err
}

// listen waits for a report until there is an error here.
func (l *life) listen() {
	for l.ctx.Err() == nil {
		text, err := l.world.Store.Get(l.ctx, l.key+"/end")
		f := l.world.Failure()
		switch {
		case err == nil:
			l.hear(parsed(text))
			return
		case f != nil:
			l.hear(group.LostRank(l.members, f))
			return
		case !errors.Is(err, context.DeadlineExceeded):
			return // this rank has ended or closed, or rank 0, who has the store, has left
		}
	}
}

// hear ends all communicators with what another rank has reported.
func (l *life) hear(r group.Report) {
	close(l.heard)
	if r.Reason != group.Mismatch {
		timer := time.NewTimer(finishGrace)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-l.ctx.Done():
		}
	}
	l.ending.Lock()
	defer l.ending.Unlock()
	if cause := r.Cause(l.members); l.record(r.Peer, cause) {
		l.stop(cause)
	}
}
