package hierarchy

import (
	"slices"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// Stats are what a rank has done so far. They are counted when calls are started.
type Stats struct {
	// Calls counts the hierarchical calls and Flat the others.
	Calls, Flat int
	// Phases are the phases of the hierarchical calls.
	Phases [phases]PhaseStats
	// Sent is the bytes that phases have sent from this rank to the ranks of each
	// machine: element m is the traffic on links from this rank's machine to
	// machine m, and that of its own machine what stayed inside. What runs flat is
	// not in it, because who sends it to whom is the inner communicator's choice. So is
	// the way of a broadcast, an all-gather: it is counted as sent to each machine
	// directly, and a ring sends as much, but all of it to the next one.
	Sent []int64
	// Machine is this rank's.
	Machine int
}

// PhaseStats are the sums over one phase.
type PhaseStats struct {
	Slices int
	Bytes  int64         // sent to other ranks
	Time   time.Duration // of the slices that were timed, see Options.Spans
}

// Inside returns the bytes sent to ranks of the same machine.
func (s Stats) Inside() int64 { return s.Sent[s.Machine] }

// Between returns the bytes sent to ranks of other machines.
func (s Stats) Between() (n int64) {
	for m, sent := range s.Sent {
		if m != s.Machine {
			n += sent
		}
	}
	return n
}

// Stats returns what this rank has done so far. The parts that Split made have
// their own.
func (c *Communicator) Stats() Stats {
	c.mu.Lock()
	c.read()
	s := c.stats
	s.Sent = slices.Clone(s.Sent)
	c.mu.Unlock()
	s.Machine = c.place.machine
	s.Flat += int(c.passed.Load())
	c.spans.mu.Lock()
	defer c.spans.mu.Unlock()
	for p := range s.Phases {
		s.Phases[p].Time = c.spans.total[p]
	}
	return s
}

// Span is when a phase of a slice began and ended. On GPUs, the device has noted the
// times by its clock, to half a microsecond: those of a rank can be compared. When they
// are on the host's clock is known to some ten microseconds, and apart from that the two
// may drift apart. On the host, Start and End are when the phase was seen to begin and
// to end, at or after the time when it did.
type Span struct {
	Call       int // number of the call, from 1
	Phase      Phase
	Slice      int // from 0
	Start, End time.Time
}

// spans keeps the last ones.
type spans struct {
	keep   int
	origin origin // for devices with a clock; c.mu is held

	mu    sync.Mutex // guards what follows
	ring  []Span
	next  int
	total [phases]time.Duration
}

func (s *spans) add(span Span) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.total[span.Phase] += span.End.Sub(span.Start)
	if len(s.ring) < s.keep {
		s.ring = append(s.ring, span)
		return
	}
	s.ring[s.next] = span
	s.next = (s.next + 1) % s.keep
}

// Spans returns the last phases that have ended, by their starts. There are none
// unless Options.Spans says how many to keep.
func (c *Communicator) Spans() []Span {
	c.mu.Lock()
	c.read()
	c.mu.Unlock()
	c.spans.mu.Lock()
	defer c.spans.mu.Unlock()
	all := slices.Clone(c.spans.ring)
	slices.SortStableFunc(all, func(a, b Span) int { return a.Start.Compare(b.Start) })
	return all
}

// read adds what has ended to the spans. c.mu is held.
func (c *Communicator) read() {
	for _, l := range c.streams {
		if l != nil && l.watch != nil {
			l.watch.read()
		}
	}
}

// count adds what a collective of a phase sends from this rank. c.mu is held.
func (c *Communicator) count(p Phase, src backend.Buffer) {
	ph := &c.stats.Phases[p]
	ph.Slices++
	M, D := c.plan.Layout.Machines(), c.plan.Layout.Devices()
	var each, peers int // bytes to each of the peers
	switch p {
	case Reduce:
		each, peers = src.NBytes()/D, D-1
	case Gather:
		each, peers = src.NBytes(), D-1
	case Exchange:
		each, peers = src.NBytes()/M, M-1
	case Broadcast:
		each, peers = src.NBytes(), M-1
	default:
		return // nothing is sent, or the inner communicator's choice
	}
	ph.Bytes += int64(each * peers)
	if p == Reduce || p == Gather {
		c.stats.Sent[c.place.machine] += int64(each * peers)
		return
	}
	for m := range c.stats.Sent {
		if m != c.place.machine {
			c.stats.Sent[m] += int64(each)
		}
	}
}
