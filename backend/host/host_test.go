package host

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/goleak"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/rendezvous"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// connect makes the communicators of P goroutine ranks.
func connect(t testing.TB, P int, timeout time.Duration) []*comm {
	t.Helper()
	return testranks.New(t, P, timeout, connectOne).Ranks
}

func connectOne(w *rendezvous.World) (*comm, error) {
	c, err := Backend{}.Connect(context.Background(), w)
	if err != nil {
		return nil, err
	}
	return c.(*comm), nil
}

func allReduce(c backend.Communicator, x []float32) error {
	return backend.Run(c, backend.Collective{Kind: backend.AllReduce}, backend.Of(x), backend.Of(x))
}

// TestSleepersMissNoWakeUp runs with no spinning at all, so that every wait
// that is not over at once goes through the futex and the passing on of
// sleepers. A wake-up that is lost shows as a sleep of 100 ms.
func TestSleepersMissNoWakeUp(t *testing.T) {
	const calls = 2000
	for _, P := range []int{2, 3, 5, 8} {
		t.Run(fmt.Sprint(P), func(t *testing.T) {
			comms := connect(t, P, time.Minute)
			for _, c := range comms {
				c.spin = spinBudget{}
			}
			slow := make([]int, P)
			errs := testranks.Each(P, func(r int) error {
				x := make([]float32, 10)
				for i := range calls {
					if rand.IntN(50) == 0 {
						time.Sleep(time.Duration(rand.IntN(200)) * time.Microsecond)
					}
					x[0] = float32(i%7 + r)
					began := time.Now()
					testranks.NoError(allReduce(comms[r], x))
					if time.Since(began) > futexTimeout*9/10 {
						slow[r]++
					}
					if want := float32(P*(i%7) + P*(P-1)/2); x[0] != want {
						return fmt.Errorf("call %d: %v, want %v", i, x[0], want)
					}
				}
				return nil
			})
			require.NoError(t, errors.Join(errs...))
			// A machine that is busy elsewhere may stall a call; lost wake-ups would
			// stall many.
			for r, n := range slow {
				require.Check(t, n <= calls/100, "rank %d: %d of %d calls slept for futexTimeout",
					r, n, calls)
			}
		})
	}
}

func TestNothingIsLeftInSharedMemory(t *testing.T) {
	dir := t.TempDir() // O_TMPFILE works on most file systems
	if err := (Backend{Dir: dir}).Available(); err != nil {
		t.Skipf("no unnamed files here: %v", err)
	}
	worlds := require.Value(rendezvous.Local(2, 0))(t)
	errs := testranks.Each(2, func(r int) error {
		c := testranks.Must(Backend{Dir: dir}.Connect(context.Background(), worlds[r]))
		if _, err := c.Alloc(1 << 16); err != nil {
			return err
		}
		entries, err := os.ReadDir(dir)
		if len(entries) != 0 {
			return fmt.Errorf("%s holds %v while the group is connected", dir, entries)
		}
		return errors.Join(err, c.Close(), worlds[r].Close())
	})
	require.NoError(t, errors.Join(errs...))
}

func TestSizesOfAllocMustAgree(t *testing.T) {
	comms := connect(t, 3, time.Minute)
	errs := testranks.Each(3, func(r int) error {
		_, err := comms[r].Alloc(100 + r/2)
		return err
	})
	for r, err := range errs {
		require.Fails(t, fmt.Sprint("rank ", r), err, backend.ErrArgument)
	}
	if err := testranks.All(3, func(r int) error {
		return allReduce(comms[r], make([]float32, 1))
	}); err != nil {
		t.Errorf("not usable after it: %v", err)
	}
}

func TestCallsAllocateNothing(t *testing.T) {
	comms := connect(t, 2, time.Minute)
	for _, n := range []int{1, 1 << 12, 1 << 18} {
		const runs = 50
		var allocs float64
		errs := testranks.Each(2, func(r int) error {
			b := testranks.Must(comms[r].Alloc(4 * n))
			x := b.As(backend.F32)
			var failed error
			reduce := func() { // AllocsPerRun counts the whole process: both ranks
				if err := backend.Run(comms[r], backend.Collective{Kind: backend.AllReduce}, x,
					x); err != nil {
					failed = err
				}
			}
			if r == 0 {
				allocs = testing.AllocsPerRun(runs, reduce)
			} else {
				for range runs + 1 {
					reduce()
				}
			}
			return failed
		})
		require.NoError(t, errors.Join(errs...))
		require.Check(t, allocs < 1, "%d elements: %v allocations per call", n, allocs)
	}
}

func TestTimeoutNamesEveryMissingRank(t *testing.T) {
	comms := connect(t, 4, 200*time.Millisecond)
	errs := testranks.Each(4, func(r int) error {
		if r == 1 || r == 2 {
			return nil
		}
		return allReduce(comms[r], make([]float32, 3))
	})
	for _, r := range []int{0, 3} {
		require.Fails(t, fmt.Sprint("rank ", r), errs[r], backend.ErrTimeout, "ranks 1, 2")
	}
	require.Fails(t, "the straggler", allReduce(comms[1], make([]float32, 3)), backend.ErrTimeout)
}

func BenchmarkAllReduce(b *testing.B) {
	for _, P := range []int{2, 4, 8} {
		comms := connect(b, P, time.Minute)
		for _, n := range []int{256, 1 << 14, 1 << 18, 1 << 22} {
			b.Run(fmt.Sprintf("%d/%d", P, 4*n), func(b *testing.B) {
				b.SetBytes(int64(n * 4))
				errs := testranks.Each(P, func(r int) error {
					x := make([]float32, n)
					for range b.N {
						testranks.NoError(allReduce(comms[r], x))
					}
					return nil
				})
				require.NoError(b, errors.Join(errs...))
			})
		}
	}
}

func TestFoundErrorsOfAPartNameTheJobsRanks(t *testing.T) {
	reduce := backend.Collective{Kind: backend.AllReduce}
	calls := map[string]func(part backend.Communicator) error{
		"no sign of rank 3 (1 of the group) for": func(part backend.Communicator) error {
			if part.Rank() == 1 {
				return nil
			}
			return allReduce(part, make([]float32, 3))
		},
		"rank 1 (0 of the group) called allreduce(sum) of 3 f32 (call 1)": func(
			part backend.Communicator) error {
			return allReduce(part, make([]float32, 3+part.Rank()))
		},
		"because of rank 3 (1 of the group): aborted: no more data": func(
			part backend.Communicator) error {
			if part.Rank() == 1 {
				part.Abort(errors.New("no more data"))
			}
			return allReduce(part, make([]float32, 3))
		},
		// the same, in either order
		"rank 3 (1 of the group) called allreduce(sum) of 4 f32 (call 1)": func(
			part backend.Communicator) error {
			return allReduce(part, make([]float32, 3+part.Rank()))
		},
		"rank 1 (0 of the group) of ": func(part backend.Communicator) error { // an argument error
			return backend.Run(part, reduce, backend.Of(make([]float32, 2)),
				backend.Of(make([]float32, 3)))
		},
	}
	for want, call := range calls {
		comms := connect(t, 4, 300*time.Millisecond)
		parts := make([]backend.Communicator, 4)
		errs := testranks.Each(4, func(r int) (err error) {
			parts[r], err = comms[r].Split(r%2, 0)
			if err != nil || r%2 == 0 {
				return err
			}
			return call(parts[r])
		})
		for _, part := range parts {
			if part != nil {
				part.Close()
			}
		}
		require.Fails(t, "Split of rank 1", errs[1], want)
	}
}

func TestFoundMemoryFromAllocStaysAddressableAfterClose(t *testing.T) {
	comms := connect(t, 2, time.Minute)
	var bytes [2][]byte
	errs := testranks.Each(2, func(r int) error {
		b, err := comms[r].Alloc(3 * page)
		bytes[r] = b.Bytes()
		return err
	})
	require.NoError(t, errors.Join(errs...))
	using, closed := make(chan struct{}), make(chan struct{})
	var user sync.WaitGroup
	user.Go(func() { // in the middle of a copy, as far as Close knows
		copy(bytes[0], bytes[1])
		close(using)
		for {
			select {
			case <-closed:
				return
			default:
				bytes[0][page]++
			}
		}
	})
	<-using
	require.Report(t, comms[0].Close())
	close(closed)
	user.Wait()
	bytes[0][2*page] = 7
	require.Check(t, bytes[0][2*page] == 7 && bytes[0][0] == 0,
		"the memory is not that of the process alone")
	bytes[1][0] = 8 // the other rank has not closed
}

func TestFreeGivesMemoryBackAtOnce(t *testing.T) {
	comms := connect(t, 2, time.Minute)
	errs := testranks.Each(2, func(r int) error {
		c := comms[r]
		b := testranks.Must(c.Alloc(2 * page))
		bytes := b.Bytes()
		bytes[0], bytes[page] = 1, 2
		if err := c.Free(b.Slice(1, 2)); !errors.Is(err, backend.ErrArgument) {
			return fmt.Errorf("Free of a part of the memory gave the error %v, want ErrArgument",
				err)
		}
		testranks.NoError(c.Free(b))
		if bytes[0] != 0 || bytes[page] != 0 { // until the next Alloc it may be looked at
			return errors.New("the memory behind freed pages is still there")
		}
		return errors.Join(c.Free(backend.Buffer{}), c.Close(), c.Free(b))
	})
	require.NoError(t, errors.Join(errs...))
}

// A communicator over this one aborts it when it hears first that a rank is down.
func TestFoundAbortBecauseOfALostRankNamesThatRank(t *testing.T) {
	comms := connect(t, 3, time.Minute)
	comms[0].Abort(
		fmt.Errorf("flat: %w", &rendezvous.Failure{Rank: 2, Cause: errors.New("killed")}))
	var f *rendezvous.Failure
	if err := backend.Barrier(comms[1]); !errors.As(err, &f) || f.Rank != 2 ||
		!strings.Contains(err.Error(), "because of rank 2: ") {
		t.Error(err)
	}
}

func TestRanksOfSeveralMachinesAreNotForThisBackend(t *testing.T) {
	worlds := require.Value(rendezvous.Local(2, time.Minute))(t)
	for _, w := range worlds {
		defer w.Close()
		w.LocalSize = 1
		require.Fails(t, fmt.Sprint("rank ", w.Rank),
			require.Err((Backend{}).Connect(t.Context(), w)), backend.ErrUnsupported,
			"1 of 2 ranks are on this machine")
	}
}

// TestRankPageIsAPage: its parts are where the comments say, in the page that a region has for it.
func TestRankPageIsAPage(t *testing.T) {
	var p rankPage
	size := unsafe.Sizeof(p)
	require.Check(t, size == page, "a rank's page has %d bytes, want %d", size, page)
	for what, offset := range map[string]uintptr{"futexWord": unsafe.Offsetof(p.futexWord),
		"waiting": unsafe.Offsetof(p.waiting), "headers": unsafe.Offsetof(p.headers)} {
		require.Check(t, offset%lineBytes == 0, "%s begins at %d, in the middle of a cache line",
			what, offset)
	}
}

// TestManyRanksShareMemory: slots of more ranks than 64 have less than a page for each, and calls
// on more take several steps.
func TestManyRanksShareMemory(t *testing.T) {
	const P, chunk = 96, 1500 // at 672 elements in a step
	g, err := testranks.Connect(P, time.Minute, connectOne)
	if errors.Is(err, syscall.ENOSPC) {
		t.Skip("it takes 77 MB of shared memory, and a container may have 64")
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Close()) })
	comms := g.Ranks
	want := func(r, i int) float32 { return float32(r + i%7) }
	require.NoError(t, testranks.All(P, func(r int) error {
		x, gathered := make([]float32, P*chunk), make([]float32, P*chunk)
		sums := make([]float32, chunk)
		for i := range x {
			x[i] = want(r, i)
		}
		call := func(k backend.Kind, dst, src []float32) error {
			return backend.Run(comms[r], backend.Collective{Kind: k}, backend.Of(dst),
				backend.Of(src))
		}
		if err := errors.Join(call(backend.AllToAll, gathered, x),
			call(backend.ReduceScatter, sums, x)); err != nil {
			return err
		}
		for i := range gathered {
			if of := want(i/chunk, r*chunk+i%chunk); gathered[i] != of {
				return fmt.Errorf("all-to-all: element %d is %v, want %v", i, gathered[i], of)
			}
		}
		if err := call(backend.AllGather, gathered, sums); err != nil {
			return err
		}
		for i := range gathered {
			if of := float32(P*(P-1)/2 + P*(i%7)); gathered[i] != of {
				return fmt.Errorf("the sum of element %d is %v, want %v", i, gathered[i], of)
			}
		}
		return allReduce(comms[r], x)
	}))
}
