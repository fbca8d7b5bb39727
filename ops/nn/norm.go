package nn

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Norm returns the p-norm of x along an axis, which it removes.
//
//	in   x  [d..., n, e...]
//	out  y  [d..., e...]      y = (sum of |x|^p)^(1/p), along n
//
// A negative axis counts from the last. gorgonia.Norm sums x^p, which for odd p is right only if no
// number is negative.
//
// Gradient: dx = dy * sign(x) * (|x|/y)^(p-1); 0 where y is 0, as in PyTorch.
// Cost: one pass over x; backward one.
// Errors: [ops.ErrShape] if x has no such axis; [backend.ErrArgument] if p is less than 1;
// [ops.ErrDType].
func Norm(p, axis int, x *gorgonia.Node) (*gorgonia.Node, error) {
	axis, err := resolve(axis, x)
	if err != nil {
		return nil, fmt.Errorf("nn: Norm: %w", err)
	}
	if p < 1 {
		return nil, fmt.Errorf("nn: Norm: %w: p is %d, want at least 1", backend.ErrArgument, p)
	}
	return build("Norm", "x", normSpec{p, axis}, x)
}

// normSpec is [Norm], with an axis that is not negative.
type normSpec struct{ P, Axis int }

// String returns "Norm{p 3, axis 1}".
func (s normSpec) String() string { return fmt.Sprintf("Norm{p %d, axis %d}", s.P, s.Axis) }

func (s normSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return slices.Delete(in[0].Clone(), s.Axis, s.Axis+1), nil
}

func (s normSpec) gradients(in []tensor.Shape) []gradient { return gradientsOf(s, in, 1) }

func (s normSpec) program(b *program.Builder, x ...program.Value) program.Value {
	sum := program.Sum(b, power(b, b.Do(fuse.Abs, x[0]), s.P), s.Axis)
	switch s.P {
	case 1:
		return sum
	case 2:
		return b.Do(fuse.Sqrt, sum)
	}
	return program.With(b, fuse.Pow, sum, 1/float64(s.P))
}

// power is x^n for n of at least 1.
func power(b *program.Builder, x program.Value, n int) program.Value {
	switch n {
	case 1:
		return x
	case 2:
		return b.Do(fuse.Square, x)
	}
	return program.With(b, fuse.Pow, x, float64(n))
}

func (s normSpec) back(b *program.Builder, _ int, x []program.Value, y, dy program.Value,
) program.Value {
	shape := b.Of(x[0]).Shape
	shape[s.Axis] = 1
	y, dy = b.Reshape(y, shape...), b.Reshape(dy, shape...)
	dx := b.Do(fuse.Sign, x[0])
	if s.P > 1 {
		share := b.Do(fuse.Div, b.Do(fuse.Abs, x[0]), y)
		dx = b.Do(fuse.Mul, dx, power(b, share, s.P-1))
	}
	return b.Do(fuse.Where, y, b.Do(fuse.Mul, dx, dy), b.Number(0, y))
}
