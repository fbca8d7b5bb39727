package observe

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

func group(size int, timeout time.Duration, kept int) *backendtest.Group {
	plain := reference.New("test", size, timeout)
	g := &backendtest.Group{Fail: plain[0].Lose}
	for _, c := range plain {
		rec := New(c.Rank(), kept)
		g.Comms = append(g.Comms, recorded{backend.WithHooks(c, rec).(backend.CheckedStarter), rec})
	}
	return g
}

// recorded is a communicator with the recorder of its calls.
type recorded struct {
	backend.CheckedStarter
	rec *Recorder
}

func TestTracedCommunicatorPasses(t *testing.T) {
	backendtest.RunWrapper(t, backendtest.Options{
		Sizes: []int{1, 2, 4},
		New: func(size int, timeout time.Duration) (*backendtest.Group, error) {
			return group(size, timeout, 100), nil
		},
	})
}

var allReduce = backend.Collective{Kind: backend.AllReduce}

// calls makes all-reduces of 1, 2, ... elements.
func calls(c backend.Communicator, n int) error {
	for i := range n {
		x := backend.Of(make([]float32, i+1))
		if err := backend.Run(c, allReduce, x, x); err != nil {
			return err
		}
	}
	return nil
}

func TestLastCallsAreKept(t *testing.T) {
	backendtest.Each(t, group(2, time.Minute, 4).Comms, func(c backend.Communicator) error {
		testranks.NoError(calls(c, 10))
		tr := c.(recorded).rec
		events := tr.Events()
		if len(events) != 4 || tr.Dropped() != 6 {
			return fmt.Errorf("%d events kept and %d dropped, want 4 and 6", len(events),
				tr.Dropped())
		}
		for i, e := range events {
			want := allReduce.Header(uint64(7+i), 7+i, backend.F32)
			if e.Header != want || e.Bytes != int64(4*(7+i)) || e.Comm != "test" ||
				e.Rank != c.Rank() || e.Queue != 0 || e.Err != nil {
				return fmt.Errorf("event %d is %+v, want %v", i, e, want)
			}
			if e.End.Before(e.Start) || i > 0 && e.Start.Before(events[i-1].End) {
				return fmt.Errorf("event %d lasts from %v to %v, after one to %v", i, e.Start,
					e.End, events[max(i-1, 0)].End)
			}
		}
		return nil
	})
}

func TestErrorsAreKeptAfterClose(t *testing.T) {
	c := group(2, 50*time.Millisecond, 4).Comms[0].(recorded)
	err := calls(c, 1)
	require.That(t, errors.Is(err, backend.ErrTimeout), "the error is %v, want ErrTimeout", err)
	err = calls(c, 1)
	require.That(t, errors.Is(err, backend.ErrTimeout), "the error is %v, want ErrTimeout", err)
	require.NoError(t, c.Close())
	for i, e := range c.rec.Events() {
		require.Check(t, errors.Is(e.Err, backend.ErrTimeout) && !e.End.IsZero(),
			"event %d has the error %v and ended at %v", i, e.Err, e.End)
	}
}

func TestWrongCallsAreNotRecorded(t *testing.T) {
	c := group(1, time.Minute, 4).Comms[0].(recorded)
	err := backend.Run(c, allReduce, backend.Of([]float32{1}), backend.Of([]float64{1}))
	require.That(t, errors.Is(err, backend.ErrArgument), "the error is %v, want ErrArgument", err)
	events := c.rec.Events()
	require.That(t, len(events) == 0, "recorded %v", events)
}

func TestQueuedCallEndsWhenItIsSeen(t *testing.T) {
	comms := group(2, time.Minute, 8).Comms
	c := comms[0].(recorded)
	q, err := c.Device().NewQueue()
	require.NoError(t, err)
	defer q.Close()
	x := backend.Of(make([]float32, 8))
	var works [2]backend.Work
	for i := range works {
		if works[i], err = c.Start(q, allReduce, x, x); err != nil {
			t.Fatal(err)
		}
	}
	for _, e := range c.rec.Events() {
		require.That(t, e.End.IsZero() && e.Queue == 1,
			"an event that waits for rank 1 ended at %v on queue %d", e.End, e.Queue)
	}
	backendtest.Each(t, comms[1:], func(peer backend.Communicator) error {
		y := backend.Of(make([]float32, 8))
		return errors.Join(backend.Run(peer, allReduce, y, y), backend.Run(peer, allReduce, y, y))
	})
	require.NoError(t, works[0].Join(context.Background()))
	joined := c.rec.endedEvents()[0].End
	require.That(t, !joined.IsZero(), "Join did not record the end")
	if err := q.Close(); err != nil { // the second call is done, and nobody joined it
		t.Fatal(err)
	}
	events := c.rec.Events()
	require.That(t, events[0].End == joined && !events[1].End.IsZero(),
		"the ends are %v and %v, want %v and some time", events[0].End, events[1].End, joined)
}

func TestPartsShareTheRing(t *testing.T) {
	backendtest.Each(t, group(2, time.Minute, 8).Comms, func(c backend.Communicator) error {
		part := testranks.Must(c.Split(0, -c.Rank()))
		testranks.NoError(errors.Join(calls(c, 1), calls(part, 1)))
		events := c.(recorded).rec.Events()
		if len(events) != 2 || events[0].Comm != c.Name() || events[1].Comm != part.Name() ||
			events[1].Rank != 1-c.Rank() {
			return fmt.Errorf("the events are %+v, want one of %s and one of %s", events, c.Name(),
				part.Name())
		}
		return nil
	})
}

func TestChromeTraceIsReadable(t *testing.T) {
	backendtest.Each(t, group(2, time.Minute, 8).Comms, func(c backend.Communicator) error {
		testranks.NoError(calls(c, 2))
		c.Abort(errors.New("for the trace"))
		if err := calls(c, 1); err == nil {
			return errors.New("a call after Abort gave no error")
		}
		var out bytes.Buffer
		testranks.NoError(c.(recorded).rec.WriteChrome(&out))
		var file struct {
			TraceEvents []struct {
				Name, Ph string
				Ts, Dur  float64
				Pid, Tid int
				Args     map[string]any
			}
		}
		testranks.NoError(json.Unmarshal(out.Bytes(), &file))
		var durations int
		for _, e := range file.TraceEvents {
			if e.Pid != c.Rank() {
				return fmt.Errorf("pid is %d, want %d", e.Pid, c.Rank())
			}
			if e.Ph == "X" {
				durations++
				if e.Name != "allreduce" || e.Ts < 1e15 || e.Dur < 0 || e.Args["bytes"] == nil {
					return fmt.Errorf("event %+v", e)
				}
			}
		}
		last := file.TraceEvents[len(file.TraceEvents)-1]
		if durations < 2 || last.Args["error"] == nil {
			return fmt.Errorf("trace is %s", out.String())
		}
		return nil
	})
}

// silent is a communicator whose calls do nothing.
type silent struct{ backend.Communicator }

func (silent) Start(backend.Queue, backend.Collective, backend.Buffer,
	backend.Buffer) (backend.Work, error) {
	return backend.Finished(nil), nil
}

func TestRecordingAllocatesNothing(t *testing.T) {
	c := backend.WithHooks(silent{reference.New("test", 1, time.Minute)[0]}, New(0, 16))
	x := backend.Of(make([]float32, 8))
	allocs := testing.AllocsPerRun(1000, func() {
		require.NoError(t, backend.Run(c, allReduce, x, x))
	})
	require.Check(t, allocs == 0, "%v allocations per call, want 0", allocs)
}

func TestShortLivedQueuesAreForgotten(t *testing.T) {
	r := New(0, 1)
	for i := range 100 {
		got := r.number(new(reference.Queue))
		require.That(t, got == i+1, "queue %d has number %d", i+1, got)
	}
}

func BenchmarkAllReduce(b *testing.B) {
	backendtest.Bench(b, backendtest.Options{Sizes: []int{1, 2},
		New: func(size int, timeout time.Duration) (*backendtest.Group, error) {
			return group(size, timeout, 100), nil
		}})
}

func TestLastCallsAreWrittenAsText(t *testing.T) {
	c := group(2, 50*time.Millisecond, 4).Comms[0].(recorded)
	var empty, two, all bytes.Buffer
	if err := c.rec.WriteLast(&empty, 3); err != nil ||
		empty.String() != "rank 0: the last 0 of 0 collectives:\n" {
		t.Errorf("%q, %v", empty.String(), err)
	}
	for range 6 {
		err := calls(c, 1)
		require.That(t, err != nil, "a call alone works")
	}
	require.NoError(t, errors.Join(c.rec.WriteLast(&two, 2), c.rec.WriteLast(&all, 9)))
	for text, want := range map[string]int{two.String(): 2, all.String(): 4} {
		lines := strings.Split(strings.TrimSpace(text), "\n")
		require.Check(t, lines[0] == fmt.Sprintf("rank 0: the last %d of 6 collectives:", want) &&
			len(lines) == 1+want, "%q", text)
		if last := lines[len(lines)-1]; !strings.Contains(
			last, " allreduce(sum) of 1 f32 (call 6) on test: failed: ") {
			t.Errorf("%q", last)
		}
	}
	now := time.Now()
	got := (Event{Start: now.Add(-time.Second)}).outcome(now)
	require.Check(t, got == "under way for 1s", "%v", got)
	if got := (Event{Start: now.Add(-time.Second), End: now}).outcome(now); got != "took 1s" {
		t.Error(got)
	}
}
