package lower

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Solver is how variables change at the end of a step, and what all of them have in common.
type Solver struct {
	Updates []Update
	// Accumulation is how gradients of several runs are added up before the updates.
	Accumulation Accumulation
	// Scale is what the sum of all runs and ranks is multiplied by; 0 is 1.
	Scale float64
	// Limit bounds the norm of all gradients together; 0 for no bound. With a norm that is not
	// finite, no update changes anything.
	Limit float64
	// Parts says that ranks have parts of the variables: the norm covers all, and the operation
	// [Squares] adds up the ranks' sums of squares.
	Parts bool
}

// Update is how a variable changes at the end of each run: a step of a solver, or another value.
type Update struct {
	Input    int   // the variable
	Gradient ir.ID // of the program, or the value that the variable gets if there is no Rule
	Kept     int   // how many vectors like the variable are kept from run to run
	// Bucket says with what other gradients ranks exchange this one, in one call. Buckets have the
	// numbers 1, 2 and so on, in the order in which they leave; 0 is for gradients that stay.
	Bucket int
	// Half says that ranks exchange the gradient in BF16: the step that computes it rounds it. Not
	// with shards, nor with several runs.
	Half bool
	// Shard is what this rank updates of the variable, nil for all of it: see [Shard].
	Shard *Shard
	// Lookups says what ranks exchange besides in place of a part of the gradient, nil for nothing.
	// Not with shards, nor with several runs.
	Lookups *Lookups
	// Uncounted gradients are the same on several ranks, of which another one counts them in the
	// norm of [Solver.Parts].
	Uncounted bool
	// Updates without a Rule have nothing else, and no others may be beside them.
	Rule Rule
}

// Rule adds the update of one element to a program: what becomes of w and of kept. Settings are
// numbers that are bound before each run.
type Rule func(p *fuse.Program, w, dw fuse.Value, kept []fuse.Value,
	setting func(i int) fuse.Value) (fuse.Value, []fuse.Value, error)

// Shard is what one rank of several updates of a variable, and keeps vectors for: the elements in
// row-major order from number From up to To, which may be none. The ranks divide each bucket. Its
// gradients are reduce-scattered, each rank updates its shard where its gradients come back, and an
// all-gather gives all ranks the whole variables: ZeRO (Rajbhandari et al., arXiv:1910.02054).
//
// So every element has one rank that updates it, from the gradient which an all-reduce would give
// all: the variables have the bits of training without shards.
type Shard struct {
	From, To int
	// The bucket has Ranks chunks of Chunk elements, of which this rank has number Rank. The
	// variable's are those from number First on.
	Chunk, Rank, Ranks, First int
	// Placed says that the bucket is in the arena while it is in use, and not in memory of its own:
	// gradients until they are scattered, variables while they are gathered. Not with several runs.
	Placed bool
	// FullyShard says that between its uses a rank keeps only its shard of the variable, as in
	// FSDP. The ranks gather a bucket of such variables in the arena before they are read, and
	// updates write the shards.
	FullyShard bool
	// Half says that a bucket of fully sharded variables is gathered in BF16, which each
	// rank makes of its shard: nothing else reads these variables ([Halved]).
	Half bool
	// Persistent says that such a bucket is gathered once in a run, and stays when others are read.
	Persistent bool
	// Mirrored says that an all-reduce leaves whole gradients on all ranks, and another rank
	// updates the same elements. Unless the variable is fully sharded, this rank has a copy of
	// these, the vector of the variable behind those that are kept, and updates that: between runs
	// the caller gives all ranks the whole variable. Not with lookups.
	Mirrored bool
}

// Span is elements From up to To of a value, in row-major order.
type Span struct{ From, To int }

// Divides reports whether ranks scatter a gradient, and gather the variable where all have it.
func (s *Shard) Divides() bool { return s != nil && !s.Mirrored }

// Copied reports whether a rank updates a copy of its shard.
func (s *Shard) Copied() bool { return s != nil && s.Mirrored && !s.FullyShard }

// Unsharded returns the dtype in which a bucket of variables of a dtype is gathered.
func (s *Shard) Unsharded(d backend.DType) backend.DType {
	if s != nil && s.Half {
		return backend.BF16
	}
	return d
}

// FullySharded reports whether a rank keeps only its shard of a variable, and gathers it.
func (s *Shard) FullySharded() bool { return s != nil && s.FullyShard }

// Empty reports whether other ranks update all of a variable.
func (s *Shard) Empty() bool { return s != nil && s.From == s.To }
