package nn

import (
	"sync"
)

// Random is the source of a model's random numbers: a seed, the step of the training, and the
// number of the rank's first sample in the step's global batch. A number is a function of these, of
// the operation and of the element (Philox4x32-10), and of nothing else: not of the rank, the
// number of ranks, or what ran before. So any division of a batch among ranks trains alike, and a
// checkpoint needs the seed and the step, which autograd.WithRandom puts into it.
//
// All ranks must make their operations in the same order. Several graphs of one rank, whose
// operations get their own numbers, may use a Random, and so may several goroutines.
type Random struct {
	seed  uint32
	mu    sync.Mutex
	op    uint32 // of the next operation
	step  uint64
	first uint64
	drawn uint64 // counts the steps that were set, equal ones too
	// placed is whether first was set
	placed bool
}

// NewRandom returns the random numbers of a seed, at step 0. Their first sample is 0, or what Place
// says.
func NewRandom(seed uint32) *Random { return &Random{seed: seed} }

// Next goes on to the next step. first is the number, in the step's global batch, of this rank's
// first sample: its rank times the size of its batch if all ranks have as many. Call Next after
// each run of a graph. Micro-batches whose gradients are accumulated are separate steps here, or
// have different first samples.
func (r *Random) Next(first int) { r.Seek(r.Step()+1, first) }

// Seek goes to a step, such as that of a checkpoint.
func (r *Random) Seek(step uint64, first int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.step, r.first, r.placed = step, uint64(first), true
	r.drawn++
}

// Place sets the number of this rank's first sample until Seek or Next does, unless one of these or
// another Place has. autograd.New and layers.Builder.Dropout call it, so that ranks draw different
// numbers from the first run on.
func (r *Random) Place(first int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.placed {
		r.first, r.placed = uint64(first), true
	}
}

// Seed returns the seed.
func (r *Random) Seed() uint32 { return r.seed }

// Step returns the step.
func (r *Random) Step() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.step
}

// First returns the number of this rank's first sample.
func (r *Random) First() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return int(r.first)
}

// operation returns the number of the next operation.
func (r *Random) operation() uint32 {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.op++
	return r.op - 1
}

// at returns the step and the first sample, and how many steps were set.
func (r *Random) at() (step, first, drawn uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.step, r.first, r.drawn
}
