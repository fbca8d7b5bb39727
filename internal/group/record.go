package group

import (
	"sync/atomic"

	"github.com/euryale-ml/euryale/backend"
)

// AbortRecord is the first report of a group, in memory that its ranks share. The
// zero AbortRecord has none.
type AbortRecord struct {
	state        atomic.Uint32 // 0, writing, written, in this order
	reason       Reason
	rank         int32
	peer         int32
	lost         int32
	sides        [2]int32
	mine, theirs [backend.HeaderSize]byte
	length       uint32
	text         [1024]byte // a longer one is cut
}

const (
	writing = 1
	written = 2
)

// Publish writes a report and returns true, unless another one was first.
func (a *AbortRecord) Publish(r Report) bool {
	if !a.state.CompareAndSwap(0, writing) {
		return false
	}
	a.reason, a.rank, a.peer, a.lost = r.Reason, int32(r.Rank), int32(r.Peer), int32(r.Lost)
	a.sides = [2]int32{int32(r.Sides[0]), int32(r.Sides[1])}
	a.mine, a.theirs = r.Mine, r.Theirs
	a.length = uint32(copy(a.text[:], r.Text))
	a.state.Store(written)
	return true
}

// Read returns the report, if there is one.
func (a *AbortRecord) Read() (Report, bool) {
	if a.state.Load() != written {
		return Report{}, false
	}
	n := min(int(a.length), len(a.text)) // another process has written it
	return Report{Reason: a.reason, Rank: int(a.rank), Peer: int(a.peer), Lost: int(a.lost),
		Sides: [2]int{int(a.sides[0]), int(a.sides[1])},
		Mine:  a.mine, Theirs: a.theirs, Text: string(a.text[:n])}, true
}
