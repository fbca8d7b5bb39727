package nn

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/stock"
)

// Norm returns the p-norm of x along an axis, which the result does not have.
//
//	in   x  [d..., n, e...]
//	out  y  [d..., e...]      y = (sum of |x|^p)^(1/p), along n
//
// A negative axis counts from the last. gorgonia.Norm sums x^p, which for odd p is the norm of
// numbers that are not negative only.
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
	return build("Norm", "x", NormSpec{p, axis}, x)
}

// NormSpec is [Norm], with an axis that is not negative.
type NormSpec struct{ P, Axis int }

// String returns "Norm{p 3, axis 1}".
func (s NormSpec) String() string { return fmt.Sprintf("Norm{p %d, axis %d}", s.P, s.Axis) }

func (s NormSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return slices.Delete(in[0].Clone(), s.Axis, s.Axis+1), nil
}

func (s NormSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{NormGradSpec(s), []int{0, result, dy}}}
}

func (s NormSpec) f32(y array[float32], x []array[float32]) error { return norm(s, y, x[0]) }
func (s NormSpec) f64(y array[float64], x []array[float64]) error { return norm(s, y, x[0]) }

func norm[T float](s NormSpec, y, x array[T]) error {
	line := 0
	lines(x.shape, s.Axis, func(at func(k int) int, n int) {
		sum := 0.0
		for k := range n {
			sum += power(math.Abs(float64(x.data[at(k)])), s.P)
		}
		y.data[line] = T(root(sum, s.P))
		line++
	})
	return nil
}

// power returns x^n.
func power(x float64, n int) float64 {
	switch n {
	case 0:
		return 1
	case 1:
		return x
	case 2:
		return x * x
	}
	return math.Pow(x, float64(n))
}

func root(x float64, n int) float64 {
	switch n {
	case 1:
		return x
	case 2:
		return math.Sqrt(x)
	}
	return math.Pow(x, 1/float64(n))
}

// NormGradSpec is the gradient of [NormSpec], from x, its result y and dy.
type NormGradSpec struct{ P, Axis int }

// String returns "NormGrad{p 3, axis 1}".
func (s NormGradSpec) String() string { return fmt.Sprintf("NormGrad{p %d, axis %d}", s.P, s.Axis) }

func (s NormGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }

func (s NormGradSpec) gradients([]tensor.Shape) []gradient { return nil }

func (s NormGradSpec) f32(dx array[float32], x []array[float32]) error {
	return normGrad(s, dx, x[0], x[1], x[2])
}

func (s NormGradSpec) f64(dx array[float64], x []array[float64]) error {
	return normGrad(s, dx, x[0], x[1], x[2])
}

func normGrad[T float](s NormGradSpec, dx, x, y, dy array[T]) error {
	line := 0
	lines(x.shape, s.Axis, func(at func(k int) int, n int) {
		size, d := float64(y.data[line]), float64(dy.data[line])
		line++
		for k := range n {
			if e := float64(x.data[at(k)]); size != 0 {
				dx.data[at(k)] = T(sign(e) * power(math.Abs(e)/size, s.P-1) * d)
			}
		}
	})
	return nil
}

// sign returns 1, -1, or x itself if it is 0 or NaN.
func sign(x float64) float64 {
	switch {
	case x > 0:
		return 1
	case x < 0:
		return -1
	}
	return x
}

// wrongNorm finds gorgonia.Norm of odd p by its last node: pow(sum(pow(x, p)), 1/p).
func wrongNorm(s suspect) string {
	inverse, ok := exponent(s.node)
	if !ok {
		return ""
	}
	if stock.Name(s.x[0].Op()) != "sumOp" {
		return ""
	}
	summed := stock.Operands(s.x[0])[0]
	p, ok := exponent(summed)
	if !ok || math.Mod(p, 2) != 1 || math.Abs(p*inverse-1) > 1e-6 {
		return ""
	}
	return fmt.Sprintf("it sums x^%v, not |x|^%[1]v: with numbers below 0 it is wrong, or NaN", p)
}

// exponent returns the constant that a node raises to.
func exponent(n *gorgonia.Node) (float64, bool) {
	x := stock.Operands(n)
	if n.Op() == nil || len(x) != 2 || !strings.HasPrefix(n.Op().String(), "^") {
		return 0, false
	}
	if !stock.Struct(x[1].Op()).IsValid() || x[1].Value() == nil {
		return 0, false
	}
	switch e := x[1].Value().Data().(type) {
	case float64:
		return e, true
	case float32:
		return float64(e), true
	}
	return 0, false
}
