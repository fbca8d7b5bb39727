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

// TestRanksLeaveTogetherOrEachAlone: what they agree on is the same on all.
func TestRanksLeaveTogetherOrEachAlone(t *testing.T) {
	const P = 3
	for round := range 100 {
		bs := boards(t, P)
		together := make([]bool, P)
		var all sync.WaitGroup
		for r := range P {
			all.Go(func() {
				time.Sleep(time.Duration(r*(round%4)) * time.Millisecond)
				together[r] = bs[r].Leave(3 * time.Millisecond)
			})
		}
		all.Wait()
		if together[0] != together[1] || together[1] != together[2] {
			t.Fatalf("round %d: %v", round, together)
		}
	}
	bs := boards(t, 2)
	if bs[0].Leave(0) || bs[1].Leave(time.Minute) {
		t.Error("ranks that do not wait for each other left together")
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
