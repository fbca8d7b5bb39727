package gpu

import (
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
)

// An act is what a rank does to a flag: set that of another rank, wait for its own, or clear it.
type act struct {
	kind byte
	at   uintptr
}

// notes is a stream that writes down what copy engines do with flags.
type notes struct {
	backend.Queue // no other method is called
	signal        uintptr
	acts          []act
}

func (n *notes) Stream() uintptr                   { return 1 }
func (n *notes) Recording() *backend.Recording     { return nil }
func (n *notes) Joined(backend.Event) bool         { return true }
func (n *notes) Fill(backend.Buffer, uint64) error { return nil }
func (n *notes) Device() backend.Device            { return host.Device{} }
func (n *notes) Reduce(_ backend.ReduceOp, _ backend.Buffer, _ ...backend.Buffer) error {
	return nil
}

func (n *notes) Push(dst, src backend.Buffer) error {
	if src.Addr() == n.signal {
		n.acts = append(n.acts, act{'s', dst.Addr()})
	}
	return nil
}

func (n *notes) Await(words ...backend.Buffer) error {
	for _, kind := range []byte{'w', 'c'} {
		for _, w := range words {
			n.acts = append(n.acts, act{kind, w.Addr()})
		}
	}
	return nil
}

// acts returns what each rank does in launches of a graph of calls, of so many rounds each.
func acts(t *testing.T, size, launches int, rounds ...int) [][]act {
	t.Helper()
	const staging = 1 << 10
	room := uintptr(padBytes(size) + 2*staging + 1<<16)
	pads, memory := make([]uintptr, size), make([]uintptr, size)
	for p := range size {
		pads[p] = 1<<30 + 2*uintptr(p)*room
		memory[p] = pads[p] + room
	}
	all := make([][]act, size)
	for r := range size {
		c := &Communicator{rank: r, size: size, choice: &choice{}}
		c.plan.Staging = staging
		m := &peerMemory{c: c, pad: &window{at: pads}}
		c.memory = m
		c.waits.Store(&waits{})
		m.windows = []*window{{own: backend.OnDevice(backend.U8, memory[r], 1<<16), at: memory}}
		n := &notes{signal: m.signal().Addr()}
		for range launches {
			for _, of := range rounds {
				x := backend.OnDevice(backend.U8, memory[r], of*2*staging/(size-1)*size-align).As(
					backend.F32)
				k := call{what: backend.Collective{Kind: backend.AllReduce}, dtype: backend.F32,
					count: x.Len(), rank: r, P: size, dst: x, src: x}
				if err := c.launchCopies(n, &k); err != nil {
					t.Fatal(err)
				}
			}
		}
		want := 0
		for _, of := range rounds {
			want += launches * (1 + 2*of) * 3 * (size - 1)
		}
		if len(n.acts) != want {
			t.Fatalf("%d ranks: rank %d does %d things to flags, want %d", size, r, len(n.acts),
				want)
		}
		all[r] = n.acts
	}
	return all
}

// fault runs what ranks do in every order, and returns what is wrong in one of them: a flag that is
// set while it is, a rank that passes a meeting to which another has not come, a flag that a
// signal was lost from, so that a rank waits forever, or one that is left behind.
func fault(all [][]act) string {
	index := map[uintptr]int{}
	for _, acts := range all {
		for _, a := range acts {
			if _, ok := index[a.at]; !ok {
				index[a.at] = len(index)
			}
		}
	}
	type state struct {
		at    [3]int
		flags uint64
	}
	perMeeting := 3 * (len(all) - 1)
	seen, todo := map[state]bool{{}: true}, []state{{}}
	for len(todo) > 0 {
		s := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		moved, over := false, true
		for r, acts := range all {
			if s.at[r] == len(acts) {
				continue
			}
			over = false
			a, next := acts[s.at[r]], s
			bit := uint64(1) << index[a.at]
			next.at[r]++
			switch {
			case a.kind == 's' && s.flags&bit != 0:
				return fmt.Sprintf("rank %d sets a flag that is set, at %v", r, s.at)
			case a.kind == 's':
				next.flags |= bit
			case a.kind == 'w' && s.flags&bit == 0:
				continue
			case a.kind == 'c':
				next.flags &^= bit
				meeting := s.at[r] / perMeeting // of which all waits are over
				for p := range all {
					if s.at[p] <= meeting*perMeeting { // it has signalled to nobody
						return fmt.Sprintf("rank %d passes meeting %d before rank %d comes: %v", r,
							meeting, p, s.at)
					}
				}
			}
			moved = true
			if !seen[next] {
				seen[next] = true
				todo = append(todo, next)
			}
		}
		switch {
		case over && s.flags != 0:
			return fmt.Sprintf("flags are left: %b", s.flags)
		case !moved && !over:
			return fmt.Sprintf("all wait forever at %v", s.at)
		}
	}
	return ""
}

// Launches of graphs follow each other while ranks run ahead as far as they can.
func TestMeetingsByFlagsLoseNoSignalInAnyOrder(t *testing.T) {
	for _, size := range []int{2, 3} {
		for _, rounds := range [][]int{{1}, {1, 1}, {2, 1}} {
			if what := fault(acts(t, size, 3, rounds...)); what != "" {
				t.Errorf("%d ranks, calls of %v rounds: %s", size, rounds, what)
			}
		}
	}
}

// What is proved above is false of meetings that all use the same flags.
func TestMeetingsByOneSetOfFlagsLoseSignals(t *testing.T) {
	for _, size := range []int{2, 3} {
		all := acts(t, size, 2, 1)
		for r := range all {
			first := all[r][:3*(size-1)]
			for i := range all[r] {
				all[r][i].at = first[i%len(first)].at
			}
		}
		if fault(all) == "" {
			t.Errorf("%d ranks: the model finds no fault", size)
		}
	}
}
