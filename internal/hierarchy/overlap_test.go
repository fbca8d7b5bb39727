package hierarchy

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/observe"
)

// onGuard runs f on ranks whose memory the host cannot touch.
func onGuard(t *testing.T, l Layout, o Options, f func(c *Communicator) error) {
	t.Helper()
	d := guarded(t)
	ranksOver(t, l, o, func(c backend.Communicator) backend.Communicator {
		return fakedevice.Over(c, d)
	}, f)
}

// guarded returns a device that is closed after the test's groups.
func guarded(t *testing.T) *fakedevice.Device {
	t.Helper()
	d := require.Value(fakedevice.New(host.Device{}))(t)
	t.Cleanup(func() {
		if err := d.Close(); err != nil { // which finds memory that was not freed
			t.Error(err)
		}
	})
	return d
}

func TestHostMemoryIsCopiedToTheDevice(t *testing.T) {
	onGuard(t, Grid(2, 2), always(), func(c *Communicator) error {
		x, y := make([]int32, 4000), make([]int32, 1000)
		for i := range x {
			x[i] = int32(c.Rank() * i)
		}
		testranks.NoError(backend.Run(c, reduceScatter, backend.Of(y), backend.Of(x)))
		testranks.NoError(backend.Run(c, allReduce, backend.Of(x), backend.Of(x)))
		for i, got := range x {
			if got != int32(6*i) {
				return fmt.Errorf("element %d is %d, want %d", i, got, 6*i)
			}
		}
		if want := int32(6 * (1000*c.Rank() + 7)); y[7] != want {
			return fmt.Errorf("element 7 of the chunk is %d, want %d", y[7], want)
		}
		return nil
	})
}

// slowLinks makes everything that communicates take its time, as links do, and no
// processor. It notes when that was; spans of the host are seen later.
type slowLinks struct {
	pause time.Duration

	mu   sync.Mutex
	used map[int][]Span // by rank
}

func (l *slowLinks) hook(p *probe, q backend.Queue) (backend.Work, error) {
	if p.phase == remainderPhase {
		return nil, nil
	}
	return nil, q.Wait(passage{l, p.rank, Span{Call: p.number(), Phase: p.phase}})
}

// by returns when a rank has used the links, in the order of the ends.
func (l *slowLinks) by(rank int) []Span {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.used[rank])
}

// passage is the event of one phase on its link.
type passage struct {
	links *slowLinks
	rank  int
	span  Span
}

func (passage) Done() bool { return false }

func (p passage) Join(context.Context) error {
	p.span.Start = time.Now()
	time.Sleep(p.links.pause)
	p.links.mu.Lock()
	defer p.links.mu.Unlock()
	p.span.End = time.Now()
	if p.links.used == nil {
		p.links.used = map[int][]Span{}
	}
	p.links.used[p.rank] = append(p.links.used[p.rank], p.span)
	return nil
}

// buckets all-reduces many buckets, some of them at a time, and looks at the sums.
func buckets(c *Communicator, count, n, inFlight int) error {
	var qs []backend.Queue
	for range inFlight {
		q := testranks.Must(c.Device().NewQueue())
		defer q.Close()
		qs = append(qs, q)
	}
	all := make([][]int32, count)
	for b := range all {
		all[b] = make([]int32, n)
		for i := range all[b] {
			all[b][i] = int32(c.Rank() + b + i)
		}
	}
	testranks.NoError(backend.Barrier(c))
	works := make([]backend.Work, count)
	for b, x := range all {
		var err error
		if works[b], err = c.Start(qs[b%inFlight], allReduce, backend.Of(x),
			backend.Of(x)); err != nil {
			return err
		}
	}
	for b, w := range works {
		testranks.NoError(w.Join(context.Background()))
		for i, got := range all[b] {
			if want := int32(6 + 4*(b+i)); got != want {
				return fmt.Errorf("bucket %d: element %d is %d, want %d", b, i, got, want)
			}
		}
	}
	return nil
}

// Span is a phase of a slice, as a Recorder has it.
type Span struct {
	Call       int // number of the call, from 1
	Phase      phase
	Slice      int // from 0
	Start, End time.Time
}

// timed returns options whose Hooks are a Recorder of a rank, if they ask for spans.
func timed(comm backend.Communicator, o Options) (Options, error) {
	if o.Spans == 0 {
		return o, nil
	}
	r := observe.New(comm.Rank(), 1)
	o.Hooks = r
	return o, r.TimeParts(comm.Device(), o.Spans)
}

// recorderOf returns the Recorder of timed, nil if there is none.
func recorderOf(c backend.Communicator) *observe.Recorder {
	r, _ := c.(*Communicator).hooks.(*observe.Recorder)
	return r
}

// spansOf returns the phases that have ended, by their starts.
func spansOf(c *Communicator) (all []Span) {
	r := recorderOf(c)
	if r == nil {
		return nil
	}
	for _, e := range r.Events() {
		s := Span{Call: int(e.Header.Seq), Start: e.Start, End: e.End}
		name, slice, some := strings.Cut(e.Part, " (slice ")
		if some {
			if _, err := fmt.Sscanf(slice, "%d of", &s.Slice); err != nil {
				panic(err)
			}
			s.Slice--
		}
		s.Phase = phase(slices.Index(phaseNames[:], name))
		if !e.End.IsZero() {
			all = append(all, s)
		}
	}
	slices.SortStableFunc(all, func(a, b Span) int { return a.Start.Compare(b.Start) })
	return all
}

// linkOf is the kind of link that a phase uses, 0 for none.
var linkOf = map[phase]int{reducePhase: 1, gatherPhase: 1, exchangePhase: 2, broadcastPhase: 2}

// overlaps counts the pairs of phases on different kinds of links, of different
// slices, that were under way at the same time.
func overlaps(spans []Span, same func(a, b Span) bool) (n int) {
	for i, a := range spans {
		for _, b := range spans[i+1:] {
			if same(a, b) && linkOf[a.Phase]*linkOf[b.Phase] == 2 && b.Start.Before(a.End) {
				n++
			}
		}
	}
	return n
}

// busy returns for how long phases were under way on links inside machines, between
// them, and on both at once.
func busy(spans []Span) (inside, between, both time.Duration) {
	type edge struct {
		at         time.Time
		link, step int
	}
	var edges []edge
	for _, s := range spans {
		if link := linkOf[s.Phase]; link > 0 {
			edges = append(edges, edge{s.Start, link, 1}, edge{s.End, link, -1})
		}
	}
	slices.SortFunc(edges, func(a, b edge) int { return a.at.Compare(b.at) })
	var under [3]int
	for i, e := range edges {
		if i > 0 {
			passed := e.at.Sub(edges[i-1].at)
			if under[1] > 0 {
				inside += passed
			}
			if under[2] > 0 {
				between += passed
			}
			if under[1] > 0 && under[2] > 0 {
				both += passed
			}
		}
		under[e.link] += e.step
	}
	return inside, between, both
}

func TestBusyTimesAreThoseOfTheUnion(t *testing.T) {
	span := func(p phase, from, to int) Span {
		return Span{Phase: p, Start: time.Unix(int64(from), 0), End: time.Unix(int64(to), 0)}
	}
	inside, between, both := busy([]Span{span(reducePhase, 0, 4), span(gatherPhase, 3, 5),
		span(exchangePhase, 4, 7), span(addPhase, 0, 9), span(broadcastPhase, 8, 9)})
	require.Check(t, inside == 5*time.Second && between == 4*time.Second && both == time.Second,
		"%v inside, %v between, %v both, want 5 s, 4 s, 1 s", inside, between, both)
}

func TestPhasesOfManyBucketsOverlap(t *testing.T) {
	count := times(64, 16)
	l := Grid(2, 2)
	o := Options{Mode: Always, Spans: 1000} // a bucket is one slice
	links := &slowLinks{pause: time.Millisecond}
	others := func(a, b Span) bool { return a.Call != b.Call }
	ranksOver(t, l, o, probes(l, links.hook), func(c *Communicator) error {
		testranks.NoError(buckets(c, count, 1000, 1))
		before := overlaps(links.by(c.Rank()), others)
		testranks.NoError(buckets(c, count, 1000, 4))
		after, seen := overlaps(links.by(c.Rank()), others), overlaps(spansOf(c), others)
		if before != 0 || after < count || seen < count {
			return fmt.Errorf("%d phases of different buckets overlap with one in flight, %d "+
				"with four, %d of those in the spans", before, after, seen)
		}
		return nil
	})
}

func TestPhasesOfSlicesOverlap(t *testing.T) {
	l := gridOf(2, 2, machineMinor)
	o := Options{Mode: Always, SliceBytes: 4 << 10, Spans: 1000}
	ranksOver(t, l, o, probes(l, (&slowLinks{pause: time.Millisecond}).hook),
		func(c *Communicator) error {
			testranks.NoError(buckets(c, 1, 16*1024, 1))
			spans := spansOf(c)
			if n := overlaps(spans, func(a, b Span) bool { return a.Slice != b.Slice }); n < 16 {
				return fmt.Errorf("%d phases of 16 slices overlap", n)
			}
			var took [phases]time.Duration
			for _, s := range spans {
				took[s.Phase] += s.End.Sub(s.Start)
			}
			for _, p := range []phase{reducePhase, exchangePhase, broadcastPhase, gatherPhase} {
				if n := c.Stats().Phases[p].Slices; n != 16 || took[p] < 10*time.Millisecond {
					return fmt.Errorf("%v: %d slices, %v", p, n, took[p])
				}
			}
			return nil
		})
}

func TestManyBucketsAreExact(t *testing.T) {
	n := times(1<<20, 1<<14)
	for _, inFlight := range []int{1, 4} {
		ranks(t, Grid(2, 2), Options{Mode: Always}, func(c *Communicator) error {
			return buckets(c, times(16, 64), n, inFlight)
		})
	}
}

// The host watches the phases of calls among nodes, which a graph cannot do for each replay.
func TestCallsAmongNodesAreNotRecorded(t *testing.T) {
	onGuard(t, Grid(2, 2), always(), func(c *Communicator) error {
		memory := testranks.Must(c.Device().Alloc(64))
		own := testranks.Must(c.Device().NewQueue()) // ranks share the device here
		x, q := memory.As(backend.I32), own.(backend.GraphQueue)
		graph := testranks.Must(q.Capture(func() error {
			if _, err := c.Start(q, allReduce, x, x); !errors.Is(err, backend.ErrUnsupported) {
				return fmt.Errorf("the error is %w", err)
			}
			return nil
		}))
		return errors.Join(graph.Close(), own.Close(), backend.Run(c, allReduce, x, x),
			c.Device().Free(memory))
	})
}
