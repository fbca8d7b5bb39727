package rendezvous

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// long bounds what should never take that long.
const long = 20 * time.Second

// soon is a deadline that is meant to pass.
const soon = 30 * time.Millisecond

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// stores are the implementations: each makes n Stores on the same data.
var stores = map[string]func(t *testing.T, n int) []Store{
	"mem": func(t *testing.T, n int) []Store {
		table := newTable()
		all := make([]Store, n)
		for i := range all {
			all[i] = table.open()
		}
		return all
	},
	"tcp": func(t *testing.T, n int) []Store {
		s := startServer(t, n)
		all := []Store{s.open()}
		for r := 1; r < n; r++ {
			all = append(all, connectRank(t, s, r))
		}
		return all
	},
}

const testToken = "a token of the tests"

func testIdentity(rank, size int) identity {
	return identity{rank: rank, size: size, pid: 1000 + rank, protocol: protocol, build: "b",
		job: "j", host: "h"}
}

func startServer(t *testing.T, size int) *server {
	t.Helper()
	ln := require.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	return serve(ln, testToken, testIdentity(0, size), long, nil)
}

func connectRank(t *testing.T, s *server, rank int) *client {
	t.Helper()
	c := require.Value(dial(within(t, long), s.ln.Addr().String(), testToken,
		testIdentity(rank, s.me.size), handshakeTime, long))(t)
	return c
}

// onStores runs a test on three Stores of every implementation, and sees that
// nothing is left running.
func onStores(t *testing.T, test func(t *testing.T, s []Store)) {
	for name, open := range stores {
		t.Run(name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			all := open(t, 3)
			test(t, all)
			closeAll(t, all)
			require.NoError(t, goleak.Find(before))
		})
	}
}

func closeAll(t *testing.T, all []Store) {
	t.Helper()
	var wg sync.WaitGroup
	for _, s := range all {
		wg.Go(func() {
			err := s.Close()
			require.Check(t, err == nil, "Close: %v", err)
		})
	}
	wg.Wait()
}

func TestGetWaitsForSet(t *testing.T) {
	onStores(t, func(t *testing.T, s []Store) {
		ctx := within(t, long)
		var wg sync.WaitGroup
		for r, store := range s {
			wg.Go(func() {
				got, err := store.Get(ctx, "key")
				require.Check(t, err == nil && string(got) == "value", "rank %d: Get = %q, %v", r,
					got, err)
			})
		}
		require.Report(t, s[2].Set(ctx, "key", []byte("value")))
		wg.Wait()
	})
}

func TestValuesOfEverySize(t *testing.T) {
	onStores(t, func(t *testing.T, s []Store) {
		ctx := within(t, long)
		for _, n := range []int{0, 1, 511, 70000, maxValue} {
			key, value := strconv.Itoa(n), bytes.Repeat([]byte{7}, n)
			require.NoError(t, s[1].Set(ctx, key, value))
			for r := range s {
				got, err := s[r].Get(ctx, key)
				require.Check(t, err == nil && got != nil && bytes.Equal(got, value),
					"%d bytes on rank %d: got %d bytes, %v", n, r, len(got), err)
			}
		}
		require.NoError(t, s[0].Set(ctx, "nil", nil))
		if got, err := s[1].Get(ctx, "nil"); err != nil || got == nil || len(got) != 0 {
			t.Errorf("Get of nil = %v, %v, want an empty value", got, err)
		}
	})
}

func TestArgumentsAreChecked(t *testing.T) {
	onStores(t, func(t *testing.T, s []Store) {
		ctx := within(t, long)
		for r := range s {
			for what, err := range map[string]error{
				"empty key":   s[r].Set(ctx, "", nil),
				"long key":    s[r].Set(ctx, strings.Repeat("k", maxKey+1), nil),
				"large value": s[r].Set(ctx, "k", make([]byte, maxValue+1)),
			} {
				require.Check(t, err != nil, "rank %d: %s: no error", r, what)
			}
			_, _, err := s[r].CompareAndSwap(ctx, "k", nil, make([]byte, maxValue+1))
			require.Check(t, err != nil, "rank %d: swap of a large value: no error", r)
			err = s[r].Set(ctx, strings.Repeat("/", maxKey), nil)
			require.Check(t, err == nil, "rank %d: longest key: %v", r, err)
		}
	})
}

func TestSlicesAreTheCallersOwn(t *testing.T) {
	onStores(t, func(t *testing.T, s []Store) {
		ctx := within(t, long)
		for r, store := range s {
			key, value := fmt.Sprint("k", r), []byte("abc")
			require.NoError(t, store.Set(ctx, key, value))
			value[0] = 'x'
			got, _ := store.Get(ctx, key)
			got[1] = 'x'
			current, _, _ := store.CompareAndSwap(ctx, key, []byte("no"), nil)
			current[2] = 'x'
			if got, _ := store.Get(ctx, key); string(got) != "abc" {
				t.Errorf("rank %d: value became %q", r, got)
			}
		}
	})
}

func TestOneSwapWins(t *testing.T) {
	onStores(t, func(t *testing.T, s []Store) {
		ctx := within(t, long)
		for round := range 10 {
			key := fmt.Sprint("k", round)
			won := make([]bool, len(s))
			current := make([]string, len(s))
			var wg sync.WaitGroup
			for r, store := range s {
				wg.Go(func() {
					c, swapped, err := store.CompareAndSwap(ctx, key, nil, []byte{byte('a' + r)})
					require.Report(t, err)
					won[r], current[r] = swapped, string(c)
				})
			}
			wg.Wait()
			winners := 0
			for r := range s {
				if won[r] {
					winners++
				}
				require.Check(t, current[r] == current[0], "ranks see %q and %q", current[r],
					current[0])
			}
			require.Check(t, winners == 1, "%d winners", winners)
		}
	})
}

func TestSwapTellsUnsetFromEmpty(t *testing.T) {
	onStores(t, func(t *testing.T, s []Store) {
		ctx := within(t, long)
		for r, store := range s {
			key := fmt.Sprint("k", r)
			try := func(old, new string, isNil bool, want string, wantNil, wantSwapped bool) {
				t.Helper()
				before := []byte(old)
				if isNil {
					before = nil
				}
				current, swapped, err := store.CompareAndSwap(ctx, key, before, []byte(new))
				if err != nil || swapped != wantSwapped || string(current) != want ||
					(current == nil) != wantNil {
					t.Errorf("rank %d: swap %q for %q = %q (nil: %v), %v, %v", r, old, new, current,
						current == nil, swapped, err)
				}
			}
			try("", "x", false, "", true, false) // not set: empty is not nil
			try("", "", true, "", false, true)   // set it to empty
			try("", "x", true, "", false, false) // set: nil does not match
			try("", "x", false, "x", false, true)
			try("y", "z", false, "x", false, false)
		}
	})
}

func TestWaitEndsWithContext(t *testing.T) {
	onStores(t, func(t *testing.T, s []Store) {
		for r := range s {
			require.Fails(t, fmt.Sprintf("rank %d: after the deadline", r),
				require.Err(s[r].Get(within(t, soon), "never")), context.DeadlineExceeded)
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan error, 1)
			go func() { _, err := s[r].Get(ctx, "never"); ended <- err }()
			cancel()
			require.Fails(t, fmt.Sprintf("rank %d: after cancel", r), <-ended, context.Canceled)
			require.Fails(t, fmt.Sprintf("rank %d: Set with a context that has ended", r),
				s[r].Set(ctx, "k", nil), context.Canceled)
		}
		// The wait that ended took nothing with it.
		ctx := within(t, long)
		s[0].Set(ctx, "never", []byte("now"))
		for r := range s {
			require.Equal(t, fmt.Sprint("rank ", r),
				string(require.Value(s[r].Get(ctx, "never"))(t)), "now")
		}
	})
}

func TestCloseWakesOwnWaiters(t *testing.T) {
	onStores(t, func(t *testing.T, s []Store) {
		ctx := within(t, long)
		for r := len(s) - 1; r >= 0; r-- { // rank 0 holds the tcp store
			ended := make(chan error, 1)
			go func() { _, err := s[r].Get(ctx, "never"); ended <- err }()
			require.Report(t, s[r].Close())
			require.Fails(t, fmt.Sprintf("rank %d: after Close", r), <-ended, ErrClosed)
			require.Fails(t, fmt.Sprintf("rank %d: Set after Close", r), s[r].Set(ctx, "k", nil),
				ErrClosed)
			err := s[r].Close()
			require.Check(t, err == nil, "rank %d: second Close: %v", r, err)
		}
	})
}

func TestManyWaitersAtOnce(t *testing.T) {
	onStores(t, func(t *testing.T, s []Store) {
		ctx := within(t, long)
		const keys = 50
		var wg sync.WaitGroup
		for k := range keys {
			for _, store := range s {
				wg.Go(func() {
					v, err := store.Get(ctx, fmt.Sprint(k))
					require.Check(t, err == nil && string(v) == fmt.Sprint(k), "key %d = %q, %v", k,
						v, err)
				})
			}
		}
		for k := range keys {
			require.Report(t, s[k%len(s)].Set(ctx, fmt.Sprint(k), []byte(fmt.Sprint(k))))
		}
		wg.Wait()
	})
}

// TestALogHasOneOrder: of what all append, each entry once, whoever reads it from wherever.
func TestALogHasOneOrder(t *testing.T) {
	onStores(t, func(t *testing.T, s []Store) {
		const each = 50
		ctx := within(t, long)
		var writers sync.WaitGroup
		for w := range s {
			writers.Go(func() {
				for i := range each {
					at, err := s[w].(Log).Append(ctx, "log", i, fmt.Append(nil, w, " ", i))
					require.Check(t, err == nil && at >= i, "entry %d of %d is at %d: %v", i, w, at,
						err)
				}
			})
		}
		var all [][]byte
		for len(all) < each*len(s) {
			more := require.Value(s[1].(Log).Entries(ctx, "log", len(all)))(t)
			require.That(t, len(more) > 0, "no entries from %d on", len(all))
			all = append(all, more...)
		}
		writers.Wait()
		next := make([]int, len(s))
		for _, entry := range all {
			var w, i int
			fmt.Sscan(string(entry), &w, &i)
			require.Check(t, i == next[w], "entry %d of %d comes where %d should", i, w, next[w])
			next[w]++
		}
		for _, store := range s {
			some := require.Value(store.(Log).Entries(ctx, "log", 100))(t)
			require.Check(t, slices.EqualFunc(some, all[100:], bytes.Equal), "from 100 on: %q",
				some)
			some = require.Value(store.(Log).Peek(ctx, "log", 7, 1000, 3))(t)
			require.Check(t, slices.EqualFunc(some, [][]byte{all[7], nil, all[3]}, bytes.Equal),
				"7, 1000 and 3: %q", some)
			some = require.Value(store.(Log).Peek(ctx, "log"))(t)
			require.Check(t, len(some) == 0, "none: %q", some)
			require.Fails(t, "an entry that nobody appends",
				require.Err(store.(Log).Entries(within(t, soon), "log", 1000)),
				context.DeadlineExceeded)
		}
		large := make([]byte, maxValue)
		for i := range 3 {
			require.NoError(t, require.Err(s[1].(Log).Append(ctx, "large", i, large[i:])))
		}
		for i := range 3 {
			some := require.Value(s[2].(Log).Entries(ctx, "large", i))(t)
			require.Check(t, len(some) == 1 && len(some[0]) == maxValue-i, "entry %d comes with %d",
				i, len(some))
		}
	})
}
