package nn

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops"
)

// SwiGLU is a gated linear unit with the gate of Swish, or SiLU.
//
//	in   gate, x  [d...]
//	out  y        [d...]   y = gate * sigmoid(gate) * x
//
// Gradient: dx = dy * gate * s and dgate = dy * x * s * (1 + gate * (1 - s)), where
// s = sigmoid(gate).
// Cost: one pass; backward one for each operand.
// Errors: [ops.ErrShape] if shapes differ; [ops.ErrDType].
// Source: Shazeer, GLU Variants Improve Transformer, 2020.
func SwiGLU(gate, x *gorgonia.Node) (*gorgonia.Node, error) {
	return build("SwiGLU", "gate x", swiGLUSpec{}, gate, x)
}

// swiGLUSpec is [SwiGLU] of gate and x.
type swiGLUSpec struct{}

// String returns "SwiGLU".
func (s swiGLUSpec) String() string { return "SwiGLU" }

func (s swiGLUSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	if !in[0].Eq(in[1]) {
		return nil, fmt.Errorf("%w: gate has shape %v and x %v", ops.ErrShape, in[0], in[1])
	}
	return in[0].Clone(), nil
}

func (s swiGLUSpec) gradients(in []tensor.Shape) []gradient { return gradientsOf(s, in, 2) }

func (s swiGLUSpec) program(b *program.Builder, x ...program.Value) program.Value {
	return b.Do(fuse.Mul, b.Do(fuse.Mul, x[0], b.Do(fuse.Sigmoid, x[0])), x[1])
}

func (s swiGLUSpec) back(b *program.Builder, i int, x []program.Value, _, dy program.Value,
) program.Value {
	if i == 1 {
		return s.program(b, x[0], dy)
	}
	open := b.Do(fuse.Sigmoid, x[0])
	shut := program.With(b, fuse.Add, b.Do(fuse.Neg, open), 1)
	slope := b.Do(fuse.Mul, open, program.With(b, fuse.Add, b.Do(fuse.Mul, x[0], shut), 1))
	return b.Do(fuse.Mul, b.Do(fuse.Mul, dy, x[1]), slope)
}
