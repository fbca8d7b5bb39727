package read

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// Statistics are the moments of a batch, of which gorgonia.BatchNorm keeps moving averages. Where
// ranks train together, they are the mean over all ranks.
type Statistics struct {
	Op             *gorgonia.BatchNormOp
	Node           *gorgonia.Node
	Momentum       float64
	Samples        int   // of each channel
	Mean, Variance ir.ID // of each channel; the variance is divided by Samples
}

// last returns the last axis of x.
func (b *builder) last(x ir.ID) int { return b.of(x).Shape.Len() - 1 }

// mean adds the mean along axes, which stay with length 1.
func (b *builder) mean(x ir.ID, axes ...int) ir.ID {
	kept, n := b.of(x).Shape, 1
	for _, axis := range axes {
		n *= kept.At(axis)
		kept = kept.With(axis, 1)
	}
	return b.with(fuse.Mul, b.reshape(b.reduceAxes(backend.Sum, x, axes...), kept), 1/float64(n))
}

// moments adds mean and variance along axes, which stay with length 1, and x - mean.
func (b *builder) moments(x ir.ID, axes ...int) (mean, variance, centred ir.ID) {
	mean = b.mean(x, axes...)
	centred = b.two(fuse.Sub, x, mean)
	return mean, b.mean(b.one(fuse.Square, centred), axes...), centred
}

// normalized adds (x - mean) * scale along axes, and scale.
func (b *builder) normalized(x ir.ID, epsilon float64, axes ...int) (z, scale ir.ID) {
	_, variance, centred := b.moments(x, axes...)
	scale = b.deviation(variance, epsilon)
	return b.two(fuse.Mul, centred, scale), scale
}

// deviation adds 1 / sqrt(variance + epsilon): NaN if the variance overflows, where 0 would make zeros
// of numbers that differ.
func (b *builder) deviation(variance ir.ID, epsilon float64) ir.ID {
	scale := b.one(fuse.InvSqrt, b.with(fuse.Add, variance, epsilon))
	return b.two(fuse.Add, scale, b.two(fuse.Sub, variance, variance)) // 0, or NaN
}

// normalizedGrad adds dx of normalized from x and dz.
func (b *builder) normalizedGrad(x, dz ir.ID, epsilon float64, axes ...int) ir.ID {
	z, scale := b.normalized(x, epsilon, axes...)
	return b.backward(z, scale, dz, b.mean(dz, axes...), b.mean(b.two(fuse.Mul, dz, z), axes...))
}

// backward adds dx of z = (x - mean) * scale: (dz - mean(dz) - z mean(dz z)) * scale.
func (b *builder) backward(z, scale, dz, mean, meanAlong ir.ID) ir.ID {
	along := b.two(fuse.Mul, z, meanAlong)
	return b.two(fuse.Mul, b.two(fuse.Sub, b.two(fuse.Sub, dz, mean), along), scale)
}

// channelAxes returns the axes along which a batch norm of x takes means: all but the channels'.
func (b *builder) channelAxes(x ir.ID) []int {
	axes := []int{0}
	for axis := 2; axis < b.of(x).Shape.Len(); axis++ {
		axes = append(axes, axis)
	}
	return axes
}

// averages adds the moving averages of mean and variance, in the shape of x, and 1 / sqrt(variance +
// epsilon): none if they are no vectors of the dtype.
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
	return found[0], b.one(fuse.InvSqrt, b.with(fuse.Add, found[1], b.number("epsilon")))
}

// batchNorm takes the moments of the batch in training, and the averages in evaluation.
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
		return b.two(fuse.Mul, b.two(fuse.Sub, x, mean), scale)
	}
	m := b.batchMoments(x)
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
		return b.two(fuse.Mul, dy, scale)
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
	z, _ := b.normalized(b.reshape(b.args[0], rows), b.number("epsilon"), 1)
	return z
}

func (b *builder) groupNormGrad() ir.ID {
	rows, ok := b.groupRows(b.args[0])
	if !ok {
		return none
	}
	return b.normalizedGrad(b.reshape(b.args[0], rows), b.reshape(b.args[1], rows), b.number("epsilon"), 1)
}

// norm is the p-norm along an axis.
func (b *builder) norm(s nn.NormSpec) ir.ID {
	x := b.one(fuse.Abs, b.args[0])
	sum := b.reduceAxes(backend.Sum, b.power(x, s.P), s.Axis)
	switch s.P {
	case 1:
		return sum
	case 2:
		return b.one(fuse.Sqrt, sum)
	}
	return b.with(fuse.Pow, sum, 1/float64(s.P))
}

// normGrad is dy * sign(x) * (|x|/y)^(p-1), and 0 where y is 0.
func (b *builder) normGrad(s nn.NormGradSpec) ir.ID {
	x := b.args[0]
	shape := b.of(x).Shape
	along := func(each ir.ID) ir.ID {
		return b.broadcast(b.reshape(each, shape.With(s.Axis, 1)), shape)
	}
	y, dx := along(b.args[1]), b.one(fuse.Sign, x)
	if s.P > 1 {
		dx = b.two(fuse.Mul, dx, b.power(b.two(fuse.Div, b.one(fuse.Abs, x), y), s.P-1))
	}
	return b.where(y, b.two(fuse.Mul, dx, along(b.args[2])), b.fill(shape, 0))
}

// power adds x^n for n of at least 1.
func (b *builder) power(x ir.ID, n int) ir.ID {
	switch n {
	case 1:
		return x
	case 2:
		return b.one(fuse.Square, x)
	}
	return b.with(fuse.Pow, x, float64(n))
}
