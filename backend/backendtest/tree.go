package backendtest

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
)

// tree runs sums in the association [backend.Tree], of operands whose sum depends on the order: or
// shows that all ranks refuse them and go on.
func (s *suite) tree(P int) error {
	return s.bench(P, 65537, func(b *bench) error {
		can := b.comms[0].Capabilities().Tree
		if len(can) == 0 {
			return b.refusesTrees()
		}
		turn := 0
		for _, kind := range []backend.Kind{backend.AllReduce, backend.ReduceScatter,
			backend.Reduce} {
			for _, d := range backend.DTypes() {
				for _, n := range []int{1, 257, 65537} {
					for i, op := range []backend.ReduceOp{backend.Sum, backend.Avg} {
						turn++
						if s.Unsupported(kind, d, op) || !s.full && (turn+i)%3 > 0 {
							continue
						}
						_, count := divide(kind, even, n, P, nil)
						what := backend.Collective{Kind: kind, Op: op, Association: backend.Tree,
							Root: P / 2, Algorithm: algorithms[turn%len(algorithms)]}
						t := newTrial(what, d, P, count, uneven, uint64(turn)).expect()
						t.unsupported = s.Tree != nil && !s.Tree(kind, d, P)
						if kind == backend.AllReduce && t.unsupported == slices.Contains(can, d) {
							return fmt.Errorf("capabilities have %v as the types that are added "+
								"in a tree: %v of %v is an exception", can, what, d)
						}
						t.inPlace, t.offset, t.where = turn%2 == 0, turn%3, wheres[turn%len(wheres)]
						if err := b.run(t, turn%4 < 2); err != nil {
							return err
						}
						if err := t.depends(P, n); err != nil {
							return err
						}
					}
				}
			}
		}
		return nil
	})
}

// branches runs sums of which ranks have several branches: or shows that all ranks refuse them.
func (s *suite) branches(P int) error {
	return s.bench(P, 3*65537, func(b *bench) error {
		caps := b.comms[0].Capabilities()
		for i, terms := range []int{P, P + 1, 2*P + 1, 3*P - 1, 4 * P, 5*P + 2, 7*P - 3} {
			for k, n := range []int{0, 1, 257, 4099, 65537} {
				turn := i + k
				d := []backend.DType{backend.F32, backend.F64, backend.I32}[turn%3]
				if s.Unsupported(backend.AllReduce, d, backend.Sum) || !s.full && turn%2 > 0 {
					continue
				}
				splits := backend.Even(max(terms, P), P)
				if turn%4 > 1 { // as uneven as can be
					splits = slices.Repeat([]int{1}, P)
					splits[turn%P] += max(terms, P) - P
				}
				what := backend.Collective{Kind: backend.AllReduce, Association: backend.Tree,
					Splits: splits, Algorithm: algorithms[turn%len(algorithms)]}
				for r := range P {
					n = min(n, 3*65537/held(what, r))
				}
				t := newTrial(what, d, P, n, uneven, uint64(turn)).expect()
				t.unsupported = !caps.Branches || !slices.Contains(caps.Tree, d)
				t.inPlace, t.offset, t.where = turn%2 == 0, turn%3, wheres[turn%len(wheres)]
				if err := b.run(t, turn%4 < 2); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// depends returns an error if the results of a trial would be the same in rank order, so that it
// shows nothing. Up to three ranks, they are.
func (t *trial) depends(P, n int) error {
	if !t.dtype.Float() || P < 4 || n < 257 {
		return nil
	}
	inOrder := t.what
	inOrder.Association = backend.InRankOrder
	want := expected(inOrder, P, t.count, t.dtype, t.srcs)
	if bytes.Equal(join(want), join(t.wants)) {
		return fmt.Errorf("%v of %d %v has the same sum in rank order", t.what, t.count, t.dtype)
	}
	return nil
}

// refusesTrees shows that a sum in a tree is refused by all ranks, and is no end.
func (b *bench) refusesTrees() error {
	t := newTrial(backend.Collective{Kind: backend.AllReduce, Association: backend.Tree},
		backend.F32, b.comms[0].Size(), 8, integers, 1)
	t.unsupported = true
	if err := b.run(t, false); err != nil {
		return err
	}
	t = newTrial(backend.Collective{Kind: backend.AllReduce}, backend.F32, b.comms[0].Size(), 8,
		integers, 1).expect()
	if err := b.run(t, false); err != nil {
		return fmt.Errorf("after a sum in a tree: %w", err)
	}
	return nil
}
