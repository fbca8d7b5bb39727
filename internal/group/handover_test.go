package group_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/shm"
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
	return regexp.MustCompile(`"`+field+`":[1-9]\d*`).ReplaceAll(note, fmt.Appendf(nil, `"%s":%d`, field, n))
}

// handOver hands 4096 bytes over among P ranks, each with its directory.
func handOver(t *testing.T, dirs []string, spoil func(note []byte) []byte) ([]*shm.Share, []error) {
	t.Helper()
	m := newMeeting(len(dirs), spoil)
	shares, errs := make([]*shm.Share, len(dirs)), make([]error, len(dirs))
	var all sync.WaitGroup
	for r, dir := range dirs {
		all.Go(func() { shares[r], errs[r] = group.Sharing{Gather: m.gatherer(r), Rank: r, Dir: dir}.HandOver(0, 4096) })
	}
	all.Wait()
	return shares, errs
}

func tmpfs(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "euryale-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if left, err := filepath.Glob(filepath.Join(dir, "*")); len(left) > 0 || err != nil {
			t.Errorf("left behind: %v, %v", left, err)
		}
		os.RemoveAll(dir)
	})
	return dir
}

// TestMemoryIsHandedOver, also where processes do not see each other, or see another one
// in the place of the leader.
func TestMemoryIsHandedOver(t *testing.T) {
	dir := tmpfs(t)
	other, err := shm.New(dir, 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Unmap()
	theirs, err := other.Offer()
	if err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(note []byte) []byte{
		"as ever":           asItIs,
		"no such process":   hidden,
		"another's process": func(note []byte) []byte { return replaced(note, "FD", theirs.FD) },
	} {
		t.Run(name, func(t *testing.T) {
			shares, errs := handOver(t, []string{dir, dir, dir}, spoil)
			if err := errors.Join(errs...); err != nil {
				t.Fatal(err)
			}
			copy(shares[0].Mem, "hello")
			for r, s := range shares {
				if got := string(s.Mem[:5]); got != "hello" {
					t.Errorf("rank %d has %q", r, got)
				}
				if err := s.Unmap(); err != nil {
					t.Error(err)
				}
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
		for _, want := range []string{"rank 2 failed", "do not see each other's processes", "EURYALE_SHM_DIR", there} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("rank %d: %v does not say %q", r, err, want)
			}
		}
	}
}

func TestLeaderThatMakesNoneIsAnErrorOfAll(t *testing.T) {
	_, errs := handOver(t, []string{"/proc", "/dev/shm"}, asItIs)
	for r, err := range errs {
		if err == nil || !strings.Contains(err.Error(), "rank 0 made none") || !strings.Contains(err.Error(), "/proc") {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}
