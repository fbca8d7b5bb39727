package plan

import (
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// FLOPs returns how many floating-point operations a step does in products.
func (s Step) FLOPs() int64 {
	size := func(r Ref) int64 {
		n := int64(1)
		for _, d := range r.Shape.Slice() {
			n *= int64(d)
		}
		return n
	}
	switch op := s.Op.(type) {
	case ir.MatMul:
		a := s.Args[0].Shape
		inner := a.At(a.Len() - 1)
		if op.TransA {
			inner = a.At(a.Len() - 2)
		}
		return 2 * size(s.Dsts[0]) * int64(inner)
	case ir.Convolution:
		y, w := s.Dsts[0], s.Args[1]
		switch op.Pass {
		case kernels.InputGradient:
			y = s.Args[0]
		case kernels.FilterGradient:
			y, w = s.Args[1], s.Dsts[0]
		}
		return 2 * size(y) * size(w) / int64(w.Shape.At(0))
	case ir.Attention:
		return attentionProducts(s, 2, size)
	case ir.AttentionGrad:
		return attentionProducts(s, 5, size)
	case ir.LSTM: // a product for each step, and back for each one but the last
		if op.Grad {
			return 8 * (size(s.Args[2]) - size(s.Args[3])) * int64(s.Args[3].Shape.At(1))
		}
		return 2 * size(s.Args[0]) * int64(s.Args[1].Shape.At(1))
	}
	return 0
}

// attentionProducts returns the operations of so many products of queries and keys, which are half
// as many where a query sees no later key.
func attentionProducts(s Step, products int64, size func(Ref) int64) int64 {
	all := 2 * products * size(s.Args[0]) * int64(s.Args[1].Shape.At(2))
	if op, ok := s.Op.(ir.Attention); ok && op.Causal {
		return all / 2
	}
	if op, ok := s.Op.(ir.AttentionGrad); ok && op.Causal {
		return all / 2
	}
	return all
}
