package read

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Statistics are the moments of a batch, of which gorgonia.BatchNorm keeps running statistics.
// Where ranks train together, they are the mean over all ranks.
type Statistics struct {
	Op             *gorgonia.BatchNormOp
	Node           *gorgonia.Node
	Momentum       float64
	Samples        int   // of each channel
	Mean, Variance ir.ID // of each channel; the variance is divided by Samples
}

// channelAxes returns the axes along which a batch norm of x takes means: all but the channels'.
func (b *builder) channelAxes(x ir.ID) []int {
	axes := []int{0}
	for axis := 2; axis < b.of(x).Shape.Len(); axis++ {
		axes = append(axes, axis)
	}
	return axes
}

// averages adds the running mean and variance, in the shape of x, and 1 / sqrt(variance
// + epsilon): none if they are no vectors of the dtype.
func (b *builder) averages(x ir.ID) (mean, scale ir.ID) {
	shape := b.of(x).Shape
	var found [2]ir.ID
	for i, name := range []string{"runningMean", "runningVariance"} {
		t := (*tensor.Dense)(b.op.FieldByName(name).UnsafePointer())
		dtype, err := DType(t.Dtype())
		if err != nil || dtype != b.dtype || !t.Shape().Eq(tensor.Shape{shape.At(1)}) {
			return none, none
		}
		one := shape
		for axis := range shape.Len() {
			one = one.With(axis, 1)
		}
		found[i] = b.reshape(b.changing(t, dtype), one.With(1, shape.At(1)))
	}
	return found[0], b.Do(fuse.InvSqrt, b.Do(fuse.Add, found[1], b.scalar(b.number("epsilon"))))
}

// batchNorm takes the moments of the batch in training, and the averages in evaluation. One value
// per channel has no variance of a sample, and would make the averages NaN forever.
func (b *builder) batchNorm() ir.ID {
	x := b.args[0]
	shape := b.of(x).Shape
	op, ok := b.node.Op().(*gorgonia.BatchNormOp)
	if !ok || !b.float() || shape.Len() < 2 {
		if b.synced() && b.training {
			b.problem = fmt.Errorf("a batch norm of %v%v over all ranks: %w",
				b.dtype, shape, backend.ErrUnsupported)
		}
		return none
	}
	if !b.training {
		mean, scale := b.averages(x)
		if mean < 0 {
			return none
		}
		return b.Do(fuse.Mul, b.Do(fuse.Sub, x, mean), scale)
	}
	m := b.batchMoments(x)
	if m.samples < 2 {
		b.problem = fmt.Errorf("a batch norm of %v%v has one value per channel, which has no "+
			"variance: %w: train with larger batches, or with vm.SyncBatchNorm on several ranks",
			b.dtype, shape, backend.ErrArgument)
		return none
	}
	channels := ir.Of(shape.At(1))
	b.Statistics = append(b.Statistics, Statistics{
		Op: op, Node: b.node, Momentum: b.number("momentum"), Samples: m.samples,
		Mean: b.reshape(m.mean, channels), Variance: b.reshape(m.variance, channels),
	})
	z, _ := b.standardized(x, m)
	return z
}

func (b *builder) batchNormGrad() ir.ID {
	x := b.args[0]
	if !b.float() || b.of(x).Shape.Len() < 2 {
		return none
	}
	dy := b.reshape(b.args[1], b.of(x).Shape)
	if !b.training {
		_, scale := b.averages(x)
		if scale < 0 {
			return none
		}
		return b.Do(fuse.Mul, dy, scale)
	}
	z, scale := b.standardized(x, b.batchMoments(x))
	return b.standardizedGrad(z, scale, dy)
}

// groupRows returns the shape of x with a row for each group of channels of a sample.
func (b *builder) groupRows(x ir.ID) (rows ir.Dims, ok bool) {
	shape, n := b.of(x).Shape, b.int("numGroups")
	if !b.float() || shape.Len() < 2 || n < 1 || shape.At(1)%n != 0 {
		return shape, false
	}
	n *= shape.At(0)
	return ir.Of(n, shape.Size()/n), true
}

func (b *builder) groupNorm() ir.ID {
	rows, ok := b.groupRows(b.args[0])
	if !ok {
		return none
	}
	z, _ := program.Normalized(&b.Builder, b.reshape(b.args[0], rows), b.number("epsilon"), 1)
	return z
}

func (b *builder) groupNormGrad() ir.ID {
	rows, ok := b.groupRows(b.args[0])
	if !ok {
		return none
	}
	x, dy := b.reshape(b.args[0], rows), b.reshape(b.args[1], rows)
	return program.NormalizedGrad(&b.Builder, x, dy, b.number("epsilon"), 1)
}
