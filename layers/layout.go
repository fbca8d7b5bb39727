package layers

import (
	"errors"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
)

// Layout is how the ranks of a communicator divide the work. See the package comment.
type Layout struct {
	Sizes
	// the ranks that add up gradients: those with this rank's part of the weights
	Data    backend.Communicator
	Replica int // the number of this rank's samples among the DP parts of a batch
	groups  [2]backend.Communicator
}

// Sizes are the numbers of ranks among which samples, positions and weights are sharded.
type Sizes struct{ DP, SP, TP int }

// String returns "dp2xsp2xtp1".
func (s Sizes) String() string { return fmt.Sprintf("dp%dxsp%dxtp%d", s.DP, s.SP, s.TP) }

// NewLayout divides the ranks of a communicator. data, sequence and tensor are numbers of ranks,
// whose product is the number of all ranks; data may be 0 for all ranks that the others leave. It
// is collective. Close the layout before comm.
//
// Errors, on all ranks: [backend.ErrArgument] if the numbers do not fit, and
// [backend.ErrMismatch] if a rank has others than rank 0; those of Split.
func NewLayout(comm backend.Communicator, data, sequence, tensor int) (*Layout, error) {
	if err := backend.Given("layers.NewLayout", "comm", comm); err != nil {
		return nil, err
	}
	ranks := comm.Size()
	if data == 0 && sequence > 0 && tensor > 0 {
		data = ranks / (sequence * tensor)
	}
	if err := sameSizes(comm, Sizes{data, sequence, tensor}); err != nil {
		return nil, fmt.Errorf("layers: %w", err)
	}
	rank := comm.Rank()
	t, s, d := rank%tensor, rank/tensor%sequence, rank/tensor/sequence
	l := &Layout{Sizes: Sizes{data, sequence, tensor}, Replica: d}
	var errs [3]error
	l.Data, errs[0] = comm.Split(t, rank)
	l.groups[Sequence], errs[1] = comm.Split(d*tensor+t, rank)
	l.groups[Tensor], errs[2] = comm.Split(d*sequence+s, rank)
	if err := errors.Join(errs[:]...); err != nil {
		return nil, errors.Join(fmt.Errorf("layers: layout %v: %w", l, err), l.Close())
	}
	return l, nil
}

// sameSizes returns an error on all ranks unless all have the same sizes, whose product is the
// number of ranks.
func sameSizes(comm backend.Communicator, s Sizes) error {
	mine := []int64{int64(s.DP), int64(s.SP), int64(s.TP)}
	all := make([]int64, len(mine)*comm.Size())
	err := group.RunOnHost(comm, backend.Collective{Kind: backend.AllGather}, backend.Of(all),
		backend.Of(mine))
	if err != nil {
		return err
	}
	for r := range comm.Size() {
		if theirs := all[len(mine)*r:][:len(mine)]; !slices.Equal(theirs, all[:len(mine)]) {
			return fmt.Errorf("%w: rank 0 has a layout of %d x %d x %d (data x sequence x "+
				"tensor), and rank %d one of %d x %d x %d: pass the same numbers on all ranks",
				backend.ErrMismatch, all[0], all[1], all[2], r, theirs[0], theirs[1], theirs[2])
		}
	}
	if min(s.DP, s.SP, s.TP) < 1 || s.DP*s.SP*s.TP != comm.Size() {
		return fmt.Errorf("%w: a layout of %d x %d x %d (data x sequence x tensor; data 0 is what "+
			"the others leave) for %d ranks: use numbers whose product is %d", backend.ErrArgument,
			s.DP, s.SP, s.TP, comm.Size(), comm.Size())
	}
	return nil
}

// Comm returns the communicator of this rank's group of a kind.
func (l *Layout) Comm(g Group) backend.Communicator { return l.groups[g] }

// Close closes the communicators of the layout.
func (l *Layout) Close() error {
	var errs []error
	for _, c := range []backend.Communicator{l.Data, l.groups[Sequence], l.groups[Tensor]} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	return errors.Join(errs...)
}

// shareOf returns which part of n things this rank of a group has. If the ranks do not divide n,
// the first ranks have one more.
func (l *Layout) shareOf(g Group, n int) (start, end int) {
	parts := backend.Even(n, l.groups[g].Size())
	for _, m := range parts[:l.groups[g].Rank()] {
		start += m
	}
	return start, start + parts[l.groups[g].Rank()]
}
