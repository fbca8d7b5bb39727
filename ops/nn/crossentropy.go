package nn

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops"
)

// NoLabel is the label that [CrossEntropy] ignores in PyTorch unless told otherwise.
const NoLabel = -100

// CrossEntropy is the loss of a classification: minus the logarithm of the probability that the
// softmax of the logits gives to the label, as a mean over all rows whose label is not ignore.
//
//	in   logits  [d..., n]
//	     labels  [d...]   Int, 0 to n-1 or ignore
//	out  loss    []       mean of log(sum(exp(logits))) - logits[label];
//	                      0 if all labels are ignored
//
// Pass [NoLabel] if all labels count. A row that is ignored contributes nothing, whatever its
// logits are. Ranks whose batches differ in the number of ignored labels get the mean of their
// means, not the mean over all labels, if gradients are averaged.
//
// Gradient: dlogits = (softmax(logits) - one-hot label) / rows, 0 in rows that are ignored. Labels
// have none.
// Cost: one pass over the logits; backward one, and no other memory than dlogits.
// Errors: [ops.ErrShape] if labels do not have the shape of the logits without the last axis;
// [ops.ErrDType] if labels are not Int; when the graph runs, [backend.ErrArgument] if a label is
// out of range.
func CrossEntropy(ignore int, logits, labels *gorgonia.Node) (*gorgonia.Node, error) {
	return build("CrossEntropy", "logits labels", crossEntropySpec{ignore}, logits, labels)
}

// crossEntropySpec is [CrossEntropy] of logits and labels.
type crossEntropySpec struct{ Ignore int }

// String returns "CrossEntropy{ignore -100}".
func (s crossEntropySpec) String() string {
	return fmt.Sprintf("CrossEntropy{ignore %d}", s.Ignore)
}

func (s crossEntropySpec) indices() int { return 1 }

func (s crossEntropySpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	logits, labels := in[0], in[1]
	if len(logits) < 2 || !slices.Equal(labels, logits[:len(logits)-1]) {
		return nil, fmt.Errorf("%w: logits have shape %v and labels %v: want (d..., n) and (d...)",
			ops.ErrShape, logits, labels)
	}
	return tensor.Shape{}, nil
}

func (s crossEntropySpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{crossEntropyGradSpec(s), []int{0, 1, dy}}, {}}
}

// targets are what a cross-entropy and its gradient need of the labels, for each row.
type targets struct {
	labels program.Value // -1 where a label is ignored
	right  program.Value // 1, 0 if a label is ignored or out of range
	others program.Value // 0, NaN if a label is out of range: what counts where it is not right
	number program.Value // of labels that are not ignored, at least 1: with the labels' axes
}

func (s crossEntropySpec) targets(b program.Builder, logits, labels program.Value) targets {
	shape := b.Of(logits).Shape
	last := len(shape) - 1
	classes := float64(shape[last])
	zero, one := b.Number(0, logits), b.Number(1, logits)
	number := allOf(b, b.Do(fuse.Where, program.With(b, fuse.NotEqual, labels, float64(s.Ignore)),
		one, zero))
	shape[last] = 1
	labels = b.Reshape(labels, shape...)
	counts := program.With(b, fuse.NotEqual, labels, float64(s.Ignore))
	inside := b.Do(fuse.Mul, program.With(b, fuse.GreaterEqual, labels, 0),
		program.With(b, fuse.Less, labels, classes))
	wrong := b.Do(fuse.Mul, counts, program.With(b, fuse.NotEqual, inside, 1))
	return targets{
		labels: program.With(b, fuse.Sub, b.Do(fuse.Mul, program.With(b, fuse.Add, labels, 1),
			counts), 1),
		right:  b.Do(fuse.Mul, counts, inside),
		others: b.Do(fuse.Where, wrong, b.Number(math.NaN(), logits), zero),
		number: program.With(b, fuse.Maximum, number, 1),
	}
}

// allOf is the sum of all elements. Along a last axis of length 1, it would take a separate pass.
func allOf(b program.Builder, x program.Value) program.Value {
	return program.Sum(b, x, program.Axes(b, x, 0)...)
}

// logSum is the logits less the largest of their row, and the logarithm of the sum of their
// exponentials: the difference is the logarithm of the softmax. Loss and gradient share both.
func logSum(b program.Builder, logits program.Value) (less, log program.Value) {
	last := len(b.Of(logits).Shape) - 1
	less = b.Do(fuse.Sub, logits, b.Reduce(backend.Max, logits, last))
	return less, b.Do(fuse.Log, program.Sum(b, b.Do(fuse.Exp, less), last))
}

// program chooses the label before the logarithm is subtracted, so that it takes no extra pass over
// a row.
func (s crossEntropySpec) program(b program.Builder, x ...program.Value) program.Value {
	t := s.targets(b, x[0], x[1])
	last := len(b.Of(x[0]).Shape) - 1
	less, log := logSum(b, x[0])
	chosen := program.Sum(b, b.Select(last, t.labels, less, b.Number(0, less)), last)
	each := b.Do(fuse.Where, t.right, b.Do(fuse.Sub, chosen, log), t.others)
	each = b.Reshape(each, b.Of(x[1]).Shape...)
	return b.Do(fuse.Neg, b.Do(fuse.Div, allOf(b, each), t.number))
}

func (s crossEntropySpec) check(labels []int, in []tensor.Shape) error {
	n := in[0][len(in[0])-1]
	for k, label := range labels {
		if label != s.Ignore && (label < 0 || label >= n) {
			return fmt.Errorf("%w: label %d is %d, out of range 0 to %d", backend.ErrArgument, k,
				label, n-1)
		}
	}
	return nil
}

// crossEntropyGradSpec is the gradient of [crossEntropySpec] by the logits, from logits, labels and
// the gradient of the loss.
type crossEntropyGradSpec struct{ Ignore int }

// String returns "CrossEntropyGrad{ignore -100}".
func (s crossEntropyGradSpec) String() string {
	return fmt.Sprintf("CrossEntropyGrad{ignore %d}", s.Ignore)
}

func (s crossEntropyGradSpec) indices() int { return 1 }

func (s crossEntropyGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return in[0].Clone(), nil
}

func (s crossEntropyGradSpec) gradients([]tensor.Shape) []gradient { return nil }

func (s crossEntropyGradSpec) check(labels []int, in []tensor.Shape) error {
	return crossEntropySpec(s).check(labels, in)
}

// program is (probability - 1 at the label) * dy / number, where the label is right.
func (s crossEntropyGradSpec) program(b program.Builder, x ...program.Value) program.Value {
	t := crossEntropySpec(s).targets(b, x[0], x[1])
	last := len(b.Of(x[0]).Shape) - 1
	less, log := logSum(b, x[0])
	p := b.Do(fuse.Exp, b.Do(fuse.Sub, less, log))
	away := b.Select(last, t.labels, program.With(b, fuse.Add, p, -1), p)
	ones := slices.Repeat([]int{1}, last+1)
	share := b.Do(fuse.Div, b.Reshape(x[2], ones[:last]...), t.number)
	share = b.Reshape(share, ones...)
	return b.Do(fuse.Where, t.right, b.Do(fuse.Mul, away, share), t.others)
}
