package cuda

import (
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// The element-wise operations of package tensor. All take the same options, and
// those with a scalar take it on either side.
var (
	_ tensor.Adder        = (*Engine)(nil)
	_ tensor.Suber        = (*Engine)(nil)
	_ tensor.Muler        = (*Engine)(nil)
	_ tensor.Diver        = (*Engine)(nil)
	_ tensor.Power        = (*Engine)(nil)
	_ tensor.MinBetweener = (*Engine)(nil)
	_ tensor.MaxBetweener = (*Engine)(nil)
	_ tensor.Lter         = (*Engine)(nil)
	_ tensor.Lteer        = (*Engine)(nil)
	_ tensor.Gter         = (*Engine)(nil)
	_ tensor.Gteer        = (*Engine)(nil)
	_ tensor.ElEqer       = (*Engine)(nil)
	_ tensor.Neger        = (*Engine)(nil)
	_ tensor.Abser        = (*Engine)(nil)
	_ tensor.Signer       = (*Engine)(nil)
	_ tensor.Squarer      = (*Engine)(nil)
	_ tensor.Cuber        = (*Engine)(nil)
	_ tensor.Inver        = (*Engine)(nil)
	_ tensor.Sqrter       = (*Engine)(nil)
	_ tensor.InvSqrter    = (*Engine)(nil)
	_ tensor.Exper        = (*Engine)(nil)
	_ tensor.Loger        = (*Engine)(nil)
	_ tensor.Log2er       = (*Engine)(nil)
	_ tensor.Tanher       = (*Engine)(nil)
	_ tensor.Clamper      = (*Engine)(nil)
	_ tensor.Mapper       = (*Engine)(nil)
)

// Add returns a + b.
func (e *Engine) Add(a, b tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binary(backend.Add, a, b, opts)
}

// AddScalar is Add with a scalar b, which is the left operand if the tensor is not.
func (e *Engine) AddScalar(a tensor.Tensor, b any, leftTensor bool, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binaryScalar(backend.Add, a, b, leftTensor, opts)
}

// Sub returns a - b.
func (e *Engine) Sub(a, b tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binary(backend.Sub, a, b, opts)
}

// SubScalar is Sub with a scalar b, which is the left operand if the tensor is not.
func (e *Engine) SubScalar(a tensor.Tensor, b any, leftTensor bool, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binaryScalar(backend.Sub, a, b, leftTensor, opts)
}

// Mul returns a * b, element by element.
func (e *Engine) Mul(a, b tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binary(backend.Mul, a, b, opts)
}

// MulScalar is Mul with a scalar b, which is the left operand if the tensor is not.
func (e *Engine) MulScalar(a tensor.Tensor, b any, leftTensor bool, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binaryScalar(backend.Mul, a, b, leftTensor, opts)
}

// Div returns a / b.
func (e *Engine) Div(a, b tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binary(backend.Div, a, b, opts)
}

// DivScalar is Div with a scalar b, which is the left operand if the tensor is not.
func (e *Engine) DivScalar(a tensor.Tensor, b any, leftTensor bool, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binaryScalar(backend.Div, a, b, leftTensor, opts)
}

// Pow returns a to the power b.
func (e *Engine) Pow(a, b tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binary(backend.Pow, a, b, opts)
}

// PowScalar is Pow with a scalar b, which is the left operand if the tensor is not.
func (e *Engine) PowScalar(a tensor.Tensor, b any, leftTensor bool, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binaryScalar(backend.Pow, a, b, leftTensor, opts)
}

// MinBetween returns the lesser of a and b.
func (e *Engine) MinBetween(a, b tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binary(backend.Minimum, a, b, opts)
}

// MinBetweenScalar is MinBetween with a scalar b, which is the left operand if the tensor is not.
func (e *Engine) MinBetweenScalar(a tensor.Tensor, b any, leftTensor bool, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binaryScalar(backend.Minimum, a, b, leftTensor, opts)
}

// MaxBetween returns the greater of a and b.
func (e *Engine) MaxBetween(a, b tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binary(backend.Maximum, a, b, opts)
}

// MaxBetweenScalar is MaxBetween with a scalar b, which is the left operand if the tensor is not.
func (e *Engine) MaxBetweenScalar(a tensor.Tensor, b any, leftTensor bool, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binaryScalar(backend.Maximum, a, b, leftTensor, opts)
}

// Lt returns a < b as 1 or 0.
func (e *Engine) Lt(a, b tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binary(backend.Less, a, b, opts)
}

// LtScalar is Lt with a scalar b, which is the left operand if the tensor is not.
func (e *Engine) LtScalar(a tensor.Tensor, b any, leftTensor bool, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binaryScalar(backend.Less, a, b, leftTensor, opts)
}

// Lte returns a <= b as 1 or 0.
func (e *Engine) Lte(a, b tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binary(backend.LessEqual, a, b, opts)
}

// LteScalar is Lte with a scalar b, which is the left operand if the tensor is not.
func (e *Engine) LteScalar(a tensor.Tensor, b any, leftTensor bool, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binaryScalar(backend.LessEqual, a, b, leftTensor, opts)
}

// Gt returns a > b as 1 or 0.
func (e *Engine) Gt(a, b tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binary(backend.Greater, a, b, opts)
}

// GtScalar is Gt with a scalar b, which is the left operand if the tensor is not.
func (e *Engine) GtScalar(a tensor.Tensor, b any, leftTensor bool, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binaryScalar(backend.Greater, a, b, leftTensor, opts)
}

// Gte returns a >= b as 1 or 0.
func (e *Engine) Gte(a, b tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binary(backend.GreaterEqual, a, b, opts)
}

// GteScalar is Gte with a scalar b, which is the left operand if the tensor is not.
func (e *Engine) GteScalar(a tensor.Tensor, b any, leftTensor bool, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binaryScalar(backend.GreaterEqual, a, b, leftTensor, opts)
}

// ElEq returns a == b as 1 or 0.
func (e *Engine) ElEq(a, b tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binary(backend.Equal, a, b, opts)
}

// EqScalar is ElEq with a scalar b, which is the left operand if the tensor is not.
func (e *Engine) EqScalar(a tensor.Tensor, b any, leftTensor bool, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binaryScalar(backend.Equal, a, b, leftTensor, opts)
}

// ElNe returns a != b as 1 or 0.
func (e *Engine) ElNe(a, b tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binary(backend.NotEqual, a, b, opts)
}

// NeScalar is ElNe with a scalar b, which is the left operand if the tensor is not.
func (e *Engine) NeScalar(a tensor.Tensor, b any, leftTensor bool, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.binaryScalar(backend.NotEqual, a, b, leftTensor, opts)
}

// Neg returns -a.
func (e *Engine) Neg(a tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.unary(backend.Neg, a, opts)
}

// Abs returns the absolute value of a.
func (e *Engine) Abs(a tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.unary(backend.Abs, a, opts)
}

// Sign returns 1, -1 or 0, as the sign of a.
func (e *Engine) Sign(a tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.unary(backend.Sign, a, opts)
}

// Square returns a * a.
func (e *Engine) Square(a tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.unary(backend.Square, a, opts)
}

// Cube returns a * a * a.
func (e *Engine) Cube(a tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.unary(backend.Cube, a, opts)
}

// Inv returns 1 / a.
func (e *Engine) Inv(a tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.unary(backend.Inv, a, opts)
}

// Sqrt returns the square root of a.
func (e *Engine) Sqrt(a tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.unary(backend.Sqrt, a, opts)
}

// InvSqrt returns 1 / sqrt(a).
func (e *Engine) InvSqrt(a tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.unary(backend.InvSqrt, a, opts)
}

// Exp returns e to the power a.
func (e *Engine) Exp(a tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.unary(backend.Exp, a, opts)
}

// Log returns the natural logarithm of a.
func (e *Engine) Log(a tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.unary(backend.Log, a, opts)
}

// Log2 returns the logarithm of a to base 2.
func (e *Engine) Log2(a tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.unary(backend.Log2, a, opts)
}

// Tanh returns the hyperbolic tangent of a.
func (e *Engine) Tanh(a tensor.Tensor, opts ...tensor.FuncOpt) (tensor.Tensor, error) {
	return e.unary(backend.Tanh, a, opts)
}
