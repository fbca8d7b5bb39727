package nn

import (
	"cmp"
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
// Pass [NoLabel] if all labels count. An ignored row contributes nothing, whatever its logits are.
// 0 is refused, because it may stand for no label or for the first class: [CrossEntropyWith]
// ignores that one. If gradients are averaged, ranks whose batches differ in the number of ignored
// labels get the mean of their means, not the mean over all labels. CrossEntropyWith has weights of
// classes, smoothed labels and other reductions.
//
// Gradient: dlogits = (softmax(logits) - one-hot label) / rows, 0 in ignored rows. Labels have
// none.
// Cost: one pass over the logits; backward one, and no other memory than dlogits.
// Errors: [ops.ErrShape] if labels do not have the shape of the logits without the last axis;
// [ops.ErrDType] if labels are not Int; [backend.ErrArgument] if ignore is 0, and when the graph
// runs, if a label is out of range. Where package vm computes the labels in the graph, the loss and
// the gradient of such a row are NaN.
func CrossEntropy(ignore int, logits, labels *gorgonia.Node) (*gorgonia.Node, error) {
	if ignore == 0 {
		return nil, fmt.Errorf("nn: CrossEntropy: %w: ignore is 0: pass nn.NoLabel if all labels "+
			"count; CrossEntropyWith and IgnoreFirst leave out the first class",
			backend.ErrArgument)
	}
	return CrossEntropyWith(CrossEntropyOptions{Ignore: ignore}, logits, labels)
}

// Reduction says how the losses of rows are combined.
type Reduction int

// The reductions.
const (
	MeanOfRows Reduction = iota // the mean, weighted by the classes of the labels
	SumOfRows
	EachRow // no reduction: a loss for each row
)

// String returns "mean", "sum" or "none", as PyTorch says.
func (r Reduction) String() string { return [...]string{"mean", "sum", "none"}[r] }

// CrossEntropyOptions are the options of [CrossEntropyWith]. The zero value is PyTorch's
// cross_entropy without arguments.
type CrossEntropyOptions struct {
	Ignore      int  // the label of rows that do not count; 0 is NoLabel
	IgnoreFirst bool // rows of label 0, the first class, do not count; Ignore is 0 then
	// Smoothing is the share of every target that is spread over all classes, 0 to 1; the label
	// gets the rest.
	Smoothing float64
	Weights   *gorgonia.Node // of classes, [n], without a gradient; nil for 1
	Reduction Reduction
}

// CrossEntropyWith is [CrossEntropy] with more options: PyTorch's cross_entropy, with its values.
//
//	out  loss  []       the mean or the sum of the losses of rows
//	           [d...]   of EachRow, 0 where a label is ignored
//
// The loss of a row is w[label] * nll[label] * (1-s) + sum(w * nll) * s/n, where nll is minus the
// logarithm of the softmax, w are the weights and s is the smoothing. The mean divides by the sum
// of w[label], or by 1 if that is 0.
//
// Gradient, cost and errors: those of CrossEntropy; [ops.ErrShape] if there are not n weights;
// [backend.ErrArgument] if the smoothing is not between 0 and 1, or the reduction does not exist.
func CrossEntropyWith(o CrossEntropyOptions, logits, labels *gorgonia.Node) (*gorgonia.Node,
	error) {
	if o.IgnoreFirst && o.Ignore != 0 {
		return nil, fmt.Errorf("nn: CrossEntropy: %w: Ignore is %d beside IgnoreFirst: rows of "+
			"one label can be ignored", backend.ErrArgument, o.Ignore)
	}
	if r := o.Reduction; !(o.Smoothing >= 0 && o.Smoothing <= 1) || r < MeanOfRows || r > EachRow {
		return nil, fmt.Errorf("nn: CrossEntropy: %w: a smoothing of %v, reduction %d",
			backend.ErrArgument, o.Smoothing, int(o.Reduction))
	}
	s := crossEntropySpec{cmp.Or(o.Ignore, NoLabel), o.Smoothing, o.Weights != nil, o.Reduction}
	if o.IgnoreFirst {
		s.Ignore = 0
	}
	if o.Weights == nil {
		return build("CrossEntropy", "logits labels", s, logits, labels)
	}
	return build("CrossEntropy", "logits labels weights", s, logits, labels, o.Weights)
}

// crossEntropySpec is [CrossEntropyWith] of logits, labels and, if it is Weighted, weights.
type crossEntropySpec struct {
	Ignore    int
	Smoothing float64
	Weighted  bool
	Reduction Reduction
}

// String returns "CrossEntropy{ignore -100}", and what else differs from [CrossEntropy].
func (s crossEntropySpec) String() string {
	name := fmt.Sprintf("CrossEntropy{ignore %d", s.Ignore)
	if s.Smoothing > 0 {
		name += fmt.Sprintf(", smoothing %v", s.Smoothing)
	}
	if s.Weighted {
		name += ", weighted"
	}
	if s.Reduction != MeanOfRows {
		name += fmt.Sprintf(", %v", s.Reduction)
	}
	return name + "}"
}

func (s crossEntropySpec) indices() int { return 1 }

func (s crossEntropySpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	logits, labels := in[0], in[1]
	if len(logits) < 2 || !slices.Equal(labels, logits[:len(logits)-1]) {
		return nil, fmt.Errorf("%w: logits have shape %v and labels %v: want (d..., n) and (d...)",
			ops.ErrShape, logits, labels)
	}
	if s.Weighted && !slices.Equal(in[2], lastOf(logits)) {
		return nil, fmt.Errorf("%w: logits have shape %v and weights %v: want a weight of each "+
			"class", ops.ErrShape, logits, in[2])
	}
	if s.Reduction == EachRow {
		return labels.Clone(), nil
	}
	return tensor.Shape{}, nil
}

func (s crossEntropySpec) gradients(in []tensor.Shape) []gradient { return gradientsOf(s, in, 1) }

// targets are what a cross-entropy and its gradient need from the labels, for each row.
type targets struct {
	labels program.Value // -1 where a label is ignored
	right  program.Value // 1, 0 if a label is ignored or out of range
	others program.Value // 0, NaN if a label is out of range: what counts where it is not right
	number program.Value // of labels that are not ignored, at least 1: with the labels' axes
	// of a weighted loss: of each row's class, of each class in a row, and of all classes
	weight, weights, all program.Value
}

// targets takes logits, labels and weights.
func (s crossEntropySpec) targets(b *program.Builder, x ...program.Value) targets {
	logits, labels := x[0], x[1]
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
	t := targets{
		labels: program.With(b, fuse.Sub, b.Do(fuse.Mul, program.With(b, fuse.Add, labels, 1),
			counts), 1),
		right:  b.Do(fuse.Mul, counts, inside),
		others: b.Do(fuse.Where, wrong, b.Number(math.NaN(), logits), zero),
		number: program.With(b, fuse.Maximum, number, 1),
	}
	if !s.Weighted {
		t.weight, t.weights, t.all = one, one, b.Number(classes, logits)
		return t
	}
	row := slices.Repeat([]int{1}, last+1)
	row[last] = int(classes)
	t.weights = b.Reshape(x[2], row...)
	t.all = program.Sum(b, t.weights, last)
	t.weight = program.Sum(b, b.Select(last, t.labels, t.weights, zero), last)
	t.weight = b.Do(fuse.Add, t.weight, t.others) // a mean is over a weight that nobody knows
	sum := allOf(b, b.Reshape(t.weight, b.Of(x[1]).Shape...))
	t.number = b.Do(fuse.Where, sum, sum, one)
	return t
}

// plain reports whether all classes count alike and labels are not smoothed.
func (s crossEntropySpec) plain() bool { return !s.Weighted && s.Smoothing == 0 }

// allOf is the sum of all elements. Along a last axis of length 1, it would take a separate pass.
func allOf(b *program.Builder, x program.Value) program.Value {
	return program.Sum(b, x, program.Axes(b, x, 0)...)
}

// logSum is the logits less the largest of their row, and the logarithm of the sum of their
// exponentials: the difference is the logarithm of the softmax. Loss and gradient share both.
func logSum(b *program.Builder, logits program.Value) (less, log program.Value) {
	last := len(b.Of(logits).Shape) - 1
	less = b.Do(fuse.Sub, logits, b.Reduce(backend.Max, logits, last))
	return less, b.Do(fuse.Log, program.Sum(b, b.Do(fuse.Exp, less), last))
}

// program chooses the label before the logarithm is subtracted, so that it takes no extra pass over
// a row.
func (s crossEntropySpec) program(b *program.Builder, x ...program.Value) program.Value {
	t := s.targets(b, x...)
	last := len(b.Of(x[0]).Shape) - 1
	less, log := logSum(b, x[0])
	chosen := program.Sum(b, b.Select(last, t.labels, less, b.Number(0, less)), last)
	each := b.Do(fuse.Sub, chosen, log)
	if !s.plain() {
		each = program.With(b, fuse.Mul, b.Do(fuse.Mul, each, t.weight), 1-s.Smoothing)
	}
	if s.Smoothing > 0 {
		sum := program.Sum(b, b.Do(fuse.Mul, less, t.weights), last)
		sum = b.Do(fuse.Sub, sum, b.Do(fuse.Mul, log, t.all))
		n := float64(b.Of(x[0]).Shape[last])
		each = b.Do(fuse.Add, each, program.With(b, fuse.Mul, sum, s.Smoothing/n))
	}
	each = b.Do(fuse.Where, t.right, each, t.others)
	each = b.Reshape(each, b.Of(x[1]).Shape...)
	switch s.Reduction {
	case MeanOfRows:
		each = b.Do(fuse.Div, allOf(b, each), t.number)
	case SumOfRows:
		each = allOf(b, each)
	}
	return b.Do(fuse.Neg, each)
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

// back is (probability - 1 at the label) * dy / number, where the label is right; smoothing adds
// what the other classes are short of.
func (s crossEntropySpec) back(b *program.Builder, _ int, x []program.Value, _, dy program.Value,
) program.Value {
	t := s.targets(b, x...)
	last := len(b.Of(x[0]).Shape) - 1
	less, log := logSum(b, x[0])
	p := b.Do(fuse.Exp, b.Do(fuse.Sub, less, log))
	away := b.Select(last, t.labels, program.With(b, fuse.Add, p, -1), p)
	if !s.plain() {
		away = program.With(b, fuse.Mul, b.Do(fuse.Mul, away, t.weight), 1-s.Smoothing)
	}
	if s.Smoothing > 0 {
		n := float64(b.Of(x[0]).Shape[last])
		even := b.Do(fuse.Sub, b.Do(fuse.Mul, p, t.all), t.weights)
		away = b.Do(fuse.Add, away, program.With(b, fuse.Mul, even, s.Smoothing/n))
	}
	ones := slices.Repeat([]int{1}, last+1)
	switch s.Reduction {
	case MeanOfRows:
		dy = b.Reshape(b.Do(fuse.Div, b.Reshape(dy, ones[:last]...), t.number), ones...)
	case SumOfRows:
		dy = b.Reshape(dy, ones...)
	case EachRow:
		dy = b.Reshape(dy, append(b.Of(dy).Shape, 1)...)
	}
	return b.Do(fuse.Where, t.right, b.Do(fuse.Mul, away, dy), t.others)
}
