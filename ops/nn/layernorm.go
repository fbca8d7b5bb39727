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
// variance is not finite is NaN (in PyTorch NaN or 0): in float32 that begins at deviations of
// about 1e19.
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

func (s layerNormSpec) gradients(in []tensor.Shape) []gradient { return gradientsOf(s, in, 3) }

func (s layerNormSpec) program(b *program.Builder, x ...program.Value) program.Value {
	z, _ := s.normalized(b, x[0])
	return b.Do(fuse.Add, b.Do(fuse.Mul, z, x[1]), x[2])
}

func (s layerNormSpec) normalized(b *program.Builder, x program.Value) (z, scale program.Value) {
	return program.Normalized(b, x, s.Epsilon, len(b.Of(x).Shape)-1)
}

func (s layerNormSpec) back(b *program.Builder, i int, x []program.Value, _, dy program.Value,
) program.Value {
	switch i {
	case 0:
		dz := b.Do(fuse.Mul, dy, x[1])
		return program.NormalizedGrad(b, x[0], dz, s.Epsilon, len(b.Of(x[0]).Shape)-1)
	case 1:
		z, _ := s.normalized(b, x[0])
		dy = b.Do(fuse.Mul, dy, z)
	}
	return sumRows(b, dy)
}

// lastOf is the shape of a vector as long as the last axis.
func lastOf(shape tensor.Shape) tensor.Shape { return tensor.Shape{shape[len(shape)-1]} }

// sumRows is the sum over all axes but the last.
func sumRows(b *program.Builder, x program.Value) program.Value {
	axes := program.Axes(b, x, 0)
	return program.Sum(b, x, axes[:len(axes)-1]...)
}
