package layers

import (
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Layout is how the ranks of a communicator divide the work. See the package comment.
type Layout struct {
	Sizes
	// the ranks that add up gradients: those with this rank's part of the weights
	Data    backend.Communicator
	Replica int // the number of this rank's samples among the DP parts of a batch
	groups  [2]backend.Communicator
}

// Sizes are the numbers of ranks among which samples, positions and weights are divided.
type Sizes struct{ DP, SP, TP int }

// String returns "dp2xsp2xtp1".
func (s Sizes) String() string { return fmt.Sprintf("dp%dxsp%dxtp%d", s.DP, s.SP, s.TP) }

// NewLayout divides the ranks of a communicator. data, sequence and tensor are numbers of ranks,
// whose product is the number of all ranks; data may be 0 for all ranks that the others leave. It
// is collective. Close the layout before comm.
//
// Errors: [backend.ErrArgument] if the numbers do not fit; those of Split.
func NewLayout(comm backend.Communicator, data, sequence, tensor int) (*Layout, error) {
	if err := backend.Given("layers.NewLayout", "comm", comm); err != nil {
		return nil, err
	}
	ranks := comm.Size()
	if data == 0 && sequence > 0 && tensor > 0 {
		data = ranks / (sequence * tensor)
	}
	if data < 1 || sequence < 1 || tensor < 1 || data*sequence*tensor != ranks {
		return nil, fmt.Errorf("layers: %w: a layout of %d x %d x %d (data x sequence x tensor; "+
			"data 0 is what the others leave) for %d ranks: use numbers whose product is %d",
			backend.ErrArgument, data, sequence, tensor, ranks, ranks)
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
