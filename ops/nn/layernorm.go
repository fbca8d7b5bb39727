package nn

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops"
)

// LayerNorm normalises the last axis, and scales and shifts the result.
//
//	in   x     [d..., n]
//	     gain  [n]
//	     bias  [n]
//	out  y     [d..., n]   y = (x - mean) / sqrt(variance + epsilon) * gain + bias
//
// Mean and variance are those of the n elements of a row; the variance divides by n. A row whose
// variance is no finite number of the type it is computed in is NaN (in PyTorch NaN or 0): with float32 in
// a machine of package vm that begins at deviations of about 1e19, in the tape machine, which
// computes in float64, at 1e154.
//
// Gradient: dbias is the sum of dy over all rows, dgain that of dy * z, where z is the normalised
// x; dx = (g - mean(g) - z * mean(g * z)) / sqrt(variance + epsilon), where g = dy * gain.
// Cost: three passes over x; backward each gradient computes mean and variance again.
// Errors: [ops.ErrShape] if x is a scalar, or gain or bias is not of the length of the last axis;
// [backend.ErrArgument] if epsilon is negative or not a number; [ops.ErrDType].
// Source: Ba, Kiros and Hinton, Layer Normalization, 2016.
func LayerNorm(epsilon float64, x, gain, bias *gorgonia.Node) (*gorgonia.Node, error) {
	if !(epsilon >= 0) {
		return nil, fmt.Errorf("nn: LayerNorm: %w: epsilon is %v", backend.ErrArgument, epsilon)
	}
	return build("LayerNorm", "x gain bias", LayerNormSpec{epsilon}, x, gain, bias)
}

// LayerNormSpec is [LayerNorm] of x, gain and bias.
type LayerNormSpec struct{ Epsilon float64 }

// String returns "LayerNorm{1e-05}".
func (s LayerNormSpec) String() string { return fmt.Sprintf("LayerNorm{%v}", s.Epsilon) }

func (s LayerNormSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	x := in[0]
	if len(x) == 0 {
		return nil, fmt.Errorf("%w: x is a scalar", ops.ErrShape)
	}
	for _, own := range in[1:] {
		if len(own) != 1 || own[0] != x[len(x)-1] {
			return nil, fmt.Errorf("%w: x has shape %v, so gain and bias must have shape (%d), not %v", ops.ErrShape, x, x[len(x)-1], own)
		}
	}
	return x.Clone(), nil
}

func (s LayerNormSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{
		{LayerNormGradSpec(s), []int{0, 1, dy}},
		{LayerNormGainGradSpec(s), []int{0, dy}},
		{LayerNormBiasGradSpec{}, []int{dy}},
	}
}

func (s LayerNormSpec) f32(y array[float32], x []array[float32]) error {
	return layerNorm(s, y, x[0], x[1], x[2])
}

func (s LayerNormSpec) f64(y array[float64], x []array[float64]) error {
	return layerNorm(s, y, x[0], x[1], x[2])
}

func layerNorm[T float](s LayerNormSpec, y, x, gain, bias array[T]) error {
	n := len(gain.data)
	for at := 0; at < len(x.data); at += n {
		mean, scale := moments(x.data[at:at+n], s.Epsilon)
		for k := range n {
			z := (float64(x.data[at+k]) - mean) * scale
			y.data[at+k] = T(z*float64(gain.data[k]) + float64(bias.data[k]))
		}
	}
	return nil
}

// moments returns the mean of a row and 1 / sqrt(variance + epsilon), NaN if the variance
// overflows.
func moments[T float](row []T, epsilon float64) (mean, scale float64) {
	n := float64(len(row))
	for _, v := range row {
		mean += float64(v)
	}
	mean /= n
	variance := 0.0
	for _, v := range row {
		variance += (float64(v) - mean) * (float64(v) - mean)
	}
	if math.IsInf(variance, 1) {
		return mean, math.NaN()
	}
	return mean, 1 / math.Sqrt(variance/n+epsilon)
}

// LayerNormGradSpec is the gradient of [LayerNormSpec] by x, from x, gain and dy.
type LayerNormGradSpec struct{ Epsilon float64 }

// String returns "LayerNormGrad{1e-05}".
func (s LayerNormGradSpec) String() string { return fmt.Sprintf("LayerNormGrad{%v}", s.Epsilon) }

func (s LayerNormGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }

func (s LayerNormGradSpec) gradients([]tensor.Shape) []gradient { return nil }

func (s LayerNormGradSpec) f32(dx array[float32], x []array[float32]) error {
	return layerNormGrad(s, dx, x[0], x[1], x[2])
}

func (s LayerNormGradSpec) f64(dx array[float64], x []array[float64]) error {
	return layerNormGrad(s, dx, x[0], x[1], x[2])
}

func layerNormGrad[T float](s LayerNormGradSpec, dx, x, gain, dy array[T]) error {
	n := len(gain.data)
	for at := 0; at < len(x.data); at += n {
		mean, scale := moments(x.data[at:at+n], s.Epsilon)
		z := func(k int) float64 { return (float64(x.data[at+k]) - mean) * scale }
		g := func(k int) float64 { return float64(dy.data[at+k]) * float64(gain.data[k]) }
		sum, along := 0.0, 0.0
		for k := range n {
			sum += g(k)
			along += g(k) * z(k)
		}
		for k := range n {
			dx.data[at+k] = T((g(k) - (sum+z(k)*along)/float64(n)) * scale)
		}
	}
	return nil
}

// LayerNormGainGradSpec is the gradient of [LayerNormSpec] by gain, from x and dy.
type LayerNormGainGradSpec struct{ Epsilon float64 }

// String returns "LayerNormGainGrad{1e-05}".
func (s LayerNormGainGradSpec) String() string {
	return fmt.Sprintf("LayerNormGainGrad{%v}", s.Epsilon)
}

func (s LayerNormGainGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return lastOf(in[0]), nil
}

// lastOf is the shape of a vector as long as the last axis.
func lastOf(shape tensor.Shape) tensor.Shape { return tensor.Shape{shape[len(shape)-1]} }

func (s LayerNormGainGradSpec) gradients([]tensor.Shape) []gradient { return nil }

func (s LayerNormGainGradSpec) f32(dgain array[float32], x []array[float32]) error {
	return layerNormGainGrad(s, dgain, x[0], x[1])
}

func (s LayerNormGainGradSpec) f64(dgain array[float64], x []array[float64]) error {
	return layerNormGainGrad(s, dgain, x[0], x[1])
}

func layerNormGainGrad[T float](s LayerNormGainGradSpec, dgain, x, dy array[T]) error {
	n := len(dgain.data)
	sum := make([]float64, n)
	for at := 0; at < len(x.data); at += n {
		mean, scale := moments(x.data[at:at+n], s.Epsilon)
		for k := range n {
			sum[k] += float64(dy.data[at+k]) * (float64(x.data[at+k]) - mean) * scale
		}
	}
	round(dgain.data, sum)
	return nil
}

// round stores sums that were accumulated in float64.
func round[T float](to []T, sums []float64) {
	for k, v := range sums {
		to[k] = T(v)
	}
}

// LayerNormBiasGradSpec is the gradient of [LayerNormSpec] by bias: the sum of dy over all axes but
// the last.
type LayerNormBiasGradSpec struct{}

// String returns "LayerNormBiasGrad".
func (s LayerNormBiasGradSpec) String() string { return "LayerNormBiasGrad" }

func (s LayerNormBiasGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return lastOf(in[0]), nil
}

func (s LayerNormBiasGradSpec) gradients([]tensor.Shape) []gradient { return nil }

func (s LayerNormBiasGradSpec) f32(dbias array[float32], x []array[float32]) error {
	return layerNormBiasGrad(dbias, x[0])
}

func (s LayerNormBiasGradSpec) f64(dbias array[float64], x []array[float64]) error {
	return layerNormBiasGrad(dbias, x[0])
}

func layerNormBiasGrad[T float](dbias, dy array[T]) error {
	sum := make([]float64, len(dbias.data))
	for at, v := range dy.data {
		sum[at%len(sum)] += float64(v)
	}
	round(dbias.data, sum)
	return nil
}
