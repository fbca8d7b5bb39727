package autograd

import (
	"fmt"
	"math/bits"
	"math/rand/v2"

	"github.com/euryale-ml/euryale/backend"
)

// Sampler says which samples each rank trains on. All ranks shuffle alike, by
// the seed and the number of the epoch, and each takes its part of every batch:
// the batches, as sets of samples in order, are the same for any number of
// ranks.
type Sampler struct {
	n, batch, rank, size int
	seed                 uint64
	fill                 bool
}

// NewSampler returns the sampler of one rank among size, for n samples and a
// global batch: what all ranks together train on in one step.
//
// When the batch does not divide n, the samples that are left over at the end of
// an epoch are dropped: the shapes of a Gorgonia graph are fixed. Every epoch
// drops others. [Sampler.Fill] completes the last batch instead.
//
// Errors: ErrArgument if size does not divide batch, if there is not one whole
// batch, or if rank is out of range.
func NewSampler(n, batch, rank, size int, seed uint64) (*Sampler, error) {
	switch {
	case size < 1 || rank < 0 || rank >= size:
		return nil, fmt.Errorf("autograd: sampler: %w: rank %d of %d ranks", backend.ErrArgument, rank, size)
	case batch < 1:
		return nil, fmt.Errorf("autograd: sampler: %w: a batch of %d", backend.ErrArgument, batch)
	case batch%size != 0:
		return nil, fmt.Errorf("autograd: sampler: %w: a batch of %d does not divide among %d ranks: use %d or %d",
			backend.ErrArgument, batch, size, max(batch/size, 1)*size, (batch/size+1)*size)
	case n < batch:
		return nil, fmt.Errorf("autograd: sampler: %w: %d samples do not make a batch of %d", backend.ErrArgument, n, batch)
	}
	return &Sampler{n: n, batch: batch, rank: rank, size: size, seed: seed}, nil
}

// Fill returns a sampler that completes the last batch of an epoch with samples
// from the epoch's beginning: none is dropped, some are seen twice.
func (s *Sampler) Fill() *Sampler {
	filled := *s
	filled.fill = true
	return &filled
}

// Steps returns the number of batches in an epoch.
func (s *Sampler) Steps() int {
	if s.fill {
		return (s.n + s.batch - 1) / s.batch
	}
	return s.n / s.batch
}

// Local returns the number of samples of a batch that are this rank's.
func (s *Sampler) Local() int { return s.batch / s.size }

// Epoch returns the samples of this rank, as numbers below n: for each step
// Local of them. Rank r has the r-th part of the batch.
//
// Cost: shuffling n numbers.
func (s *Sampler) Epoch(epoch int) [][]int {
	order := permutation(s.n, s.seed, uint64(epoch))
	steps := make([][]int, s.Steps())
	for i := range steps {
		first := i*s.batch + s.rank*s.Local()
		steps[i] = make([]int, s.Local())
		for j := range steps[i] {
			steps[i][j] = order[(first+j)%s.n]
		}
	}
	return steps
}

// permutation shuffles the numbers below n. It is written out, because what
// rand.Perm makes of a seed may change with the release of Go, and ranks may
// have been built by different ones.
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
