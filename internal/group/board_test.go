package group_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/shm"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/rendezvous"
)

// onBoards tests every kind of board, on as many ranks as makes calls for.
func onBoards(t *testing.T, test func(t *testing.T, boards func(size int) []group.Board)) {
	for name, boards := range map[string]func(t *testing.T, size int) []group.Board{
		"memory": memories,
		"sockets": func(t *testing.T, size int) (all []group.Board) {
			for _, b := range sockets(t, size, time.Minute) {
				all = append(all, b)
			}
			return all
		},
	} {
		t.Run(name, func(t *testing.T) {
			test(t, func(size int) []group.Board { return boards(t, size) })
		})
	}
}

// memories returns the boards of ranks that share memory.
func memories(t *testing.T, size int) []group.Board {
	t.Helper()
	share := require.Value(shm.New("/dev/shm", group.MemoryBytes(size)))(t)
	t.Cleanup(func() { share.Unmap() })
	all := make([]group.Board, size)
	for r := range all {
		all[r] = group.NewMemory(share, r, size)
	}
	return all
}

// sockets returns the boards of ranks that are connected, and releases them at the end.
func sockets(t testing.TB, size int, timeout time.Duration) []*group.Sockets {
	t.Helper()
	all, addrs := unopened(t, size, timeout)
	for _, b := range all {
		b.Open(addrs)
	}
	return all
}

// unopened returns boards of ranks that are not connected yet, and their addresses.
func unopened(t testing.TB, size int, timeout time.Duration) ([]*group.Sockets, []string) {
	t.Helper()
	worlds, err := rendezvous.Local(size, timeout)
	require.NoError(t, err)
	members := make([]int, size)
	for r := range members {
		members[r] = r
	}
	all := make([]*group.Sockets, size)
	addrs := make([]string, size)
	for r, w := range worlds {
		if all[r], err = group.NewSockets(w, "test", members, r); err != nil {
			t.Fatal(err)
		}
		addrs[r] = all[r].Addr()
	}
	t.Cleanup(func() {
		testranks.Each(size, func(r int) error {
			return errors.Join(all[r].Release(), worlds[r].Close())
		})
	})
	return all, addrs
}

// compares waits until a board has compared the calls up to one.
func compares(t *testing.T, b group.Board, upTo, want uint64) {
	t.Helper()
	require.Soon(t, fmt.Sprintf("calls are compared up to %d", want), func() bool {
		n, d := b.Compare(upTo)
		require.That(t, n <= want && d == nil, "compared up to %d, %+v", n, d)
		return n == want
	})
}

// differs waits until a board has found a call that differs.
func differs(t *testing.T, b group.Board, upTo, call uint64) (d *group.Difference) {
	t.Helper()
	require.Soon(t, fmt.Sprintf("call %d is found to differ", call), func() bool {
		var n uint64
		n, d = b.Compare(upTo)
		require.That(t, n < call, "compared up to %d, %+v", n, d)
		return d != nil
	})
	n, _ := b.Compare(upTo)
	require.Check(t, n == call-1, "compared up to %d, and call %d differs", n, call)
	return d
}

func header(seq uint64, count int) *backend.Header {
	h := backend.Collective{Kind: backend.AllReduce}.Header(seq, count, backend.F32)
	return &h
}

func TestBoardComparesWhatAllHavePosted(t *testing.T) {
	onBoards(t, func(t *testing.T, boards func(int) []group.Board) {
		bs := boards(3)
		for seq := uint64(1); seq <= 5; seq++ {
			for r, b := range bs {
				if r < 2 || seq <= 3 {
					b.Post(header(seq, 8), true)
				}
			}
		}
		compares(t, bs[0], 5, 3)
		bs[2].Post(header(4, 9), true)
		if d := differs(t, bs[0], 5, 4); d.Peer != 2 || backend.GetHeader(&d.Mine).Count != 8 ||
			backend.GetHeader(&d.Theirs).Count != 9 {
			t.Errorf("%+v: call 4 differs on rank 2", d)
		}
		if d := differs(t, bs[2], 5, 4); d.Peer != 2 || backend.GetHeader(&d.Theirs).Count != 9 {
			t.Errorf("rank 2 has found %+v", d)
		}
		n, d := bs[0].Compare(3)
		require.Check(t, n == 3 && d == nil, "compared up to %d, %v: only call 4 differs", n, d)
	})
}

func TestBoardComparesARankThatDoesNot(t *testing.T) {
	onBoards(t, func(t *testing.T, boards func(int) []group.Board) {
		bs := boards(2)
		bs[0].Post(header(1, 8), true)
		bs[1].Post(header(1, 8), false)
		if d := differs(t, bs[0], 1, 1); backend.GetHeader(&d.Theirs) != (backend.Header{}) {
			t.Errorf("got %+v, want the header of no call", d)
		}
		bs = boards(2)
		bs[0].Post(header(1, 8), false)
		bs[1].Post(header(1, 9), false)
		compares(t, bs[0], 1, 1)
		n, d := boards(2)[0].Compare(0)
		require.Check(t, n == 0 && d == nil, "nothing compares to %d, %v", n, d)
	})
}

// A rank that is far ahead of another is compared with it once that one comes near.
func TestBoardComparesWhatIsNear(t *testing.T) {
	onBoards(t, func(t *testing.T, boards func(int) []group.Board) {
		bs := boards(2)
		const far = 3000
		for seq := uint64(1); seq <= far; seq++ {
			bs[1].Post(header(seq, 9), true)
		}
		require.Soon(t, "what rank 1 has begun", func() bool {
			bs[0].Compare(1)
			return bs[0].Begun(1) == far
		})
		for seq := uint64(1); seq <= far; seq++ {
			bs[0].Post(header(seq, 8), true)
			if seq < far-1024 {
				compares(t, bs[0], seq, seq)
			}
		}
		require.Soon(t, "a difference", func() bool { _, d := bs[0].Compare(far); return d != nil })
		n, _ := bs[0].Compare(far)
		require.Check(t, n >= far-1024, "call %d was compared, which is too old", n+1)
	})
}

func TestBoardShowsWhoHasClosedAfterWhatItHasBegun(t *testing.T) {
	onBoards(t, func(t *testing.T, boards func(int) []group.Board) {
		bs := boards(3)
		for seq := uint64(1); seq <= 7; seq++ {
			bs[1].Post(header(seq, 8), true)
		}
		bs[1].Close()
		for _, b := range bs {
			require.Soon(t, "rank 1 has closed", func() bool { return b.Closed(1) })
			if b.Closed(0) || b.Closed(2) || b.Begun(1) != 7 || b.Begun(0) != 0 {
				t.Errorf("closed are %v %v, begun %d and %d", b.Closed(0), b.Closed(2), b.Begun(1),
					b.Begun(0))
			}
		}
	})
}

// Who sees a report sees all that was begun before it, by any rank.
func TestBoardShowsTheFirstReport(t *testing.T) {
	onBoards(t, func(t *testing.T, boards func(int) []group.Board) {
		bs := boards(3)
		first := group.Report{Reason: group.Lost, Rank: 2, Peer: -1, Lost: 7,
			Sides: [2]int{3, 4}, Mine: [backend.HeaderSize]byte{1},
			Theirs: [backend.HeaderSize]byte{2}, Text: "first"}
		for r, b := range bs {
			b.Post(header(1, 8), true)
			_, ok := b.Reported()
			require.Check(t, !ok, "rank %d has a report that nobody made", r)
		}
		bs[2].Publish(first)
		for _, b := range bs {
			require.Soon(t, "the report", func() bool { _, ok := b.Reported(); return ok })
			r, _ := b.Reported()
			require.Check(t, r == first, "got %+v", r)
			for r := range bs {
				if b.Begun(r) != 1 {
					t.Errorf("rank %d has begun %d calls", r, b.Begun(r))
				}
			}
		}
		bs[0].Publish(group.Report{Reason: group.Aborted, Text: "second"})
		r, _ := bs[1].Reported()
		require.Check(t, r == first, "then %+v", r)
	})
}

func TestNotesAlternate(t *testing.T) {
	onBoards(t, func(t *testing.T, boards func(int) []group.Board) {
		bs := boards(2)
		_, ok := bs[0].Noted(1, 1)
		require.Check(t, !ok, "there is a note that nobody has left")
		bs[1].Note(1, []byte("a longer one"))
		bs[1].Note(2, []byte("two"))
		read := func(round uint64, want string) {
			t.Helper()
			require.Soon(t, want, func() bool { _, ok := bs[0].Noted(1, round); return ok })
			note, _ := bs[0].Noted(1, round)
			require.Check(t, len(note) == group.NoteBytes &&
				string(bytes.TrimRight(note, "\x00")) == want, "round %d: %q", round, note)
		}
		read(1, "a longer one")
		read(2, "two")
		bs[1].Note(3, []byte("3"))
		read(3, "3")
	})
}

// TestRanksLeaveTogetherOrEachAlone: what they agree on is the same on all.
func TestRanksLeaveTogetherOrEachAlone(t *testing.T) {
	onBoards(t, func(t *testing.T, boards func(int) []group.Board) {
		const P = 3
		for round := range 100 {
			bs := boards(P)
			together := make([]bool, P)
			testranks.Each(P, func(r int) error {
				time.Sleep(time.Duration(r*(round%4)) * time.Millisecond)
				together[r] = bs[r].Leave(3 * time.Millisecond)
				return nil
			})
			if together[0] != together[1] || together[1] != together[2] {
				t.Fatalf("round %d: %v", round, together)
			}
		}
		bs := boards(2)
		require.Check(t, !bs[0].Leave(0) && !bs[1].Leave(time.Minute),
			"ranks that do not wait for each other left together")
		bs = boards(2)
		if errs := testranks.Each(2, func(r int) error {
			if !bs[r].Leave(time.Minute) {
				return errors.New("it left alone")
			}
			return nil
		}); errors.Join(errs...) != nil {
			t.Error(testranks.Join(errs))
		}
	})
}

func TestReleasedBoardShowsNothing(t *testing.T) {
	share := require.Value(shm.New("/dev/shm", group.MemoryBytes(2)))(t)
	for name, b := range map[string]group.Board{"memory": group.NewMemory(share, 0, 2),
		"sockets": sockets(t, 2, time.Minute)[0]} {
		b.Post(header(1, 8), true)
		b.Close()
		b.Publish(group.Report{Reason: group.Aborted, Text: "x"})
		require.NoError(t, b.Release())
		_, ok := b.Reported()
		require.Check(t, !ok && !b.Closed(0) && b.Begun(0) == 0, "%s: something is left", name)
		b.Post(header(2, 8), true) // does no harm
	}
}
