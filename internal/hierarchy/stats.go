package hierarchy

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
)

// Stats are what a rank has done so far. They are counted when calls are started.
type Stats struct {
	// Calls counts the hierarchical calls and Flat the others.
	Calls, Flat int
	// Phases are the phases of the hierarchical calls, in their order.
	Phases [phases]struct {
		Slices int
		Bytes  int64 // sent to other ranks
	}
	// Sent is the bytes that phases have sent from this rank to the ranks of each machine: element
	// m is the traffic on links from this rank's machine to machine m, and the element of this
	// machine is what stayed inside. Sent does not count what runs flat, because the inner
	// communicator chooses who sends it to whom. That one also chooses the way of a broadcast,
	// which is an all-gather: this is counted as sent to each machine directly. A ring sends as
	// much, but all of it to the next machine.
	Sent []int64
	// Machine is this rank's machine.
	Machine int
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
	defer c.mu.Unlock()
	s := c.stats
	s.Sent = slices.Clone(s.Sent)
	s.Machine = c.place.machine
	s.Flat += int(c.passed.Load())
	return s
}

// count adds what a collective of a phase sends from this rank. c.mu is held.
func (c *Communicator) count(p phase, src backend.Buffer) {
	ph := &c.stats.Phases[p]
	ph.Slices++
	M, D := c.plan.Layout.Machines(), c.plan.Layout.fewest()
	others := len(c.plan.Layout.machines[c.place.machine]) - 1
	var each, peers int // bytes to each of the peers
	switch p {
	case reducePhase:
		each, peers = src.NBytes()/D, min(D, others) // a rank without a rail keeps nothing
		if c.place.device < D {
			peers = D - 1
		}
	case gatherPhase:
		each, peers = src.NBytes(), others
	case exchangePhase:
		each, peers = src.NBytes()/M, M-1
	case broadcastPhase:
		each, peers = src.NBytes(), M-1
	default:
		return // nothing is sent, or the inner communicator's choice
	}
	ph.Bytes += int64(each * peers)
	if p == reducePhase || p == gatherPhase {
		c.stats.Sent[c.place.machine] += int64(each * peers)
		return
	}
	for m := range c.stats.Sent {
		if m != c.place.machine {
			c.stats.Sent[m] += int64(each)
		}
	}
}
