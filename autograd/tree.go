package autograd

import (
	"fmt"
	"math/bits"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/sumtree"
)

// TreeShare returns which of n micro-batches a rank runs in a step with [WithTree]: share of them,
// from number first on. Shares differ by at most one, and the first ranks have the larger ones.
//
// Errors: ErrArgument unless every rank has a micro-batch.
func TreeShare(n, rank, ranks int) (first, share int, err error) {
	if rank < 0 || rank >= ranks || n < ranks {
		return 0, 0, fmt.Errorf("%w: %d micro-batches for rank %d of %d: each needs at least one",
			backend.ErrArgument, n, rank, ranks)
	}
	shares := backend.Even(n, ranks)
	for _, before := range shares[:rank] {
		first += before
	}
	return first, shares[rank], nil
}

// TreeMean returns the mean of numbers of micro-batches, such as their losses: those of rank 0 come
// first. It is collective. Numbers are added in float64 in the
// tree of [WithTree], so that the mean is bitwise identical on any number of ranks.
//
// Cost: one all-gather, or two for many numbers. Errors come from the communicator;
// ErrArgument without numbers.
func TreeMean(comm backend.Communicator, numbers []float64) (mean float64, err error) {
	if err := backend.Given("autograd.TreeMean", "comm", comm); err != nil {
		return 0, err
	}
	if len(numbers) == 0 {
		err = fmt.Errorf("%w: no numbers", backend.ErrArgument)
	}
	var notes [][]float64
	if err == nil {
		notes, err = told(comm, group.FramedOver(backend.Label(comm, backend.ForMean)), numbers)
	}
	if err != nil {
		return 0, onRank(comm, "tree mean", err)
	}
	all := slices.Concat(notes...)
	n := len(all)
	for ; len(all) > 1; all = all[:(len(all)+1)/2] {
		for i := 0; i < len(all); i += 2 {
			all[i/2] = all[i]
			if i+1 < len(all) {
				all[i/2] += all[i+1]
			}
		}
	}
	return all[0] / float64(n), nil
}

// tree is how the gradients of micro-batches are added; nil without WithTree.
type tree struct {
	all      int   // micro-batches of a step
	branches []int // how many micro-batches the branches have that this rank adds up
	most     int   // branches of a rank
	splits   []int // the shares of all ranks; nil if each is one branch, all of the same size
}

// newTree returns the tree of n micro-batches.
func newTree(comm backend.Communicator, n int, params []*param) (*tree, error) {
	P := comm.Size()
	first, share, err := TreeShare(n, comm.Rank(), P)
	if err != nil {
		return nil, fmt.Errorf("WithTree: %w", err)
	}
	t := &tree{all: n, branches: sumtree.Branches(nil, first, share, n), most: 1}
	if shares := backend.Even(t.all, P); P > 1 && (t.all%P > 0 || bits.OnesCount(uint(share)) > 1) {
		t.splits = shares
	}
	what := backend.Collective{Kind: backend.AllReduce, Association: backend.Tree, Splits: t.splits}
	for r := range t.splits {
		t.most = max(t.most, len(what.Branches(nil, r)))
	}
	can := comm.Capabilities()
	for _, p := range params {
		if P > 1 && (!slices.Contains(can.Tree, p.dtype) || t.splits != nil && !can.Branches) {
			return nil, fmt.Errorf("WithTree: %w", backend.RefuseTree(comm, what, p.dtype))
		}
	}
	return t, nil
}
