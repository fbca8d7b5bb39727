package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// worldOver returns the World of a rank over a store of a server.
func worldOver(t *testing.T, rank, size int, store Store) *World {
	t.Helper()
	w := require.Value(New(Env{Job: "j", Rank: rank, Size: size, LocalRank: rank, LocalSize: size,
		Timeout: long}, store))(t)
	t.Cleanup(func() { w.Close() })
	return w
}

// noSign is the failure that a rank blames rank 2 with.
func noSign() *Failure { return &Failure{Rank: 2, Cause: errors.New("no sign of rank 2")} }

// TestALossIsPutDownToTheLastReport: a rank ends because of another one, as it has said before.
func TestALossIsPutDownToTheLastReport(t *testing.T) {
	s := tcpServer(t, 3)
	finder := connectRank(t, s, 1)
	w := worldOver(t, 1, 3, finder)
	watcher := worldOver(t, 2, 3, connectRank(t, s, 2))
	require.NoError(t, w.LeaveReport(noSign(), long))
	require.Check(t, w.Failure() == nil && watcher.Failure() == nil,
		"a last report of a rank that lives is a failure")
	finder.link.conn.Close() // as the end of its process would
	<-watcher.Down()
	if f := watcher.Failure(); f.Rank != 2 || !strings.Contains(f.Error(), "no sign of rank 2") {
		t.Errorf("the job names %v", f)
	}
}

// TestTheServersLossIsPutDownToItsLastReport: the ranks that it serves have its last report before
// its error is known.
func TestTheServersLossIsPutDownToItsLastReport(t *testing.T) {
	s := tcpServer(t, 3)
	own := worldOver(t, 0, 3, s.open())
	watcher := worldOver(t, 1, 3, connectRank(t, s, 1))
	require.NoError(t, own.LeaveReport(noSign(), long))
	for _, m := range s.connected() {
		m.link.conn.Close()
	}
	<-watcher.Down()
	require.Equal(t, "the job names", watcher.Failure().Rank, 2)
}

// TestAWillIsWithdrawn: a rank that has found a way on ends for a reason of its own, whether it
// serves the others or not.
func TestAWillIsWithdrawn(t *testing.T) {
	s := tcpServer(t, 3)
	own := worldOver(t, 0, 3, s.open())
	finder := connectRank(t, s, 1)
	w := worldOver(t, 1, 3, finder)
	watcher := connectRank(t, s, 2)
	for _, w := range []*World{own, w} {
		require.NoError(t, errors.Join(w.LeaveReport(noSign(), long),
			w.Withdraw(long)))
	}
	require.Soon(t, "rank 0's last report is withdrawn", func() bool {
		return watcher.reports.last.Load() == nil
	})
	finder.link.conn.Close() // as the end of its process would
	<-own.Down()
	f := own.Failure()
	require.Check(t, f.Rank == 1 && !f.Declared, "the job names %v", f)
}

// TestAWillLapses: a rank that goes on after an error has found a way on, and what ends it later is
// its own.
func TestAWillLapses(t *testing.T) {
	loss := &Failure{Rank: 1, Cause: errors.New("killed")}
	var w lastReports
	now := time.Now()
	require.Equal(t, "without a last report", w.instead(loss, now), loss)
	w.takeReport(noSign().lastReport(0), now)
	require.Equal(t, "with a last report", w.instead(loss, now.Add(reportTime)).Rank, 2)
	require.Equal(t, "with an old last report",
		w.instead(loss, now.Add(reportTime+time.Millisecond)), loss)
}

// A rank that blames itself, or nobody, leaves no last report.
func TestNobodyWillsHisOwnFailure(t *testing.T) {
	onWorlds(t, 2, func(t *testing.T, w []*World) {
		require.Report(t, w[1].LeaveReport(errors.New("no more data"), long))
		v, err := look(within(t, long), w[0].inner, reportKey(1))
		require.Check(t, v == nil && err == nil, "the store has %q, %v", v, err)
	})
}

// TestMissingAreThoseWhoDoNotWait follows ranks that wait to those that others wait for.
func TestMissingAreThoseWhoDoNotWait(t *testing.T) {
	for _, c := range []struct {
		waits map[int][]int
		seem  []int
		want  []int
	}{
		{nil, []int{2, 3}, []int{2, 3}},
		{map[int][]int{2: {3}}, []int{2, 3}, []int{3}},
		{map[int][]int{2: {3}, 3: {4}}, []int{2}, []int{4}},
		{map[int][]int{2: {3, 4}, 3: {1}}, []int{2, 3}, []int{4}},
		{map[int][]int{2: {3}, 3: {2}}, []int{2}, []int{2}},    // all wait for each other
		{map[int][]int{2: {1}}, []int{2}, []int{2}},            // for the rank that asks
		{map[int][]int{2: {3}, 3: {2, 4}}, []int{2}, []int{4}}, // a circle with a way out
	} {
		t.Run(fmt.Sprint(c.waits, c.seem), func(t *testing.T) {
			all := require.Value(Local(5, long))(t)
			for r, of := range c.waits {
				require.NoError(t, all[r].inner.Set(t.Context(), fmt.Sprint(waitsPrefix, r),
					[]byte(encodeRanks(of))))
			}
			if got := all[1].Missing(t.Context(), c.seem); !slices.Equal(got, c.want) {
				t.Errorf("ranks %v are missing, want %v", got, c.want)
			}
			each(all, func(w *World) { w.Close() })
		})
	}
}

// TestWhoWaitsIsSeenToWaitWhileItDoes on every store.
func TestWhoWaitsIsSeenToWaitWhileItDoes(t *testing.T) {
	onWorlds(t, 3, func(t *testing.T, w []*World) {
		seen := func(want ...int) {
			t.Helper()
			ctx := within(t, long)
			for !slices.Equal(w[0].Missing(ctx, []int{1}), want) {
				if ctx.Err() != nil {
					t.Fatalf("%v are missing, want %v", w[0].Missing(context.Background(),
						[]int{1}), want)
				}
				if want[0] == 2 {
					w[1].Waits([]int{2})
				}
				time.Sleep(time.Millisecond)
			}
		}
		seen(1)
		seen(2)
		seen(1) // it no longer says so
	})
}

// lateStore takes its first value late, as if this process had had no core meanwhile.
type lateStore struct {
	Store
	late sync.Once
}

func (s *lateStore) Set(ctx context.Context, key string, value []byte) error {
	s.late.Do(func() { time.Sleep(time.Hour) })
	return s.Store.Set(context.Background(), key, value)
}

// TestWhoWaitsIsSeenToWaitAfterAPause: it had no time to say so again.
func TestWhoWaitsIsSeenToWaitAfterAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newTable()
		w := worldOver(t, 1, 3, &lateStore{Store: table.open()})
		w.Waits([]int{2})
		shown := func() string {
			v, _ := look(t.Context(), table.open(), waitsPrefix+"1")
			return string(v)
		}
		time.Sleep(time.Hour + showPause + showPause/2)
		if got := shown(); got != "2" {
			t.Errorf("after the pause rank 1 is seen to wait for %q, want rank 2", got)
		}
		time.Sleep(2 * freshLooks * showPause)
		require.Equal(t, "a while after it has last said so, rank 1 is seen to wait for", shown(),
			"")
		w.Close()
	})
}

// TestWhoAsksAServerThatEndsNamesWhomItsWillNames: the time of ranks is up at about the same time,
// and the program of the first may end while another one asks it who is missing.
func TestWhoAsksAServerThatEndsNamesWhomItsWillNames(t *testing.T) {
	for _, how := range []string{"it is silent", "its connection ends"} {
		t.Run(how, func(t *testing.T) {
			s := tcpServer(t, 3)
			own := worldOver(t, 0, 3, s.open())
			c := connectRank(t, s, 1)
			w := worldOver(t, 1, 3, c)
			require.NoError(t, own.LeaveReport(noSign(), long))
			ctx := within(t, long)
			require.Soon(t, "the last report", func() bool { return c.reports.last.Load() != nil })
			if how == "it is silent" {
				s.table.mu.Lock()
				defer s.table.mu.Unlock()
				short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
				defer cancel()
				ctx = short
			} else {
				for _, m := range s.connected() {
					m.link.conn.Close()
				}
				<-c.link.over.Done()
			}
			got := w.Missing(ctx, []int{0})
			require.Check(t, slices.Equal(got, []int{2}), "ranks %v are missing, want rank 2", got)
		})
	}
}

// endedConn is a connection to a process that has ended: writing finds that first, and only then is
// read what it has said before.
type endedConn struct {
	net.Conn
	said  *bytes.Reader
	wrote chan struct{}
}

func (e endedConn) Write([]byte) (int, error) {
	close(e.wrote)
	return 0, errors.New("broken pipe")
}

func (e endedConn) Read(p []byte) (int, error) {
	<-e.wrote
	time.Sleep(10 * time.Millisecond)
	return e.said.Read(p)
}

// TestTheWillOfAServerIsReadAfterAWriteHasFailed: whoever writes to the server as it ends finds
// that before it has read the last report.
func TestTheWillOfAServerIsReadAfterAWriteHasFailed(t *testing.T) {
	near, far := net.Pipe()
	defer far.Close()
	var said bytes.Buffer
	report := noSign().lastReport(0)
	require.NoError(t, (frame{kind: kindLastReport, body: report}).writeTo(&said))
	conn := endedConn{near, bytes.NewReader(said.Bytes()), make(chan struct{})}
	w := worldOver(t, 1, 3, newClient(conn, identity{}, "", identity{rank: 1, size: 3}, long))
	<-w.Down()
	require.Equal(t, "the job names", w.Failure().Rank, 2)
}

// TestAServerThatDoesNotAnswerIsMissing: who it is that others wait for only the store could say.
func TestAServerThatDoesNotAnswerIsMissing(t *testing.T) {
	s := tcpServer(t, 3)
	w := worldOver(t, 1, 3, connectRank(t, s, 1))
	s.table.mu.Lock()
	defer s.table.mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	got := w.Missing(ctx, []int{2})
	require.Check(t, slices.Equal(got, []int{0}), "ranks %v are missing, want the server", got)
}

// TestAllRanksThatSeemMissingAreAsked: a few at a time.
func TestAllRanksThatSeemMissingAreAsked(t *testing.T) {
	var seem []int
	for rank := range 2*mostAsked + 1 {
		seem = append(seem, rank+1)
	}
	s, asked := newSearch(0, seem), []int{}
	for level := s.level(); len(level) > 0; level = s.level() {
		for _, rank := range level {
			s.answered(rank, nil)
		}
		asked = append(asked, level...)
	}
	if !slices.Equal(asked, seem) || !slices.Equal(s.result(), seem) {
		t.Errorf("%v are asked, and %v missing", asked, s.result())
	}
}
