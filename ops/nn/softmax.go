package nn

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/program"
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
// Cost: one pass over x, along the last axis; along others three.
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
// Cost: one pass over x, along the last axis; along others three.
// Errors: [ops.ErrShape] if x has no such axis; [ops.ErrDType].
func LogSoftMax(axis int, x *gorgonia.Node) (*gorgonia.Node, error) {
	return buildSoftMax("LogSoftMax", axis, true, x)
}

func buildSoftMax(name string, axis int, log bool, x *gorgonia.Node) (*gorgonia.Node, error) {
	axis, err := resolve(axis, x)
	if err != nil {
		return nil, fmt.Errorf("nn: %s: %w", name, err)
	}
	return build(name, "x", softMaxSpec{axis, log}, x)
}

// softMaxSpec is [SoftMax], or [LogSoftMax] if Log is set, with an axis that is not negative.
type softMaxSpec struct {
	Axis int
	Log  bool
}

// String returns "SoftMax{axis 1}" or "LogSoftMax{axis 1}".
func (s softMaxSpec) String() string { return logged("SoftMax", s.Axis, s.Log) }

func logged(name string, axis int, log bool) string {
	if log {
		name = "Log" + name
	}
	return fmt.Sprintf("%s{axis %d}", name, axis)
}

func (s softMaxSpec) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }

func (s softMaxSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{softMaxGradSpec(s), []int{result, dy}}}
}

func (s softMaxSpec) program(b program.Builder, x ...program.Value) program.Value {
	return program.SoftMax(b, x[0], s.Axis, s.Log)
}

// softMaxGradSpec is the gradient of [softMaxSpec], from its result y and dy.
type softMaxGradSpec struct {
	Axis int
	Log  bool
}

// String returns "SoftMaxGrad{axis 1}" or "LogSoftMaxGrad{axis 1}".
func (s softMaxGradSpec) String() string { return logged("SoftMaxGrad", s.Axis, s.Log) }

func (s softMaxGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return in[0].Clone(), nil
}

func (s softMaxGradSpec) gradients([]tensor.Shape) []gradient { return nil }

func (s softMaxGradSpec) program(b program.Builder, x ...program.Value) program.Value {
	return program.SoftMaxGrad(b, x[0], x[1], s.Axis, s.Log)
}
