package plan

import (
	"slices"

	"github.com/euryale-ml/euryale/kernels"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// epilogues marks the loops that may run in the product before them.
func epilogues(p *Plan) {
	for i := 1; i < len(p.Steps); i++ {
		before, s := p.Steps[i-1], &p.Steps[i]
		s.Epilogue = before.Runs == s.Runs && multiplies(before.Op) && follows(s, before.Dsts[0])
	}
}

// multiplies reports whether an operation is a product whose elements are finished one after the
// other. Gradients of filters are sums of the sums of parts.
func multiplies(op ir.Op) bool {
	c, convolves := op.(ir.Convolution)
	_, product := op.(ir.MatMul)
	return product || convolves && c.Pass != kernels.FilterGradient
}

// follows reports whether a step is a loop over the elements of a product, each of which it reads
// in its own place. What folds rows is none: it is worth more as a loop over whole rows.
func follows(s *Step, product Ref) bool {
	loop, ok := s.Op.(Loop)
	if !ok || !product.Dense() || slices.ContainsFunc(loop.Program.Outputs,
		func(o fuse.Output) bool { return o.Folded }) ||
		slices.ContainsFunc(loop.Program.Code, func(c fuse.Instr) bool {
			return c.Op.FoldsRows()
		}) {
		return false
	}
	reads := false
	for _, a := range s.Args {
		if a.Buffer != product.Buffer {
			continue
		}
		if reads = a.Dense() && a.Offset == product.Offset &&
			a.Shape == ir.Of(loop.Program.Shape...) &&
			a.Shape.Size() == product.Shape.Size(); !reads {
			return false
		}
	}
	return reads
}
