package backendtest

import (
	"fmt"
	"math/rand/v2"

	"github.com/euryale-ml/euryale/backend"
)

// rows runs all-to-alls that change the axis along which a tensor is distributed, without copies of
// it, where the communicator offers that, and shows that it refuses the others and goes on.
func (s *suite) rows(P int) error {
	return s.bench(P, 1<<16, func(b *bench) error {
		rng := rand.New(rand.NewPCG(23, uint64(P)))
		trials := 24
		if s.full {
			trials = 400
		}
		for turn := range trials {
			d := backend.DTypes()[turn%len(backend.DTypes())]
			what, count := redistribution(rng, P)
			if s.Unsupported(what.Kind, d, what.Op) {
				continue
			}
			t := newTrial(what, d, P, count, uneven, uint64(turn)).expect()
			t.unsupported = !b.comms[0].Capabilities().RunsRows(what, d, count)
			t.offset, t.where = turn%3, wheres[turn%len(wheres)]
			if err := b.run(t, turn%4 < 2); err != nil {
				return fmt.Errorf("%v of %d %v with splits %v in rows %v: %w", what, count, d,
					what.Splits, *what.Rows, err)
			}
		}
		return nil
	})
}

// redistribution returns a random AllToAll of a tensor [a, b, c, d, e] that is distributed along b,
// or d, and then along the other one, and its count. Rank r has join[r] of the first and gets
// cut[r] of the second.
func redistribution(rng *rand.Rand, P int) (c backend.Collective, count int) {
	c = backend.Collective{Kind: backend.AllToAll, Rows: &backend.Rows{Src: make([]int, P),
		Dst: make([]int, P)}}
	a, between, inner := 1+rng.IntN(3), 1+rng.IntN(3), 1+rng.IntN(40)
	if rng.IntN(2) == 0 {
		inner = 8 * (1 + rng.IntN(5)) // whole units
	}
	uneven, scattersFirst := rng.IntN(2) == 0, rng.IntN(2) == 0
	cut, join := make([]int, P), make([]int, P)
	for r := range P {
		cut[r], join[r] = 1+rng.IntN(3), 1+rng.IntN(3)
		if !uneven {
			cut[r], join[r] = cut[0], join[0]
		}
		if uneven && rng.IntN(5) == 0 {
			cut[r] = 0
		}
	}
	for s := range P {
		c.Rows.Src[s], c.Rows.Dst[s] = a, max(1, a*cut[s]*between)
		if !scattersFirst {
			c.Rows.Src[s], c.Rows.Dst[s] = a*join[s]*between, a
		}
		for r := range P {
			n := a * join[s] * between * cut[r] * inner
			if count += n; uneven {
				c.Splits = append(c.Splits, n)
			}
		}
	}
	if !uneven {
		count /= P * P
	}
	return c, count
}
