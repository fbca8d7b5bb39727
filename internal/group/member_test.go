package group_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

// engine is one rank's calls, of which done are done.
type engine struct {
	mu      sync.Mutex
	wants   uint64
	failed  error
	stopped chan struct{}
}

func (e *engine) Wants() uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.wants
}

func (e *engine) Advance() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.failed
}

func (e *engine) Stop() { close(e.stopped) }

// members returns the ranks of a group whose memory is shared.
func members(t *testing.T, size int, timeout time.Duration) ([]*group.Member, []group.Board,
	[]*rendezvous.World) {
	t.Helper()
	worlds := require.Value(rendezvous.Local(size, timeout))(t)
	bs := memories(t, size)
	of := make(backend.Members, size)
	for r := range of {
		of[r] = r
	}
	all := make([]*group.Member, size)
	for r, w := range worlds {
		all[r] = group.NewMember(group.Config{Name: "test", Rank: r, Members: of, World: w,
			Health: bs[r]})
		t.Cleanup(func() { all[r].Leave(); w.Close() })
	}
	return all, bs, worlds
}

// ended waits for the end of a rank's group.
func ended(t *testing.T, m *group.Member, want string, is error) {
	t.Helper()
	select {
	case <-m.Over():
	case <-time.After(10 * time.Second):
		t.Fatalf("rank %d does not end", m.Rank)
	}
	if err := m.Err(); !errors.Is(err, is) || !strings.Contains(err.Error(), want) {
		t.Errorf("rank %d: %v, want %v: %s", m.Rank, err, is, want)
	}
}

func TestWatchdogEndsTheGroup(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(ms []*group.Member, bs []group.Board, ws []*rendezvous.World, es []*engine)
		is   error
		want string
	}{
		{"rank 1 aborts", func(ms []*group.Member, _ []group.Board, _ []*rendezvous.World,
			_ []*engine) {
			ms[1].Abort(errors.New("no more data"))
		}, backend.ErrAborted, "no more data"},
		{"rank 1 is lost", func(_ []*group.Member, _ []group.Board, ws []*rendezvous.World,
			_ []*engine) {
			ws[1].Fail(errors.New("out of memory"))
		}, backend.ErrAborted, "rank 1 failed: out of memory"},
		{"rank 1's device fails", func(ms []*group.Member, _ []group.Board, _ []*rendezvous.World,
			es []*engine) {
			es[1].mu.Lock()
			defer es[1].mu.Unlock()
			es[1].wants, es[1].failed = 1, ms[1].Broken(errors.New("ECC error"))
		}, backend.ErrAborted, "ECC error"},
		{"rank 1 is absent", func(_ []*group.Member, bs []group.Board, _ []*rendezvous.World,
			es []*engine) {
			es[0].mu.Lock()
			defer es[0].mu.Unlock()
			es[0].wants = 1
		}, backend.ErrTimeout, "no sign of rank 1 for 300ms"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ms, bs, ws := members(t, 2, 300*time.Millisecond)
			es := []*engine{{stopped: make(chan struct{})}, {stopped: make(chan struct{})}}
			for r, m := range ms {
				m.Watch(es[r])
			}
			c.do(ms, bs, ws, es)
			for r, m := range ms {
				ended(t, m, c.want, c.is)
				<-es[r].stopped
				m.Leave()
			}
		})
	}
}

func TestWaitingForAClosedRankFails(t *testing.T) {
	ms, bs, _ := members(t, 2, time.Minute)
	bs[0].Post(header(1, 8), true)
	ms[1].Close()
	ended(t, ms[1], "Close was called on this rank", backend.ErrClosed)
	for ms[0].Check(1) == nil {
		time.Sleep(time.Millisecond)
	}
	ended(t, ms[0], "rank 1 has closed its communicator without taking part", backend.ErrClosed)
}

func TestGatherGivesEveryRankTheNotesOfAll(t *testing.T) {
	ms, bs, _ := members(t, 3, time.Minute)
	var all sync.WaitGroup
	for r, m := range ms {
		all.Go(func() {
			gather := m.OverBoard(bs[r], time.Minute)
			for round := range 20 {
				mine := bytes.Repeat([]byte{byte(r), byte(round)}, (r+1)*round*round)
				notes, err := gather(mine)
				if err != nil {
					t.Error(err)
					return
				}
				for p, note := range notes {
					if !bytes.Equal(note, bytes.Repeat([]byte{byte(p), byte(round)},
						(p+1)*round*round)) {
						t.Errorf("round %d: rank %d has %d bytes of rank %d", round, r,
							len(note), p)
					}
				}
			}
		})
	}
	all.Wait()
	ms, bs, _ = members(t, 2, time.Minute)
	ms[1].Close()
	require.Fails(t, "OverBoard", require.Err(ms[0].OverBoard(bs[0], time.Minute)(nil)),
		backend.ErrClosed, "rank 1")
	ms, bs, _ = members(t, 2, time.Minute)
	require.Fails(t, "OverBoard", require.Err(ms[0].OverBoard(bs[0], 10*time.Millisecond)(nil)),
		backend.ErrTimeout, "rank 1")
}

func TestErrorOfAnotherGroupIsNotOwn(t *testing.T) {
	ms, _, _ := members(t, 1, time.Minute)
	other := &backend.Error{Comm: "test/1.0", Cause: backend.ErrClosed}
	require.Check(t, !ms[0].Own(other) && !ms[0].Ends(other),
		"the error of a part is taken for the group's")
	if err := ms[0].Broken(other); !ms[0].Ends(err) || !ms[0].Own(ms[0].Err()) {
		t.Error("the group goes on after what it cannot go on after")
	}
	require.Fails(t, "Failure", ms[0].Failure("allreduce"), "allreduce")
}

func TestCheckAllocatesNothingUnraced(t *testing.T) {
	if proctest.Race {
		t.Skip("the race detector allocates")
	}
	ms, _, _ := members(t, 2, time.Minute)
	n := testing.AllocsPerRun(100, func() { ms[0].Check(1) })
	require.Check(t, n == 0, "%v allocations", n)
}

func TestALostRankThatHasAbortedIsNamedWithItsReason(t *testing.T) {
	ms, _, ws := members(t, 3, time.Second)
	ms[1].Abort(errors.New("no more data"))
	ws[1].Fail(errors.New("connection lost"))
	for _, r := range []int{0, 2} {
		ms[r].Tell(
			group.Down{Failure: &rendezvous.Failure{Rank: 1, Cause: errors.New("connection lost")}})
		ended(t, ms[r], "no more data", backend.ErrAborted)
	}
}

func TestRankThatWaitsForLongSaysSoOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ms, bs, ws := members(t, 3, 0)
		var said []string
		ws[1].LongWait = func(ranks string, waited time.Duration) {
			said = append(said, fmt.Sprint(ranks, " ", waited))
		}
		bs[1].Post(header(1, 8), true)
		bs[2].Post(header(1, 8), true)
		for range 50 {
			require.NoError(t, ms[1].Check(1))
			time.Sleep(time.Second)
		}
		require.Slices(t, "said", said, []string{"rank 0 20s"})
	})
}
