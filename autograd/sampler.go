package autograd

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"reflect"
	"slices"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// Sampler decides which samples each rank trains on. All ranks shuffle in the same way, by
// seed and epoch, and each takes its part of every batch. So the batches, as ordered lists of
// samples, are the same for any number of ranks.
type Sampler struct {
	n, batch, first, local int // this rank has local samples of a batch, from the first on
	seed                   uint64
	fill, rest             bool
}

// NewSampler returns the sampler of this rank of a communicator, for n samples and a global batch:
// what all ranks together train on in one step. It is collective: ranks with different numbers
// would train on overlapping shares.
//
// If the batch does not divide n, the remaining samples at the end of an epoch are dropped,
// because the shapes of a Gorgonia graph are fixed. Each epoch drops different ones.
// [Sampler.Fill] completes the last batch instead, and [Sampler.Rest] keeps it.
//
// Cost: an all-gather of 32 bytes.
//
// Errors: ErrArgument if the number of ranks does not divide batch, or if the samples do not fill
// one batch; [backend.ErrMismatch] on every rank, naming what differs, if ranks pass different
// numbers; those of the communicator.
func NewSampler(comm backend.Communicator, n, batch int, seed uint64) (*Sampler, error) {
	if err := backend.Given("autograd.NewSampler", "comm", comm); err != nil {
		return nil, err
	}
	s, err := newSampler(comm.Rank(), comm.Size(), n, batch, seed)
	return agreed(comm, s, err, n, batch, seed)
}

// NewTreeSampler is [NewSampler] for steps of several micro-batches. Each rank runs its [TreeShare]
// of them and gets their samples, micro-batch by micro-batch.
//
// Errors: those of NewSampler, except that microBatches must divide batch, and those of TreeShare.
func NewTreeSampler(comm backend.Communicator, n, batch, microBatches int, seed uint64) (*Sampler,
	error) {
	if err := backend.Given("autograd.NewTreeSampler", "comm", comm); err != nil {
		return nil, err
	}
	first, share, err := TreeShare(microBatches, comm.Rank(), comm.Size())
	s := &Sampler{}
	if err == nil {
		s, err = newSampler(0, microBatches, n, batch, seed)
	}
	if err == nil {
		s.first, s.local = first*s.local, share*s.local
	}
	return agreed(comm, s, err, n, batch, seed)
}

// agreed returns a sampler, or an error on all ranks if one rank has an error or different numbers.
func agreed(comm backend.Communicator, s *Sampler, err error, n, batch int, seed uint64) (*Sampler,
	error) {
	text := fmt.Sprintf("the sampler has %d samples\nthe batch is %d\nthe seed is %d\n", n, batch,
		seed)
	if err := Agree(backend.Label(comm, backend.ForSampler), text, err); err != nil {
		return nil, err
	}
	return s, nil
}

func newSampler(rank, parts, n, batch int, seed uint64) (*Sampler, error) {
	switch {
	case batch < 1:
		return nil, fmt.Errorf("autograd: sampler: %w: a batch of %d", backend.ErrArgument, batch)
	case batch%parts != 0:
		return nil, fmt.Errorf("autograd: sampler: %w: a batch of %d does not divide into %d "+
			"parts: use %s",
			backend.ErrArgument, batch, parts, divisible(batch, parts))
	case n < batch:
		return nil, fmt.Errorf("autograd: sampler: %w: %d samples are fewer than a batch of %d: "+
			"take a smaller batch", backend.ErrArgument, n, batch)
	}
	local := batch / parts
	return &Sampler{n: n, batch: batch, first: rank * local, local: local, seed: seed}, nil
}

// divisible names the batches next to one that the ranks do not divide.
func divisible(batch, size int) string {
	if batch < size {
		return fmt.Sprint(size)
	}
	return fmt.Sprintf("%d or %d", batch/size*size, (batch/size+1)*size)
}

// Fill returns a sampler that completes the last batch of an epoch with samples
// from the epoch's beginning: none is dropped, some are seen twice.
func (s *Sampler) Fill() *Sampler {
	filled := *s
	filled.fill = true
	return &filled
}

// Rest returns a sampler whose epochs end with the samples that do not fill a batch: none is
// dropped. The last batch may then have fewer samples, and a rank may have fewer of them than
// others, or none: see [Evaluation], which divides the same way.
func (s *Sampler) Rest() *Sampler {
	whole := *s
	whole.rest = true
	return &whole
}

// Steps returns the number of batches in an epoch.
func (s *Sampler) Steps() int {
	if s.fill || s.rest {
		return (s.n + s.batch - 1) / s.batch
	}
	return s.n / s.batch
}

// Local returns how many samples of a batch this rank has.
func (s *Sampler) Local() int { return s.local }

// Epoch returns the samples of this rank, as numbers below n: Local of them for each
// step, but see [Sampler.Rest]. Rank r has the r-th part of the batch.
//
// Cost: shuffling n numbers.
func (s *Sampler) Epoch(epoch int) [][]int {
	order := permutation(s.n, s.seed, uint64(epoch))
	steps := make([][]int, s.Steps())
	for i := range steps {
		first := i*s.batch + s.first
		steps[i] = make([]int, s.share(first))
		for j := range steps[i] {
			steps[i][j] = order[(first+j)%s.n]
		}
	}
	return steps
}

// share returns how many samples a rank has of a batch, from its first one on.
func (s *Sampler) share(first int) int {
	if s.rest {
		return max(0, min(s.Local(), s.n-first))
	}
	return s.Local()
}

// Evaluation returns this rank's samples for one pass over n samples, in order, as numbers below n.
// Over all ranks each sample occurs exactly once, whatever n is. It is collective. In each step a
// rank has up to local samples, the batch of its graph; step i covers the samples from i*local*size
// on, of which rank r has the r-th part.
//
// All ranks have the same number of steps, so each may call collectives. In the last step a
// share may be shorter, or empty. So a mean over all samples is the quotient of two sums over
// ranks, see [Sum], not a mean of means:
//
//	shares, err := autograd.Evaluation(comm, len(images), local)
//	for _, share := range shares {
//		err = autograd.Rows(batch, images, share) // the rest of the batch is zeros
//		err = vm.RunAll()
//		correct += ... // among the first len(share) results
//		seen += float64(len(share))
//	}
//	err = autograd.Sum(comm, &correct, &seen)
//
// Cost: an all-gather of 32 bytes.
//
// Errors: ErrArgument if n is negative, or if local is not positive; [backend.ErrMismatch] on every
// rank, naming what differs, if ranks pass different numbers; those of the communicator.
func Evaluation(comm backend.Communicator, n, local int) ([][]int, error) {
	if err := backend.Given("autograd.Evaluation", "comm", comm); err != nil {
		return nil, err
	}
	shares, err := evaluation(comm.Rank(), comm.Size(), n, local)
	text := fmt.Sprintf("the evaluation has %d samples\na share has up to %d\n", n, local)
	if err := Agree(backend.Label(comm, backend.ForEvaluation), text, err); err != nil {
		return nil, err
	}
	return shares, nil
}

func evaluation(rank, size, n, local int) ([][]int, error) {
	if n < 0 || local < 1 {
		return nil, fmt.Errorf("autograd: evaluation: %w: %d samples, %d of them at a time: "+
			"there must be at least 0, and 1 at a time", backend.ErrArgument, n, local)
	}
	local = min(local, max(n, 1)) // which changes nothing, and keeps the sums in range
	var shares [][]int
	for first := 0; first < n; first += local * size {
		share := []int{}
		begin := first + rank*local
		for i := begin; i < min(begin+local, n); i++ {
			share = append(share, i)
		}
		shares = append(shares, share)
	}
	return shares, nil
}

// permutation shuffles the numbers below n. It does not use rand.Perm, whose
// result for a seed may change with the release of Go: ranks may have been
// built by different ones.
func permutation(n int, seed, stream uint64) []int {
	source := rand.NewPCG(seed, stream)
	order := make([]int, n)
	for i := range order {
		// A number up to i; that it is not exactly uniform does not matter for
		// n far below 2^64.
		j, _ := bits.Mul64(source.Uint64(), uint64(i+1))
		order[i] = order[j]
		order[j] = i
	}
	return order
}

// Rows copies rows of src, the samples with these numbers, into dst:
//
//	src   [n, d...]    all samples, of any dtype
//	rows  [b]          numbers below n, such as one step of [Sampler.Epoch]
//	dst   [B, d...]    B >= b, of the same dtype: dst[i] = src[rows[i]] for i < b
//
// If a share is shorter than the graph's batch, the rest of dst becomes zero. Make dst once, bind
// it to the graph's input with gorgonia.Let, and fill it again in each step.
//
// Both are contiguous tensors on the host. Cost: one copy of the rows; nothing is allocated.
//
// Errors: ErrArgument for shapes or dtypes that do not fit, and for a number out of range; dst is
// unchanged then.
func Rows(dst, src *tensor.Dense, rows []int) error {
	if err := backend.Given("autograd.Rows", "dst", dst, "src", src); err != nil {
		return err
	}
	if err := rowsFit(dst, src, rows); err != nil {
		return wrapped("rows: %w: %w", backend.ErrArgument, err)
	}
	to, from := dst.Raw, src.Raw
	n := len(to) / dst.Shape()[0] // bytes of a row
	for i, row := range rows {
		copy(to[i*n:(i+1)*n], from[row*n:(row+1)*n])
	}
	clear(to[len(rows)*n:])
	return nil
}

// rowsFit returns an error if Rows cannot copy.
func rowsFit(dst, src *tensor.Dense, rows []int) error {
	for _, t := range []*tensor.Dense{dst, src} {
		switch {
		case !t.IsNativelyAccessible():
			return fmt.Errorf("a tensor %v is not in the memory of the host: gather on the host, "+
				"and copy the batch to the device", t.Shape())
		case t.Dims() == 0 || t.RequiresIterator() || !t.DataOrder().IsRowMajor() ||
			len(t.Raw) != t.Shape().TotalSize()*int(t.Dtype().Size()):
			return fmt.Errorf("a tensor %v is a scalar, a view or transposed: it must be "+
				"contiguous, with at least one axis", t.Shape())
		case !pointerless(t.Dtype()):
			return fmt.Errorf("a tensor of %v: numbers and bool are supported", t.Dtype())
		}
	}
	d, s := dst.Shape(), src.Shape()
	if dst.Dtype() != src.Dtype() || !slices.Equal(d[1:], s[1:]) {
		return fmt.Errorf("rows of %v%v for rows of %v%v: they must be alike", src.Dtype(), s[1:],
			dst.Dtype(), d[1:])
	}
	if d[0] == 0 || len(rows) > d[0] {
		return fmt.Errorf("%d rows for a tensor %v, which has room for %d", len(rows), d, d[0])
	}
	for i, row := range rows {
		if row < 0 || row >= s[0] {
			return fmt.Errorf("row %d of the batch is number %d: there are %d, from 0", i, row,
				s[0])
		}
	}
	return nil
}

// pointerless reports whether elements hold no pointers.
func pointerless(d tensor.Dtype) bool {
	return d.Kind() >= reflect.Bool && d.Kind() <= reflect.Complex128 &&
		d.Kind() != reflect.Uintptr
}
