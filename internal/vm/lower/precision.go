package lower

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// precise puts matrix multiplications of F32 into a precision. Gradients of updates and other
// results that come of one by element-wise values alone stay F32.
//
//	MatMul(x, y) = MatMul(x, y) of operands rounded to TF32 or BF16: digits change
func precise(p *ir.Program, precision ir.Precision) *ir.Program {
	switch precision {
	case ir.TF32:
		return rewrite(p, func(n *numbering, _ ir.ID, v ir.Value) ir.ID {
			switch op := v.Op.(type) {
			case ir.MatMul:
				op.TF32 = v.DType == backend.F32
				v.Op = op
			case ir.Convolution:
				op.TF32 = v.DType == backend.F32
				v.Op = op
			case ir.LSTM:
				op.Precision = ir.TF32
				v.Op = op
			}
			return n.add(v)
		})
	case ir.BF16:
		return halved(p)
	}
	return p
}

// halved makes matrix multiplications, convolutions and attention of F32 those of BF16. A value is
// rounded once, where it is computed, whatever views of it they read. What only loops and these
// operations read of them is stored as BF16, too: loops widen what they load. Operations that carry
// elements carry those.
func halved(p *ir.Program) *ir.Program {
	wide, narrow := widened(p), narrowed(p)
	return rewrite(p, func(n *numbering, id ir.ID, v ir.Value) ir.ID {
		half := v.DType == backend.BF16 // already
		if half && v.Op == (ir.Cast{}) {
			return n.narrow(v.Args[0])
		}
		n.halve(&v, wide[id], narrow[id])
		x := n.simplest(v)
		if wide[id] && v.DType == backend.BF16 && !half {
			return n.widen(x)
		}
		return x
	})
}

// halve makes v BF16 if it is a matrix multiplication, a convolution or attention of F32, or a view
// or parts of BF16, or carries what is BF16 before or behind it. A matrix multiplication gives all
// digits that are wanted itself. Convolutions do not, nor does cuDNN: also gradients of filters are
// rounded once.
func (n *numbering) halve(v *ir.Value, wide, narrow bool) {
	f32 := v.DType == backend.F32
	switch op := v.Op.(type) {
	case ir.Reshape, ir.Permute, ir.Slice, ir.Broadcast:
		v.DType = n.of(v.Args[0]).DType
	case ir.Concat:
		n.halveConcat(v, narrow)
	case ir.Result:
		n.halveResult(v)
	case ir.Opaque:
		if op.Carries && f32 && (narrow || n.of(v.Args[0]).DType == backend.BF16) {
			v.Args, v.DType = []ir.ID{n.narrow(v.Args[0])}, backend.BF16
		}
	case ir.LSTM: // its operands and its first result stay F32
		op.Precision = ir.BF16
		v.Op = op
	case ir.MatMul:
		if f32 {
			v.Args = []ir.ID{n.narrow(v.Args[0]), n.narrow(v.Args[1])}
			if !wide {
				v.DType = backend.BF16
			}
		}
	case ir.Convolution, ir.Attention, ir.AttentionGrad:
		if f32 {
			args := slices.Clone(v.Args)
			for i, a := range args {
				if !isExact(v.Op, i) {
					args[i] = n.narrow(a)
				}
			}
			v.Args, v.DType = args, backend.BF16
		}
	}
}

// isExact reports whether operand i of attention or its gradient is F32, always, or integers.
func isExact(op ir.Op, i int) bool {
	_, _, counts := ir.Hiding(op)
	return ir.Exact(op, i) || i == counts
}

// halveResult makes v a result of attention in BF16: the statistics are F32, gradients BF16.
func (n *numbering) halveResult(v *ir.Value) {
	if from := n.of(v.Args[0]); from.Op == (ir.Cast{}) { // the first result was widened
		v.Args = from.Args
	}
	from := n.of(v.Args[0])
	if _, grad := from.Op.(ir.AttentionGrad); grad {
		v.DType = from.DType
	}
}

// halveConcat makes v BF16 if all operands are, or if it is read as BF16 alone, as halves are that
// positions turn: what computes these then rounds them. Otherwise it makes all operands F32.
func (n *numbering) halveConcat(v *ir.Value, narrow bool) {
	if narrow && v.DType == backend.F32 {
		v.Args = slices.Clone(v.Args)
		for i, a := range v.Args {
			v.Args[i] = n.narrow(a)
		}
	}
	half := func(a ir.ID) bool { return n.of(a).DType == backend.BF16 }
	if !slices.ContainsFunc(v.Args, func(a ir.ID) bool { return !half(a) }) {
		v.DType = backend.BF16
		return
	}
	args := slices.Clone(v.Args)
	for i, a := range args {
		if half(a) {
			args[i] = n.widen(a)
		}
	}
	v.Args = args
}

// widen returns x, which is BF16, as F32.
func (n *numbering) widen(x ir.ID) ir.ID {
	v := n.of(x)
	return n.simplest(ir.Value{Op: ir.Cast{}, Args: []ir.ID{x}, Shape: v.Shape, DType: backend.F32,
		Name: v.Name})
}

// narrow returns x as BF16.
func (n *numbering) narrow(x ir.ID) ir.ID {
	v := n.of(x)
	_, cast := v.Op.(ir.Cast)
	switch {
	case v.DType == backend.BF16:
		return x
	case cast && n.of(v.Args[0]).DType == backend.BF16:
		return v.Args[0]
	case ir.Rounded(v.Op) > 0:
		v.Op, v.Args = ir.Result{Index: ir.Rounded(v.Op)}, []ir.ID{x}
	case ir.View(v.Op):
		v.Args = []ir.ID{n.narrow(v.Args[0])}
	default:
		v.Op, v.Args = ir.Cast{}, []ir.ID{x}
	}
	v.DType = backend.BF16
	return n.simplest(v)
}

// widened returns which values must have all digits if they are matrix multiplications: those from
// which element-wise values lead to a result or to a place, such as the largest element's, and
// those that an operation reads, maybe as a view or a part, which is no loop and reads no BF16
// itself.
func widened(p *ir.Program) []bool {
	wide, result := make([]bool, len(p.Values)), make([]bool, len(p.Values))
	for _, r := range p.Results {
		wide[r], result[r] = true, true
	}
	for i, v := range slices.Backward(p.Values) {
		_, concat := v.Op.(ir.Concat)
		_, locates := v.Op.(ir.Locate)
		view, elementwise := concat || ir.View(v.Op) || carries(v.Op), ir.Elementwise(v.Op)
		for j, a := range v.Args {
			result[a] = result[a] || locates || result[i] && (view || elementwise)
			wide[a] = wide[a] || result[a] || wide[i] && view || !view && !elementwise &&
				!readsHalf(v.Op) || isExact(v.Op, j)
		}
	}
	return wide
}

// readsHalf reports whether an operation on F32 reads BF16, too.
func readsHalf(op ir.Op) bool {
	switch op.(type) {
	case ir.MatMul, ir.Convolution, ir.Attention, ir.AttentionGrad, ir.Reduce:
		return true
	}
	return false
}

// narrowed returns which values are read as BF16 alone: by matrix multiplications, convolutions,
// attention and casts to BF16, maybe as a view or carried.
func narrowed(p *ir.Program) []bool {
	read, wider := make([]bool, len(p.Values)), make([]bool, len(p.Values))
	for _, r := range p.Results {
		wider[r] = true
	}
	for i, v := range slices.Backward(p.Values) {
		for j, a := range v.Args {
			read[a] = true
			switch v.Op.(type) {
			case ir.MatMul, ir.Convolution, ir.Attention, ir.AttentionGrad:
				wider[a] = wider[a] || isExact(v.Op, j)
			case ir.Cast:
				wider[a] = wider[a] || v.DType != backend.BF16
			default:
				wider[a] = wider[a] || wider[i] || !read[i] || !ir.View(v.Op) && !carries(v.Op)
			}
		}
	}
	for i := range read {
		read[i] = read[i] && !wider[i]
	}
	return read
}

// roundExchanged returns the program with those gradients in BF16 that ranks exchange so: their
// digits change.
//
//	Cast(xᵀy), Cast(Reduce(x)) = xᵀy, Reduce(x) that round themselves
func roundExchanged(p *ir.Program, updates []Update) *ir.Program {
	if !slices.ContainsFunc(updates, func(u Update) bool { return u.Half }) {
		return p
	}
	users := p.Users()
	q := &ir.Program{Values: slices.Clone(p.Values), Results: slices.Clone(p.Results)}
	first := tail(p, updates)
	for i, u := range updates {
		if u.Half {
			q.Results[first+i] = round(q, users, p.Results[first+i])
		}
	}
	return prune(q)
}

// round returns a value in BF16. A matrix multiplication of BF16 or a sum that nothing else reads
// gives BF16 itself; other values are cast.
func round(p *ir.Program, users [][]ir.ID, id ir.ID) ir.ID {
	v, alone := p.Values[id], len(users[id]) == 1
	_, rounds := v.Op.(ir.Reduce)
	if _, matmul := v.Op.(ir.MatMul); matmul {
		rounds = p.Values[v.Args[0]].DType == backend.BF16
	}
	switch {
	case alone && rounds:
		p.Values[id].DType = backend.BF16
		return id
	case alone && v.Op == (ir.Reshape{}):
		v.Args = []ir.ID{round(p, users, v.Args[0])}
	default:
		v.Op, v.Args = ir.Cast{}, []ir.ID{id}
	}
	v.DType = backend.BF16
	return p.Add(v)
}

// carries reports whether an operation moves elements of BF16 as it does those of F32.
func carries(op ir.Op) bool {
	o, ok := op.(ir.Opaque)
	return ok && o.Carries
}

// Halved reports which inputs [Program] reads as BF16 alone, as matrix multiplications of that
// precision do: ranks may gather their digits of that.
func Halved(p *ir.Program, inputs []int, gradients ...ir.ID) []bool {
	p = Program(p, gradients...)
	halved, users := make([]bool, len(inputs)), p.Users()
	for i, input := range inputs {
		for id, v := range p.Values {
			if v.Op != (ir.Input{Index: input}) {
				continue
			}
			halved[i] = v.DType == backend.F32 && len(users[id]) > 0 &&
				!slices.ContainsFunc(users[id], func(user ir.ID) bool {
					by := p.Values[user]
					return by.Op != (ir.Cast{}) || by.DType != backend.BF16
				})
		}
	}
	return halved
}
