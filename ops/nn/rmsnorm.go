package nn

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops"
)

// RMSNorm divides by the root of the mean of squares over the axes of gain, the last ones of x, and
// scales the result.
//
//	in   x     [d..., n...]
//	     gain  [n...]
//	out  y     [d..., n...]   y = x / sqrt(mean(x*x) + epsilon) * gain
//
// A row whose mean of squares is not finite is NaN, as in [LayerNorm].
//
// Gradient: dgain is the sum over d of dy * z, where z is the normalised x;
// dx = (g - z * mean(g * z)) / sqrt(mean(x*x) + epsilon), where g = dy * gain.
// Cost: one pass over x; backward each gradient computes the mean again.
// Errors: [ops.ErrShape] if gain is a scalar, or its axes are not the last ones of x;
// [backend.ErrArgument] if epsilon is negative or not a number; [ops.ErrDType].
// Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
func RMSNorm(epsilon float64, x, gain *gorgonia.Node) (*gorgonia.Node, error) {
	if !(epsilon >= 0) {
		return nil, fmt.Errorf("nn: RMSNorm: %w: epsilon is %v", backend.ErrArgument, epsilon)
	}
	return build("RMSNorm", "x gain", rmsNormSpec{epsilon}, x, gain)
}

// rmsNormSpec is [RMSNorm] of x and gain.
type rmsNormSpec struct{ Epsilon float64 }

// String returns "RMSNorm{1e-05}".
func (s rmsNormSpec) String() string { return fmt.Sprintf("RMSNorm{%v}", s.Epsilon) }

func (s rmsNormSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	x, gain := in[0], in[1]
	if n := len(x) - len(gain); len(gain) == 0 || n < 0 || !slices.Equal(x[n:], gain) {
		return nil, fmt.Errorf("%w: x has shape %v, so gain must have its last axes, not shape %v",
			ops.ErrShape, x, gain)
	}
	return x.Clone(), nil
}

func (s rmsNormSpec) gradients(in []tensor.Shape) []gradient { return gradientsOf(s, in, 2) }

// rows are x as a matrix, gain as a row, z, and what x is multiplied by: NaN where the mean of
// squares overflows.
func (s rmsNormSpec) rows(b *program.Builder, x, gain program.Value) (of, row, z,
	scale program.Value) {
	n := tensor.Shape(b.Of(gain).Shape).TotalSize()
	of = b.Reshape(x, tensor.Shape(b.Of(x).Shape).TotalSize()/n, n)
	mean := program.Mean(b, b.Do(fuse.Square, of), 1)
	scale = b.Do(fuse.InvSqrt, program.With(b, fuse.Add, mean, s.Epsilon))
	scale = b.Do(fuse.Add, scale, b.Do(fuse.Sub, mean, mean)) // 0, or NaN
	return of, b.Reshape(gain, 1, n), b.Do(fuse.Mul, of, scale), scale
}

func (s rmsNormSpec) program(b *program.Builder, x ...program.Value) program.Value {
	_, gain, z, _ := s.rows(b, x[0], x[1])
	return b.Reshape(b.Do(fuse.Mul, z, gain), b.Of(x[0]).Shape...)
}

func (s rmsNormSpec) back(b *program.Builder, i int, x []program.Value, _, dy program.Value,
) program.Value {
	of, gain, z, scale := s.rows(b, x[0], x[1])
	dy = b.Reshape(dy, b.Of(of).Shape...)
	if i == 1 {
		return b.Reshape(program.Sum(b, b.Do(fuse.Mul, dy, z), 0), b.Of(x[1]).Shape...)
	}
	g := b.Do(fuse.Mul, dy, gain)
	along := b.Do(fuse.Mul, z, program.Mean(b, b.Do(fuse.Mul, g, z), 1))
	return b.Reshape(b.Do(fuse.Mul, b.Do(fuse.Sub, g, along), scale), b.Of(x[0]).Shape...)
}
