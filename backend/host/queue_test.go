package host

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/serial"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestFoundAllocOfMoreThanTheMachineHasPanics(t *testing.T) {
	for _, nbytes := range []int{1 << 50, math.MaxInt, -1} {
		require.Fails(t, fmt.Sprintf("%d bytes", nbytes), require.Err((Device{}).Alloc(nbytes)),
			backend.ErrArgument)
	}
}

// An event that is recorded again forgets the point before, also one that is still to come.
func TestTimedEventsAreWhenTheQueueGotThere(t *testing.T) {
	q := newQueue()
	defer q.Close()
	var events [3]backend.TimedEvent
	for i := range events {
		events[i], _ = q.NewTimedEvent()
	}
	from, to, again := events[0], events[1], events[2]
	gate := make(serial.Event)
	pause := func() error { return q.submit(func() { time.Sleep(10 * time.Millisecond) }) }
	require.NoError(t, errors.Join(q.RecordTimed(again), q.RecordTimed(from), pause(),
		q.RecordTimed(to), q.Wait(gate), q.RecordTimed(again)))
	for {
		if took, happened, err := to.Elapsed(from); err != nil {
			t.Fatal(err)
		} else if happened {
			require.Check(t, took >= 10*time.Millisecond, "it took %v, want 10 ms", took)
			break
		}
		time.Sleep(time.Millisecond)
	}
	if _, happened, err := again.Elapsed(from); happened || err != nil {
		t.Errorf("a point behind the gate has happened: %v, %v", happened, err)
	}
	close(gate)
	done, err := q.Record()
	if err == nil {
		err = done.Join(t.Context())
	}
	if took, happened, _ := again.Elapsed(to); !happened || took < 0 || err != nil {
		t.Errorf("behind the gate: %v, %v, %v", took, happened, err)
	}
}
