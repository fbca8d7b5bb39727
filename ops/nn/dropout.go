package nn

import (
	"fmt"
	"sync"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops"
)

// Dropout sets elements to zero at random, each with probability p, and scales the others by
// 1/(1-p). In evaluation (gorgonia.EvalMode) it copies x.
//
//	in   x  [n, d...]   n samples
//	out  y  [n, d...]   y = x * mask / (1 - p), mask 0 or 1
//
// The mask follows from the seed and step of random, the number of this Dropout among those of
// random, the sample's number in the global batch, and the element. Call [Random.Next] between
// runs, or every step would have the same mask.
//
// Gradient: dx = dy * mask / (1 - p), with the same mask, which is computed again.
// Cost: one pass over x and one Philox4x32-10 for four elements; backward the same over dy.
// Errors: [ops.ErrShape] if x is a scalar; [backend.ErrArgument] if p is not in [0, 1) or random is
// nil; [ops.ErrDType]; when the graph runs in training, backend.ErrArgument if it already ran at
// this step.
// Source: Srivastava et al., Dropout: A Simple Way to Prevent Neural Networks from Overfitting, 2014.
func Dropout(p float64, random *Random, x *gorgonia.Node) (*gorgonia.Node, error) {
	if !(p >= 0 && p < 1) {
		return nil, fmt.Errorf("nn: Dropout: %w: the probability is %v: use one of at least 0 and less than 1", backend.ErrArgument, p)
	}
	if random == nil {
		return nil, fmt.Errorf("nn: Dropout: %w: random is nil: make one with NewRandom", backend.ErrArgument)
	}
	return build("Dropout", "x", DropoutSpec{P: p, Mask: &Mask{Random: random, Op: random.operation()}}, x)
}

// DropoutSpec is [Dropout], or its gradient, which applies the mask to dy.
type DropoutSpec struct {
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
		return fmt.Errorf("%w: step %d already ran: call Random.Next between runs, or each would have the same mask", backend.ErrArgument, step)
	}
	m.ran, m.drawn = true, drawn
	return nil
}

// String returns "Dropout{0.1, #3}", with the number of the Dropout.
func (s DropoutSpec) String() string {
	name := "Dropout"
	if s.Gradient {
		name = "DropoutGrad"
	}
	return fmt.Sprintf("%s{%v, #%d}", name, s.P, s.Mask.Op)
}

// SetTraining switches between training and evaluation, of the gradient, too.
func (s DropoutSpec) SetTraining(on bool) error {
	s.Mask.mu.Lock()
	defer s.Mask.mu.Unlock()
	s.Mask.evaluation = !on
	return nil
}

func (s DropoutSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	if len(in[0]) == 0 {
		return nil, fmt.Errorf("%w: x is a scalar", ops.ErrShape)
	}
	return in[0].Clone(), nil
}

func (s DropoutSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{DropoutSpec{s.P, s.Mask, true}, []int{dy}}}
}

func (s DropoutSpec) f32(y array[float32], x []array[float32]) error { return dropout(s, y, x[0]) }
func (s DropoutSpec) f64(y array[float64], x []array[float64]) error { return dropout(s, y, x[0]) }

func dropout[T float](s DropoutSpec, y, x array[T]) error {
	if !s.Mask.Training() {
		copy(y.data, x.data)
		return nil
	}
	if !s.Gradient {
		if err := s.Mask.Draw(); err != nil {
			return err
		}
	}
	step, first, _ := s.Mask.Random.at()
	key := [2]uint32{s.Mask.Random.Seed(), s.Mask.Op}
	p, scale := T(s.P), T(1/(1-s.P))
	sample := len(x.data) / x.shape[0]
	for i := range x.shape[0] {
		row, to := x.data[i*sample:(i+1)*sample], y.data[i*sample:(i+1)*sample]
		var u [4]T
		for k, v := range row {
			if k%len(u) == 0 {
				u = uniforms[T](key, step, first+uint64(i), k/len(u))
			}
			if u[k%len(u)] >= p {
				to[k] = v * scale
			}
		}
	}
	return nil
}
