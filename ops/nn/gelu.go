package nn

import (
	"math"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
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
func GELU(x *gorgonia.Node) (*gorgonia.Node, error) { return build("GELU", "x", GELUSpec{}, x) }

// GELUTanh returns the approximation of [GELU] that GPT-2 uses.
//
//	in   x  [d...]
//	out  y  [d...]   y = x * (1 + tanh(u)) / 2, u = sqrt(2/pi) * (x + 0.044715*x*x*x)
//
// Gradient: dx = dy * ((1 + tanh(u))/2 + x * (1 - tanh(u)**2)/2 * du/dx).
// Cost and errors: those of GELU.
func GELUTanh(x *gorgonia.Node) (*gorgonia.Node, error) {
	return build("GELUTanh", "x", GELUSpec{Tanh: true}, x)
}

// GELUSpec is [GELU], or [GELUTanh] if Tanh is set.
type GELUSpec struct{ Tanh bool }

// String returns "GELU" or "GELUTanh".
func (s GELUSpec) String() string {
	if s.Tanh {
		return "GELUTanh"
	}
	return "GELU"
}

func (s GELUSpec) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }

func (s GELUSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{GELUGradSpec(s), []int{0, dy}}}
}

func (s GELUSpec) f32(y array[float32], x []array[float32]) error { return gelu(s, y, x[0]) }
func (s GELUSpec) f64(y array[float64], x []array[float64]) error { return gelu(s, y, x[0]) }

func gelu[T float](s GELUSpec, y, x array[T]) error {
	for i, v := range x.data {
		half, _ := geluParts(s.Tanh, float64(v))
		y.data[i] = T(float64(v) * half)
	}
	return nil
}

// geluParts returns y/x and its derivative by x.
func geluParts(approximate bool, x float64) (half, slope float64) {
	if !approximate {
		return (1 + math.Erf(x/math.Sqrt2)) / 2, math.Exp(-x*x/2) / math.Sqrt(2*math.Pi)
	}
	const cubic = 0.044715
	scale := math.Sqrt(2 / math.Pi)
	t := math.Tanh(scale * (x + cubic*x*x*x))
	return (1 + t) / 2, (1 - t*t) / 2 * scale * (1 + 3*cubic*x*x)
}

// GELUGradSpec is the gradient of [GELUSpec], from x and dy.
type GELUGradSpec struct{ Tanh bool }

// String returns "GELUGrad" or "GELUTanhGrad".
func (s GELUGradSpec) String() string { return GELUSpec(s).String() + "Grad" }

func (s GELUGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }

func (s GELUGradSpec) gradients([]tensor.Shape) []gradient { return nil }

func (s GELUGradSpec) f32(dx array[float32], x []array[float32]) error {
	return geluGrad(s, dx, x[0], x[1])
}

func (s GELUGradSpec) f64(dx array[float64], x []array[float64]) error {
	return geluGrad(s, dx, x[0], x[1])
}

func geluGrad[T float](s GELUGradSpec, dx, x, dy array[T]) error {
	for i, v := range x.data {
		half, slope := geluParts(s.Tanh, float64(v))
		dx.data[i] = T(float64(dy.data[i]) * (half + float64(v)*slope))
	}
	return nil
}
