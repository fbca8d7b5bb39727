package gpu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// recorded are collectives of floats that a graph is made of, of which NCCL and kernels run some.
func recorded(size int) []backend.Collective {
	all := []backend.Collective{sum, {Kind: backend.AllReduce, Op: backend.Avg},
		{Kind: backend.AllReduce, Op: backend.Max}}
	for _, k := range backend.Kinds() {
		all = append(all, backend.Collective{Kind: k, Root: size - 1})
	}
	return all
}

// operands are the lengths of those of a collective of n elements for each rank.
func operandsOf(k backend.Kind, size, n int) (dst, src int) {
	dst, src = n*size, n*size
	switch k {
	case backend.AllGather, backend.Gather:
		src = n
	case backend.ReduceScatter, backend.Scatter:
		dst = n
	}
	return dst, src
}

// graphTest is what a rank needs to record calls.
type graphTest struct {
	c   *Communicator
	q   backend.GraphQueue
	all []backend.Collective
	x   backend.Buffer
	one backend.Buffer // of ones
	ys  []backend.Buffer
}

const graphElements = 40

// newGraphTest gives each call of all its own result.
func newGraphTest(c *Communicator, all []backend.Collective) (*graphTest, func() error, error) {
	g := &graphTest{c: c, q: c.Device().Default().(backend.GraphQueue), all: all}
	n := graphElements * c.Size()
	memory, err := c.Device().Alloc(4 * n * (len(all) + 2))
	if err != nil {
		return nil, nil, err
	}
	part := func(i int) backend.Buffer { return memory.As(backend.F32).Slice(i*n, (i+1)*n) }
	g.x, g.one = part(0), part(len(all)+1)
	for i := range all {
		g.ys = append(g.ys, part(i+1))
	}
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(i%7 + 10*c.Rank())
	}
	return g, func() error { return c.Device().Free(memory) }, errors.Join(g.q.Zero(memory),
		g.q.Move(g.x, backend.Of(x)), g.q.Move(g.one, backend.Of(slices.Repeat([]float32{1}, n))),
		drain(context.Background(), g.q))
}

// start starts call i on a queue, each element of x after the one before is added.
func (g *graphTest) start(q backend.Queue, i int) (backend.Work, error) {
	dst, src := operandsOf(g.all[i].Kind, g.c.Size(), graphElements)
	return g.c.Start(q, g.all[i], g.ys[i].Slice(0, dst), g.x.Slice(0, src))
}

// startAll starts all calls, and changes x for the next time.
func (g *graphTest) startAll(q backend.Queue) error {
	for i := range g.all {
		if _, err := g.start(q, i); err != nil {
			return err
		}
	}
	return q.Reduce(backend.Sum, g.x, g.x, g.one)
}

// results reads all results.
func (g *graphTest) results() ([]float32, error) {
	var all []float32
	for _, y := range g.ys {
		one := make([]float32, y.Len())
		if err := errors.Join(g.q.Move(backend.Of(one), y), drain(context.Background(),
			g.q)); err != nil {
			return nil, err
		}
		all = append(all, one...)
	}
	return all, nil
}

// graphCases are what ranks do with graphs, by any algorithm and on any device.
var graphCases = []struct {
	name  string
	ranks int
	run   func(c *Communicator) error
}{
	{"bits", 2, graphsMatchEager},
	{"replays", 2, callsRunInReplaysOnly},
	{"fork", 2, capturesForkAndJoin},
	{"before", 2, replaysFollowWhatRuns},
	{"refused", 2, capturesRefuse},
}

func TestGraphs(t *testing.T) { testGraphs(t, len(graphCases)) }

// With -short, as for the race detector, the first case has few replays.
func TestGraphsReplayedOftenUnraced(t *testing.T) { testGraphs(t, 1) }

func testGraphs(t *testing.T, cases int) {
	t.Helper()
	for _, use := range []Algorithm{byNCCL, byLL, byLL128TwoShot, byOneShot, byTwoShot} {
		for _, test := range graphCases[:cases] {
			t.Run(fmt.Sprintf("%s/%v", test.name, use), func(t *testing.T) {
				g := newRig(t)
				o := options()
				o.Force = use
				each(t, g.group(t, test.ranks, same(o)), test.run)
			})
		}
	}
}

func TestGroupAndPartShareAGraph(t *testing.T) {
	g := newRig(t)
	each(t, g.group(t, 4, same(options())), groupAndPart)
}

// A graph of all kinds gives what eager calls give, also between them, and when two graphs take
// turns.
func graphsMatchEager(c *Communicator) (err error) {
	all := recorded(c.Size())
	eager, free, err := newGraphTest(c, all)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, free()) }()
	graphed, free2, err := newGraphTest(c, all)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, free2()) }()
	q := graphed.q
	one, err := q.Capture(func() error { return graphed.startAll(q) })
	if err != nil {
		return err
	}
	two, err := q.Capture(func() error {
		return errors.Join(graphed.startAll(q), graphed.startAll(q))
	})
	if err != nil {
		return err
	}
	// Kernels may not wait for this rank while its memory is being taken.
	if err := assemble(c); err != nil {
		return err
	}
	replays := 100
	if testing.Short() {
		replays = 20
	}
	before := c.seq.Load()
	for i := range replays {
		switch i % 4 {
		case 0, 3:
			_, err = one.Launch(nil)
			err = errors.Join(err, eager.startAll(q))
		case 1:
			err = errors.Join(eager.startAll(q), graphed.startAll(q))
		case 2:
			_, err = two.Launch(nil)
			err = errors.Join(err, eager.startAll(q), eager.startAll(q))
		}
		if err != nil {
			return err
		}
	}
	want, err := eager.results()
	if err != nil {
		return err
	}
	got, err := graphed.results()
	if err != nil {
		return err
	}
	if !slices.Equal(got, want) {
		return errors.New("a graph gives other results than eager calls")
	}
	// Of four rounds, three are replays, and six are of eager calls.
	if calls, want := c.seq.Load()-before, uint64(replays/4*(6*len(all)+3)); calls != want {
		return fmt.Errorf("%d calls were posted, want %d", calls, want)
	}
	return errors.Join(one.Close(), two.Close(), assemble(c))
}

// A capture runs nothing, and its Work orders queues inside of it only.
func callsRunInReplaysOnly(c *Communicator) error {
	return holding(c, []float32{1}, func(x backend.Buffer) error {
		q := c.Device().Default().(backend.GraphQueue)
		var w backend.Work
		graph := testranks.Must(q.Capture(func() (err error) {
			w, err = c.Start(q, sum, x, x)
			return err
		}))
		if n := c.seq.Load(); n != 0 || c.Usage() != (Usage{}) {
			return fmt.Errorf("%d calls were posted, used %+v", n, c.Usage())
		}
		testranks.NoError(assemble(c))
		if err := w.Join(context.Background()); !w.Done() || !errors.Is(err, backend.ErrArgument) ||
			!strings.Contains(err.Error(), "Launch") {
			return fmt.Errorf("join of a call in a graph: %v", err)
		}
		if err := w.Wait(q); !errors.Is(err, backend.ErrArgument) {
			return fmt.Errorf("wait for a call in a graph that is made: %v", err)
		}
		for range 3 {
			r, err := graph.Launch(nil)
			if err == nil {
				err = r.Join(context.Background())
			}
			if err != nil {
				return err
			}
		}
		if n := c.used[c.Choose(sum, backend.F32, 4)].Load(); n != 3 {
			return fmt.Errorf("%d calls were counted, want 3", n)
		}
		got := []float32{0}
		if err := errors.Join(q.Move(backend.Of(got), x), drain(context.Background(), q),
			graph.Close()); err != nil || got[0] != 8 {
			return fmt.Errorf("the sum is %v: %v", got, err)
		}
		if _, err := graph.Launch(nil); !errors.Is(err, backend.ErrClosed) {
			return fmt.Errorf("launch after Close: %v", err)
		}
		return nil
	})
}

// A collective on a side queue runs beside what follows it on the first one, and both wait for
// each other where the program says so. The fake runs nodes as late as their order lets them.
func capturesForkAndJoin(c *Communicator) error {
	return holding(c, []float32{1, 2}, func(x backend.Buffer) error {
		q := c.Device().Default().(backend.GraphQueue)
		side, err := c.Device().NewQueue()
		if err != nil {
			return err
		}
		defer side.Close()
		fork := func(join bool) (*backend.Graph, error) {
			return q.Capture(func() error {
				if err := q.Reduce(backend.Sum, x, x, x); err != nil {
					return err
				}
				e, err := q.Record()
				if err != nil {
					return err
				}
				if err := side.Wait(e); err != nil {
					return err
				}
				w, err := c.Start(side, sum, x, x)
				if err != nil {
					return err
				}
				if join {
					return errors.Join(w.Wait(q), q.Reduce(backend.Sum, x, x, x, x))
				}
				return nil
			})
		}
		_, err = fork(false)
		if !errors.Is(err, backend.ErrArgument) || !strings.Contains(err.Error(), "is not joined") {
			return fmt.Errorf("a side queue that is not joined again: %w", err)
		}
		graph, err := fork(true)
		if err != nil {
			return err
		}
		for range 2 {
			if _, err := graph.Launch(nil); err != nil {
				return err
			}
		}
		got := make([]float32, 2)
		testranks.NoError(errors.Join(q.Move(backend.Of(got), x), drain(context.Background(), q),
			graph.Close()))
		if want := []float32{144, 288}; !slices.Equal(got, want) { // 1*2*2*3 * 2*2*3
			return fmt.Errorf("%v, want %v", got, want)
		}
		return nil
	})
}

// A group and a part of it have calls in one graph, in both orders of their names.
// A call that runs already on another queue comes before the replays of a graph that waits for it.
func replaysFollowWhatRuns(c *Communicator) error {
	return holding(c, []float32{1}, func(x backend.Buffer) error {
		q := c.Device().Default().(backend.GraphQueue)
		side := testranks.Must(c.Device().NewQueue())
		defer side.Close()
		e := testranks.Must(q.Record()) // of the copy to x
		testranks.NoError(side.Wait(e))
		w := testranks.Must(c.Start(side, sum, x, x))
		graph := testranks.Must(q.Capture(func() error {
			return errors.Join(w.Wait(q), q.Reduce(backend.Sum, x, x, x, x))
		}))
		for range 2 {
			if _, err := graph.Launch(nil); err != nil {
				return err
			}
		}
		got := []float32{0}
		if err := errors.Join(q.Move(backend.Of(got), x), drain(context.Background(), q),
			graph.Close()); err != nil || got[0] != 18 {
			return fmt.Errorf("%v: %w", got, err)
		}
		return nil
	})
}

func groupAndPart(c *Communicator) error {
	split := testranks.Must(c.Split(c.Rank()/2, c.Rank()))
	part := split.(*Communicator)
	return errors.Join(holding(c, []float32{1}, func(x backend.Buffer) error {
		q := c.Device().Default().(backend.GraphQueue)
		graph, err := q.Capture(func() error {
			_, err := part.Start(q, sum, x, x)
			if err == nil {
				_, err = c.Start(q, sum, x, x)
			}
			if err == nil {
				_, err = part.Start(q, sum, x, x)
			}
			return err
		})
		if err != nil {
			return err
		}
		for range 3 {
			w := testranks.Must(graph.Launch(nil))
			if err := errors.Join(w.Wait(q), w.Join(context.Background())); err != nil ||
				!w.Done() {
				return fmt.Errorf("done %v: %w", w.Done(), err)
			}
		}
		got := []float32{0}
		err = errors.Join(q.Move(backend.Of(got), x), drain(context.Background(), q), graph.Close())
		// Split is a call, too
		if err != nil || got[0] != 4096 || c.seq.Load() != 4 || part.seq.Load() != 3 {
			return fmt.Errorf("%v, %d and %d calls: %w", got, c.seq.Load(), part.seq.Load(), err)
		}
		return nil
	}), part.Close())
}

// Ranks that replay other graphs, or at another place, are told what each of them did.
func TestReplaysThatDifferAreAMismatch(t *testing.T) {
	for name, test := range map[string]struct {
		calls  func(rank int) int // in the graph
		eager  bool               // rank 1 starts a call in place of the replay
		remedy string
	}{
		"lengths": {func(rank int) int {
			return 2 + rank
		}, false, "launch the same graphs in the same order"},
		"eager": {func(int) int { return 2 }, true, "call Graph.Launch on every rank"},
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t)
			each(t, g.group(t, 2, same(options())), func(c *Communicator) error {
				return holding(c, []float32{1}, func(x backend.Buffer) error {
					q := c.Device().Default().(backend.GraphQueue)
					graph := testranks.Must(q.Capture(func() error {
						for range test.calls(c.Rank()) {
							if _, err := c.Start(q, sum, x, x); err != nil {
								return err
							}
						}
						return nil
					}))
					w, err := graph.Launch(nil)
					if test.eager && err == nil {
						err = w.Join(context.Background())
					}
					if test.eager && err == nil {
						if c.Rank() == 1 {
							w, err = c.Start(q, sum, x, x)
						} else {
							w, err = graph.Launch(nil)
						}
					}
					if err == nil {
						err = w.Join(context.Background())
					}
					var m *backend.MismatchError
					if !errors.As(err, &m) || !strings.Contains(err.Error(), "replay") ||
						!strings.Contains(err.Error(), "of a graph of 2 collectives") ||
						!strings.Contains(err.Error(), test.remedy) {
						return fmt.Errorf("the error is %w", err)
					}
					return graph.Close()
				})
			})
		})
	}
}

// What cannot be recorded is refused, and says what to do; the communicator stays usable.
func capturesRefuse(c *Communicator) error {
	window, err := c.Alloc(64)
	if err != nil {
		return err
	}
	q := c.Device().Default().(backend.GraphQueue)
	x := window.As(backend.F32)
	onHost := backend.Of(make([]float32, x.Len()))
	graph, err := q.Capture(func() error {
		if _, err := c.Start(q, sum, x, x); err != nil {
			return err
		}
		_, alloc := c.Alloc(64)
		_, split := c.Split(0, 0)
		_, host := c.Start(q, sum, onHost, onHost)
		_, wrong := c.Start(q, sum, x, x.Slice(0, 1))
		for doing, err := range map[string]error{"before Capture": alloc, "Split": split,
			"copy it to the device": host, "element": wrong, "Free": c.Free(window)} {
			if !errors.Is(err, backend.ErrArgument) || !strings.Contains(err.Error(), doing) {
				return fmt.Errorf("the error is %v, want one with %q", err, doing)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if _, err := graph.Launch(nil); err != nil {
		return err
	}
	return errors.Join(backend.Run(c, sum, x, x), graph.Close(), c.Free(window))
}

// stuck records graphs of n calls, and replays them; the last rank lacks the replay number last.
func stuck(t *testing.T, comms []*Communicator, n, last int) (works []backend.Work,
	graphs []*backend.Graph, xs []backend.Buffer) {
	works, graphs, xs = make([]backend.Work, len(comms)), make([]*backend.Graph, len(comms)),
		make([]backend.Buffer, len(comms))
	each(t, comms, func(c *Communicator) error {
		b := testranks.Must(c.Alloc(64)) // which copy engines take
		x, q := b.As(backend.F32), c.Device().Default().(backend.GraphQueue)
		xs[c.Rank()] = x
		graph, err := q.Capture(func() error {
			for range n {
				if _, err := c.Start(q, sum, x, x); err != nil {
					return err
				}
			}
			return nil
		})
		testranks.NoError(err)
		graphs[c.Rank()] = graph
		for i := range last {
			if i+1 == last && c.Rank()+1 == len(comms) {
				return works[c.Rank()].Join(context.Background())
			}
			if works[c.Rank()], err = graph.Launch(nil); err != nil {
				return err
			}
		}
		return nil
	})
	return works, graphs, xs
}

// The watchdog treats a replay as a call, and says where it was.
func TestReplayThatARankDoesNotJoinTimesOut(t *testing.T) {
	for _, use := range []Algorithm{byNCCL, byTwoShot} {
		g := newRig(t)
		o := options()
		o.Force = use
		comms := g.groupWithin(t, 2, 300*time.Millisecond, same(o))
		works, _, _ := stuck(t, comms, 3, 17)
		err := works[0].Join(context.Background())
		var e *backend.Error
		require.Check(t, errors.As(err, &e) && e.Peer == 1 && errors.Is(err, backend.ErrTimeout) &&
			strings.Contains(err.Error(), "replay 17 of a graph of 3 collectives") &&
			strings.Contains(err.Error(), "at collective 1: allreduce(sum) of 16 f32"),
			"%v: the error is %v", use, err)
	}
}

// assemble returns once every rank has called it: no kernel waits for a rank meanwhile.
func assemble(c *Communicator) error {
	c.order.Lock()
	defer c.order.Unlock()
	return c.gather.Vote(c.members, nil)
}

// halfway records three sums, of which the third waits for hold on the last rank.
func halfway(t *testing.T, comms []*Communicator, hold func(q backend.Queue) error) []backend.Work {
	works := make([]backend.Work, len(comms))
	each(t, comms, func(c *Communicator) error {
		b := testranks.Must(c.Alloc(64)) // which copy engines take
		x, q := b.As(backend.F32), c.Device().Default().(backend.GraphQueue)
		graph, err := q.Capture(func() error {
			for i := range 5 {
				if i == 2 && c.Rank()+1 == len(comms) {
					if err := hold(q); err != nil {
						return err
					}
				}
				if _, err := c.Start(q, sum, x, x); err != nil {
					return err
				}
			}
			return nil
		})
		testranks.NoError(err)
		testranks.NoError(assemble(c))
		works[c.Rank()], err = graph.Launch(nil)
		return err
	})
	return works
}

// The watchdog of a replay says which of its collectives it had come to.
func TestWatchdogNamesTheCollectiveOfAGraph(t *testing.T) {
	for _, use := range []Algorithm{byNCCL, byTwoShot} {
		g := newRig(t)
		o := options()
		o.Force = use
		release := make(chan struct{})
		works := halfway(t, g.groupWithin(t, 2, 300*time.Millisecond, same(o)),
			func(q backend.Queue) error {
				return g.Submit(q.(stream).Stream(), func() { <-release })
			})
		err := works[0].Join(context.Background())
		close(release)
		require.Fails(t, fmt.Sprintf("%v: the error is", use), err, backend.ErrTimeout,
			"replay 1 of a graph of 5 collectives", "at collective 3: allreduce(sum) of 16 f32")
	}
}

// ends are how a rank leaves others alone in a replay.
var ends = map[string]struct {
	of   func(c *Communicator)
	want error
}{
	"abort": {func(c *Communicator) { c.Abort(errors.New("enough")) }, backend.ErrAborted},
	"close": {func(c *Communicator) { c.Close() }, backend.ErrClosed},
	"down":  {func(c *Communicator) { c.world.Fail(errors.New("killed")) }, backend.ErrAborted},
}

func TestEndOfARankEndsReplays(t *testing.T) {
	for name, end := range ends {
		for _, use := range []Algorithm{byNCCL, byTwoShot} {
			t.Run(fmt.Sprintf("%s/%v", name, use), func(t *testing.T) {
				g := newRig(t)
				o := options()
				o.Force = use
				endsReplays(t, g.group(t, 3, same(o)), end.of, end.want)
			})
		}
	}
}

// A rank that ends while others wait for it in a replay is named, and graphs cannot be launched any
// more.
func endsReplays(t *testing.T, comms []*Communicator, end func(c *Communicator), want error) {
	works, graphs, xs := stuck(t, comms, 3, 2)
	last := len(comms) - 1
	began := time.Now()
	end(comms[last])
	for r, w := range works[:last] {
		err := w.Join(context.Background())
		var e *backend.Error
		require.Check(t, errors.As(err, &e) && e.Peer == last && errors.Is(err, want) &&
			strings.Contains(err.Error(), "replay 2 of a graph of 3 collectives"),
			"rank %d: the error is %v", r, err)
		require.Fails(t, fmt.Sprintf("rank %d: a later launch", r),
			require.Err(graphs[r].Launch(nil)), want)
		q := comms[r].Device().Default() // the device goes on
		require.Report(t, errors.Join(q.Zero(xs[r]), drain(context.Background(), q)))
	}
	took := time.Since(began)
	require.Check(t, took <= proctest.Within(2*time.Second), "it took %v", took)
	for r, graph := range graphs {
		err := graph.Close()
		require.Check(t, err == nil, "rank %d: %v", r, err)
	}
}

// Close ends a group whose graphs nobody has closed: NCCL's end waits for them.
func TestGraphsEndWithTheirGroups(t *testing.T) {
	for _, use := range []Algorithm{byNCCL, byTwoShot} {
		g := newRig(t)
		o := options()
		o.Force = use
		closesWithGraphs(t, g.group(t, 2, same(o)))
	}
}

func closesWithGraphs(t *testing.T, comms []*Communicator) {
	_, graphs, _ := stuck(t, comms, 2, 0)
	each(t, comms, func(c *Communicator) error {
		w := testranks.Must(graphs[c.Rank()].Launch(nil))
		return errors.Join(w.Join(context.Background()), c.Close())
	})
	for _, graph := range graphs {
		require.Fails(t, "launch after the group's Close", require.Err(graph.Launch(nil)),
			backend.ErrClosed)
		require.Report(t, graph.Close())
	}
}

// refusing is a participant whose replays fail, inside those of the communicator that it embeds.
type refusing struct{ backend.Communicator }

func (refusing) Name() string                        { return "~" }
func (r refusing) Of() backend.Communicator          { return r }
func (refusing) Err() error                          { return nil }
func (refusing) Complete(backend.Queue) error        { return nil }
func (refusing) Made(*backend.Graph) (forget func()) { return func() {} }
func (refusing) Replay(backend.Queue, func() error) (backend.Work, error) {
	return nil, errors.New("refused")
}

// TestAReplayThatFailsEndsItsGroup: NCCL's end waits for the graph, which Launch holds.
func TestAReplayThatFailsEndsItsGroup(t *testing.T) {
	g := newRig(t)
	o := options()
	o.Force = byNCCL
	each(t, g.group(t, 1, same(o)), func(c *Communicator) error {
		return holding(c, []float32{1}, func(x backend.Buffer) error {
			q := c.Device().Default().(backend.GraphQueue)
			graph, err := q.Capture(func() error {
				q.Recording().Participant(refusing{c}, func() backend.Participant {
					return refusing{c}
				})
				_, err := c.Start(q, sum, x, x)
				return err
			})
			if err != nil {
				return err
			}
			launched := make(chan error, 1)
			go func() {
				_, err := graph.Launch(nil)
				launched <- err
			}()
			select {
			case err = <-launched:
			case <-time.After(proctest.Within(5 * time.Second)):
				err = errors.New("the launch does not return")
			}
			require.Fails(t, "the launch", err, "refused")
			return nil
		})
	})
}
