package observe

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/observe/internal/straggler"
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
	computed, _ := r.takeComputed()
	require.Equal(t, "the time of computing", computed.Round(time.Microsecond),
		90*time.Microsecond)
	require.NoError(t, g.Close())
	require.Equal(t, "graphs that are left", len(r.graphs), 0)
	err = r.Close()
	require.Check(t, err == nil && main.live == 0, "%d timed events are left: %v", main.live, err)
}

// layered is step in two layers, of which the second one computes for more us in addition.
func layered(main, side *graphQueue, c backend.Communicator, more *int) func() error {
	return func() error {
		layer := c.(interface{ Layer(backend.Queue, string) }).Layer
		layer(main, "h.0")
		if err := step(main, side, c)(); err != nil {
			return err
		}
		layer(main, "h.1")
		main.do(func() { main.now += time.Duration(7+*more) * time.Microsecond })
		layer(main, "")
		main.compute(3)
		return nil
	}
}

// Layers have the times of their replays, without those in which they wait for calls. Only traces
// have them as events, and what is slower for three steps is known without.
func TestLayersInGraphsHaveTheTimesOfTheirReplays(t *testing.T) {
	for _, kept := range []int{0, 100} {
		main, side, r, c := graphs(t)
		if kept > 0 {
			r.KeepLayers(kept)
		}
		more, got := 0, []string(nil)
		g, err := main.Capture(layered(main, side, c, &more))
		require.NoError(t, err)
		for i := range 6 {
			if i == 3 {
				more = 100
			}
			_, err := g.Launch(nil)
			require.NoError(t, err)
			time.Sleep(time.Millisecond) // a replay ends in the past of the host
			r.readReplays()
			if i == 0 { // the origin of times is the begin of the replay
				for _, p := range r.parts {
					got = append(got, fmt.Sprintf("%s%d: %v", p.name, p.bucket,
						p.spent.Round(time.Microsecond)))
				}
				require.Slices(t, "the parts", got, []string{"h.00: 30µs", "1: 30µs", "h.10: 7µs"})
			}
			_, slower := r.takeComputed()
			want := straggler.Slower{}
			if i == 5 {
				want = straggler.Slower{GPU: 100 * time.Microsecond, Layer: numberOf("h.1"),
					InIt: 100 * time.Microsecond}
			}
			slower.GPU = slower.GPU.Round(time.Microsecond)
			slower.InIt = slower.InIt.Round(time.Microsecond)
			require.Equal(t, fmt.Sprintf("what is slower after step %d", i), slower, want)
		}
		require.Equal(t, "its name", r.layerName(numberOf("h.1")), "h.1")
		var layers []Event
		for _, e := range r.Events() {
			if e.Layer != "" {
				layers = append(layers, e)
			}
		}
		require.Equal(t, "layers", len(layers), min(kept, 12))
		var last bytes.Buffer
		require.NoError(t, r.WriteLast(&last, 100))
		require.Check(t, !strings.Contains(last.String(), "h.1") && strings.Contains(last.String(),
			"the last 12 of"), "the last calls are %s", last.String())
		var trace bytes.Buffer
		require.NoError(t, r.WriteChrome(&trace))
		require.Equal(t, "layers in the trace", strings.Count(trace.String(), `"name":"h.1"`),
			min(kept, 6))
		for i, e := range layers {
			require.Check(t, e.Layer == []string{"h.0", "h.1"}[i%2] && e.End.Sub(e.Start) > 0 &&
				(i%2 == 0 || e.Start.Sub(layers[i-1].End).Abs() < time.Microsecond),
				"layer %d is %+v", i, e)
		}
		require.NoError(t, g.Close())
		err = r.Close()
		require.Check(t, err == nil && main.live == 0, "%d timed events are left: %v", main.live,
			err)
	}
}

// Without a clock, a graph has the nodes that its program gives it.
func TestGraphsAreAsTheyAreUnlessTheyAreWatched(t *testing.T) {
	main, side, r, c := graphs(t)
	require.NoError(t, r.Close())
	live := main.live
	g, err := main.Capture(layered(main, side, c, new(int)))
	require.NoError(t, err)
	require.Equal(t, "nodes", len(main.tape.nodes), 12)
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
