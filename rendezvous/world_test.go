package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// worlds makes the Worlds of size ranks over every implementation.
var worlds = map[string]func(t *testing.T, size int) []*World{
	"local": func(t *testing.T, size int) []*World {
		return require.Value(Local(size, 0))(t)
	},
	"mem": func(t *testing.T, size int) []*World { return over(t, stores["mem"](t, size)) },
	"tcp": func(t *testing.T, size int) []*World { return over(t, stores["tcp"](t, size)) },
	"tls": func(t *testing.T, size int) []*World {
		all := local(t, size, long)
		for r := range all {
			all[r].TLS = true
		}
		ws, errs := joinAll(t, all)
		require.NoError(t, errors.Join(errs...))
		return ws
	},
}

func over(t *testing.T, all []Store) []*World {
	ws := make([]*World, len(all))
	for r, s := range all {
		w := require.Value(New(Env{Job: "test", Rank: r, Size: len(all), LocalRank: r,
			LocalSize: len(all), Timeout: long, Token: testToken}, s))(t)
		ws[r] = w
	}
	return ws
}

func onWorlds(t *testing.T, size int, test func(t *testing.T, w []*World)) {
	for name, open := range worlds {
		t.Run(name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			all := open(t, size)
			test(t, all)
			each(all, func(w *World) { require.Report(t, errors.Join(w.Close(), w.Close())) })
			require.NoError(t, goleak.Find(before))
		})
	}
}

// each runs f for every World at once.
func each(all []*World, f func(w *World)) {
	var wg sync.WaitGroup
	for _, w := range all {
		wg.Go(func() { f(w) })
	}
	wg.Wait()
}

func TestAllGatherInRankOrder(t *testing.T) {
	for _, size := range []int{1, 2, 5, 9} {
		onWorlds(t, size, func(t *testing.T, all []*World) {
			each(all, func(w *World) {
				for round := range 3 {
					got, err := w.AllGather(t.Context(), fmt.Sprint("round", round),
						fmt.Appendf(nil, "%d of %d", w.Rank, round))
					if err != nil {
						t.Errorf("rank %d: %v", w.Rank, err)
						return
					}
					for r, v := range got {
						require.Equal(t, fmt.Sprintf("rank %d: value of rank %d", w.Rank, r),
							string(v), fmt.Sprintf("%d of %d", r, round))
					}
				}
			})
		})
	}
}

func TestBarrierWaitsForTheLast(t *testing.T) {
	onWorlds(t, 3, func(t *testing.T, all []*World) {
		passed := make(chan int, 3)
		var wg sync.WaitGroup
		for _, w := range all[:2] {
			wg.Go(func() {
				require.Report(t, w.Barrier(t.Context(), "b"))
				passed <- w.Rank
			})
		}
		select {
		case r := <-passed:
			t.Errorf("rank %d passed without rank 2", r)
		case <-time.After(soon):
		}
		require.Report(t, all[2].Barrier(t.Context(), "b"))
		wg.Wait()
	})
}

func TestMissingRanksAreNamed(t *testing.T) {
	onWorlds(t, 5, func(t *testing.T, all []*World) {
		here := []*World{all[0], all[2], all[4]}
		each(here, func(w *World) {
			w.Timeout = 200 * time.Millisecond
			err := w.Barrier(t.Context(), "b")
			var missing *MissingError
			if !errors.As(err, &missing) || !slices.Equal(missing.Ranks, []int{1, 3}) ||
				!errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("rank %d: %v", w.Rank, err)
				return
			}
			for _, part := range []string{fmt.Sprintf("rank %d: barrier \"b\"", w.Rank),
				"ranks 1, 3 did not", "200ms"} {
				require.Fails(t, fmt.Sprint("rank ", w.Rank), err, part)
			}
		})
	})
}

func TestKeyIsUsedOnce(t *testing.T) {
	onWorlds(t, 2, func(t *testing.T, all []*World) {
		each(all, func(w *World) {
			require.Report(t, w.Barrier(t.Context(), "b"))
			require.Fails(t, "second use", w.Barrier(t.Context(), "b"), "used before")
		})
	})
}

func TestFailReachesEveryRank(t *testing.T) {
	onWorlds(t, 4, func(t *testing.T, all []*World) {
		f := all[1].Failure()
		require.Check(t, f == nil, "failure before any: %v", f)
		each(all, func(w *World) {
			if w.Rank == 2 {
				require.Report(t, w.Fail(errors.New("out of paper")))
				return
			}
			var f *Failure
			// Waits that are under way end, on the World and on its Store.
			if err := w.Barrier(t.Context(), "b"); !errors.As(err, &f) || f.Rank != 2 ||
				!strings.Contains(err.Error(), "rank 2 failed: out of paper") {
				t.Errorf("rank %d: Barrier: %v", w.Rank, err)
			}
			_, err := w.Store.Get(t.Context(), "never")
			require.Check(t, errors.As(err, &f) && f.Rank == 2, "rank %d: Get: %v", w.Rank, err)
		})
		all[3].Fail(errors.New("me too")) // the first stays
		for _, w := range all {
			<-w.Down()
			if f := w.Failure(); f.Rank != 2 || f.Cause.Error() != "out of paper" {
				t.Errorf("rank %d: %v", w.Rank, f)
			}
		}
	})
}

func TestFoundFailureIsOfTheRankThatItBeganWith(t *testing.T) {
	missing := &MissingError{Rank: 2, What: "join", Ranks: []int{3},
		Cause: context.DeadlineExceeded}
	onWorlds(t, 4, func(t *testing.T, all []*World) {
		require.NoError(t, all[2].Fail(fmt.Errorf("start: %w", missing)))
		for _, w := range all {
			<-w.Down()
			if f := w.Failure(); f.Rank != 3 ||
				!strings.Contains(f.Error(), "rank 3 did not join in time") {
				t.Errorf("rank %d: %v", w.Rank, f)
			}
		}
	})
}

func TestStoreOfWorldEndsWithTimeout(t *testing.T) {
	onWorlds(t, 2, func(t *testing.T, all []*World) {
		all[1].Timeout = soon
		_, err := all[1].Store.Get(t.Context(), "never")
		require.Fails(t, "Get", err, context.DeadlineExceeded,
			`rank 1: get key "never": timeout after 30ms`)
	})
}

func TestCloseIsNoFailure(t *testing.T) {
	onWorlds(t, 3, func(t *testing.T, all []*World) {
		each(all, func(w *World) {
			require.Report(t, w.Barrier(t.Context(), "last"))
			require.Report(t, w.Close())
			f := w.Failure()
			require.Check(t, f == nil, "rank %d: %v", w.Rank, f)
			require.Fails(t, "Barrier after Close", w.Barrier(t.Context(), "b"), ErrClosed)
		})
	})
}

func TestCloseEndsOwnWaits(t *testing.T) {
	onWorlds(t, 2, func(t *testing.T, all []*World) {
		ended := make(chan error, 1)
		go func() { ended <- all[1].Barrier(t.Context(), "b") }()
		all[1].Close()
		require.Fails(t, "Barrier", <-ended, ErrClosed)
	})
}

func TestLocalNeedsARank(t *testing.T) {
	for _, size := range []int{0, -1, maxRanks + 1} {
		_, err := Local(size, 0)
		require.Check(t, err != nil, "Local(%d): no error", size)
	}
}

func TestFoundLocalRanksHeedATimeout(t *testing.T) {
	for given, want := range map[time.Duration]time.Duration{0: DefaultTimeout, soon: soon} {
		worlds := require.Value(Local(2, given))(t)
		require.Equal(t, fmt.Sprintf("Local with %v waits", given), worlds[1].Timeout, want)
		if given == soon {
			var missing *MissingError
			err := worlds[0].Barrier(t.Context(), "alone")
			require.Check(t, errors.As(err, &missing), "rank 1 is missing: %v", err)
		}
		closeWorlds(worlds)
	}
	require.Fails(t, "a negative timeout is taken", require.Err(Local(1, -1)))
}

func TestLocalWorldsOfOneProcessDiffer(t *testing.T) {
	a, _ := Local(1, 0)
	b, _ := Local(1, 0)
	require.Check(t, a[0].Name != b[0].Name, "both are %q", a[0].Name)
	a[0].Close()
	b[0].Close()
}

// TestOnlyWhatHasEndedIsDown: a rank that another one blames may live.
func TestOnlyWhatHasEndedIsDown(t *testing.T) {
	missing := &MissingError{Rank: 1, What: "join", Ranks: []int{2}, Cause: context.Canceled}
	for cause, want := range map[error]string{
		errors.New("no data"):            "rank 1 failed: no data",
		missing:                          "rank 2 failed: rendezvous",
		&Failure{Rank: 2, Cause: io.EOF}: "rank 2 is down: ",
		&Failure{Rank: 2, Cause: io.EOF, Declared: true}:    "rank 2 failed: ",
		fmt.Errorf("ended: %w", &Failure{2, io.EOF, false}): "rank 2 is down: ended",
	} {
		f := (&World{Rank: 1}).failureOf(cause)
		got := decodeFailure(f.encode()).Error()
		require.Check(t, strings.HasPrefix(got, want), "%v: %s, want %s", cause, got, want)
	}
}

func TestFailureSurvivesTheStore(t *testing.T) {
	f := decodeFailure((&Failure{Rank: 3, Cause: errors.New("two words\nand a line"),
		Declared: true}).encode())
	require.Check(t, f.Rank == 3 && f.Declared && f.Cause.Error() == "two words\nand a line", "%+v",
		f)
	require.Equal(t, "decodeFailure", decodeFailure([]byte("garbage")).Rank, -1)
}

func TestBuildIDIsStable(t *testing.T) {
	a, err := buildID()
	b, _ := buildID()
	require.Check(t, err == nil && a == b && len(a) == 16, "%q, %q, %v", a, b, err)
	exe := require.Value(os.Open("/proc/self/exe"))(t)
	defer exe.Close()
	require.Check(t, goBuildNote(exe) != nil, "no Go build ID found in a Go executable")
	const sizes, mark = "\x04\x00\x00\x00\x02\x00\x00\x00", "\x04\x00\x00\x00Go\x00\x00"
	for text, want := range map[string]string{
		"no ELF": "", mark + "id": "", "..." + sizes + mark: "", "..." + sizes + mark + "i": "",
		"..." + sizes + mark + "\x00\x00": "", "..." + sizes + mark + "id.": "id",
	} {
		got := goBuildNote(strings.NewReader(text))
		require.Check(t, string(got) == want, "%q in %q, want %q", got, text, want)
	}
}

// silent is a store whose holder was stopped: every call ends with its context.
type silent struct{ Store }

func (silent) Get(ctx context.Context, _ string) ([]byte, error) { return nil, ended(ctx) }
func (silent) Set(ctx context.Context, _ string, _ []byte) error { return ended(ctx) }
func (silent) CompareAndSwap(ctx context.Context, _ string, _, _ []byte) ([]byte, bool, error) {
	return nil, false, ended(ctx)
}

func ended(ctx context.Context) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

func TestFoundStoreThatDoesNotAnswerIsBlamedOnRank0(t *testing.T) {
	w := require.Value(New(Env{Job: "j", Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2,
		Timeout: soon}, silent{NewMemStore()}))(t)
	defer w.Close()
	_, got := w.Store.Get(t.Context(), "k")
	for what, err := range map[string]error{
		"barrier": w.Barrier(t.Context(), "b"), "set": w.Store.Set(t.Context(), "k", nil),
		"get": got,
	} {
		require.Fails(t, what, err, context.DeadlineExceeded, "because of rank 0: ")
	}
}
