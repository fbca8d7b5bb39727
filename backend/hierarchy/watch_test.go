package hierarchy

import (
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
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

// reach makes the oldest n stamps happen, all if n is negative.
func (q *fakeQueue) reach(n int) {
	if n < 0 {
		n = len(q.taken)
	}
	for _, s := range q.taken[:n] {
		s.happened = true
	}
	q.taken = q.taken[n:]
}

// Since is as coarse as that of GPUs.
func (s *fakeTimedEvent) Elapsed(since backend.TimedEvent) (time.Duration, bool, error) {
	from := since.(*fakeTimedEvent)
	ms := float32((s.at - from.at).Seconds() * 1e3)
	return time.Duration(float64(ms) * float64(time.Millisecond)), s.happened && from.happened, nil
}

func (s *fakeTimedEvent) Close() error {
	s.queue.live--
	return nil
}

// metered returns a meter of a fake device whose clock was 0 at the epoch.
func metered(t *testing.T, keep int) (*meter, *fakeQueue, *spans) {
	t.Helper()
	q := &fakeQueue{}
	s := &spans{keep: keep, origin: origin{stamp: &fakeTimedEvent{queue: q, happened: true}, at: time.Unix(0, 0)}}
	m, ok := newStopwatch(q, s).(*meter)
	if !ok {
		t.Fatal("the device's clock is not used")
	}
	return m, q, s
}

// phase times one of 10 us.
func phase(t *testing.T, m *meter, q *fakeQueue, call int) {
	t.Helper()
	err := m.timed(Span{Call: call}, func() error {
		q.now += 10 * time.Microsecond
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestSpansAreReadOnceTheDeviceHasGotThere(t *testing.T) {
	m, q, s := metered(t, 100)
	for call := range 3 {
		q.now = time.Duration(call) * time.Second
		phase(t, m, q, call)
	}
	for reached, want := range []int{0, 0, 1, 1, 2, 2, 3} { // stamps, and phases that have two
		if m.read(); len(s.ring) != want {
			t.Errorf("%d spans after %d stamps, want %d", len(s.ring), reached, want)
		}
		if len(q.taken) > 0 {
			q.reach(1)
		}
	}
	for call, span := range s.ring {
		start := time.Unix(int64(call), 0)
		if span.Call != call || span.Start.Sub(start).Abs() > time.Microsecond || (span.End.Sub(span.Start)-10*time.Microsecond).Abs() > time.Microsecond {
			t.Errorf("span %d: %+v", call, span)
		}
	}
}

func TestPhasesThatNobodyReadsTakeNoMoreStamps(t *testing.T) {
	m, q, s := metered(t, 10*maxPending)
	for call := range maxPending + 5 {
		phase(t, m, q, call)
	}
	q.reach(-1)
	for call := range 1000 {
		phase(t, m, q, call)
		q.reach(-1)
	}
	if q.live != 2*maxPending {
		t.Errorf("%d stamps, want %d", q.live, 2*maxPending)
	}
	if m.read(); len(s.ring) != maxPending+1000 {
		t.Errorf("%d spans, want %d: all but 5", len(s.ring), maxPending+1000)
	}
	if err := m.close(); err != nil || q.live != 0 {
		t.Errorf("%d stamps are left: %v", q.live, err)
	}
}

// A float32 of the milliseconds in an hour has steps of a quarter of a millisecond.
func TestTimesAreAsExactHoursLater(t *testing.T) {
	m, q, s := metered(t, 2000)
	const gap = 5 * time.Second
	for call := range 2000 {
		q.now = time.Duration(call) * gap
		phase(t, m, q, call)
		q.reach(-1)
	}
	m.read()
	for i := 1; i < len(s.ring); i++ {
		if got := s.ring[i].Start.Sub(s.ring[i-1].Start); (got - gap).Abs() > time.Microsecond {
			t.Fatalf("phase %d begins %v after the one before, want %v", i, got, gap)
		}
	}
	if late := s.ring[1999].Start.Sub(time.Unix(0, int64(1999*gap))); len(s.ring) != 2000 || late.Abs() > time.Millisecond {
		t.Errorf("%d spans, the last one off by %v", len(s.ring), late)
	}
}
