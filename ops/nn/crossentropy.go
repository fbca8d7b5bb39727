package nn

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops"
)

// NoLabel is the label that [CrossEntropy] ignores in PyTorch unless told otherwise.
const NoLabel = -100

// CrossEntropy is the loss of a classification: minus the logarithm of the probability that the
// softmax of the logits gives to the label, as a mean over all rows whose label is not ignore.
//
//	in   logits  [d..., n]
//	     labels  [d...]   Int, 0 to n-1 or ignore
//	out  loss    []       mean of log(sum(exp(logits))) - logits[label]; 0 if all labels are ignored
//
// Pass [NoLabel] if all labels count. A row that is ignored contributes nothing, whatever its
// logits are. Ranks whose batches differ in the number of ignored labels get the mean of their
// means, not the mean over all labels, if gradients are averaged.
//
// Gradient: dlogits = (softmax(logits) - one-hot label) / rows, 0 in rows that are ignored. Labels
// have none.
// Cost: two passes over the logits; backward three, and no other memory than dlogits.
// Errors: [ops.ErrShape] if labels do not have the shape of the logits without the last axis;
// [ops.ErrDType] if labels are not Int; when the graph runs, [backend.ErrArgument] if a label is
// out of range.
func CrossEntropy(ignore int, logits, labels *gorgonia.Node) (*gorgonia.Node, error) {
	return build("CrossEntropy", "logits labels", CrossEntropySpec{ignore}, logits, labels)
}

// CrossEntropySpec is [CrossEntropy] of logits and labels.
type CrossEntropySpec struct{ Ignore int }

// String returns "CrossEntropy{ignore -100}".
func (s CrossEntropySpec) String() string { return fmt.Sprintf("CrossEntropy{ignore %d}", s.Ignore) }

func (s CrossEntropySpec) indices() int { return 1 }

func (s CrossEntropySpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	logits, labels := in[0], in[1]
	if len(logits) < 2 || !slices.Equal(labels, logits[:len(logits)-1]) {
		return nil, fmt.Errorf("%w: logits have shape %v and labels %v: want (d..., n) and (d...)", ops.ErrShape, logits, labels)
	}
	return tensor.Shape{}, nil
}

func (s CrossEntropySpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{CrossEntropyGradSpec(s), []int{0, 1, dy}}, {}}
}

func (s CrossEntropySpec) f32(y array[float32], x []array[float32]) error {
	return crossEntropy(s, y, x[0], x[1].ints)
}

func (s CrossEntropySpec) f64(y array[float64], x []array[float64]) error {
	return crossEntropy(s, y, x[0], x[1].ints)
}

func crossEntropy[T float](s CrossEntropySpec, loss, logits array[T], labels []int) error {
	n := len(logits.data) / len(labels)
	counted, err := counting(labels, n, s.Ignore)
	if err != nil || counted == 0 {
		return err
	}
	sum := 0.0
	for i, label := range labels {
		if label == s.Ignore {
			continue
		}
		row := logits.data[i*n : (i+1)*n]
		most, total := exponentials(row)
		sum += math.Log(total) + (most - float64(row[label])) // equal logits cancel
	}
	loss.data[0] = T(sum / float64(counted))
	return nil
}

// counting returns how many labels count, and checks them.
func counting(labels []int, n, ignore int) (counted int, err error) {
	for k, label := range labels {
		if label == ignore {
			continue
		}
		if label < 0 || label >= n {
			return 0, fmt.Errorf("%w: label %d is %d, out of range 0 to %d", backend.ErrArgument, k, label, n-1)
		}
		counted++
	}
	return counted, nil
}

// exponentials returns the largest element of a row, and the sum of exp(x - largest).
func exponentials[T float](row []T) (most, sum float64) {
	most = math.Inf(-1)
	for _, v := range row {
		most = max(most, float64(v))
	}
	for _, v := range row {
		sum += math.Exp(float64(v) - most)
	}
	return most, sum
}

// CrossEntropyGradSpec is the gradient of [CrossEntropySpec] by the logits, from logits, labels and
// the gradient of the loss.
type CrossEntropyGradSpec struct{ Ignore int }

// String returns "CrossEntropyGrad{ignore -100}".
func (s CrossEntropyGradSpec) String() string {
	return fmt.Sprintf("CrossEntropyGrad{ignore %d}", s.Ignore)
}

func (s CrossEntropyGradSpec) indices() int { return 1 }

func (s CrossEntropyGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return in[0].Clone(), nil
}

func (s CrossEntropyGradSpec) gradients([]tensor.Shape) []gradient { return nil }

func (s CrossEntropyGradSpec) f32(dx array[float32], x []array[float32]) error {
	return crossEntropyGrad(s, dx, x[0], x[1].ints, x[2])
}

func (s CrossEntropyGradSpec) f64(dx array[float64], x []array[float64]) error {
	return crossEntropyGrad(s, dx, x[0], x[1].ints, x[2])
}

func crossEntropyGrad[T float](s CrossEntropyGradSpec, dx, logits array[T], labels []int, dy array[T]) error {
	n := len(logits.data) / len(labels)
	counted, err := counting(labels, n, s.Ignore)
	if err != nil || counted == 0 {
		return err
	}
	scale := float64(dy.data[0]) / float64(counted)
	for i, label := range labels {
		if label == s.Ignore {
			continue
		}
		row, to := logits.data[i*n:(i+1)*n], dx.data[i*n:(i+1)*n]
		most, total := exponentials(row)
		for k, v := range row {
			p := math.Exp(float64(v)-most) / total
			if k == label {
				p--
			}
			to[k] = T(p * scale)
		}
	}
	return nil
}
