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
// A negative axis counts from the last. gorgonia.SoftMax merges with LogSoftMax of the same x,
// changes if a Log reads it, and for a column takes the first axis.
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
func (s softMaxSpec) String() string {
	return fmt.Sprintf("%s{axis %d}", map[bool]string{false: "SoftMax", true: "LogSoftMax"}[s.Log],
		s.Axis)
}

func (s softMaxSpec) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }

func (s softMaxSpec) gradients(in []tensor.Shape) []gradient { return gradientsOf(s, in, 1) }

func (s softMaxSpec) program(b *program.Builder, x ...program.Value) program.Value {
	return program.SoftMax(b, x[0], s.Axis, s.Log)
}

func (s softMaxSpec) back(b *program.Builder, _ int, _ []program.Value, y, dy program.Value,
) program.Value {
	return program.SoftMaxGrad(b, y, dy, s.Axis, s.Log)
}
