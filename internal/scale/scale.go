// Package scale predicts what the start of a job takes, and the recovery of an elastic one, for
// euryale explain --scale. Tests compare it with starts of few ranks (internal/session), and with
// simulations of up to 4,096 (rendezvous, internal/elastic). It knows of ranks without GPUs.
package scale

import "time"

// Network is how machines reach each other.
type Network struct {
	Latency   time.Duration
	Bandwidth float64 // of a machine in one direction, in bytes a second
}

// Takes returns how long bytes are on their way out of a machine.
func (n Network) Takes(bytes int) time.Duration {
	return time.Duration(float64(bytes) / n.Bandwidth * float64(time.Second))
}

// Cost is what something takes.
type Cost struct {
	Messages    int // from and to the process that serves the others: rank 0, or the launcher
	Bytes       int // of these messages
	Connections int // between others
	Time        time.Duration
}

// Times of one core, measured on an EPYC: bench/results/2026-11/2026-11-30-starts.md.
const (
	PerMessage    = 15 * time.Microsecond
	PerConnection = 120 * time.Microsecond // at one of its ends
)

// Bytes of messages, as rendezvous/frame.go and the elastic log pack them; the simulations of both
// and internal/session/scale_linux_test.go compare their sums.
const (
	Frame     = 40      // header, key and numbers of one
	Answer    = 1 << 20 // of values at most; see rendezvous
	handshake = 430     // its four, and the wait for the failure of a rank
	Post      = 105     // where a process has stopped
	Place     = 44      // of a process in the decision of a generation
	Address   = 33      // of a process, with the question
)

// Rounds returns the bytes of what each rank tells all others as a job starts, in all-gathers:
// measured, and within a tenth of what internal/session/scale_linux_test.go finds.
func Rounds(machines, devices int) []int {
	const join, agreed = 520, 0
	switch {
	case machines == 1: // shared memory
		return []int{join, 140, agreed}
	case devices == 1:
		return []int{join, 235, agreed, 310}
	}
	return []int{join, 790, agreed, 310, agreed}
}

// Start predicts the start of a job: rendezvous, group and communicators, with a core for each
// rank, once the program is loaded.
func Start(machines, devices int, n Network) (c Cost) {
	ranks := machines * devices
	rounds := Rounds(machines, devices)
	c.Messages, c.Bytes = 5, handshake
	for _, value := range rounds {
		all := ranks * (4 + value)
		answers := 1 + (all-1)/Answer
		c.Messages += 2 * answers
		c.Bytes += 2*answers*Frame + value + all
	}
	c.Messages *= ranks - 1
	c.Bytes *= ranks - 1
	c.Time = time.Duration(c.Messages)*PerMessage + n.Takes(c.Bytes) +
		2*time.Duration(len(rounds)+2)*n.Latency
	if machines > 1 { // each with each other, and with what compares calls
		c.Connections = ranks*(ranks-1)/2 + ranks
		ends := ranks
		if devices > 1 { // two groups of the ranks with one place on their machines
			c.Connections += 2 * (ranks*(machines-1)/2 + ranks)
			ends += 2 * machines
		}
		c.Time += time.Duration(ends) * PerConnection
	}
	return c
}

// Recovery predicts how long after the death of a rank of an elastic job all train again: the
// others without it, and then with its replacement. What these two generations send of the training
// itself is not counted.
func Recovery(machines, devices int, n Network) (c Cost) {
	const generations, reads = 2, 6
	ranks := machines * devices
	decision := ranks * Place
	// In a generation a process posts, reads what all post, decides, and says since when.
	c.Messages = 2 * (1 + reads + 2)
	c.Bytes = Frame*c.Messages + ranks*Post + 3*decision
	if machines > 1 { // it asks for addresses twice, and where rank 0 is
		c.Messages += 2 * 3
		c.Bytes += 2*ranks*Address + 6*Frame
		c.Connections = 2 * (ranks - 1)
	}
	c.Messages *= ranks
	c.Bytes *= ranks
	c.Time = time.Duration(c.Messages)*PerMessage + n.Takes(c.Bytes) +
		time.Duration(c.Connections)*PerConnection
	c.Connections *= ranks
	start := Start(machines, devices, n)
	c.Messages = generations * (c.Messages + start.Messages)
	c.Bytes = generations * (c.Bytes + start.Bytes)
	c.Connections = generations * (c.Connections + start.Connections)
	c.Time = generations * (c.Time + start.Time)
	// The replacement reads what was posted before, one by one.
	c.Messages += 2 * ranks
	c.Time += time.Duration(ranks) * 2 * (PerMessage + n.Latency)
	return c
}
