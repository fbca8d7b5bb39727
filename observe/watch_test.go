package observe

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/observe/internal/straggler"
	"github.com/euryale-ml/euryale/rendezvous"
)

const pause = 20 * time.Millisecond

func TestCallsAreCountedByKindAndBucket(t *testing.T) {
	g := group(2, time.Minute, 4)
	var found [2]map[Kind]Total
	backendtest.Each(t, g.Comms, func(c backend.Communicator) error {
		rec := c.(recorded).rec
		testranks.NoError(calls(c, 1)) // before Count
		rec.Count()
		testranks.NoError(calls(c, 3)) // 4, 8 and 12 bytes
		if c.Rank() == 1 {
			time.Sleep(pause)
		}
		x := backend.Of(make([]float32, 10))
		bucket := allReduce
		bucket.Origin = &backend.Origin{Purpose: backend.ForSync, Ordinal: 2}
		testranks.NoError(backend.Run(c, bucket, x, x))
		rec.Count()
		found[c.Rank()] = rec.Totals()
		return nil
	})
	plain := Kind{Kind: backend.AllReduce, Algorithm: backend.Auto.String()}
	second := plain
	second.Bucket = 2
	for r, all := range found {
		if p, s := all[plain], all[second]; len(all) != 2 || p.Calls != 3 || p.Bytes != 24 ||
			s.Calls != 1 || s.Bytes != 40 {
			t.Errorf("rank %d has counted %+v", r, all)
		}
	}
	late := found[0][second].Exposed
	require.Check(t, late >= pause*9/10, "rank 0 has waited for %v, want %v", late, pause)
	got := New(0, 1).Totals()
	require.Check(t, got == nil, "without Count: %v", got)
}

// slow is a communicator whose calls take a pause to join.
type slow struct{ backend.Communicator }

func (slow) Start(backend.Queue, backend.Collective, backend.Buffer, backend.Buffer) (backend.Work,
	error) {
	return slowWork{}, nil
}

type slowWork struct{ joined }

func (slowWork) Join(context.Context) error {
	time.Sleep(pause)
	return nil
}

// What a program computes between Start and Join is not exposed.
func TestTimeToJoinIsExposed(t *testing.T) {
	r := New(0, 1)
	r.Count()
	c := backend.WithHooks(slow{reference.New("test", 1, time.Minute)[0]}, r)
	x := backend.Of(make([]float32, 1))
	began := time.Now()
	w := require.Value(c.Start(nil, allReduce, x, x))(t)
	time.Sleep(pause)
	require.NoError(t, w.Join(t.Context()))
	took := time.Since(began)
	if got := r.ticks.scale().since(r.exposed()); got < pause*9/10 || got > took-pause*9/10 {
		t.Errorf("of %v, %v are exposed", took, got)
	}
}

func TestStepsOfATrainingAreFollowed(t *testing.T) {
	g := group(3, time.Minute, 10)
	var all [3]Progress
	var verdicts [3][]straggler.Verdict
	backendtest.Each(t, g.Comms, func(c backend.Communicator) error {
		r := c.Rank()
		w := NewWatch(&rendezvous.World{Rank: r, Size: 3}, c.(recorded).rec, io.Discard)
		w.Start(c.Device())
		defer w.Close()
		w.Begin()
		for n := 1; n <= 4; n++ {
			testranks.NoError(w.During(straggler.Loader, func() error {
				require.Equal(t, fmt.Sprintf("rank %d reads", r), w.Progress().State, "loading")
				if r == 2 {
					time.Sleep(pause)
				}
				return nil
			}))
			sample := w.Sample()
			told := make([]float64, 3*len(sample))
			x, y := backend.Of(sample), backend.Of(told)
			gather := backend.Collective{Kind: backend.AllGather}
			testranks.NoError(backend.Run(c, gather, y, x))
			w.Step(StepInfo{Number: 10 + n, Loss: float64(n), Samples: 2, FLOPs: 100, Ready: 1,
				Capacity: 3}, slices.Collect(slices.Chunk(told, len(sample))))
		}
		all[r], verdicts[r] = w.Progress(), w.Verdicts()
		w.Close()
		require.Equal(t, fmt.Sprintf("rank %d has ended", r), w.Progress().State, "ended")
		return nil
	})
	for r, p := range all {
		steps := uint64(0)
		for _, n := range p.Buckets {
			steps += n
		}
		want := StepInfo{Number: 14, Loss: 4, Samples: 2, FLOPs: 100, Ready: 1, Capacity: 3}
		require.Check(t, p.StepInfo == want && p.Steps == 4 && p.Samples == 8 && p.FLOPs == 400 &&
			steps == 4, "rank %d has come to %+v", r, p)
		require.Check(t, slices.Equal(verdicts[r], verdicts[0]) && (p.Verdict.Late > 0) == (r == 2),
			"rank %d: the verdicts are %+v, its own %+v", r, verdicts[r], p.Verdict)
	}
	p := all[2]
	require.Check(t, p.Verdict.Cause == straggler.Loader && p.Noted[straggler.Loader] >= 4*pause &&
		p.Late >= 3*pause && !(p.Caused < 0.5) && !(all[0].Exposed < p.Exposed) &&
		p.State == "computing", "the straggler has come to %+v", p)
}

func TestANilWatchDoesNothing(t *testing.T) {
	w := WatchOf(reference.New("test", 1, time.Minute)[0])
	require.That(t, w == nil, "a communicator without a session has a watch")
	w.Begin()
	w.Note(straggler.Loader, time.Second)
	ran := false
	err := w.During(straggler.Loader, func() error { ran = true; return nil })
	require.Check(t, err == nil && ran, "it runs: %v, %v", ran, err)
	sample := w.Sample()
	require.Check(t, sample == nil, "its sample is %v", sample)
	w.Step(StepInfo{}, nil)
	require.Fails(t, "it starts", require.Err(Start(reference.New("test", 1, time.Minute)[0])))
}

func TestBoundsHoldTheirSteps(t *testing.T) {
	w := NewWatch(&rendezvous.World{}, New(0, 1), io.Discard)
	for i := range Buckets {
		for _, took := range []time.Duration{Bound(i), Bound(i) + 1} {
			w.mine.Time = took
			w.count(StepInfo{}, 0)
		}
	}
	for i, n := range w.so.Buckets {
		if want := min(uint64(i)+1, 2); n != want {
			t.Errorf("bucket %d, up to %v, has %d steps, want %d", i, Bound(i), n, want)
		}
	}
}

// What a step costs a rank of 8, besides the bytes that travel with its losses.
func BenchmarkStep(b *testing.B) {
	w := NewWatch(&rendezvous.World{Size: 8}, New(0, 1), io.Discard)
	w.Start(reference.Device{})
	defer w.Close()
	w.Begin()
	b.ReportAllocs()
	for b.Loop() {
		told := slices.Repeat([][]float64{w.Sample()}, 8)
		w.Step(StepInfo{}, told)
	}
}

// TestRanksThatAreAllSlowerThanTheyWereHaveAVerdict, with its cause, in the report, too.
func TestRanksThatAreAllSlowerThanTheyWereHaveAVerdict(t *testing.T) {
	g := group(2, time.Minute, 10)
	var reports [2]strings.Builder
	backendtest.Each(t, g.Comms, func(c backend.Communicator) error {
		r := c.Rank()
		w := NewWatch(&rendezvous.World{Rank: r, Size: 2}, c.(recorded).rec, io.Discard)
		w.Start(c.Device())
		defer w.Close()
		w.Begin()
		for n := 1; n <= 60; n++ {
			testranks.NoError(w.During(straggler.Loader, func() error {
				if n > 30 {
					time.Sleep(pause / 10)
				}
				return nil
			}))
			sample := w.Sample()
			told := make([]float64, 2*len(sample))
			gather := backend.Collective{Kind: backend.AllGather}
			testranks.NoError(backend.Run(c, gather, backend.Of(told), backend.Of(sample)))
			w.Step(StepInfo{Number: n}, slices.Collect(slices.Chunk(told, len(sample))))
		}
		all := w.Verdicts()
		require.Check(t, slices.ContainsFunc(all, func(v Verdict) bool {
			return v.Rank == straggler.AllRanks && v.Cause == straggler.Loader
		}), "rank %d: %v", r, all)
		return w.Report(&reports[r])
	})
	require.Check(t, strings.Contains(reports[1].String(), "all ranks: a step takes "), "%s",
		reports[1].String())
}
