package observe

import (
	"errors"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// A call that is under way for long loses its record, and its end is not recorded as that
// of the call which has it now.
func TestEndsOfCallsThatAreDroppedAreForgotten(t *testing.T) {
	c, r := group(1, time.Minute, 1).Comms[0], New(0, 2)
	seq := uint64(0)
	begin := func() uint64 {
		seq++
		return r.Start(&backend.Call{Comm: c, Header: backend.Header{Seq: seq}})
	}
	slow, slower := begin(), begin()
	for range 10 {
		r.End(begin(), nil)
	}
	last := begin()
	r.End(slow, errors.New("of call 1"))
	r.End(slower, errors.New("of call 2"))
	kept := r.endedEvents()
	if kept[0].Header.Seq != 12 || kept[0].End.IsZero() || kept[0].Err != nil ||
		kept[1].Header.Seq != 13 || !kept[1].End.IsZero() {
		t.Errorf("the calls kept are %+v and %+v, want call 12, which has ended, and 13, which "+
			"has not", kept[0], kept[1])
	}
	r.End(last, nil)
	if kept := r.endedEvents(); kept[1].End.IsZero() {
		t.Error("the end of the last call is not recorded")
	}
}
