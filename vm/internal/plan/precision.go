package plan

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// precise returns the program with its products of F32 in a precision. Gradients of updates and other
// results that come of a product by element-wise values alone stay F32.
func precise(p *ir.Program, precision ir.Precision) *ir.Program {
	switch precision {
	case ir.TF32:
		return rewrite(p, func(n *numbering, v ir.Value) ir.ID {
			switch op := v.Op.(type) {
			case ir.MatMul:
				op.TF32 = v.DType == backend.F32
				v.Op = op
			case ir.Convolution:
				op.TF32 = v.DType == backend.F32
				v.Op = op
			}
			return n.add(v)
		})
	case ir.BF16:
		return halved(p)
	}
	return p
}

// halved returns the program with its products of F32 computed of BF16. A value is rounded once, where
// it is computed, whatever views of it products read. A product that only loops and other products
// read is stored as BF16, too: loops widen what they load. Convolutions stay F32.
func halved(p *ir.Program) *ir.Program {
	wide, next := widened(p), 0
	return rewrite(p, func(n *numbering, v ir.Value) ir.ID {
		id := next
		next++
		if ir.View(v.Op) {
			v.DType = n.of(v.Args[0]).DType
		}
		if _, product := v.Op.(ir.MatMul); product && v.DType == backend.F32 {
			v.Args = []ir.ID{n.narrow(v.Args[0]), n.narrow(v.Args[1])}
			if !wide[id] {
				v.DType = backend.BF16
			}
		}
		return n.simplest(v)
	})
}

// narrow returns x as BF16.
func (n *numbering) narrow(x ir.ID) ir.ID {
	v := n.of(x)
	switch {
	case v.DType == backend.BF16:
		return x
	case ir.View(v.Op):
		v.Args = []ir.ID{n.narrow(v.Args[0])}
	default:
		v.Op, v.Args = ir.Cast{}, []ir.ID{x}
	}
	v.DType = backend.BF16
	return n.simplest(v)
}

// widened returns which values must have all digits of a product that they are: those from which
// element-wise values lead to a result, and those that an operation reads which is no loop and no
// product.
func widened(p *ir.Program) []bool {
	wide := make([]bool, len(p.Values))
	for _, r := range p.Results {
		wide[r] = true
	}
	for i, v := range slices.Backward(p.Values) {
		_, product := v.Op.(ir.MatMul)
		_, reduction := v.Op.(ir.Reduce)
		passes := ir.View(v.Op) || ir.Elementwise(v.Op)
		for _, a := range v.Args {
			wide[a] = wide[a] || passes && wide[i] || !passes && !product && !reduction
		}
	}
	return wide
}
