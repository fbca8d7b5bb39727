package cuda

import (
	"fmt"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// none is the arithmetic of an [Engine]: errors that say what to do. A machine of Gorgonia would otherwise fail with no more
// than that the engine lacks a method. These are the operations that graphs begin with.
type none struct{}

func no(operation string) (tensor.Tensor, error) {
	return nil, fmt.Errorf("cuda: %s: %w: an engine keeps tensors on a device and does not compute: run the graph by vm.New on the device, with tensors of the host",
		operation, backend.ErrUnsupported)
}

func noResult(operation string) error {
	_, err := no(operation)
	return err
}

func (none) Add(_, _ tensor.Tensor, _ ...tensor.FuncOpt) (tensor.Tensor, error) { return no("Add") }
func (none) Sub(_, _ tensor.Tensor, _ ...tensor.FuncOpt) (tensor.Tensor, error) { return no("Sub") }
func (none) Mul(_, _ tensor.Tensor, _ ...tensor.FuncOpt) (tensor.Tensor, error) { return no("Mul") }
func (none) Div(_, _ tensor.Tensor, _ ...tensor.FuncOpt) (tensor.Tensor, error) { return no("Div") }
func (none) Pow(_, _ tensor.Tensor, _ ...tensor.FuncOpt) (tensor.Tensor, error) { return no("Pow") }

func (none) AddScalar(_ tensor.Tensor, _ any, _ bool, _ ...tensor.FuncOpt) (tensor.Tensor, error) {
	return no("AddScalar")
}
func (none) SubScalar(_ tensor.Tensor, _ any, _ bool, _ ...tensor.FuncOpt) (tensor.Tensor, error) {
	return no("SubScalar")
}
func (none) MulScalar(_ tensor.Tensor, _ any, _ bool, _ ...tensor.FuncOpt) (tensor.Tensor, error) {
	return no("MulScalar")
}
func (none) DivScalar(_ tensor.Tensor, _ any, _ bool, _ ...tensor.FuncOpt) (tensor.Tensor, error) {
	return no("DivScalar")
}
func (none) PowScalar(_ tensor.Tensor, _ any, _ bool, _ ...tensor.FuncOpt) (tensor.Tensor, error) {
	return no("PowScalar")
}

func (none) Neg(tensor.Tensor, ...tensor.FuncOpt) (tensor.Tensor, error)      { return no("Neg") }
func (none) Abs(tensor.Tensor, ...tensor.FuncOpt) (tensor.Tensor, error)      { return no("Abs") }
func (none) Square(tensor.Tensor, ...tensor.FuncOpt) (tensor.Tensor, error)   { return no("Square") }
func (none) Cube(tensor.Tensor, ...tensor.FuncOpt) (tensor.Tensor, error)     { return no("Cube") }
func (none) Inv(tensor.Tensor, ...tensor.FuncOpt) (tensor.Tensor, error)      { return no("Inv") }
func (none) Sqrt(tensor.Tensor, ...tensor.FuncOpt) (tensor.Tensor, error)     { return no("Sqrt") }
func (none) Exp(tensor.Tensor, ...tensor.FuncOpt) (tensor.Tensor, error)      { return no("Exp") }
func (none) Log(tensor.Tensor, ...tensor.FuncOpt) (tensor.Tensor, error)      { return no("Log") }
func (none) Tanh(tensor.Tensor, ...tensor.FuncOpt) (tensor.Tensor, error)     { return no("Tanh") }
func (none) Map(any, tensor.Tensor, ...tensor.FuncOpt) (tensor.Tensor, error) { return no("Map") }

func (none) Sum(tensor.Tensor, ...int) (tensor.Tensor, error)         { return no("Sum") }
func (none) Max(tensor.Tensor, ...int) (tensor.Tensor, error)         { return no("Max") }
func (none) Repeat(tensor.Tensor, int, ...int) (tensor.Tensor, error) { return no("Repeat") }
func (none) RepeatReuse(_, _ tensor.Tensor, _ int, _ ...int) (tensor.Tensor, error) {
	return no("RepeatReuse")
}
func (none) MatMul(_, _, _ tensor.Tensor) error    { return noResult("MatMul") }
func (none) MatVecMul(_, _, _ tensor.Tensor) error { return noResult("MatVecMul") }
func (none) Outer(_, _, _ tensor.Tensor) error     { return noResult("Outer") }
