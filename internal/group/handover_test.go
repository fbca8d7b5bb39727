//go:build linux && !portable

package group_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/shm"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/rendezvous"
)

// meeting gathers notes of goroutines, and spoils those of its first round.
type meeting struct {
	mu    sync.Mutex
	came  *sync.Cond
	notes [][]byte
	n     int // that are there, over all rounds
	spoil func(note []byte) []byte
}

func newMeeting(P int, spoil func(note []byte) []byte) *meeting {
	m := &meeting{notes: make([][]byte, P), spoil: spoil}
	m.came = sync.NewCond(&m.mu)
	return m
}

// gatherer returns that of rank r: it takes turns, so that no round overtakes another.
func (m *meeting) gatherer(r int) group.Gatherer {
	round := 0
	return func(note []byte) ([][]byte, error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		if round == 0 {
			note = m.spoil(note)
		}
		m.notes[r] = note
		P := len(m.notes)
		m.n++
		m.came.Broadcast()
		for m.n < (2*round+1)*P {
			m.came.Wait()
		}
		theirs := slices.Clone(m.notes)
		m.n++
		m.came.Broadcast()
		for m.n < (2*round+2)*P {
			m.came.Wait()
		}
		round++
		return theirs, nil
	}
}

// What becomes of the leader's offer.
func asItIs(note []byte) []byte { return note }

func hidden(note []byte) []byte { return replaced(note, "PID", 1<<30) }

// replaced puts a number in the place of one in an offer.
func replaced(note []byte, field string, n int) []byte {
	return regexp.MustCompile(`"`+field+`":[1-9]\d*`).ReplaceAll(note, fmt.Appendf(nil, `"%s":%d`,
		field, n))
}

// handOver hands 4096 bytes over among P ranks, each with its directory.
func handOver(t *testing.T, dirs []string, spoil func(note []byte) []byte) ([]*shm.Share, []error) {
	t.Helper()
	m := newMeeting(len(dirs), spoil)
	shares, errs := make([]*shm.Share, len(dirs)), make([]error, len(dirs))
	var all sync.WaitGroup
	for r, dir := range dirs {
		all.Go(func() {
			shares[r], errs[r] = group.Sharing{Gather: m.gatherer(r), Rank: r, Dir: dir}.HandOver(
				0, 4096, nil)
		})
	}
	all.Wait()
	return shares, errs
}

func tmpfs(t *testing.T) string {
	t.Helper()
	dir := require.Value(os.MkdirTemp("/dev/shm", "euryale-test-"))(t)
	t.Cleanup(func() {
		left, err := filepath.Glob(filepath.Join(dir, "*"))
		require.Check(t, len(left) == 0 && err == nil, "left behind: %v, %v", left, err)
		os.RemoveAll(dir)
	})
	return dir
}

// TestMemoryIsHandedOver, also where processes do not see each other, or see another one
// in the place of the leader.
func TestMemoryIsHandedOver(t *testing.T) {
	dir := tmpfs(t)
	other := require.Value(shm.New(dir, 4096))(t)
	defer other.Unmap()
	theirs := require.Value(other.Offer())(t)
	for name, spoil := range map[string]func(note []byte) []byte{
		"as ever":           asItIs,
		"no such process":   hidden,
		"another's process": func(note []byte) []byte { return replaced(note, "FD", theirs.FD) },
	} {
		t.Run(name, func(t *testing.T) {
			shares, errs := handOver(t, []string{dir, dir, dir}, spoil)
			require.NoError(t, errors.Join(errs...))
			copy(shares[0].Mem, "hello")
			for r, s := range shares {
				require.Equal(t, fmt.Sprint("rank ", r), string(s.Mem[:5]), "hello")
				require.Report(t, s.Unmap())
			}
		})
	}
}

func TestMemoryThatOneRankCannotReachIsAnErrorOfAll(t *testing.T) {
	here, there := tmpfs(t), tmpfs(t)
	shares, errs := handOver(t, []string{here, here, there}, hidden)
	for r, err := range errs {
		if err == nil || shares[r] != nil {
			t.Errorf("rank %d: %v, %v", r, shares[r], err)
			continue
		}
		for _, want := range []string{"rank 2 failed", "do not see each other's processes",
			"EURYALE_SHM_DIR", there} {
			require.Fails(t, fmt.Sprint("rank ", r), err, want)
		}
	}
}

func TestLeaderThatMakesNoneIsAnErrorOfAll(t *testing.T) {
	_, errs := handOver(t, []string{"/proc", "/dev/shm"}, asItIs)
	for r, err := range errs {
		require.Fails(t, fmt.Sprint("rank ", r), err, "no shared memory: rank 0 failed", "/proc")
	}
}

// Parts whose ranks share a machine have their board in memory, the others over connections.
func TestEveryPartGetsItsKindOfBoard(t *testing.T) {
	for _, c := range []struct {
		name    string
		ranks   []int // of each part; the other ranks are in none
		machine []int
		sockets []bool
	}{
		{"all ranks of one machine", []int{0, 0, 0, 0}, []int{0, 0, 0, 0},
			[]bool{false, false, false, false}},
		{"all ranks of two machines", []int{0, 0, 0, 0}, []int{0, 0, 1, 1},
			[]bool{true, true, true, true}},
		{"a part for each machine", []int{0, 0, 1, 1}, []int{0, 0, 1, 1},
			[]bool{false, false, false, false}},
		{"parts between machines", []int{0, 1, 0, 1}, []int{0, 0, 1, 1},
			[]bool{true, true, true, true}},
		{"a part between machines, one on a machine", []int{0, 1, 1, 0}, []int{1, 0, 0, 0},
			[]bool{true, false, false, true}},
		{"ranks in no part", []int{0, -1, 0, -1}, []int{0, 0, 1, 1},
			[]bool{true, false, true, false}},
	} {
		t.Run(c.name, func(t *testing.T) {
			worlds := require.Value(rendezvous.Local(len(c.ranks), time.Minute))(t)
			require.NoError(t, testranks.All(len(worlds), func(r int) error {
				w := worlds[r]
				defer w.Close()
				w.Node = c.machine[r]
				if slices.Max(c.machine) > 0 {
					w.LocalSize = 2
				}
				gather := group.OverStore(t.Context(), w, "boards")
				whole := group.NewMember(group.Config{Name: w.Name, Rank: r,
					Members: group.Whole(w).Members, World: w})
				part := testranks.Must(whole.Split(gather, c.ranks[r], 0))
				b := testranks.Must(group.Sharing{Gather: gather,
					Rank: r, Dir: "/dev/shm"}.Board(w, part))
				if c.ranks[r] < 0 {
					if b != nil {
						return errors.New("it has a board")
					}
					return nil
				}
				if _, ok := b.(*group.Sockets); ok != c.sockets[r] {
					return fmt.Errorf("it has a %T", b)
				}
				b.Note(1, []byte("here"))
				for p := range part.Ranks {
					require.Soon(t, "the notes of all", func() bool {
						_, ok := b.Noted(p, 1)
						return ok
					})
				}
				if !b.Leave(time.Minute) {
					return errors.New("it leaves alone")
				}
				return b.Release()
			}))
		})
	}
}
