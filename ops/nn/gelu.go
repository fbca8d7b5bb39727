package nn

import (
	"math"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// GELU returns the Gaussian error linear unit of every element.
//
//	in   x  [d...]
//	out  y  [d...]   y = x * (1 + erf(x / sqrt 2)) / 2
//
// Gradient: dx = dy * ((1 + erf(x / sqrt 2))/2 + x * exp(-x*x/2) / sqrt(2 pi)).
// Cost: one pass over x; backward one over x and dy.
// Errors: [ops.ErrDType].
// Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.
func GELU(x *gorgonia.Node) (*gorgonia.Node, error) { return build("GELU", "x", geluSpec{}, x) }

// GELUTanh returns the approximation of [GELU] that GPT-2 uses.
//
//	in   x  [d...]
//	out  y  [d...]   y = x * (1 + tanh(u)) / 2, u = sqrt(2/pi) * (x + 0.044715*x*x*x)
//
// Gradient: dx = dy * ((1 + tanh(u))/2 + x * (1 - tanh(u)**2)/2 * du/dx).
// Cost and errors: those of GELU.
func GELUTanh(x *gorgonia.Node) (*gorgonia.Node, error) {
	return build("GELUTanh", "x", geluSpec{Tanh: true}, x)
}

// geluSpec is [GELU], or [GELUTanh] if Tanh is set.
type geluSpec struct{ Tanh bool }

// String returns "GELU" or "GELUTanh".
func (s geluSpec) String() string {
	if s.Tanh {
		return "GELUTanh"
	}
	return "GELU"
}

func (s geluSpec) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }

func (s geluSpec) gradients(in []tensor.Shape) []gradient { return gradientsOf(s, in, 1) }

func (s geluSpec) program(b *program.Builder, x ...program.Value) program.Value {
	half, _ := s.parts(b, x[0])
	return b.Do(fuse.Mul, x[0], half)
}

// parts adds y/x and its derivative by x.
func (s geluSpec) parts(b *program.Builder, x program.Value) (half, slope program.Value) {
	if !s.Tanh {
		erf := b.Do(fuse.Erf, program.With(b, fuse.Mul, x, 1/math.Sqrt2))
		half = program.With(b, fuse.Mul, program.With(b, fuse.Add, erf, 1), 0.5)
		density := b.Do(fuse.Exp, program.With(b, fuse.Mul, b.Do(fuse.Square, x), -0.5))
		return half, program.With(b, fuse.Mul, density, 1/math.Sqrt(2*math.Pi))
	}
	const cubic = 0.044715
	scale := math.Sqrt(2 / math.Pi)
	u := b.Do(fuse.Add, x, program.With(b, fuse.Mul, b.Do(fuse.Cube, x), cubic))
	t := b.Do(fuse.Tanh, program.With(b, fuse.Mul, u, scale))
	half = program.With(b, fuse.Mul, program.With(b, fuse.Add, t, 1), 0.5)
	du := program.With(b, fuse.Mul, b.Do(fuse.Square, x), 3*cubic*scale/2)
	du = program.With(b, fuse.Add, du, scale/2)
	rest := program.With(b, fuse.Add, b.Do(fuse.Neg, b.Do(fuse.Square, t)), 1)
	return half, b.Do(fuse.Mul, rest, du)
}

func (s geluSpec) back(b *program.Builder, _ int, x []program.Value, _, dy program.Value,
) program.Value {
	half, slope := s.parts(b, x[0])
	return b.Do(fuse.Mul, dy, b.Do(fuse.Add, half, b.Do(fuse.Mul, x[0], slope)))
}
