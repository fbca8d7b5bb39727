package reference

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/rendezvous"
)

// world is all groups that came from one.
type world struct {
	timeout time.Duration
	mu      sync.Mutex
	groups  map[string]*group
}

func (w *world) newGroup(name string, members backend.Members) *group {
	size := len(members)
	g := &group{world: w, name: name, size: size, members: members, closed: make([]bool, size),
		meetings: map[uint64]*meeting{}, changed: make(chan struct{})}
	if w.groups == nil {
		w.groups = map[string]*group{}
	}
	w.groups[name] = g
	return g
}

// groupOf returns the group of a name; the first of its ranks to ask makes it.
func (w *world) groupOf(name string, members backend.Members) *group {
	w.mu.Lock()
	defer w.mu.Unlock()
	if g, ok := w.groups[name]; ok {
		return g
	}
	return w.newGroup(name, members)
}

func (w *world) lose(f *rendezvous.Failure) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, g := range w.groups {
		g.fail(slices.Index(g.members, f.Rank), fmt.Errorf("%w: %w", backend.ErrAborted, f))
	}
}

// group is what the ranks of a group share.
type group struct {
	world   *world
	name    string
	size    int
	members backend.Members

	mu       sync.Mutex
	meetings map[uint64]*meeting // by call number
	closed   []bool              // ranks that have closed
	err      error               // the first failure, sticky
	peer     int                 // who caused it
	changed  chan struct{}       // closed and replaced when something changes
}

// meeting is one call, as far as the ranks have come.
type meeting struct {
	calls   []*call  // by rank; nil before it comes
	srcs    [][]byte // copies of the sources
	arrived int
	left    int
}

// wake makes every waiting rank look again. mu is held.
func (g *group) wake() {
	close(g.changed)
	g.changed = make(chan struct{})
}

// wait waits for a change or the time. mu is held, except while waiting.
func (g *group) wait(timer *time.Timer) (inTime bool) {
	changed := g.changed
	g.mu.Unlock()
	defer g.mu.Lock()
	select {
	case <-changed:
		return true
	case <-timer.C:
		return false
	}
}

// fail records the first failure and wakes everyone.
func (g *group) fail(peer int, cause error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.endGroup(peer, cause)
}

// endGroup is fail with mu held.
func (g *group) endGroup(peer int, cause error) {
	if g.err == nil {
		g.err, g.peer = cause, peer
	}
	g.wake()
}

// failure returns why a rank can call nothing, or nil.
func (g *group) failure(rank int, what string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.ended(rank, what)
}

// ended is failure with mu held.
func (g *group) ended(rank int, what string) error {
	e := &backend.Error{Comm: g.name, Members: g.members, Rank: rank, Peer: g.peer, Call: what,
		Cause: g.err}
	if g.closed[rank] {
		e.Peer, e.Cause = rank, fmt.Errorf("%w: Close was called on this rank", backend.ErrClosed)
	}
	if e.Cause == nil {
		return nil
	}
	return e
}

// meet is one call of one rank: it leaves a copy of its source, waits for every
// other rank, and computes its own result.
func (g *group) meet(rank int, k *call) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.ended(rank, k.header.String()); err != nil {
		return err
	}
	m := g.arrive(rank, k)
	timer := time.NewTimer(g.world.timeout)
	defer timer.Stop()
	for m.arrived < g.size {
		g.lookForClosed(m)
		if err := g.ended(rank, k.header.String()); err != nil {
			return err
		}
		if !g.wait(timer) {
			p := m.missing()
			g.endGroup(p, fmt.Errorf("%w: no sign of %s for %v", backend.ErrTimeout,
				g.members.Rank(p), g.world.timeout))
		}
	}
	if m.left++; m.left == g.size {
		delete(g.meetings, k.header.Seq)
	}
	if err, blamed := m.compare(g.members, k); err != nil {
		// Every rank of the meeting finds out by itself.
		g.endGroup(blamed, err)
		return &backend.Error{Comm: g.name, Members: g.members, Rank: rank, Peer: blamed,
			Call: k.header.String(), Cause: err}
	}
	return m.result(rank, k)
}

// arrive puts a rank's call into its meeting. mu is held.
func (g *group) arrive(rank int, k *call) *meeting {
	m := g.meetings[k.header.Seq]
	if m == nil {
		m = &meeting{calls: make([]*call, g.size), srcs: make([][]byte, g.size)}
		g.meetings[k.header.Seq] = m
	}
	m.calls[rank] = k
	m.srcs[rank] = append([]byte(nil), k.src.Bytes()...)
	m.arrived++
	g.wake()
	return m
}

// lookForClosed ends the group if a missing rank will never come. mu is held.
func (g *group) lookForClosed(m *meeting) {
	for p, closed := range g.closed {
		if closed && m.calls[p] == nil {
			g.endGroup(p, fmt.Errorf("%w: %s has closed without taking part", backend.ErrClosed,
				g.members.Rank(p)))
		}
	}
}

func (m *meeting) missing() int {
	for p, k := range m.calls {
		if k == nil {
			return p
		}
	}
	return -1
}

// compare finds two ranks that started different collectives, if this rank compares them. The
// second is to blame if more ranks call the same as the first than anything else; blamed is -1
// otherwise.
func (m *meeting) compare(
	of backend.Members, k *call,
) (differ *backend.MismatchError, blamed int) {
	sides := map[[backend.HeaderSize]byte][]int{}
	for p, theirs := range m.calls {
		var h [backend.HeaderSize]byte
		theirs.header.Put(&h)
		sides[h] = append(sides[h], p)
	}
	if !k.verify || len(sides) == 1 {
		return nil, -1
	}
	sorted := slices.SortedFunc(maps.Values(sides), func(a, b []int) int {
		return cmp.Or(len(b)-len(a), a[0]-b[0])
	})
	most, other := sorted[0][0], sorted[1][0]
	for _, side := range sorted[2:] {
		other = min(other, side[0])
	}
	blamed = other
	if len(sorted[0]) == len(sorted[1]) {
		blamed = -1
	}
	return &backend.MismatchError{Members: of, Rank: most, Peer: other,
		Mine: m.calls[most].header, Theirs: m.calls[other].header}, blamed
}
