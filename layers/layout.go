package layers

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/autograd"
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
	seat    *seat // the Tensor group of an elastic job, nil elsewhere
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

// NewElasticLayout is for the graph of an elastic job (vm.WithElastic) whose ranks form replicas of
// so many tensor ranks each, as many as there are ranks for. The processes of other ranks end, and
// those that take their place wait until there are enough. A process has the same part of the
// weights in all generations, a replacement that of which the fewest are left. All processes call
// it once, before vm.New; it is not collective. Build other graphs, such as one that evaluates, on
// the same layout.
//
// Errors: [backend.ErrArgument] for less than one tensor rank; those of the job, such as one that
// does not begin with a multiple of them.
func NewElasticLayout(ctx context.Context, job autograd.Job, tensor int) (*Layout, error) {
	if err := backend.Given("layers.NewElasticLayout", "ctx", ctx, "job", job); err != nil {
		return nil, err
	}
	if tensor < 1 {
		return nil, fmt.Errorf("layers: NewElasticLayout: %w: %d tensor ranks", backend.ErrArgument,
			tensor)
	}
	part, err := job.Job().Divide(ctx, tensor)
	if err != nil {
		return nil, fmt.Errorf("layers: NewElasticLayout: %w", err)
	}
	l := &Layout{Sizes: Sizes{1, 1, tensor}, Data: autograd.Solo()}
	l.groups = [2]backend.Communicator{autograd.Solo(), autograd.Solo()}
	if tensor > 1 {
		l.seat = &seat{l.Data, part, tensor}
		l.groups[Tensor] = l.seat
	}
	return l, nil
}

// seat is a rank's place in the Tensor group of an elastic job, which has another communicator in
// each generation.
type seat struct {
	backend.Communicator
	part, parts int
}

// Name implements [backend.Communicator].
func (s *seat) Name() string { return "elastic/tensor" }

// Rank implements [backend.Communicator].
func (s *seat) Rank() int { return s.part }

// Size implements [backend.Communicator].
func (s *seat) Size() int { return s.parts }

// Start implements [backend.Communicator].
func (s *seat) Start(q backend.Queue, c backend.Collective, dst, src backend.Buffer) (backend.Work,
	error) {
	if s.Communicator.Size() != s.parts {
		return nil, fmt.Errorf("%w: %v of ranks that are not together: run graphs of the "+
			"layers.NewElasticLayout of vm.WithElastic, in its turns", backend.ErrArgument, c)
	}
	return s.Communicator.Start(q, c, dst, src)
}

// Unwrap implements [backend.Wrapper].
func (s *seat) Unwrap() []backend.Communicator { return []backend.Communicator{s.Communicator} }

// move takes the communicator of a generation.
func (s *seat) move(comm backend.Communicator) { s.Communicator = comm }

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
