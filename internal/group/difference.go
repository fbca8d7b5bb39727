package group

import (
	"cmp"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/spinwait"
)

// Difference is a call that ranks have begun differently.
type Difference struct {
	Sides [2]int // the lowest rank of those that call the same as most, and of the others
	// the second of them, which is to blame; -1 where nobody can say which side is
	Peer         int
	Mine, Theirs [backend.HeaderSize]byte // what Sides have called
}

// Unseen stands for the digest of a call that is not known.
const Unseen = ^uint64(0)

// Differ compares a call by its digest of each rank. It returns nil if those that are known are
// equal, or if header is nil for one of the sides. The ranks that call what most of them do are
// right. If that may still be another call, because of those that are unseen, or because there is
// none that most call, nobody is to blame. So all ranks that see all calls blame the same one.
func Differ(digests []uint64, header func(rank int) *[backend.HeaderSize]byte) *Difference {
	most, differ := -1, false
	for r, d := range digests {
		switch {
		case d == Unseen:
		case most < 0:
			most = r
		default:
			differ = differ || d != digests[most]
		}
	}
	if !differ {
		return nil
	}
	count := map[uint64]int{}
	for _, d := range digests {
		count[d]++
	}
	for r, d := range digests {
		if d != Unseen && count[d] > count[digests[most]] {
			most = r
		}
	}
	other, known := -1, true
	for r, d := range digests {
		if d == Unseen || d == digests[most] {
			continue
		}
		if other < 0 {
			other = r
		}
		known = known && count[d]+count[Unseen] < count[digests[most]]
	}
	mine, theirs := header(most), header(other)
	if mine == nil || theirs == nil {
		return nil
	}
	found := &Difference{Sides: [2]int{most, other}, Peer: -1, Mine: *mine, Theirs: *theirs}
	if known {
		found.Peer = other
	}
	return found
}

// Differs is the finding that calls differ.
func (d *Difference) Differs() Found {
	return Found{Report: Report{Reason: Mismatch, Peer: d.Peer, Sides: d.Sides, Mine: d.Mine,
		Theirs: d.Theirs}}
}

// LateTime is how long ranks that have seen calls that differ wait for those of ranks that are
// late: all must know within a second.
const LateTime = time.Second

// AwaitsStragglers bounds the wait for the calls of stragglers, where others differ.
func (m *Member) AwaitsStragglers() *spinwait.Patience {
	return spinwait.Patient(min(LateTime, cmp.Or(m.Timeout, m.World.Timeout)/4))
}
