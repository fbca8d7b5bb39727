package read

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// targets are what a cross-entropy and its gradient need of the labels.
type targets struct {
	labels ir.ID // of the logits' shape: -1 where a label is ignored
	right  ir.ID // of each label: 1, 0 if it is ignored or out of range
	others ir.ID // of each label: 0, NaN if it is out of range; what counts where it is not right
	number ir.ID // of labels that are not ignored, at least 1
}

func (b *builder) targets(logits, labels ir.ID, ignore int) targets {
	shape, float := b.of(logits).Shape, b.dtype
	classes := shape.Len() - 1
	rows := shape.Without(classes)
	labels = b.reshape(labels, rows)
	b.dtype = b.of(labels).DType
	counts := b.with(fuse.NotEqual, labels, float64(ignore))
	inside := b.two(fuse.Mul, b.with(fuse.GreaterEqual, labels, 0), b.with(fuse.Less, labels, float64(shape.At(classes))))
	wrong := b.two(fuse.Mul, counts, b.with(fuse.NotEqual, inside, 1))
	right := b.two(fuse.Mul, counts, inside)
	known := b.with(fuse.Sub, b.two(fuse.Mul, b.with(fuse.Add, labels, 1), counts), 1)
	b.dtype = float
	cast := func(x ir.ID) ir.ID { return b.add(ir.Cast{}, rows, float, x) }
	zero := b.fill(rows, 0)
	return targets{
		labels: b.broadcast(b.reshape(known, shape.With(classes, 1)), shape),
		right:  cast(right),
		others: b.where(cast(wrong), b.fill(rows, math.NaN()), zero),
		number: b.with(fuse.Maximum, b.sum(cast(counts)), 1),
	}
}

// fill adds a number, repeated to a shape.
func (b *builder) fill(shape ir.Dims, number float64) ir.ID {
	return b.expand(b.add(ir.ScalarOf(number), ir.Dims{}, b.dtype), shape)
}

// where adds x where c is not 0, and y elsewhere, all of one shape.
func (b *builder) where(c, x, y ir.ID) ir.ID {
	return b.add(ir.Where{}, b.of(x).Shape, b.dtype, c, x, y)
}

// sum adds the sum of all elements.
func (b *builder) sum(x ir.ID) ir.ID {
	var axes []int
	for axis := range b.of(x).Shape.Len() {
		axes = append(axes, axis)
	}
	return b.reduceAxes(backend.Sum, x, axes...)
}

// logSum returns logits less the largest of their row, and the logarithm of the sum of their exponentials:
// the difference is the logarithm of the softmax. Loss and gradient share both.
func (b *builder) logSum(logits ir.ID) (less, logSum ir.ID) {
	classes := b.last(logits)
	less = b.two(fuse.Sub, logits, b.alongRows(b.reduceAxes(backend.Max, logits, classes), logits))
	return less, b.one(fuse.Log, b.reduceAxes(backend.Sum, b.one(fuse.Exp, less), classes))
}

// alongRows repeats what has one element for each row of x.
func (b *builder) alongRows(each, x ir.ID) ir.ID {
	shape := b.of(x).Shape
	return b.broadcast(b.reshape(each, shape.With(shape.Len()-1, 1)), shape)
}

// crossEntropy is minus the mean of the labels' log-probabilities. The label is chosen before the logarithm is
// subtracted, so that it takes no extra pass over a row.
func (b *builder) crossEntropy(ignore int) ir.ID {
	logits := b.args[0]
	shape, classes := b.of(logits).Shape, b.last(logits)
	t := b.targets(logits, b.args[1], ignore)
	less, logSum := b.logSum(logits)
	atLabel := b.add(ir.Select{Axis: classes}, shape, b.dtype, t.labels, less, b.fill(shape, 0))
	chosen := b.reduceAxes(backend.Sum, atLabel, classes)
	sum := b.sum(b.where(t.right, b.two(fuse.Sub, chosen, logSum), t.others))
	return b.one(fuse.Neg, b.two(fuse.Div, sum, t.number))
}

// crossEntropyGrad is (probability - 1 at the label) * dy / number, where the label is right.
func (b *builder) crossEntropyGrad(ignore int) ir.ID {
	logits := b.args[0]
	shape, classes := b.of(logits).Shape, b.last(logits)
	t := b.targets(logits, b.args[1], ignore)
	less, logSum := b.logSum(logits)
	p := b.one(fuse.Exp, b.two(fuse.Sub, less, b.alongRows(logSum, logits)))
	away := b.add(ir.Select{Axis: classes}, shape, b.dtype, t.labels, b.with(fuse.Add, p, -1), p)
	share := b.two(fuse.Div, b.reshape(b.args[2], ir.Dims{}), t.number)
	right, others := b.alongRows(t.right, logits), b.alongRows(t.others, logits)
	return b.where(right, b.two(fuse.Mul, away, share), others)
}
