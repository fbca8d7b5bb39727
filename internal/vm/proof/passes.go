package proof

import (
	"slices"

	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// pass is a pass of a loop over all elements; where rows are folded, of each row over its own. For
// each element, operands are read before results are written. What is in a later pass comes later,
// for all elements of the row. Rows, and elements of other loops, run at any time.
type pass struct {
	reads, writes []int // numbers of inputs and outputs
}

// passesOf returns the passes of a loop. Where rows are folded, there is one for each fold that
// needs the ones before, and a last one, in which elements are stored and folded across rows: all
// of them load what they are computed from, but not what a row has one element of, which is loaded
// first and stored last. Results that are folded are written at any time: they are in no pass.
func passesOf(p *fuse.Program) []pass {
	folds, most := foldsBefore(p)
	all := make([]pass, most+2)
	last := len(p.Shape) - 1
	perRow := func(strides []int) bool { return len(all) > 2 && strides[last] == 0 }
	for k := range p.Inputs {
		if perRow(p.Inputs[k].Strides) {
			all[0].reads = append(all[0].reads, k)
		}
	}
	read := func(at int, x fuse.Value) {
		for _, k := range inputsOf(p, x) {
			if !perRow(p.Inputs[k].Strides) && !slices.Contains(all[at].reads, k) {
				all[at].reads = append(all[at].reads, k)
			}
		}
	}
	end := len(all) - 2
	for k := range p.Code {
		if c := &p.Code[k]; c.Op.FoldsRows() {
			read(folds[k]-1, c.Args[0])
		}
	}
	for k := range p.Outputs {
		out := &p.Outputs[k]
		read(end, out.Value)
		switch {
		case out.Folded:
		case perRow(out.Strides):
			all[end+1].writes = append(all[end+1].writes, k)
		default:
			all[end].writes = append(all[end].writes, k)
		}
	}
	return all
}

// foldsBefore returns how many folds of rows are done, one after the other, before each value of a
// loop is known, and the most of all.
func foldsBefore(p *fuse.Program) (folds []int, most int) {
	folds = make([]int, len(p.Code))
	for k := range p.Code {
		c := &p.Code[k]
		for _, x := range c.Args[:c.Op.Operands()] {
			folds[k] = max(folds[k], folds[x])
		}
		if c.Op.FoldsRows() {
			folds[k]++
		}
		most = max(most, folds[k])
	}
	return folds, most
}

// inputsOf returns what an element of a value is computed from, without the rows that are folded.
func inputsOf(p *fuse.Program, x fuse.Value) (inputs []int) {
	needed := make([]bool, x+1)
	needed[x] = true
	for k := x; k >= 0; k-- {
		c := &p.Code[k]
		switch {
		case !needed[k]:
		case c.Op == fuse.Load:
			inputs = append(inputs, c.Args[0])
		case c.Op.FoldsRows() && k < x:
		default:
			for _, y := range c.Args[:c.Op.Operands()] {
				needed[y] = true
			}
		}
	}
	return inputs
}

// aligned reports whether a step reads each element of operand k before it writes it, in result j,
// and nothing else of that memory.
func (r *proof) aligned(s *plan.Step, j, k int) bool {
	d, a := &s.Dsts[j], &s.Args[k]
	if a.Buffer != d.Buffer || a.Offset != d.Offset || a.DType.Size() != d.DType.Size() {
		return false
	}
	switch op := s.Op.(type) {
	case ir.Put:
		return k == 0 && a.Shape == d.Shape && a.Dense()
	case plan.Loop:
		return r.inPlace(op.Program, j, k)
	case plan.Joined: // which run at once
		for _, p := range op.Programs {
			if j < len(p.Outputs) {
				return k >= 0 && k < len(p.Inputs) && r.inPlace(p, j, k)
			}
			j, k = j-len(p.Outputs), k-len(p.Inputs)
		}
	}
	return false
}

// inPlace reports whether a loop may have output j in the memory of input k, which begin at one
// place: each element of both is the same index's, and no pass reads it after it is written.
func (r *proof) inPlace(p *fuse.Program, j, k int) bool {
	if j >= len(p.Outputs) || k >= len(p.Inputs) || p.Outputs[j].Folded {
		return false
	}
	out, in := &p.Outputs[j], &p.Inputs[k]
	for axis, n := range p.Shape {
		if n > 1 && in.Strides[axis] != out.Strides[axis] {
			return false
		}
	}
	written := false
	for _, of := range r.passes(p) {
		if written && slices.Contains(of.reads, k) {
			return false
		}
		written = written || slices.Contains(of.writes, j)
	}
	return written
}

// inside reports whether the step before may run a step, too, element by element, in the order in
// which it has them.
func (r *proof) inside(before, s *plan.Step) bool {
	if before.Runs != s.Runs || len(s.Dsts) == 0 || len(before.Dsts) == 0 {
		return false
	}
	y := &before.Dsts[0]
	switch op := before.Op.(type) {
	case ir.MatMul: // some elements are done while others are not
		return r.ofElements(s, y)
	case ir.Convolution: // gradients of filters are sums of sums of parts
		return op.Pass != kernels.FilterGradient && r.ofElements(s, y)
	case ir.Concat: // which a loop stores: what is read of it is what that has stored, if it has
		// its digits
		loop, ok := s.Op.(plan.Loop)
		return ok && before.Epilogue && moves(loop.Program) && y.DType == fuse.Type(y.DType) &&
			s.Dsts[0].Dense() && s.Dsts[0].Shape == y.Shape && r.ofElements(s, y)
	case plan.Loop: // stores each of its results also in a concatenation
		_, concat := s.Op.(ir.Concat)
		return concat && onePass(op.Program) && !slices.ContainsFunc(s.Args,
			func(a plan.Ref) bool { return !stores(op.Program, before.Dsts, &a) })
	}
	return false
}

// moves reports whether a loop gives one value, which it has loaded.
func moves(p *fuse.Program) bool {
	return len(p.Code) == 1 && p.Code[0].Op == fuse.Load && len(p.Outputs) == 1
}

// onePass reports whether a loop folds nothing.
func onePass(p *fuse.Program) bool {
	_, most := foldsBefore(p)
	return most == 0 && !slices.ContainsFunc(p.Outputs,
		func(o fuse.Output) bool { return o.Folded })
}

// stores reports whether a loop has stored all of what a refers to, whatever the order of its axes.
func stores(p *fuse.Program, dsts []plan.Ref, a *plan.Ref) bool {
	axes := func(r *plan.Ref) (all [][2]int) {
		for i := range r.Shape.Len() {
			if n := r.Shape.At(i); n != 1 {
				all = append(all, [2]int{r.Strides.At(i), n})
			}
		}
		slices.SortFunc(all, func(x, y [2]int) int { return slices.Compare(x[:], y[:]) })
		return all
	}
	return slices.ContainsFunc(dsts, func(d plan.Ref) bool {
		return d.Buffer == a.Buffer && d.Offset == a.Offset && d.DType == a.DType && d.Dense() &&
			d.Shape == ir.Of(p.Shape...) && slices.Equal(axes(&d), axes(a)) &&
			d.Shape.Len() == a.Shape.Len()
	})
}

// ofElements reports whether a step is a loop of one pass over the elements of y, of which it reads
// only its own, at least once, and in whose memory it writes only these.
func (r *proof) ofElements(s *plan.Step, y *plan.Ref) bool {
	loop, ok := s.Op.(plan.Loop)
	if !ok || !onePass(loop.Program) || !y.Dense() || len(s.Args) != len(loop.Program.Inputs) ||
		len(s.Dsts) != len(loop.Program.Outputs) {
		return false
	}
	p, reads := loop.Program, 0
	rows := ir.Of(p.Shape...)
	own := func(of *plan.Ref, strides []int) bool {
		at := rows.Strides()
		for axis, n := range p.Shape {
			if n > 1 && strides[axis] != at.At(axis) {
				return false
			}
		}
		return of.Buffer == y.Buffer && of.Offset == y.Offset && of.DType == y.DType &&
			rows.Size() == y.Shape.Size()
	}
	for k := range s.Args {
		if r.share(s.Args[k].Buffer, y.Buffer) {
			if reads++; !own(&s.Args[k], p.Inputs[k].Strides) {
				return false
			}
		}
	}
	for k := range s.Dsts {
		if r.share(s.Dsts[k].Buffer, y.Buffer) && !own(&s.Dsts[k], p.Outputs[k].Strides) {
			return false
		}
	}
	return reads > 0
}
