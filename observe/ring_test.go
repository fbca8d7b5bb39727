package observe

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// A call that is under way for long loses its record, and its end is not recorded as that
// of the call which has it now; its memory is its own.
func TestEndsOfCallsThatAreDroppedAreForgotten(t *testing.T) {
	c := group(1, time.Minute, 2).Comms[0].(*Communicator)
	r, x := c.ring, backend.Of([]float32{1})
	begin := func() *call { return r.begin(c, nil, &allReduce, 1, x, x) }
	slow, slower := begin(), begin()
	for range 10 {
		r.over(begin(), nil, false)
	}
	last := begin()
	r.over(slow, errors.New("of call 1"), false)
	slower.inner = backend.Finished(errors.New("of call 2"))
	if err := slower.Join(context.Background()); err == nil {
		t.Error("the Work of a call that is dropped has no error")
	}
	kept := r.events()
	if kept[0].Header.Seq != 12 || kept[0].End.IsZero() || kept[0].Err != nil || kept[1].Header.Seq != 13 || !kept[1].End.IsZero() {
		t.Errorf("the calls kept are %+v and %+v, want call 12, which is over, and 13, which is not", kept[0], kept[1])
	}
	r.over(last, nil, true)
	if kept := r.events(); kept[1].End.IsZero() {
		t.Error("the end of the last call is not recorded")
	}
}
