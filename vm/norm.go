package vm

import (
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/vm/exec"
	"github.com/euryale-ml/euryale/internal/vm/read"
)

// norm is a batch normalisation in training. It adds the statistics of each run to the running
// statistics of its operation.
type norm struct {
	read.Statistics
	results [2]int // of the plan: mean and variance
	batch   [2]backend.Buffer
	average [2]backend.Buffer // memory of the operation
}

// norms are the batch normalisations of a graph.
type norms struct {
	all   []norm
	found []byte // by all of them, in the runs of a step so far
}

// takeNorms notes what a run has found.
func (b *norms) takeNorms(e *exec.Executor) error {
	for _, n := range b.all {
		for i, batch := range n.batch {
			if err := e.Result(n.results[i], batch); err != nil {
				return fmt.Errorf("vm: the statistics of %v: %w", n.Op, err)
			}
			b.found = append(b.found, batch.Bytes()...)
		}
	}
	return nil
}

// clearNorms leaves out what was found.
func (b *norms) clearNorms() { b.found = b.found[:0] }

// find makes mean and variance of each batch normalisation results of the program.
func (b *norms) find(g *read.Graph) error {
	b.all = nil
	for _, s := range g.Statistics {
		n := norm{Statistics: s, results: [2]int{resultOf(g, s.Mean), resultOf(g, s.Variance)}}
		mean, variance := s.Op.Stats()
		for i, t := range []tensor.Tensor{mean, variance} {
			var err, other error
			n.average[i], err = memoryOf(t)
			n.batch[i], other = memoryOf(
				tensor.New(tensor.Of(t.Dtype()), tensor.WithShape(t.Shape()...)))
			if err := errors.Join(err, other); err != nil {
				return fmt.Errorf("vm: %v: %w", s.Op, err)
			}
		}
		b.all = append(b.all, n)
	}
	return nil
}

// average notes the statistics that batch norms have found in a run. In the last run of a step it
// updates the averages, so all ranks have the same ones between steps, unless Apply does that. With
// WithTree ranks have found different statistics, and each takes those of all ranks, one after the
// other.
func (b *norms) average(e *exec.Executor, last bool, of micro, p *parallel) error {
	if err := b.takeNorms(e); err != nil || !last || len(b.found) == 0 {
		return err
	}
	if of.Tree && p != nil {
		all, err := p.exchange.Gather(b.found)
		if err != nil {
			return p.fail(fmt.Errorf("vm: the statistics of batch norms: %w", err))
		}
		b.found = slices.Concat(all...)
	}
	if !of.Apart {
		b.move()
	}
	return nil
}

// move updates the averages with all that was found.
func (b *norms) move() {
	for found := b.found; len(found) > 0; {
		for _, n := range b.all {
			for _, batch := range n.batch {
				found = found[copy(batch.Bytes(), found):]
			}
			n.update()
		}
	}
	b.clearNorms()
}

// update is average = momentum * batch + (1 - momentum) * average, with the variance of a sample,
// as in Gorgonia.
func (n *norm) update() {
	samples := float64(n.Samples)
	for i, scale := range []float64{1, samples / (samples - 1)} {
		if n.batch[i].DType() == backend.F32 {
			mix(backend.View[float32](n.average[i]), backend.View[float32](n.batch[i]), n.Momentum,
				scale)
		} else {
			mix(backend.View[float64](n.average[i]), backend.View[float64](n.batch[i]), n.Momentum,
				scale)
		}
	}
}

func mix[T float32 | float64](average, batch []T, momentum, scale float64) {
	for c, x := range batch {
		average[c] = T(momentum*scale*float64(x) + (1-momentum)*float64(average[c]))
	}
}

// setTraining tells an operation whether it trains. Averages that nothing has trained begin; others
// stay as they are: by itself, SetTraining throws them away.
func setTraining(op gorgonia.TrainModeOp, on bool) error {
	a, ok := op.(stock.Averaging)
	if !ok {
		return op.SetTraining(on)
	}
	if err := stock.Begin(a); err != nil {
		return err
	}
	if !on {
		return op.SetTraining(on)
	}
	if averages, ok := op.(gorgonia.Op); ok && stock.Trains(averages) {
		return nil
	}
	mean, variance := a.Stats()
	keptMean, keptVariance := mean.Clone().(tensor.Tensor), variance.Clone().(tensor.Tensor)
	return errors.Join(op.SetTraining(on), a.SetStats(keptMean, keptVariance))
}

// SyncBatchNorm makes every gorgonia.BatchNorm of the graph normalise the batches of all ranks of
// [WithDataParallel] together, so that ranks train as one rank does with the whole batch. Without
// it each rank normalises its own share, which is noisy if the share is small. PyTorch calls it
// SyncBatchNorm.
//
// The gradient is exact: on a rank, dx is the derivative of the sum of all ranks' losses. Running
// statistics take the mean and variance of the whole batch, bitwise identical on all ranks. The
// variance is computed from each rank's mean and variance, so large means do not cancel. Evaluation
// ([Eval]) uses the averages and needs no other rank. All ranks must have equally many samples.
//
// Cost: for each batch norm of C channels, an all-gather of 2C elements in the forward pass and an
// all-reduce of 2C in the backward pass, on the device of the plan. The passes wait for them.
//
// New returns ErrArgument without WithDataParallel, with [WithTree], whose bits do not depend on
// which micro-batches run together, and for a graph without batch norms; [backend.ErrMismatch] if
// ranks have different numbers of samples.
func SyncBatchNorm() Option { return func(m *Machine) { m.synced = true } }

// checkSync returns why batch norms cannot normalise the batches of all ranks.
func (m *Machine) checkSync() error {
	why := ""
	switch {
	case !m.synced:
		return nil
	case !m.training:
		why = "in evaluation batch norms take no batches, but the running statistics: leave it out"
	case m.parallel == nil && m.elastic == nil:
		why = "no ranks train together: use WithDataParallel, too"
	case m.micro.Tree:
		why = "with WithTree and WithElastic bits do not depend on the number of ranks, and here " +
			"on the micro-batches that ranks run together: leave out one of them"
	default:
		return nil
	}
	return fmt.Errorf("vm: SyncBatchNorm: %w: %s", backend.ErrArgument, why)
}
