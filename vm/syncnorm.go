package vm

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

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
