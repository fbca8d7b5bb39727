package nn

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// SoftMax returns exp(x) divided by its sum along an axis.
//
//	in   x  [d..., n, e...]
//	out  y  [d..., n, e...]   y = exp(x - max) / sum(exp(x - max)), along n
//
// A negative axis counts from the last. gorgonia.SoftMax merges with LogSoftMax of the same x, is
// changed by a Log of it, and takes the first axis of a column.
//
// Gradient: dx = y * (dy - sum(dy * y)), along n.
// Cost: three passes over x.
// Errors: [ops.ErrShape] if x has no such axis; [ops.ErrDType].
func SoftMax(axis int, x *gorgonia.Node) (*gorgonia.Node, error) {
	return buildSoftMax("SoftMax", axis, false, x)
}

// LogSoftMax returns the logarithm of [SoftMax], without computing small numbers first.
//
//	in   x  [d..., n, e...]
//	out  y  [d..., n, e...]   y = x - max - log(sum(exp(x - max))), along n
//
// A negative axis counts from the last. For a loss of labels use [CrossEntropy].
//
// Gradient: dx = dy - exp(y) * sum(dy), along n.
// Cost: three passes over x.
// Errors: [ops.ErrShape] if x has no such axis; [ops.ErrDType].
func LogSoftMax(axis int, x *gorgonia.Node) (*gorgonia.Node, error) {
	return buildSoftMax("LogSoftMax", axis, true, x)
}

func buildSoftMax(name string, axis int, log bool, x *gorgonia.Node) (*gorgonia.Node, error) {
	axis, err := resolve(axis, x)
	if err != nil {
		return nil, fmt.Errorf("nn: %s: %w", name, err)
	}
	return build(name, "x", SoftMaxSpec{axis, log}, x)
}

// SoftMaxSpec is [SoftMax], or [LogSoftMax] if Log is set, with an axis that is not negative.
type SoftMaxSpec struct {
	Axis int
	Log  bool
}

// String returns "SoftMax{axis 1}" or "LogSoftMax{axis 1}".
func (s SoftMaxSpec) String() string { return logged("SoftMax", s.Axis, s.Log) }

func logged(name string, axis int, log bool) string {
	if log {
		name = "Log" + name
	}
	return fmt.Sprintf("%s{axis %d}", name, axis)
}

func (s SoftMaxSpec) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }

func (s SoftMaxSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{SoftMaxGradSpec(s), []int{result, dy}}}
}

func (s SoftMaxSpec) f32(y array[float32], x []array[float32]) error { return softmax(s, y, x[0]) }
func (s SoftMaxSpec) f64(y array[float64], x []array[float64]) error { return softmax(s, y, x[0]) }

func softmax[T float](s SoftMaxSpec, y, x array[T]) error {
	lines(x.shape, s.Axis, func(at func(k int) int, n int) {
		most, sum := math.Inf(-1), 0.0
		for k := range n {
			most = max(most, float64(x.data[at(k)]))
		}
		for k := range n {
			sum += math.Exp(float64(x.data[at(k)]) - most)
		}
		for k := range n {
			v := float64(x.data[at(k)]) - most
			if s.Log {
				y.data[at(k)] = T(v - math.Log(sum))
			} else {
				y.data[at(k)] = T(math.Exp(v) / sum)
			}
		}
	})
	return nil
}

// lines calls f for each line of elements along an axis: element k of n is at at(k).
func lines(shape tensor.Shape, axis int, f func(at func(k int) int, n int)) {
	before, along, behind := around(shape, axis)
	for i := range before {
		for j := range behind {
			f(func(k int) int { return (i*along+k)*behind + j }, along)
		}
	}
}

// SoftMaxGradSpec is the gradient of [SoftMaxSpec], from its result y and dy.
type SoftMaxGradSpec struct {
	Axis int
	Log  bool
}

// String returns "SoftMaxGrad{axis 1}" or "LogSoftMaxGrad{axis 1}".
func (s SoftMaxGradSpec) String() string { return logged("SoftMaxGrad", s.Axis, s.Log) }

func (s SoftMaxGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }

func (s SoftMaxGradSpec) gradients([]tensor.Shape) []gradient { return nil }

func (s SoftMaxGradSpec) f32(dx array[float32], x []array[float32]) error {
	return softmaxGrad(s, dx, x[0], x[1])
}

func (s SoftMaxGradSpec) f64(dx array[float64], x []array[float64]) error {
	return softmaxGrad(s, dx, x[0], x[1])
}

func softmaxGrad[T float](s SoftMaxGradSpec, dx, y, dy array[T]) error {
	lines(y.shape, s.Axis, func(at func(k int) int, n int) {
		sum := 0.0
		for k := range n {
			if s.Log {
				sum += float64(dy.data[at(k)])
			} else {
				sum += float64(dy.data[at(k)]) * float64(y.data[at(k)])
			}
		}
		for k := range n {
			v, d := float64(y.data[at(k)]), float64(dy.data[at(k)])
			if s.Log {
				dx.data[at(k)] = T(d - math.Exp(v)*sum)
			} else {
				dx.data[at(k)] = T(v * (d - sum))
			}
		}
	})
	return nil
}
