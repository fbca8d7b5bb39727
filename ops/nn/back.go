package nn

import (
	"fmt"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/program"
)

// differentiable is a spec whose gradients are programs of its operands, its result and dy. These
// gradients cannot be differentiated again.
type differentiable interface {
	spec
	// back adds the gradient of operand i.
	back(b *program.Builder, i int, x []program.Value, y, dy program.Value) program.Value
}

// gradientsOf returns gradients of the first operands of s, n of them, and none of the others.
func gradientsOf(s differentiable, in []tensor.Shape, n int) []gradient {
	all, of := make([]gradient, len(in)), make([]int, len(in), len(in)+2)
	for i := range in {
		of[i] = i
	}
	for i := range n {
		all[i] = gradient{backSpec{s, i}, append(of, result, dy)}
	}
	return all
}

// backSpec is the gradient of a spec by an operand, from all operands, the result and dy.
type backSpec struct {
	Forward differentiable
	Operand int
}

// String returns "gradient 0 of GELU".
func (s backSpec) String() string { return fmt.Sprintf("gradient %d of %v", s.Operand, s.Forward) }

func (s backSpec) dtype(in []tensor.Dtype) (tensor.Dtype, error) { return in[s.Operand], nil }

func (s backSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return in[s.Operand].Clone(), nil
}

func (s backSpec) gradients([]tensor.Shape) []gradient { return nil }

func (s backSpec) program(b *program.Builder, x ...program.Value) program.Value {
	n := len(x) - 2
	return s.Forward.back(b, s.Operand, x[:n], x[n], x[n+1])
}
