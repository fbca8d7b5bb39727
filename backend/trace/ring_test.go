package trace

import (
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

// A call that is being started for long loses its place, and not its memory.
func TestCallsUnderWayKeepTheirMemory(t *testing.T) {
	r := newRing(0, 2)
	begin := func(seq uint64) *call { return r.begin(nil, nil, 0, backend.Header{Seq: seq}) }
	slow := begin(1)
	for seq := range uint64(10) {
		begin(2+seq).over(nil, false)
	}
	if slow.header.Seq != 1 {
		t.Errorf("the memory of call 1 was given to call %d", slow.header.Seq)
	}
	slow.over(nil, false)
	if last := r.kept()[1]; last.header.Seq != 11 {
		t.Errorf("the last call kept is %d, want 11", last.header.Seq)
	}
}
