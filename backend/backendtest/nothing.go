package backendtest

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Nothing lists calls among P ranks in which some ranks have no elements, or all have none: they
// send nothing, receive nothing, or both. Between them are calls in which every rank has some.
// Ranks that have nothing take part all the same, or the calls after them mix.
func Nothing(P int) (calls []backend.Collective) {
	mixed := []backend.Collective{
		{Kind: backend.AllReduce}, {Kind: backend.AllGather}, {Kind: backend.AllToAll},
		{Kind: backend.Broadcast, Root: P - 1}, {Kind: backend.ReduceScatter},
	}
	for i, w := range pairsOfNothing(P) {
		all := backend.Collective{Kind: backend.AllToAll, Splits: make([]int, P*P)}
		for s := range P {
			for r := range P {
				all.Splits[s*P+r] = w(s, r)
			}
		}
		calls = append(calls, all, all, mixed[i%len(mixed)])
	}
	for _, kind := range backend.Kinds() {
		if kind == backend.AllToAll || !chunked(kind) {
			continue
		}
		for i, only := range []int{0, P - 1, P} { // P: nobody has any
			some, others := make([]int, P), make([]int, P)
			for r := range P {
				if some[r] = 3; r != only {
					some[r], others[r] = 0, 3
				}
			}
			for _, splits := range [][]int{some, others} {
				c := backend.Collective{Kind: kind, Splits: splits}
				if kind.Rooted() {
					c.Root = (P - 1) * (i % 2)
				}
				calls = append(calls, c, c, mixed[i%len(mixed)])
			}
		}
	}
	return calls
}

// pairsOfNothing lists what rank s sends to rank r.
func pairsOfNothing(P int) []func(s, r int) int {
	last := P - 1
	some := func(has bool) int {
		if has {
			return 3
		}
		return 0
	}
	return []func(s, r int) int{
		func(s, r int) int { return some(s != last && r != last) },
		func(s, r int) int { return some(s != 0 && r != 0) },
		func(s, _ int) int { return some(s != last) },
		func(_, r int) int { return some(r != last) },
		func(s, _ int) int { return some(s != 0) },
		func(_, r int) int { return some(r != 0) },
		func(s, r int) int { return some(s == 0 && r == last) },
		func(s, r int) int { return some(s == last && r == 0) },
		func(s, r int) int { return some(s == last && r == last) },
		func(s, r int) int { return some(s == r) },
		func(s, r int) int { return some((s+r)%2 == 1) },
		func(int, int) int { return 0 },
	}
}

// nothing runs them one after the other, so that a rank which has nothing may be ahead of the
// others.
func (s *suite) nothing(P int) error {
	var trials []*trial
	for i, c := range Nothing(P) {
		d := []backend.DType{backend.F32, backend.F16, backend.I64}[i%3]
		t := newTrial(c, d, P, 2+i%3, integers, uint64(i)).expect()
		t.unsupported = s.Unsupported(c.Kind, d, backend.Sum)
		trials = append(trials, t)
		if c.Splits == nil { // nobody has any elements of an even chunk
			none := newTrial(c, d, P, 0, integers, uint64(i)).expect()
			none.unsupported = t.unsupported
			trials = append(trials, none)
		}
	}
	return s.bench(P, 64*P, func(b *bench) error {
		return s.each(b.comms, func(c backend.Communicator) error {
			for _, q := range []backend.Queue{nil, b.qs[c.Rank()]} {
				for _, t := range trials {
					if err := t.rank(c, b.ms[c.Rank()], q); err != nil {
						return fmt.Errorf("%v of count %d, splits %v: %w", t.what, t.count,
							t.what.Splits, err)
					}
				}
			}
			return nil
		})
	})
}
