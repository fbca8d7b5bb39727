package gpu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

func TestVoteNamesWhatIsWrong(t *testing.T) {
	good := func() []rankInfo {
		return []rankInfo{{Bus: "0000:01", Version: 22803}, {Bus: "0000:02", Version: 22803},
			{Bus: "0000:03", Version: 22803}}
	}
	for name, test := range map[string]struct {
		spoil func(c []rankInfo)
		want  string
	}{
		"nothing": {func([]rankInfo) {}, ""},
		"refusal": {func(c []rankInfo) {
			c[1].Error = "no GPU"
		}, "rank 1 cannot take part: no GPU"},
		"refusal of what there is": {func(c []rankInfo) {
			c[1].Error, c[1].Unsupported = "unsupported: too old", true
		}, "unsupported: rank 1 cannot take part: too old"},
		"machines": {func(c []rankInfo) { c[2].Node, c[2].Bus = 1, "0000:01" }, ""},
		"versions": {func(c []rankInfo) {
			c[1].Version = 21805
		}, "rank 0 has NCCL 2.28.3, rank 1 has 2.18.5"},
		"one GPU": {func(c []rankInfo) {
			c[2].Bus = "0000:01"
		}, "ranks 0 and 2 are both on the GPU at 0000:01"},
		"one GPU of two machines": {func(c []rankInfo) {
			c[2].Bus, c[2].Host = "0000:01", "another"
		}, ""},
	} {
		ranks := good()
		test.spoil(ranks)
		err := vote(ranks)
		require.Check(t, (err == nil) == (test.want == "") && (err == nil ||
			strings.Contains(err.Error(), test.want)), "%s: got %v, want %q", name, err, test.want)
	}
}

func TestVersionsArePrinted(t *testing.T) {
	for v, want := range map[int]string{2708: "2.7.8", 21800: "2.18.0", 22803: "2.28.3"} {
		got := versionText(v)
		require.Check(t, got == want, "%d is %s, want %s", v, got, want)
	}
}

func TestRoutesKeepTheMeaning(t *testing.T) {
	reduce := func(op backend.ReduceOp) backend.Collective {
		return backend.Collective{Kind: backend.AllReduce, Op: op}
	}
	for _, test := range []struct {
		what backend.Collective
		d    backend.DType
		P    int
		want route
	}{
		{reduce(backend.Sum), backend.F16, 3, native},
		{reduce(backend.Max), backend.I64, 3, native},
		{reduce(backend.Max), backend.F32, 2, composed}, // NCCL loses a NaN
		{reduce(backend.Avg), backend.F32, 4, native},
		{reduce(backend.Avg), backend.F32, 3, divided},
		{reduce(backend.Avg), backend.F16, 4, native},
		{reduce(backend.Avg), backend.F16, 3, composed}, // a sum could overflow
		{reduce(backend.Avg), backend.I32, 4, divided},
		{backend.Collective{Kind: backend.AllGather, Op: backend.Max}, backend.F32, 4, native},
	} {
		if got := routeOf(test.what, test.d, test.P); got != test.want {
			t.Errorf("%v of %v among %d goes by %d, want %d", test.what, test.d, test.P, got,
				test.want)
		}
	}
}

// TestPairsOfRanksAgreeOnEveryPiece: else a send would wait for ever.
func TestPairsOfRanksAgreeOnEveryPiece(t *testing.T) {
	const P, n = 3, 4
	splits := map[backend.Kind][]int{
		backend.AllGather: {0, 5, 2}, backend.Gather: {4, 0, 1}, backend.Scatter: {0, 0, 3},
		backend.AllToAll: {0, 1, 2, 3, 0, 0, 1, 1, 0},
	}
	for kind, uneven := range splits {
		for _, s := range [][]int{nil, uneven} {
			pieces := func(r, p int) (out, in int) {
				k := call{what: backend.Collective{Kind: kind, Root: 1, Splits: s}, count: n,
					dtype: backend.F32, rank: r, P: P, src: backend.OnDevice(backend.F32, 1<<12,
						100), dst: backend.OnDevice(backend.F32, 1<<20, 100)}
				if kind == backend.AllGather || kind == backend.Gather {
					k.src = k.src.Slice(0, lengthOf(s, r, n))
				}
				if kind == backend.Scatter {
					k.dst = k.dst.Slice(0, lengthOf(s, r, n))
				}
				o, i := k.pieces(p)
				return o.Len(), i.Len()
			}
			for r := range P {
				for p := range P {
					out, _ := pieces(r, p)
					if _, in := pieces(p, r); in != out {
						t.Errorf("%v, splits %v: rank %d sends %d elements to rank %d, which "+
							"takes %d", kind, s, r, out, p, in)
					}
				}
			}
		}
	}
}

func lengthOf(splits []int, r, n int) int {
	if splits == nil {
		return n
	}
	return splits[r]
}

// connectFake connects P ranks over a fake.
func connectFake(t *testing.T, P int, timeout time.Duration) (*rig, []backend.Communicator) {
	t.Helper()
	g := newRig(t)
	return g, connect(t, g.nccl(), P, timeout)
}

func connect(t *testing.T, b *Backend, P int, timeout time.Duration) []backend.Communicator {
	t.Helper()
	g := require.Value(backendtest.Over(b)(P, timeout))(t)
	t.Cleanup(func() {
		closeAll(t, g.Comms)
		require.NoError(t, g.Close())
	})
	return g.Comms
}

// closeAll closes all ranks at once.
func closeAll(t testing.TB, comms []backend.Communicator) {
	t.Helper()
	backendtest.Each(t, comms, backend.Communicator.Close)
}

var allReduce = backend.Collective{Kind: backend.AllReduce}

// with runs f with n float32 on the rank's device.
func with(c backend.Communicator, n int, f func(x backend.Buffer) error) error {
	b, err := c.Device().Alloc(4 * n)
	if err != nil {
		return err
	}
	return errors.Join(f(b.As(backend.F32)), c.Device().Free(b))
}

func TestHostMemoryIsStagedAndThatIsSaidOnce(t *testing.T) {
	b := newRig(t).nccl()
	var said []string
	b.Notice = func(text string) { said = append(said, text) }
	comms := connect(t, b, 2, time.Minute)
	all := []backend.Collective{
		allReduce, {Kind: backend.Broadcast, Root: 1}, {Kind: backend.Reduce, Root: 1},
	}
	for range 2 {
		backendtest.Each(t, comms, func(c backend.Communicator) error {
			for _, what := range all {
				x := []float32{float32(c.Rank()), 5}
				y := []float32{-1, -1}
				want := []float32{1, 10}
				switch {
				case what.Kind == backend.Broadcast:
					want = []float32{1, 5}
				case what.Kind == backend.Reduce && c.Rank() == 0:
					want = y
				}
				testranks.NoError(backend.Run(c, what, backend.Of(y), backend.Of(x)))
				if !slices.Equal(y, want) {
					return fmt.Errorf("%v: got %v, want %v", what, y, want)
				}
			}
			return nil
		})
	}
	require.Check(t, len(said) == 1 && strings.Contains(said[0], "host memory"), "said %q", said)
}

// TestMemoryOfAnotherDeviceIsRefused: NCCL would not say so, or on a peer only.
func TestMemoryOfAnotherDeviceIsRefused(t *testing.T) {
	_, comms := connectFake(t, 2, time.Minute)
	err := with(comms[1], 4, func(theirs backend.Buffer) error {
		return with(comms[0], 4, func(mine backend.Buffer) error {
			var errs []error
			host := backend.Of(make([]float32, 4))
			for _, buffers := range [][2]backend.Buffer{{mine, theirs}, {theirs, mine},
				{host, theirs}, {theirs, host}} {
				err := backend.Run(comms[0], allReduce, buffers[0], buffers[1])
				if !errors.Is(err, backend.ErrArgument) ||
					!strings.Contains(fmt.Sprint(err), "not of this rank's device, fake:0") {
					errs = append(errs, fmt.Errorf("got %w", err))
				}
			}
			return errors.Join(errs...)
		})
	})
	require.Report(t, err)
	backendtest.Each(t, comms, func(c backend.Communicator) error { // which nothing has happened to
		return with(c, 4, func(x backend.Buffer) error { return backend.Run(c, allReduce, x, x) })
	})
	comms[0].Abort(errors.New("enough"))
	err = with(comms[1], 4, func(theirs backend.Buffer) error {
		return backend.Run(comms[0], allReduce, theirs, theirs)
	})
	if !errors.Is(err, backend.ErrAborted) { // whose memory it is no longer matters
		t.Errorf("after the end: %v", err)
	}
}

// TestTooOldToSplit: that is said, and is all that an old NCCL lacks.
func TestTooOldToSplit(t *testing.T) {
	f := newRig(t)
	f.old = fmt.Errorf("%w: NCCL 2.10.3 cannot split groups", backend.ErrUnsupported)
	b := f.nccl()
	if text, err := b.Describe(); err != nil || strings.Contains(text, "cannot") {
		t.Errorf("it is described as %q, %v", text, err)
	}
	const what = "NCCL 2.10.3 cannot split groups" // the rig says so of all that it cannot
	lacks := b.Lacks()
	require.Check(t, slices.Equal(lacks, []string{what, what}), "it lacks %q", lacks)
	backendtest.Each(t, connect(t, b, 2, time.Minute), checkWithoutSplit)
}

// checkWithoutSplit checks a group that cannot be split.
func checkWithoutSplit(c backend.Communicator) error {
	if _, err := c.Split(0, 0); !errors.Is(err, backend.ErrUnsupported) ||
		!strings.Contains(err.Error(), "cannot split") {
		return fmt.Errorf("split: got %w", err)
	}
	return with(c, 4, func(x backend.Buffer) error { return backend.Run(c, allReduce, x, x) })
}

func TestPartsEndInTheBackground(t *testing.T) {
	f, comms := connectFake(t, 2, time.Minute)
	free := make(chan struct{})
	f.hold.Store(&free)
	backendtest.Each(t, comms, func(c backend.Communicator) error {
		part := testranks.Must(c.Split(0, 0))
		return errors.Join(part.Close(), backend.Barrier(c))
	})
	close(free)
}

func TestErrorOfNCCLEndsEveryRank(t *testing.T) {
	f, comms := connectFake(t, 2, time.Minute)
	broken := errors.New("unhandled cuda error")
	f.refuse.Store(&broken)
	backendtest.Each(t, comms, func(c backend.Communicator) error {
		err := with(c, 4, func(x backend.Buffer) error { return backend.Run(c, allReduce, x, x) })
		var sticky *backend.Error
		if !errors.As(err, &sticky) || !strings.Contains(err.Error(), broken.Error()) ||
			!strings.Contains(err.Error(), "allreduce") {
			return fmt.Errorf("got %w", err)
		}
		return nil
	})
}

// TestAbortedGroupCallsNCCLNoMore: the group's end waits for a call that is being started
// only so long, and then frees what the rest of that call would use.
func TestAbortedGroupCallsNCCLNoMore(t *testing.T) {
	for name, what := range map[string]backend.Collective{
		"composed": {Kind: backend.AllReduce, Op: backend.Max},
		"divided":  {Kind: backend.AllReduce, Op: backend.Avg},
	} {
		t.Run(name, func(t *testing.T) {
			f, comms := connectFake(t, 3, time.Minute)
			entered, leave := make(chan struct{}), make(chan struct{})
			wait := func() { close(entered); <-leave }
			f.slow.Store(&wait)
			go func() {
				<-entered
				comms[0].Abort(errors.New("enough"))
				close(leave)
			}()
			err := with(comms[0], 100_000, func(x backend.Buffer) error {
				w, err := comms[0].Start(nil, what, x, x)
				require.Check(t, err != nil, "Start returned %v", w)
				return err
			})
			require.Fails(t, "with", err, backend.ErrAborted, "enough")
			f.look(func() {
				require.Check(t, f.late <= 0, "NCCL was called %d times after it was aborted",
					f.late)
			})
		})
	}
}

func TestPartThatCannotConnectIsAnError(t *testing.T) {
	f, comms := connectFake(t, 2, time.Minute)
	broken := errors.New("unhandled cuda error")
	f.refuse.Store(&broken)
	backendtest.Each(t, comms, func(c backend.Communicator) error {
		part, err := c.Split(c.Rank(), 0)
		if err == nil || part != nil || !strings.Contains(err.Error(), broken.Error()) ||
			!strings.Contains(err.Error(), "split") {
			return fmt.Errorf("got %v, %w", part, err)
		}
		return nil
	})
}

func TestAllocAgainstCollectiveIsAMismatch(t *testing.T) {
	_, comms := connectFake(t, 2, time.Minute)
	backendtest.Each(t, comms, func(c backend.Communicator) error {
		return with(c, 4, func(x backend.Buffer) error {
			var err error
			if c.Rank() == 0 {
				_, err = c.Alloc(64)
			} else {
				err = backend.Run(c, allReduce, x, x)
			}
			if !errors.Is(err, backend.ErrMismatch) {
				return fmt.Errorf("got %w, want ErrMismatch", err)
			}
			return nil
		})
	})
}

func TestMismatchThatNobodyJoinsIsFound(t *testing.T) {
	_, comms := connectFake(t, 2, time.Minute)
	backendtest.Each(t, comms, func(c backend.Communicator) error {
		return with(c, 4, func(x backend.Buffer) error {
			op := []backend.ReduceOp{backend.Sum, backend.Prod}[c.Rank()]
			if _, err := c.Start(nil, backend.Collective{Kind: backend.AllReduce, Op: op}, x,
				x); err != nil {
				return err
			}
			for deadline := time.Now().Add(20 * time.Second); time.Now().Before(
				deadline); time.Sleep(time.Millisecond) {
				if err := c.(*Communicator).member.Failure(""); err != nil {
					if !errors.Is(err, backend.ErrMismatch) {
						return err
					}
					return nil
				}
			}
			return errors.New("nothing was found")
		})
	})
}

func TestAbortAndCloseBesideCalls(t *testing.T) {
	for round := range 10 {
		_, comms := connectFake(t, 2, time.Minute)
		var all sync.WaitGroup
		for _, c := range comms {
			all.Go(func() {
				err := with(c, 100, func(x backend.Buffer) error {
					for {
						if err := backend.Run(c, allReduce, x, x); err != nil {
							return err
						}
					}
				})
				require.Check(t, errors.Is(err, backend.ErrAborted) || errors.Is(err,
					backend.ErrClosed), "round %d: %v", round, err)
			})
		}
		all.Go(func() {
			time.Sleep(time.Duration(round) * time.Millisecond)
			comms[0].Abort(errors.New("enough"))
		})
		all.Go(func() { time.Sleep(time.Duration(9-round) * time.Millisecond); comms[1].Close() })
		all.Wait()
	}
}

func TestConnectFailsOnEveryRank(t *testing.T) {
	before := goleak.IgnoreCurrent()
	f := newRig(t)
	b := f.nccl()
	b.open = func(ordinal int) (Device, error) {
		if ordinal == 1 {
			return nil, errors.New("out of memory")
		}
		return f.device(ordinal)
	}
	_, err := backendtest.Over(b)(3, time.Minute)
	n := strings.Count(fmt.Sprint(err), "rank 1 cannot take part: out of memory")
	require.Check(t, n == 3, "%d of 3 ranks say why: %v", n, err)
	require.Report(t, f.CloseGPUs())
	require.NoError(t, goleak.Find(before))
}

func TestStartAllocatesOnceInManyCalls(t *testing.T) {
	c := &Communicator{}
	got := testing.AllocsPerRun(10*worksAtOnce, func() { c.newWork() })
	require.Check(t, got == 0, "%v allocations for each work", got)
}

// A queue need not be ordered after what was started on it, and another one must be.
func TestWaitOrdersOtherQueuesOnly(t *testing.T) {
	f, comms := connectFake(t, 2, time.Minute)
	var waits [2]atomic.Int64 // of streams for events, by rank
	f.fault = func(rank int, doing string) error {
		if doing == "wait for an event" {
			waits[rank].Add(1)
		}
		return nil
	}
	backendtest.Each(t, comms, func(c backend.Communicator) error {
		other, err := c.Device().NewQueue()
		if err != nil {
			return err
		}
		err = with(c, 4, func(x backend.Buffer) error {
			w, err := c.Start(nil, allReduce, x, x)
			if err != nil {
				return err
			}
			for _, q := range []backend.Queue{c.Device().Default(), other} {
				before := waits[c.Rank()].Load()
				if err := w.Wait(q); err != nil {
					return err
				}
				after := waits[c.Rank()].Load()
				own := c.(*Communicator)
				own.state.Lock()
				over := own.done >= own.seq.Load() // the watchdog has seen that
				own.state.Unlock()
				if ordered := after > before; ordered != (q == other) && !over {
					return fmt.Errorf("ordered: %v, another queue: %v", ordered, q == other)
				}
			}
			return w.Join(context.Background())
		})
		return errors.Join(err, other.Close())
	})
}

func TestJoinOfAClosedCommunicatorEnds(t *testing.T) {
	_, comms := connectFake(t, 2, time.Minute)
	err := with(comms[0], 4, func(x backend.Buffer) error {
		w, err := comms[0].Start(nil, allReduce, x, x)
		if err != nil {
			return err
		}
		return errors.Join(comms[0].Close(), w.Join(context.Background()))
	})
	require.Fails(t, "with", err, backend.ErrClosed)
}

// TestErrIsWhatEndedTheGroup: a session tells the job of it when it closes.
func TestErrIsWhatEndedTheGroup(t *testing.T) {
	_, comms := connectFake(t, 2, time.Minute)
	errOf := func(c backend.Communicator) error { return c.(*Communicator).Err() }
	err := errOf(comms[0])
	require.Check(t, err == nil, "a group that works has failed: %v", err)
	comms[0].Abort(errors.New("enough"))
	<-comms[1].(*Communicator).member.Over()
	for _, c := range comms {
		require.Fails(t, fmt.Sprintf("rank %d", c.Rank()), errOf(c), backend.ErrAborted, "enough")
	}
}
