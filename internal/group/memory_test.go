package group_test

import (
	"bytes"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/shm"
)

// boards returns the boards of ranks that share memory.
func boards(t *testing.T, size int) []group.Board {
	t.Helper()
	share, err := shm.New("/dev/shm", group.MemoryBytes(size))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { share.Unmap() })
	all := make([]group.Board, size)
	for r := range all {
		all[r] = group.NewMemory(share, r, size)
	}
	return all
}

func header(seq uint64, count int) *backend.Header {
	h := backend.Collective{Kind: backend.AllReduce}.Header(seq, count, backend.F32)
	return &h
}

func TestBoardComparesWhatAllHavePosted(t *testing.T) {
	bs := boards(t, 3)
	for seq := uint64(1); seq <= 5; seq++ {
		for r, b := range bs {
			if r < 2 || seq <= 3 {
				b.Post(header(seq, 8), true)
			}
		}
	}
	if n, d := bs[0].Compare(5); n != 3 || d != nil {
		t.Errorf("compared up to %d, %v: rank 2 has posted 3", n, d)
	}
	bs[2].Post(header(4, 9), true)
	if n, d := bs[0].Compare(5); n != 3 || d == nil || d.Peer != 2 || backend.GetHeader(d.Mine[:]).Count != 8 || backend.GetHeader(d.Theirs[:]).Count != 9 {
		t.Errorf("compared up to %d, %+v: call 4 differs on rank 2", n, d)
	}
	if n, d := bs[2].Compare(5); n != 3 || d == nil || d.Peer != 0 {
		t.Errorf("rank 2 has compared up to %d, %+v", n, d)
	}
}

func TestBoardComparesARankThatDoesNot(t *testing.T) {
	bs := boards(t, 2)
	bs[0].Post(header(1, 8), true)
	bs[1].Post(header(1, 8), false)
	_, d := bs[0].Compare(1)
	if d == nil || backend.GetHeader(d.Theirs[:]) != (backend.Header{}) {
		t.Errorf("got %+v, want the header of no call", d)
	}
	bs[0].Post(header(2, 8), false)
	bs[1].Post(header(2, 9), false)
	if n, d := boards(t, 2)[0].Compare(0); n != 0 || d != nil {
		t.Errorf("nothing compares to %d, %v", n, d)
	}
}

func TestRankFarAheadIsNotCompared(t *testing.T) {
	bs := boards(t, 2)
	const far = 3000
	for seq := uint64(1); seq <= far; seq++ {
		bs[1].Post(header(seq, 9), true)
	}
	for seq := uint64(1); seq <= far; seq++ {
		bs[0].Post(header(seq, 8), true)
		n, d := bs[0].Compare(seq)
		if d != nil {
			if seq < far-1024 {
				t.Errorf("call %d was compared, which rank 1 has overwritten", seq)
			}
			return
		}
		if n != seq {
			t.Fatalf("compared up to %d, want %d", n, seq)
		}
	}
	t.Error("nothing was compared")
}

func TestNotesAlternate(t *testing.T) {
	bs := boards(t, 2)
	if _, ok := bs[0].Noted(1, 1); ok {
		t.Error("there is a note that nobody has left")
	}
	bs[1].Note(1, []byte("a longer one"))
	bs[1].Note(2, []byte("two"))
	for round, want := range []string{"a longer one", "two"} {
		note, ok := bs[0].Noted(1, uint64(round+1))
		if !ok || len(note) != group.NoteBytes || string(bytes.TrimRight(note, "\x00")) != want {
			t.Errorf("round %d: %q, %v", round+1, note, ok)
		}
	}
	bs[1].Note(3, []byte("3"))
	if note, _ := bs[0].Noted(1, 3); string(bytes.TrimRight(note, "\x00")) != "3" {
		t.Errorf("a note has something left of one before: %q", note)
	}
}

func TestRanksLeaveTogetherOrNot(t *testing.T) {
	for _, c := range []struct {
		patience []time.Duration
		together bool
	}{
		{[]time.Duration{time.Minute, time.Minute, time.Minute}, true},
		{[]time.Duration{time.Minute, time.Millisecond}, false}, // of three
	} {
		bs := boards(t, 3)
		var all sync.WaitGroup
		for r, patience := range c.patience {
			all.Go(func() {
				if got := bs[r].Leave(patience); got != c.together {
					t.Errorf("rank %d of %d: together is %v", r, len(c.patience), got)
				}
			})
		}
		all.Wait()
		if !c.together && bs[2].Leave(time.Minute) {
			t.Error("a rank leaves together with ranks that have left")
		}
	}
}

func TestReleasedBoardShowsNothing(t *testing.T) {
	share, err := shm.New("/dev/shm", group.MemoryBytes(2))
	if err != nil {
		t.Fatal(err)
	}
	b := group.NewMemory(share, 0, 2)
	b.Post(header(1, 8), true)
	b.Close()
	b.Publish(group.Report{Reason: group.Aborted, Text: "x"})
	if err := b.Release(); err != nil {
		t.Fatal(err)
	}
	if _, ok := b.Reported(); ok || b.Closed(0) || b.Begun(0) != 0 {
		t.Error("something is left")
	}
	b.Post(header(2, 8), true) // does no harm
}
