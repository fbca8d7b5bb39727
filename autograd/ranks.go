package autograd

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/residence"
)

// Agree returns an error on every rank unless all ranks pass the same description, which may have
// several lines, and none has a problem. The error names a rank and its problem, or the first line
// that differs, as a [backend.ErrMismatch]. It is collective; a rank with a problem takes part, so
// that no rank waits for it. Cost: an all-gather of 32 bytes if ranks agree.
func Agree(comm backend.Communicator, description string, problem error) error {
	if err := backend.Given("autograd.Agree", "comm", comm); err != nil {
		return errors.Join(problem, err)
	}
	err := residence.Bound(comm.Device(), func() error {
		_, err := group.Alike(comm, description, nil, problem)
		return err
	})
	if err != nil && err != problem {
		return named(comm, err)
	}
	return err
}

// Mean replaces each number by its mean over all ranks. It is collective; all ranks pass the
// same number of arguments:
//
//	loss, accuracy := ...                             // of this rank
//	err := autograd.Mean(comm, &loss, &accuracy)      // of all
//
// Ranks have equal weights, however many samples each has seen: for a mean over samples use [Sum].
//
// All ranks get bitwise identical results: numbers are added in rank order, in float64,
// uncompressed. Cost: one all-gather of 8 bytes for each number.
//
// Errors come from the communicator; the numbers are unchanged then.
func Mean(comm backend.Communicator, numbers ...*float64) error {
	sums, err := sum(comm, backend.ForMean, "Mean", numbers)
	for i, s := range sums {
		*numbers[i] = s / float64(comm.Size())
	}
	return err
}

// Sum replaces each number by its sum over all ranks, like [Mean]. For shares of different sizes,
// the mean over all samples is a quotient of two sums:
//
//	err := autograd.Sum(comm, &loss, &samples)
//	loss /= samples
func Sum(comm backend.Communicator, numbers ...*float64) error {
	sums, err := sum(comm, backend.ForSum, "Sum", numbers)
	for i, s := range sums {
		*numbers[i] = s
	}
	return err
}

// Gather returns the numbers of all ranks, which pass the same number of them. It is collective.
// Cost: one all-gather of 8 bytes for each number. Errors come from the communicator.
func Gather(comm backend.Communicator, numbers ...float64) ([][]float64, error) {
	if err := backend.Given("autograd.Gather", "comm", comm); err != nil {
		return nil, err
	}
	return exchange(comm, backend.ForGather, "gather", numbers)
}

// Any reports on all ranks whether a condition holds on any of them. It is collective. Ranks use it
// to take the same decision. To stop because one of them was told to, there is [Stopped].
//
// A condition on values that are the same on all ranks, such as a loss from [Mean], needs no Any.
// Cost: one all-gather of 8 bytes. Errors come from the communicator.
func Any(comm backend.Communicator, condition bool) (bool, error) {
	ranks := 0.0
	if condition {
		ranks = 1
	}
	sums, err := sum(comm, backend.ForAny, "Any", []*float64{&ranks})
	return err == nil && sums[0] > 0, err
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
	all, err := exchange(comm, backend.ForStopped, "stopped", []float64{float64(exit.By(ctx))})
	if err != nil {
		return nil, err
	}
	if by := slices.Max(slices.Concat(all...)); by > 0 {
		stop = exit.Stopped(by)
	}
	return stop, nil
}

// sum returns the sums over all ranks, added in rank order, for a function of the package.
func sum(comm backend.Communicator, purpose backend.Purpose, function string,
	numbers []*float64) ([]float64, error) {
	err := backend.Given("autograd."+function, "comm", comm, "numbers", numbers)
	if err != nil {
		return nil, err
	}
	mine, sums := make([]float64, len(numbers)), make([]float64, len(numbers))
	for i, n := range numbers {
		mine[i] = *n
	}
	all, err := exchange(comm, purpose, strings.ToLower(function), mine)
	if err != nil {
		return nil, err
	}
	for _, theirs := range all {
		for i, n := range theirs {
			sums[i] += n
		}
	}
	return sums, nil
}

// exchange returns the numbers of all ranks.
func exchange(comm backend.Communicator, purpose backend.Purpose, what string,
	numbers []float64) ([][]float64, error) {
	if len(numbers) == 0 {
		return make([][]float64, comm.Size()), nil
	}
	all, err := told(comm, group.OverComm(backend.Label(comm, purpose)), numbers)
	return all, onRank(comm, what, err)
}

// told returns the numbers of all ranks by a gatherer of comm.
func told(comm backend.Communicator, by group.Gatherer, numbers []float64) (all [][]float64,
	err error) {
	var notes [][]byte
	err = residence.Bound(comm.Device(), func() (err error) {
		notes, err = by(backend.Of(numbers).Bytes())
		return err
	})
	for _, note := range notes {
		theirs := make([]float64, len(note)/8)
		copy(backend.Of(theirs).Bytes(), note)
		all = append(all, theirs)
	}
	return all, err
}

// prefix is what errors of the package begin with.
const prefix = "autograd: "

// wrapped is fmt.Errorf for an error that may come from this package: what it says of the package,
// the rank and the bucket appears only once.
func wrapped(format string, args ...any) error { return once{fmt.Errorf(format, args...)} }

// onRank says on which rank a call has failed, if it has.
func onRank(comm backend.Communicator, what string, err error) error {
	if err == nil {
		return nil
	}
	return wrapped("rank %d of %s: %s: %w", comm.Rank(), comm.Name(), what, err)
}

func named(comm backend.Communicator, err error) error {
	if errors.As(err, new(*backend.Error)) {
		return err
	}
	return wrapped("rank %d of %s: %w", comm.Rank(), comm.Name(), err)
}

type once struct{ error }

func (e once) Unwrap() error { return e.error }

func (e once) Error() string {
	text := strings.ReplaceAll(e.error.Error(), prefix, "")
	said := map[string]bool{}
	var parts []string
	for part := range strings.SplitSeq(text, ": ") {
		place := strings.HasPrefix(part, "rank ") || strings.HasPrefix(part, "bucket ")
		if place && said[part] {
			continue
		}
		said[part], parts = true, append(parts, part)
	}
	return prefix + strings.Join(parts, ": ")
}

// notices reports what a user should know, each text once: see [WithNotice].
type notices struct {
	notice func(text string) // nil on ranks that leave it to the first
	said   map[string]bool
}

func (n *notices) say(text string) {
	if n.notice != nil && !n.said[text] {
		n.said[text] = true
		n.notice(text)
	}
}

// item is a part of the model that ranks compare.
type item struct {
	name  string
	bytes func() ([]byte, error)
}

// alikeOn returns an error unless items are bitwise identical on all ranks of a communicator. A
// rank with a problem, or whose items cannot be read, takes part.
func alikeOn(comm backend.Communicator, all []item, problem error) error {
	const size = 8 // of a hash
	mine := make([]byte, size*len(all))
	var hashing errgroup.Group
	hashing.SetLimit(runtime.GOMAXPROCS(0))
	for i, p := range all {
		value, err := p.bytes()
		problem = cmp.Or(problem, err)
		if comm.Size() == 1 {
			continue // with nothing to compare
		}
		hashing.Go(func() error {
			sum := sha256.Sum256(value)
			copy(mine[size*i:], sum[:size])
			return nil
		})
	}
	_ = hashing.Wait() // nothing fails
	notes, err := group.Alike(comm, "", mine, problem)
	if err != nil {
		return err
	}
	for r, theirs := range notes {
		for i, p := range all {
			at := size * i
			if !bytes.Equal(theirs[at:at+size], notes[0][at:at+size]) {
				return fmt.Errorf("%w: %s is not the same on rank %d as on rank 0",
					backend.ErrMismatch, p.name, r)
			}
		}
	}
	return nil
}
