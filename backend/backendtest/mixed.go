package backendtest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
)

// mixedAcrossQueues is acrossQueues with random calls of many kinds and lengths on a few
// operands. Kernels make queues late, now and then, so that a call which is not ordered
// after one that it shares memory with overtakes it.
func (s *suite) mixedAcrossQueues(P int) error {
	const operands, chunk, calls = 5, 40, 24
	long := 1 << 17
	if proctest.Race { // which makes kernels slow
		long >>= 3
	}
	return s.ranks(P, func(c backend.Communicator) error {
		return queues(c, 3, func(qs []backend.Queue) error {
			return s.vectors(c, operands, chunk*P/2, func(vs []*vector) error {
				return s.vectors(c, len(qs), long, func(busy []*vector) error {
					for round := range s.times(60) {
						m := &mixed{c: c, vs: vs, qs: qs, busy: busy,
							rng: rand.New(rand.NewPCG(uint64(round), 3)), late: rand.New(
								rand.NewPCG(uint64(round), uint64(c.Rank())))}
						if err := m.round(calls); err != nil {
							return fmt.Errorf("round %d: %w, after %v", round, err, m.started)
						}
					}
					return nil
				})
			})
		})
	})
}

// mixed is one round of it: operands as they should be on all ranks, and what was started.
type mixed struct {
	c       backend.Communicator
	vs      []*vector
	qs      []backend.Queue
	busy    []*vector     // operands of kernels that make queues late
	rng     *rand.Rand    // the same on every rank
	late    *rand.Rand    // this rank's
	want    [][][]float32 // by operand and rank
	started []string
}

// extent is where a call reads or writes.
type extent struct{ operand, lo, n int }

func (m *mixed) round(calls int) error {
	if err := m.fill(); err != nil {
		return err
	}
	var works []backend.Work
	for range calls {
		w, err := m.start()
		if err != nil {
			return err
		}
		works = append(works, w)
	}
	for _, w := range works {
		if err := w.Join(context.Background()); err != nil {
			return err
		}
	}
	return m.check()
}

func (m *mixed) fill() error {
	m.want = make([][][]float32, len(m.vs))
	for i, v := range m.vs {
		for range m.c.Size() {
			x := make([]float32, v.bytes.As(backend.F32).Len())
			for j := range x {
				x[j] = float32(m.rng.IntN(5))
			}
			m.want[i] = append(m.want[i], x)
		}
		want := backend.Of(m.want[i][m.c.Rank()])
		if err := v.copyAndWait(v.bytes.As(backend.F32), want); err != nil {
			return err
		}
	}
	return nil
}

// start starts a random call on a random queue.
func (m *mixed) start() (backend.Work, error) {
	what, dst, src := m.choose()
	m.apply(what, dst, src)
	at := m.rng.IntN(len(m.qs))
	m.started = append(m.started, fmt.Sprintf("%v of %v to %v on %d", what, src, dst, at))
	if b := m.busy[at].bytes.As(backend.F32); m.late.IntN(6) == 0 {
		for range 8 {
			if err := m.qs[at].Divide(b, b, 1); err != nil {
				return nil, err
			}
		}
	}
	return m.c.Start(m.qs[at], what, m.buffer(dst), m.buffer(src))
}

func (m *mixed) buffer(p extent) backend.Buffer {
	return m.vs[p.operand].bytes.As(backend.F32).Slice(p.lo, p.lo+p.n)
}

// choose returns a call. Where a sum could become too large to be exact, it is a maximum.
func (m *mixed) choose() (what backend.Collective, dst, src extent) {
	P, whole := m.c.Size(), len(m.want[0][0])
	what = []backend.Collective{
		{Kind: backend.AllReduce}, {Kind: backend.AllReduce}, {Kind: backend.AllReduce,
			Op: backend.Max},
		{Kind: backend.ReduceScatter}, {Kind: backend.AllGather}, {Kind: backend.Broadcast,
			Root: m.rng.IntN(P)},
	}[m.rng.IntN(6)]
	count := 1 + m.rng.IntN(whole/P)
	if m.rng.IntN(4) == 0 {
		count = 1 // fewer elements than ranks, where there are no chunks
	}
	dst, src = extent{m.rng.IntN(len(m.vs)), 0, count}, extent{m.rng.IntN(len(m.vs)), 0, count}
	switch what.Kind {
	case backend.ReduceScatter:
		src.n *= P
	case backend.AllGather:
		dst.n *= P
	}
	if src.n != dst.n && dst.operand == src.operand {
		dst.operand = (src.operand + 1) % len(m.vs)
	}
	src.lo = m.rng.IntN(whole - src.n + 1)
	if dst.lo = m.rng.IntN(whole - dst.n + 1); dst.operand == src.operand {
		dst.lo = src.lo // in place
	}
	const exact = 1 << 24
	for _, x := range m.want[src.operand] {
		if what.Op == backend.Sum && slices.Max(x) > exact/float32(P) {
			what.Op = backend.Max
		}
	}
	if what.Kind == backend.AllGather || what.Kind == backend.Broadcast {
		what.Op = backend.Sum
	}
	return what, dst, src
}

// apply does to the operands of all ranks what a call should.
func (m *mixed) apply(what backend.Collective, dst, src extent) {
	in := make([][]float32, m.c.Size())
	for r := range in {
		in[r] = slices.Clone(m.want[src.operand][r][src.lo : src.lo+src.n])
	}
	total := slices.Clone(in[0])
	for _, x := range in[1:] {
		for i, v := range x {
			if what.Op == backend.Max {
				total[i] = max(total[i], v)
			} else {
				total[i] += v
			}
		}
	}
	for r := range in {
		out := m.want[dst.operand][r][dst.lo : dst.lo+dst.n]
		switch what.Kind {
		case backend.AllReduce:
			copy(out, total)
		case backend.ReduceScatter:
			copy(out, total[r*dst.n:])
		case backend.AllGather:
			copy(out, slices.Concat(in...))
		case backend.Broadcast:
			copy(out, in[what.Root])
		}
	}
}

func (m *mixed) check() error {
	for i, v := range m.vs {
		want := m.want[i][m.c.Rank()]
		got := make([]float32, len(want))
		if err := v.copyAndWait(backend.Of(got), v.bytes.As(backend.F32)); err != nil {
			return err
		}
		for j, g := range got {
			if g != want[j] {
				return fmt.Errorf("element %d of operand %d is %v, want %v", j, i, g, want[j])
			}
		}
	}
	return nil
}
