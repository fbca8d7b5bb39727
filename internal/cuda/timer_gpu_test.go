//go:build gpu

package cuda

import (
	"errors"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestStampsOfTwoQueuesAreComparable(t *testing.T) {
	d := openDevice(t, 0)
	p, q := newQueueOf(t, d), newQueueOf(t, d)
	began := time.Now()
	var events [3]backend.TimedEvent
	for i := range events {
		events[i] = must[backend.TimedEvent](t)(p.NewTimedEvent())
		defer func() { ok(t, events[i].Close()) }()
	}
	for range 2 { // a stamp may be taken again
		ok(t, p.RecordTimed(events[0]))
		ok(t, p.drain())
		time.Sleep(5 * time.Millisecond)
		ok(t, q.RecordTimed(events[1]))
		ok(t, p.follow(q))
		ok(t, p.RecordTimed(events[2]))
		ok(t, p.drain())
	}
	took := time.Since(began)
	since := func(later, earlier int) time.Duration {
		s, happened, err := events[later].Elapsed(events[earlier])
		ok(t, err)
		require.Check(t, happened, "a stamp of an idle queue has not happened")
		return s
	}
	const clock = time.Microsecond // its steps
	first, second, both := since(1, 0), since(2, 1), since(2, 0)
	if first < 4*time.Millisecond || second < -clock || both > took ||
		(first+second-both).Abs() > 2*clock {
		t.Errorf("%v and %v, together %v; the host saw %v", first, second, both, took)
	}
	back := since(0, 1)
	require.Check(t, (first+back).Abs() <= clock, "%v there, %v back", first, back)
}

func TestStampOfWhatIsUnderWayHasNotHappened(t *testing.T) {
	d := openDevice(t, 0)
	q := newQueueOf(t, d)
	before, after := must[backend.TimedEvent](t)(q.NewTimedEvent()), must[backend.TimedEvent](t)(
		q.NewTimedEvent())
	defer func() { ok(t, errors.Join(before.Close(), after.Close())) }()
	x := allocate(t, d, 32<<20)
	ok(t, q.RecordTimed(before))
	for range 50 { // milliseconds
		ok(t, q.arithmetic.Zero(x))
	}
	ok(t, q.RecordTimed(after))
	took, happened, err := after.Elapsed(before)
	require.Check(t, err == nil && !happened, "%v, %v, %v", took, happened, err)
	ok(t, q.drain())
	if took, happened, err := after.Elapsed(before); err != nil || !happened || took <= 0 {
		t.Errorf("%v, %v, %v", took, happened, err)
	}
}

func TestStampsOfAnotherDeviceAreRefused(t *testing.T) {
	d, e := openTwo(t)
	own, other := must[backend.TimedEvent](t)(d.main.NewTimedEvent()), must[backend.TimedEvent](t)(
		e.main.NewTimedEvent())
	defer func() { ok(t, errors.Join(own.Close(), other.Close())) }()
	err := d.main.RecordTimed(other)
	require.Check(t, errors.Is(err, backend.ErrArgument), "the error is %v, want ErrArgument", err)
	if _, _, err := own.Elapsed(other); !errors.Is(err, backend.ErrArgument) {
		t.Errorf("the error is %v, want ErrArgument", err)
	}
	q := must[backend.Queue](t)(d.NewQueue()).(*Queue)
	ok(t, q.Close())
	if err := q.RecordTimed(own); !errors.Is(err, backend.ErrClosed) {
		t.Errorf("on a closed queue the error is %v, want ErrClosed", err)
	}
}
