package autograd

import (
	"context"
	"encoding/binary"
	"math"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/internal/residence"
)

// Mean replaces each number by its mean over all ranks. It is collective; all ranks pass the
// same number of arguments:
//
//	loss, accuracy := ...                             // of this rank
//	err := autograd.Mean(comm, &loss, &accuracy)      // of all
//
// Ranks have equal weights, however many samples each has seen: for a mean over samples use [Sum].
//
// All ranks get the same bits: numbers are added in rank order, in float64, uncompressed. Cost: one
// all-gather of 8 bytes for each number.
//
// Errors come from the communicator; the numbers are unchanged then.
func Mean(comm backend.Communicator, numbers ...*float64) error {
	if err := backend.Given("autograd.Mean", "comm", comm, "numbers", numbers); err != nil {
		return err
	}
	sums, err := sum(comm, backend.ForMean, numbers)
	if err != nil {
		return wrapped("rank %d of %s: mean: %w", comm.Rank(), comm.Name(), err)
	}
	for i, n := range numbers {
		*n = sums[i] / float64(comm.Size())
	}
	return nil
}

// Sum replaces each number by its sum over all ranks, like [Mean]. For shares of different sizes,
// the mean over all samples is a quotient of two sums:
//
//	err := autograd.Sum(comm, &loss, &samples)
//	loss /= samples
func Sum(comm backend.Communicator, numbers ...*float64) error {
	if err := backend.Given("autograd.Sum", "comm", comm, "numbers", numbers); err != nil {
		return err
	}
	sums, err := sum(comm, backend.ForSum, numbers)
	if err != nil {
		return wrapped("rank %d of %s: sum: %w", comm.Rank(), comm.Name(), err)
	}
	for i, n := range numbers {
		*n = sums[i]
	}
	return nil
}

// Gather returns the numbers of all ranks, which pass the same number of them. It is collective.
// Cost: one all-gather of 8 bytes for each number. Errors come from the communicator.
func Gather(comm backend.Communicator, numbers ...float64) ([][]float64, error) {
	if err := backend.Given("autograd.Gather", "comm", comm); err != nil {
		return nil, err
	}
	all, err := exchange(comm, backend.ForGather, numbers)
	if err != nil {
		return nil, wrapped("rank %d of %s: gather: %w", comm.Rank(), comm.Name(), err)
	}
	return all, nil
}

// Any reports on all ranks whether a condition holds on any of them. It is collective. Ranks use it
// to take the same decision. To stop because one of them was told to, there is [Stopped].
//
// A condition on values that are the same on all ranks, such as a loss from [Mean], needs no Any.
// Cost: one all-gather of 8 bytes. Errors come from the communicator.
func Any(comm backend.Communicator, condition bool) (bool, error) {
	if err := backend.Given("autograd.Any", "comm", comm); err != nil {
		return false, err
	}
	ranks := 0.0
	if condition {
		ranks = 1
	}
	sums, err := sum(comm, backend.ForAny, []*float64{&ranks})
	if err != nil {
		return false, wrapped("rank %d of %s: any: %w", comm.Rank(), comm.Name(), err)
	}
	return sums[0] > 0, nil
}

// Stopped is for training loops without package fit. It returns the same on all ranks: why they
// stop, once ctx has ended on one of them, as a context of signal.NotifyContext does; nil while
// they go on. It is collective. Ranks then save, and return the error stop, which is a
// fit.ErrStopped: the status of euryale.ExitStatus then says that the training is not finished.
//
//	stop, err := autograd.Stopped(ctx, comm)
//
// Cost: one all-gather of 8 bytes. The error err comes from the communicator.
func Stopped(ctx context.Context, comm backend.Communicator) (stop, err error) {
	if err := backend.Given("autograd.Stopped", "ctx", ctx, "comm", comm); err != nil {
		return nil, err
	}
	all, err := exchange(comm, backend.ForStopped, []float64{float64(exit.By(ctx))})
	if err != nil {
		return nil, wrapped("rank %d of %s: stopped: %w", comm.Rank(), comm.Name(), err)
	}
	if by := slices.Max(slices.Concat(all...)); by > 0 {
		stop = exit.Stopped(by)
	}
	return stop, nil
}

// sum returns the sums over all ranks, added in rank order.
func sum(comm backend.Communicator, purpose backend.Purpose, numbers []*float64) ([]float64,
	error) {
	mine := make([]float64, len(numbers))
	for i, n := range numbers {
		mine[i] = *n
	}
	all, err := exchange(comm, purpose, mine)
	sums := make([]float64, len(numbers))
	for _, theirs := range all {
		for i, n := range theirs {
			sums[i] += n
		}
	}
	return sums, err
}

// exchange returns the numbers of all ranks.
func exchange(comm backend.Communicator, purpose backend.Purpose, numbers []float64) ([][]float64,
	error) {
	all := make([][]float64, comm.Size())
	if len(numbers) == 0 {
		return all, nil
	}
	note := make([]byte, 0, 8*len(numbers))
	for _, n := range numbers {
		note = binary.LittleEndian.AppendUint64(note, math.Float64bits(n))
	}
	var notes [][]byte
	err := residence.Bound(comm.Device(), func() (err error) {
		notes, err = gather(backend.Label(comm, purpose), note)
		return err
	})
	for r, note := range notes {
		all[r] = make([]float64, len(numbers))
		for i := range all[r] {
			all[r][i] = math.Float64frombits(binary.LittleEndian.Uint64(note[8*i:]))
		}
	}
	return all, err
}
