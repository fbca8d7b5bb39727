package nn

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops"
)

// LayerNorm normalises the last axis, and scales and shifts the result.
//
//	in   x     [d..., n]
//	     gain  [n]
//	     bias  [n]
//	out  y     [d..., n]   y = (x - mean) / sqrt(variance + epsilon) * gain + bias
//
// Mean and variance are taken over the n elements of a row; the variance divides by n. A row whose
// variance is no finite number is NaN (in PyTorch NaN or 0): in float32 that begins at deviations
// of about 1e19.
//
// Gradient: dbias is the sum of dy over all rows, dgain that of dy * z, where z is the normalised
// x; dx = (g - mean(g) - z * mean(g * z)) / sqrt(variance + epsilon), where g = dy * gain.
// Cost: one pass over x; backward each gradient computes mean and variance again.
// Errors: [ops.ErrShape] if x is a scalar, or gain or bias is not of the length of the last axis;
// [backend.ErrArgument] if epsilon is negative or not a number; [ops.ErrDType].
// Source: Ba, Kiros and Hinton, Layer Normalization, 2016.
func LayerNorm(epsilon float64, x, gain, bias *gorgonia.Node) (*gorgonia.Node, error) {
	if !(epsilon >= 0) {
		return nil, fmt.Errorf("nn: LayerNorm: %w: epsilon is %v", backend.ErrArgument, epsilon)
	}
	return build("LayerNorm", "x gain bias", layerNormSpec{epsilon}, x, gain, bias)
}

// layerNormSpec is [LayerNorm] of x, gain and bias.
type layerNormSpec struct{ Epsilon float64 }

// String returns "LayerNorm{1e-05}".
func (s layerNormSpec) String() string { return fmt.Sprintf("LayerNorm{%v}", s.Epsilon) }

func (s layerNormSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	x := in[0]
	if len(x) == 0 {
		return nil, fmt.Errorf("%w: x is a scalar", ops.ErrShape)
	}
	for _, own := range in[1:] {
		if len(own) != 1 || own[0] != x[len(x)-1] {
			return nil, fmt.Errorf("%w: x has shape %v, so gain and bias must have shape (%d), "+
				"not %v", ops.ErrShape, x, x[len(x)-1], own)
		}
	}
	return x.Clone(), nil
}

func (s layerNormSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{
		{layerNormGradSpec(s), []int{0, 1, dy}},
		{layerNormGainGradSpec(s), []int{0, dy}},
		{layerNormBiasGradSpec{}, []int{dy}},
	}
}

func (s layerNormSpec) program(b program.Builder, x ...program.Value) program.Value {
	z, _ := s.normalized(b, x[0])
	return b.Do(fuse.Add, b.Do(fuse.Mul, z, x[1]), x[2])
}

func (s layerNormSpec) normalized(b program.Builder, x program.Value) (z, scale program.Value) {
	return program.Normalized(b, x, s.Epsilon, len(b.Of(x).Shape)-1)
}

// layerNormGradSpec is the gradient of [layerNormSpec] by x, from x, gain and dy.
type layerNormGradSpec struct{ Epsilon float64 }

// String returns "LayerNormGrad{1e-05}".
func (s layerNormGradSpec) String() string { return fmt.Sprintf("LayerNormGrad{%v}", s.Epsilon) }

func (s layerNormGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return in[0].Clone(), nil
}

func (s layerNormGradSpec) gradients([]tensor.Shape) []gradient { return nil }

func (s layerNormGradSpec) program(b program.Builder, x ...program.Value) program.Value {
	dz := b.Do(fuse.Mul, x[2], x[1])
	return program.NormalizedGrad(b, x[0], dz, s.Epsilon, len(b.Of(x[0]).Shape)-1)
}

// layerNormGainGradSpec is the gradient of [layerNormSpec] by gain, from x and dy.
type layerNormGainGradSpec struct{ Epsilon float64 }

// String returns "LayerNormGainGrad{1e-05}".
func (s layerNormGainGradSpec) String() string {
	return fmt.Sprintf("LayerNormGainGrad{%v}", s.Epsilon)
}

func (s layerNormGainGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return lastOf(in[0]), nil
}

// lastOf is the shape of a vector as long as the last axis.
func lastOf(shape tensor.Shape) tensor.Shape { return tensor.Shape{shape[len(shape)-1]} }

func (s layerNormGainGradSpec) gradients([]tensor.Shape) []gradient { return nil }

func (s layerNormGainGradSpec) program(b program.Builder, x ...program.Value) program.Value {
	z, _ := layerNormSpec(s).normalized(b, x[0])
	return sumRows(b, b.Do(fuse.Mul, x[1], z))
}

// sumRows is the sum over all axes but the last.
func sumRows(b program.Builder, x program.Value) program.Value {
	axes := program.Axes(b, x, 0)
	return program.Sum(b, x, axes[:len(axes)-1]...)
}

// layerNormBiasGradSpec is the gradient of [layerNormSpec] by bias: the sum of dy over all axes but
// the last.
type layerNormBiasGradSpec struct{}

// String returns "LayerNormBiasGrad".
func (s layerNormBiasGradSpec) String() string { return "LayerNormBiasGrad" }

func (s layerNormBiasGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return lastOf(in[0]), nil
}

func (s layerNormBiasGradSpec) gradients([]tensor.Shape) []gradient { return nil }

func (s layerNormBiasGradSpec) program(b program.Builder, x ...program.Value) program.Value {
	return sumRows(b, x[0])
}
