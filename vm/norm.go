package vm

import (
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm/internal/exec"
	"github.com/euryale-ml/euryale/vm/internal/read"
)

// norm is a batch normalisation in training: its operation gets the moving averages of what each
// run has found.
type norm struct {
	read.Statistics
	results [2]int // of the plan: mean and variance
	batch   [2]backend.Buffer
	average [2]backend.Buffer // memory of the operation
}

// findNorms makes mean and variance of each batch normalisation results of the program.
func (m *Machine) findNorms() error {
	m.norms = nil
	for _, s := range m.read.Statistics {
		n := norm{Statistics: s, results: [2]int{m.result(s.Mean), m.result(s.Variance)}}
		mean, variance := s.Op.Stats()
		for i, t := range []tensor.Tensor{mean, variance} {
			var err, other error
			n.average[i], err = memoryOf(t)
			n.batch[i], other = memoryOf(tensor.New(tensor.Of(t.Dtype()), tensor.WithShape(t.Shape()...)))
			if err := errors.Join(err, other); err != nil {
				return fmt.Errorf("vm: %v: %w", s.Op, err)
			}
		}
		m.norms = append(m.norms, n)
	}
	return nil
}

// update is average = momentum * batch + (1 - momentum) * average, with the variance as that of a
// sample, as Gorgonia has it.
func (n *norm) update(e *exec.Executor) error {
	samples := float64(n.Samples)
	for i, scale := range []float64{1, samples / (samples - 1)} {
		if err := e.Result(n.results[i], n.batch[i]); err != nil {
			return fmt.Errorf("vm: the statistics of %v: %w", n.Op, err)
		}
		if n.batch[i].DType() == backend.F32 {
			mix(backend.View[float32](n.average[i]), backend.View[float32](n.batch[i]), n.Momentum, scale)
		} else {
			mix(backend.View[float64](n.average[i]), backend.View[float64](n.batch[i]), n.Momentum, scale)
		}
	}
	return nil
}

func mix[T float32 | float64](average, batch []T, momentum, scale float64) {
	for c, x := range batch {
		average[c] = T(momentum*scale*float64(x) + (1-momentum)*float64(average[c]))
	}
}

// setTraining tells an operation whether it trains. Batch norms keep the averages that they have:
// by itself, SetTraining throws them away.
func setTraining(op gorgonia.TrainModeOp, on bool) error {
	b, ok := op.(*gorgonia.BatchNormOp)
	if !ok || !on {
		return op.SetTraining(on)
	}
	mean, variance := b.Stats()
	memory, err := memoryOf(variance)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(memory.Bytes(), func(x byte) bool { return x != 0 }) {
		return op.SetTraining(on) // it never trained, and a variance of 0 becomes 1
	}
	keptMean, keptVariance := mean.Clone().(tensor.Tensor), variance.Clone().(tensor.Tensor)
	return errors.Join(op.SetTraining(on), b.SetStats(keptMean, keptVariance))
}
