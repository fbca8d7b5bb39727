package plan

import (
	"slices"

	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// epilogues marks the loops that may run in the product before them, and the concatenations,
// rounded or not, that the loop before them may write.
func epilogues(p *Plan) {
	for i := 1; i < len(p.Steps); i++ {
		p.Steps[i].Epilogue = ends(&p.Steps[i-1], &p.Steps[i])
	}
}

// ends reports whether the step before may run a step, too.
func ends(before, s *Step) bool {
	return before.Runs == s.Runs && (multiplies(before.Op) && follows(s, before.Dsts[0]) ||
		joins(s, before) || rounds(s, before))
}

// rounds reports whether a step is a loop that only casts a concatenation which the loop before
// that may write. What that loop computes has the digits of the concatenation: BF16 is rounded.
func rounds(s, before *Step) bool {
	loop, ok := s.Op.(Loop)
	_, concat := before.Op.(ir.Concat)
	return ok && concat && before.Epilogue && len(loop.Program.Code) == 1 && len(s.Dsts) == 1 &&
		s.Dsts[0].Dense() && s.Dsts[0].Shape == before.Dsts[0].Shape &&
		fuse.Type(before.Dsts[0].DType) == before.Dsts[0].DType && follows(s, before.Dsts[0])
}

// joins reports whether a step is a concatenation of results that a loop has stored element by
// element: the gradients of the gates of an LSTM, say.
func joins(s, before *Step) bool {
	loop, ok := before.Op.(Loop)
	_, concat := s.Op.(ir.Concat)
	if !ok || !concat || len(s.Args) > maxStored || slices.ContainsFunc(loop.Program.Outputs,
		func(o fuse.Output) bool { return o.Folded }) ||
		slices.ContainsFunc(loop.Program.Code, func(c fuse.Instr) bool {
			return c.Op.FoldsRows()
		}) {
		return false
	}
	return !slices.ContainsFunc(s.Args, func(a Ref) bool { return PartOf(a, before) < 0 })
}

// maxStored is how many parts of a concatenation a loop writes at the most.
const maxStored = 8

// PartOf returns which result of a loop an operand is, all of it as it lies, -1 for none.
func PartOf(a Ref, loop *Step) int {
	p := loop.Op.(Loop).Program
	return slices.IndexFunc(loop.Dsts, func(d Ref) bool {
		_, all := AxesOf(a, p.Shape)
		return d.Buffer == a.Buffer && d.Offset == a.Offset && d.Dense() && all &&
			d.Shape == ir.Of(p.Shape...) && d.DType == a.DType
	})
}

// AxesOf returns which axes of a dense value of a shape those of r are, if r is all of it,
// permuted.
func AxesOf(r Ref, shape []int) (axes []int, ok bool) {
	if r.Shape.Len() != len(shape) {
		return nil, false
	}
	dense := ir.Of(shape...).Strides()
	for i := range r.Shape.Len() {
		n := r.Shape.At(i)
		for j := range shape {
			if shape[j] == n && (n == 1 || dense.At(j) == r.Strides.At(i)) &&
				!slices.Contains(axes, j) {
				axes = append(axes, j)
				break
			}
		}
	}
	return axes, len(axes) == len(shape)
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
