package gpu

import (
	"fmt"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// An act is what a rank does to a flag: set that of another rank, wait for its own, or clear it; or
// to memory of others and its own: fill a part of it, or empty it.
type act struct {
	kind byte // s, w, c; f, e
	at   uintptr
	call int // of the rank, of all launches
	meet int // how often the rank has met before
}

// notes is a stream that writes down what copy engines do.
type notes struct {
	backend.Queue // no other method is called
	signal        uintptr
	staging       [2]uintptr // of this rank, from and to
	call, meet    int
	acts          []act
}

func (n *notes) Stream() uintptr                   { return 1 }
func (n *notes) Recording() *backend.Recording     { return nil }
func (n *notes) Joined(backend.Event) bool         { return true }
func (n *notes) Fill(backend.Buffer, uint64) error { return nil }
func (n *notes) Device() backend.Device            { return host.Device{} }

func (n *notes) add(kind byte, at uintptr) {
	n.acts = append(n.acts, act{kind, at, n.call, n.meet})
}

// read empties what it reads of staging.
func (n *notes) read(src backend.Buffer) bool {
	staged := n.staging[0] <= src.Addr() && src.Addr() < n.staging[1] && src.Len() > 0
	if staged {
		n.add('e', src.Addr())
	}
	return staged
}

func (n *notes) Reduce(_ backend.ReduceOp, _ backend.Buffer, srcs ...backend.Buffer) error {
	for _, src := range srcs {
		n.read(src)
	}
	return nil
}

func (n *notes) Push(dst, src backend.Buffer) error {
	switch {
	case src.Addr() == n.signal:
		n.add('s', dst.Addr())
	case !n.read(src) && src.Len() > 0:
		n.add('f', dst.Addr())
	}
	return nil
}

func (n *notes) Await(words ...backend.Buffer) error {
	for _, kind := range []byte{'w', 'c'} {
		for _, w := range words {
			n.add(kind, w.Addr())
		}
	}
	n.meet++
	return nil
}

// met is a call by copy engines: elsewhere is whether an all-gather is to memory in no window.
type met struct {
	kind      backend.Kind
	rounds    int // for which staging has room, where it takes that
	elsewhere bool
}

// meetings is how often ranks meet in the call.
func (m met) meetings() int {
	if m.kind == backend.AllGather && !m.elsewhere {
		return 2
	}
	return 1 + 2*m.rounds
}

// of returns the call of a rank, whose whole operand begins at an address.
func (m met) of(rank, size, staging int, at uintptr) call {
	if m.elsewhere {
		at += 1 << 20
	}
	chunk := m.rounds*2*staging/(size-1) - align
	whole := backend.OnDevice(backend.U8, at, size*chunk).As(backend.F32)
	own := whole.Slice(rank*chunk/4, (rank+1)*chunk/4)
	k := call{what: backend.Collective{Kind: m.kind}, dtype: backend.F32, count: own.Len(),
		rank: rank, P: size, dst: whole, src: whole}
	switch m.kind {
	case backend.AllReduce:
		k.count = whole.Len()
	case backend.ReduceScatter:
		k.dst = own
	default:
		k.src = own
	}
	return k
}

// acts returns what each rank does in launches of a graph of calls. After each call it empties the
// memory in its window that others have filled.
func acts(t *testing.T, size, launches int, calls ...met) [][]act {
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
		n := &notes{signal: m.signal().Addr(),
			staging: [2]uintptr{pads[r] + uintptr(padBytes(size)), pads[r] + room}}
		want := 0
		for range launches {
			for _, of := range calls {
				k := of.of(r, size, staging, memory[r])
				require.NoError(t, c.launchCopies(n, &k))
				n.call++
				if want += of.meetings(); n.meet != want {
					t.Fatalf("%d ranks: rank %d meets %d times, want %d", size, r, n.meet, want)
				}
			}
		}
		all[r] = n.acts
	}
	return emptying(all, launches*len(calls), func(rank int, a act) bool {
		return memory[rank] <= a.at && a.at < memory[rank]+1<<16
	})
}

// emptying has each rank empty, after each call, what others have filled of its memory.
func emptying(all [][]act, calls int, in func(rank int, a act) bool) [][]act {
	both := make([][]act, len(all))
	for r := range all {
		for call := range calls {
			for _, a := range all[r] {
				if a.call == call {
					both[r] = append(both[r], a)
				}
			}
			for _, a := range slices.Concat(all...) {
				if a.call == call && a.kind == 'f' && in(r, a) {
					both[r] = append(both[r], act{'e', a.at, call, a.meet + 1})
				}
			}
		}
	}
	return both
}

// fault runs what ranks do in every order, and returns what is wrong in one of them: a flag that is
// set while it is, a rank that passes a meeting to which another has not come, a flag that a
// signal was lost from, so that a rank waits forever, or one that is left behind; memory that is
// filled before it is empty, or read before it is filled.
func fault(all [][]act) string {
	index := map[uintptr]int{}
	comes := make([]map[int]int, len(all)) // by meeting: the first signal for it
	for r, acts := range all {
		comes[r] = map[int]int{}
		for i, a := range acts {
			if _, ok := index[a.at]; !ok {
				index[a.at] = len(index)
			}
			if _, ok := comes[r][a.meet]; !ok && a.kind == 's' {
				comes[r][a.meet] = i
			}
		}
	}
	type state struct {
		at    [3]int
		flags uint64
	}
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
			case (a.kind == 's' || a.kind == 'f') && s.flags&bit != 0:
				return fmt.Sprintf("rank %d: %c of what is set, at %v", r, a.kind, s.at)
			case a.kind == 's', a.kind == 'f':
				next.flags |= bit
			case a.kind == 'w' && s.flags&bit == 0:
				continue
			case a.kind == 'e' && s.flags&bit == 0:
				return fmt.Sprintf("rank %d reads what is not there, at %v", r, s.at)
			case a.kind == 'e':
				next.flags &^= bit
			case a.kind == 'c':
				next.flags &^= bit
				for p := range all { // all its waits of the meeting are over
					if s.at[p] <= comes[p][a.meet] { // it has signalled to nobody
						return fmt.Sprintf("rank %d passes meeting %d before rank %d comes: %v", r,
							a.meet, p, s.at)
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
		for _, calls := range [][]met{
			{{kind: backend.AllReduce, rounds: 1}},
			{{kind: backend.AllReduce, rounds: 1}, {kind: backend.AllReduce, rounds: 1}},
			{{kind: backend.AllReduce, rounds: 2}, {kind: backend.AllReduce, rounds: 1}},
			{{kind: backend.ReduceScatter, rounds: 1}},
			{{kind: backend.AllGather, rounds: 1}},
			{{kind: backend.AllGather, rounds: 2, elsewhere: true}},
			{{kind: backend.ReduceScatter, rounds: 2}, {kind: backend.AllGather, rounds: 1}},
			{{kind: backend.AllGather, rounds: 1}, {kind: backend.AllReduce, rounds: 1},
				{kind: backend.AllGather, rounds: 1, elsewhere: true}},
		} {
			what := fault(acts(t, size, 3, calls...))
			require.Check(t, what == "", "%d ranks, %v: %s", size, calls, what)
		}
	}
}

// What is proved above is false of meetings that all use the same flags.
func TestMeetingsByOneSetOfFlagsLoseSignals(t *testing.T) {
	for _, size := range []int{2, 3} {
		all := acts(t, size, 2, met{kind: backend.AllReduce, rounds: 1})
		for r := range all {
			var first []uintptr
			i := 0
			for k, a := range all[r] {
				if a.kind == 'f' || a.kind == 'e' {
					continue
				}
				if len(first) < 3*(size-1) {
					first = append(first, a.at)
				}
				all[r][k].at = first[i%(3*(size-1))]
				i++
			}
		}
		require.Check(t, fault(all) != "", "%d ranks: the model finds no fault", size)
	}
}
