package proof

import (
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/plan"
)

// What the types of a plan say, read without its functions.

// memory is what a run finds that is not the arena's: a variable, a vector of a solver, a sum of
// runs.
type memory struct {
	kind          plan.Kind
	index, vector int
}

// memoryOf says which memory a buffer is, if it is not the arena's.
func memoryOf(b *plan.Buffer) memory { return memory{b.Kind, b.Index, b.Vector} }

// memoryOfLeaf says in which memory a value lies that comes from outside.
func memoryOfLeaf(op ir.Op) memory {
	switch op := op.(type) {
	case ir.Input:
		return memory{plan.Input, op.Index, 0}
	case ir.State:
		return memory{plan.State, op.Input, op.Vector}
	case ir.Setting:
		return memory{plan.Setting, op.Index, 0}
	case ir.PartialSum:
		if op.Inner {
			return memory{plan.PartialSum, op.Index, op.Vector}
		}
		return memory{plan.Gradient, op.Index, op.Vector}
	}
	return memory{plan.Constant, op.(ir.Constant).Index, 0}
}

// placed reports whether a buffer has a place, so that what overlaps it is known.
func placed(b *plan.Buffer) bool {
	return b.Kind == plan.Arena || b.Kind == plan.FullBucket || b.Within > 0
}

// elementsOf returns the elements of a variable of n that a rank updates: those in its chunk.
func elementsOf(s *lower.Shard, n int) (from, to int) {
	first, end := s.Rank*s.Chunk-s.First, (s.Rank+1)*s.Chunk-s.First
	return min(max(first, 0), n), min(max(end, 0), n)
}
