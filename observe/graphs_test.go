package observe

import (
	"fmt"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// graphQueue is a queue of a device with a clock that the test sets, and which can be recorded.
type graphQueue struct {
	*fakeQueue // for its timed events
	tape       *tape
	now        time.Duration
}

// tape is what queues of a device have recorded together.
type tape struct {
	queues    []*graphQueue
	recording *backend.Recording
	nodes     []func()
}

// point is an event of a queue.
type point struct {
	backend.Event
	at time.Duration
}

func (q *graphQueue) Recording() *backend.Recording { return q.tape.recording }

// do runs f, or records it.
func (q *graphQueue) do(f func()) error {
	if q.tape.recording == nil {
		f()
	} else {
		q.tape.nodes = append(q.tape.nodes, f)
	}
	return nil
}

func (q *graphQueue) compute(micros int) {
	q.do(func() { q.now += time.Duration(micros) * time.Microsecond })
}

func (q *graphQueue) Record() (backend.Event, error) {
	e := &point{}
	return e, q.do(func() { e.at = q.now })
}

func (q *graphQueue) Wait(e backend.Event) error {
	return q.do(func() { q.now = max(q.now, e.(*point).at) })
}

func (q *graphQueue) RecordTimed(e backend.TimedEvent) error {
	own := e.(*fakeTimedEvent)
	return q.do(func() { own.at, own.happened = q.now, true })
}

func (q *graphQueue) Capture(f func() error) (*backend.Graph, error) {
	r := &backend.Recording{}
	q.tape.recording, q.tape.nodes = r, nil
	err := f()
	q.tape.recording = nil
	return backend.NewGraph(q, r, q.tape), err
}

// Launch implements [backend.Replayer].
func (t *tape) Launch(on backend.Queue) error {
	q := on.(*graphQueue)
	for _, one := range t.queues {
		one.now = q.now
	}
	for _, f := range t.nodes {
		f()
	}
	return nil
}

// Close implements [backend.Replayer].
func (t *tape) Close() error { return nil }

// takes is a communicator whose recorded calls take a microsecond for each element.
type takes struct{ backend.Base }

func (takes) StartChecked(q backend.Queue, _ backend.Collective, count int, _, _ backend.Buffer) (
	backend.Work, error) {
	q.(*graphQueue).compute(count)
	e, err := q.Record()
	return backend.RecordedWork(e), err
}

// graphs returns two queues of a device, and a communicator of which r records the calls.
func graphs(t *testing.T) (main, side *graphQueue, r *Recorder, c backend.Communicator) {
	t.Helper()
	r, q := timing(t, 100)
	on := &tape{}
	main, side = &graphQueue{fakeQueue: q, tape: on}, &graphQueue{fakeQueue: q, tape: on}
	on.queues = []*graphQueue{main, side}
	inner := reference.New("job", 1, time.Minute)[0]
	return main, side, r, backend.WithHooks(takes{backend.Wrap(inner)}, r)
}

// step computes for 20 us, exchanges a bucket for 30 us, of which it computes for 10, and calls
// something for 5 us where it computes.
func step(main, side *graphQueue, c backend.Communicator) func() error {
	call := func(on backend.Queue, purpose backend.Purpose, n int) (backend.Work, error) {
		x := backend.Of(make([]float32, n))
		return c.Start(on, backend.Collective{Kind: backend.AllReduce,
			Origin: &backend.Origin{Purpose: purpose, Ordinal: 1}}, x, x)
	}
	return func() error {
		main.compute(20)
		ready, err := main.Record()
		if err != nil {
			return err
		}
		if err := side.Wait(ready); err != nil {
			return err
		}
		w, err := call(side, backend.ForSync, 30)
		if err != nil {
			return err
		}
		main.compute(10)
		if err := w.Wait(main); err != nil {
			return err
		}
		if w, err = call(main, backend.ForGraph, 5); err != nil {
			return err
		}
		return w.Wait(main)
	}
}

func TestCallsInGraphsHaveTheTimesOfTheirReplays(t *testing.T) {
	main, side, r, c := graphs(t)
	r.Count()
	g, err := main.Capture(step(main, side, c))
	require.NoError(t, err)
	require.Equal(t, "calls of a capture", len(r.Events()), 0)
	for range 3 {
		_, err := g.Launch(nil)
		require.NoError(t, err)
		time.Sleep(2 * time.Millisecond) // a replay ends in the past of the host
		main.now += 2 * time.Millisecond
	}
	var got []string
	var first time.Time
	micros := func(t time.Time) int64 {
		return t.Sub(first).Round(time.Microsecond).Microseconds()
	}
	for i, e := range r.Events() {
		if i%2 == 0 {
			first = e.Start
		}
		got = append(got, fmt.Sprintf("%s, call %d: %d to %d us", e.Comm, e.Header.Seq,
			micros(e.Start), micros(e.End)))
	}
	require.Slices(t, "the calls", got, []string{
		"job, graph 1, call 1: 0 to 30 us", "job, graph 1, call 2: 30 to 35 us",
		"job, graph 1, call 3: 0 to 30 us", "job, graph 1, call 4: 30 to 35 us",
		"job, graph 1, call 5: 0 to 30 us", "job, graph 1, call 6: 30 to 35 us",
	})
	for bucket, exposed := range map[int]int{0: 5, 1: 20} {
		total := r.Totals()[Kind{backend.AllReduce, backend.Auto.String(), bucket}]
		require.Check(t, total.Calls == 3 && (total.Exposed-time.Duration(3*exposed)*
			time.Microsecond).Abs() <= time.Microsecond, "bucket %d: %+v of %v", bucket, total,
			r.Totals())
	}
	require.Equal(t, "the time of computing", r.takeComputed().Round(time.Microsecond),
		90*time.Microsecond)
	require.NoError(t, g.Close())
	require.Equal(t, "graphs that are left", len(r.graphs), 0)
	err = r.Close()
	require.Check(t, err == nil && main.live == 0, "%d timed events are left: %v", main.live, err)
}

// Without a clock, a graph has the nodes that its program gives it.
func TestGraphsAreAsTheyAreUnlessTheyAreWatched(t *testing.T) {
	main, side, r, c := graphs(t)
	require.NoError(t, r.Close())
	live := main.live
	g, err := main.Capture(step(main, side, c))
	require.NoError(t, err)
	require.Equal(t, "nodes", len(main.tape.nodes), 10)
	_, err = g.Launch(nil)
	require.NoError(t, err)
	require.Equal(t, "events", len(r.Events())+main.live-live, 0)
}

// A replay that still runs has no times, and the next one does not take them over.
func TestReplaysUnderWayAreLeftOut(t *testing.T) {
	main, side, r, c := graphs(t)
	g, err := main.Capture(step(main, side, c))
	require.NoError(t, err)
	for range 2 {
		_, err = g.Launch(nil)
		require.NoError(t, err)
		r.graphs[0].end.(*fakeTimedEvent).happened = false
	}
	require.Equal(t, "calls of replays that run", len(r.Events()), 0)
	r.graphs[0].end.(*fakeTimedEvent).happened = true
	all := r.Events()
	require.Check(t, len(all) == 2 && all[0].Header.Seq == 3, "the calls are %v", all)
}

// The clock of a device that goes by another rate stays within what the host has seen.
func TestClocksOfDevicesFollowThatOfTheHost(t *testing.T) {
	for _, rate := range []time.Duration{0, 3} {
		main, side, r, c := graphs(t)
		g, err := main.Capture(step(main, side, c))
		require.NoError(t, err)
		for range 5 {
			main.now = rate * time.Since(r.ticks.epoch)
			before := time.Now()
			_, err := g.Launch(nil)
			require.NoError(t, err)
			time.Sleep(time.Millisecond)
			all := r.Events()
			start, end := all[len(all)-2].Start, all[len(all)-1].End
			require.Check(t, !start.Before(before) && !end.After(time.Now()),
				"rate %d: a call is from %v to %v, and it was launched at %v", rate,
				start.Sub(before), end.Sub(before), before)
		}
	}
}
