package observe

import (
	"context"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// fakeQueue is a queue of a device whose clock the test sets.
type fakeQueue struct {
	backend.Queue
	now   time.Duration
	taken []*fakeTimedEvent // that have not happened
	live  int
}

type fakeTimedEvent struct {
	queue    *fakeQueue
	at       time.Duration
	happened bool
}

// fakeDevice has one queue.
type fakeDevice struct {
	backend.Device
	queue *fakeQueue
}

func (d fakeDevice) NewQueue() (backend.Queue, error) { return d.queue, nil }

func (q *fakeQueue) Close() error { return nil }

// Record is called for the origin alone.
func (q *fakeQueue) Record() (backend.Event, error) {
	q.reach(-1)
	return past{}, nil
}

func (q *fakeQueue) NewTimedEvent() (backend.TimedEvent, error) {
	q.live++
	return &fakeTimedEvent{queue: q}, nil
}

func (q *fakeQueue) RecordTimed(s backend.TimedEvent) error {
	own := s.(*fakeTimedEvent)
	own.at, own.happened = q.now, false
	q.taken = append(q.taken, own)
	return nil
}

// past is an event of the past.
type past struct{ backend.Event }

func (past) Join(context.Context) error { return nil }

// reach makes the oldest n events happen, all if n is negative.
func (q *fakeQueue) reach(n int) {
	if n < 0 {
		n = len(q.taken)
	}
	for _, s := range q.taken[:n] {
		s.happened = true
	}
	q.taken = q.taken[n:]
}

// Elapsed is as coarse as that of GPUs.
func (s *fakeTimedEvent) Elapsed(since backend.TimedEvent) (time.Duration, bool, error) {
	from := since.(*fakeTimedEvent)
	ms := float32((s.at - from.at).Seconds() * 1e3)
	return time.Duration(float64(ms) * float64(time.Millisecond)), s.happened && from.happened, nil
}

func (s *fakeTimedEvent) Close() error {
	s.queue.live--
	return nil
}

// timing returns a recorder of n parts on a fake device.
func timing(t *testing.T, n int) (*Recorder, *fakeQueue) {
	t.Helper()
	q := &fakeQueue{}
	r := New(0, 1)
	require.NoError(t, r.TimeParts(fakeDevice{queue: q}, n-1))
	return r, q
}

// phase times a part of 10 us.
func phase(r *Recorder, q *fakeQueue, call int) {
	comm := reference.New("test", 1, time.Minute)[0]
	id := r.Start(&backend.Call{Comm: comm, Queue: q, Header: backend.Header{Seq: uint64(call)},
		Part: "add"})
	q.now += 10 * time.Microsecond
	r.End(id, nil)
}

// ended returns the parts that have ended.
func ended(r *Recorder) (all []Event) {
	for _, e := range r.Events() {
		if !e.End.IsZero() {
			all = append(all, e)
		}
	}
	return all
}

func TestPartsAreTimedOnceTheDeviceHasGotThere(t *testing.T) {
	r, q := timing(t, 100)
	origin := r.ticks.epoch.Add(r.clock.at)
	for call := range 3 {
		q.now = time.Duration(call) * time.Second
		phase(r, q, call)
	}
	for reached, want := range []int{0, 0, 1, 1, 2, 2, 3} { // events, and parts that have two
		got := len(ended(r))
		require.Check(t, got == want, "%d parts after %d events, want %d", got, reached, want)
		if len(q.taken) > 0 {
			q.reach(1)
		}
	}
	for call, e := range ended(r) {
		start := origin.Add(time.Duration(call) * time.Second)
		require.Check(t, e.Part == "add" && e.Header.Seq == uint64(call) &&
			e.Start.Sub(start).Abs() <= time.Microsecond &&
			(e.End.Sub(e.Start)-10*time.Microsecond).Abs() <= time.Microsecond, "part of call "+
			"%d: %+v", call, e)
	}
}

func TestPartsThatNobodyReadsTakeNoMoreEvents(t *testing.T) {
	r, q := timing(t, 100)
	for call := range 1000 {
		phase(r, q, call)
	}
	most := 2*len(r.records) + 1 // and the origin
	require.Check(t, q.live <= most, "%d timed events, want %d at most", q.live, most)
	q.reach(-1)
	if got := ended(r); len(got) != 100 || got[99].Header.Seq != 999 {
		t.Errorf("%d parts, want the last 100", len(got))
	}
	err := r.Close()
	require.Check(t, err == nil && q.live == 0, "%d timed events are left: %v", q.live, err)
	got := ended(r)
	require.Check(t, len(got) == 100, "%d parts after Close", len(got))
	phase(r, q, 1000) // as without a clock
	if got := ended(r); len(got) != 100 || got[99].Header.Seq != 1000 {
		t.Errorf("%d parts with one after Close", len(got))
	}
}

// A float32 of the milliseconds in an hour has steps of a quarter of a millisecond.
func TestTimesAreAsExactHoursLater(t *testing.T) {
	const gap, parts = 5 * time.Second, 2000
	r, q := timing(t, parts)
	origin := r.ticks.epoch.Add(r.clock.at)
	for call := range parts {
		q.now = time.Duration(call) * gap
		phase(r, q, call)
		q.reach(-1)
	}
	all := ended(r)
	for i := 1; i < len(all); i++ {
		if got := all[i].Start.Sub(all[i-1].Start); (got - gap).Abs() > time.Microsecond {
			t.Fatalf("part %d begins %v after the one before, want %v", i, got, gap)
		}
	}
	late := all[len(all)-1].Start.Sub(origin.Add((parts - 1) * gap))
	require.Check(t, len(all) == parts && late.Abs() <= time.Millisecond,
		"%d parts, the last one off by %v", len(all), late)
}
