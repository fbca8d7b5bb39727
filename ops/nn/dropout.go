package nn

import (
	"fmt"
	"sync"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/ops"
)

// Dropout sets elements to zero at random, each with probability p, and scales the others by
// 1/(1-p). In evaluation (gorgonia.EvalMode) it copies x.
//
//	in   x  [n, d...]   n samples
//	out  y  [n, d...]   y = x * mask / (1 - p), mask 0 or 1
//
// The mask depends on the seed and step of random, the number of this Dropout among the Dropouts of
// random, the sample's number in the global batch, and the element. Call [Random.Next] between
// runs, or every step would have the same mask.
//
// Gradient: dx = dy * mask / (1 - p), with the same mask, which is recomputed.
// Cost: one pass over x and one Philox4x32-10 for four elements; backward the same over dy.
// Errors: [ops.ErrShape] if x is a scalar; [backend.ErrArgument] if p is not in [0, 1) or random is
// nil; [ops.ErrDType]; when the graph runs in training, backend.ErrArgument if it already ran at
// this step.
// Source: Srivastava et al., Dropout: A Simple Way to Prevent Neural Networks from Overfitting,
// 2014.
func Dropout(p float64, random *Random, x *gorgonia.Node) (*gorgonia.Node, error) {
	if !(p >= 0 && p < 1) {
		return nil, fmt.Errorf("nn: Dropout: %w: the probability is %v: use one of at least 0 "+
			"and less than 1", backend.ErrArgument, p)
	}
	if random == nil {
		return nil, fmt.Errorf("nn: Dropout: %w: random is nil: make one with NewRandom",
			backend.ErrArgument)
	}
	return build("Dropout", "x",
		dropoutSpec{P: p, Mask: &Mask{Random: random, Op: random.operation()}}, x)
}

// dropoutSpec is [Dropout], or its gradient, which applies the mask to dy.
type dropoutSpec struct {
	P        float64 // probability of zero
	Mask     *Mask
	Gradient bool
}

// Mask says which elements a [Dropout] sets to zero: those whose random number, of key
// (seed, Op) and counter (step, sample, element), is less than P.
type Mask struct {
	Random *Random
	Op     uint32 // the number of the Dropout among the operations of Random

	mu         sync.Mutex
	evaluation bool
	ran        bool
	drawn      uint64 // when it ran
}

// Training reports whether the mask is applied.
func (m *Mask) Training() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.evaluation
}

// Draw notes that the forward pass runs: machines that compute a Dropout without its Do call it
// before. It returns [backend.ErrArgument] if the pass already ran at this step.
func (m *Mask) Draw() error {
	step, _, drawn := m.Random.at()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ran && m.drawn == drawn {
		return fmt.Errorf("%w: step %d already ran: call Random.Next between runs, or each would "+
			"have the same mask", backend.ErrArgument, step)
	}
	m.ran, m.drawn = true, drawn
	return nil
}

// String returns "Dropout{0.1, #3}", with the number of the Dropout.
func (s dropoutSpec) String() string {
	name := "Dropout"
	if s.Gradient {
		name = "DropoutGrad"
	}
	return fmt.Sprintf("%s{%v, #%d}", name, s.P, s.Mask.Op)
}

// SetTraining switches between training and evaluation, for the gradient, too.
func (s dropoutSpec) SetTraining(on bool) error {
	s.Mask.mu.Lock()
	defer s.Mask.mu.Unlock()
	s.Mask.evaluation = !on
	return nil
}

func (s dropoutSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	if len(in[0]) == 0 {
		return nil, fmt.Errorf("%w: x is a scalar", ops.ErrShape)
	}
	return in[0].Clone(), nil
}

func (s dropoutSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{dropoutSpec{s.P, s.Mask, true}, []int{dy}}}
}

// program gets the step and the first sample, of training, besides x.
func (s dropoutSpec) program(b *program.Builder, x ...program.Value) program.Value {
	if len(x) == 1 {
		return x[0]
	}
	step, first := b.Slice(x[1], 0, 0, 1, 1), b.Slice(x[1], 0, 1, 1, 1)
	return b.Dropout(s.P, s.Mask.Random.Seed(), s.Mask.Op, x[0], step, first)
}
