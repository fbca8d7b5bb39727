package program

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// node is a value of a recorder. It has one of emit, axes, view, into and call, unless it is an
// operand of the program or another result of a call.
type node struct {
	Tensor
	args []Value

	// emit adds the instructions of one element, given those of the operands. placed says that they
	// depend on where the element is.
	emit   instructions
	placed bool
	// axes are folded by fold.
	axes []int
	fold backend.ReduceOp
	// view returns where the value lies in the memory of its operand, false if a copy must be made
	// of that. One that renames axes has the elements of its operand in the same order.
	view    func(x strided) (y strided, ok bool)
	renames bool
	// into returns where in the value, which is zeros before, operand i is copied to.
	into func(y strided, i int) strided
	// call computes the value, and others besides, from operands in row-major order.
	call    kernel
	besides []Tensor
	result  int // of the call of the operand, from 1 on
}

// instructions adds those of one element to a loop.
type instructions func(p *fuse.Program, x []fuse.Value) fuse.Value

// kernel computes values from others.
type kernel func(dst, src []backend.Buffer) error

// recorder is the Builder of [Compile]: it notes what a program does.
type recorder struct{ nodes []node }

var _ Builder = (*recorder)(nil)

func (r *recorder) add(n node) Value {
	r.nodes = append(r.nodes, n)
	return Value(len(r.nodes) - 1)
}

// Of implements [Builder].
func (r *recorder) Of(x Value) Tensor {
	t := r.nodes[x].Tensor
	return Tensor{slices.Clone(t.Shape), t.DType}
}

// InRange implements [Builder]: all operands of a Do have been looked at.
func (*recorder) InRange(Value) bool { return true }

// Number implements [Builder].
func (r *recorder) Number(number float64, like Value) Value {
	d := r.Of(like).DType
	return r.add(
		node{Tensor: Tensor{nil, d}, emit: func(p *fuse.Program, _ []fuse.Value) fuse.Value {
			return p.Const(fuse.Type(d), number)
		}})
}

// elements adds a value that is computed element by element.
func (r *recorder) elements(d backend.DType, placed bool, emit instructions, x ...Value) Value {
	var shapes [][]int
	for _, v := range x {
		shapes = append(shapes, r.Of(v).Shape)
	}
	return r.add(node{Tensor: Tensor{Common(shapes...), d}, args: x, emit: emit, placed: placed})
}

// Common returns the shape that others are repeated to.
func Common(shapes ...[]int) []int {
	var common []int
	for _, s := range shapes {
		if more := len(s) - len(common); more > 0 {
			common = slices.Concat(s[:more], common)
		}
		for i, n := range s {
			if at := len(common) - len(s) + i; n != 1 {
				common[at] = n
			}
		}
	}
	return common
}

// Do implements [Builder].
func (r *recorder) Do(f fuse.Op, x ...Value) Value {
	d := r.Of(x[len(x)-1]).DType
	return r.elements(d, false, func(p *fuse.Program, x []fuse.Value) fuse.Value {
		if f == fuse.Where { // by vectors, where all are of one type
			return p.Do(f, p.Cast(fuse.Type(d), x[0]), x[1], x[2])
		}
		return p.Do(f, x...)
	}, x...)
}

// Cast implements [Builder].
func (r *recorder) Cast(d backend.DType, x Value) Value {
	if r.Of(x).DType == d {
		return x
	}
	return r.elements(d, false, func(p *fuse.Program, v []fuse.Value) fuse.Value {
		return p.Cast(fuse.Type(d), v[0])
	}, x)
}

// Locate implements [Builder].
func (r *recorder) Locate(axis int, x Value) Value {
	return r.elements(backend.I64, true, func(p *fuse.Program, v []fuse.Value) fuse.Value {
		return p.Locate(axis, v[0])
	}, x)
}

// Select implements [Builder].
func (r *recorder) Select(axis int, labels, x, y Value) Value {
	return r.elements(r.Of(x).DType, true, func(p *fuse.Program, v []fuse.Value) fuse.Value {
		return p.Select(axis, v[0], v[1], v[2])
	}, labels, x, y)
}

// Dropout implements [Builder].
func (r *recorder) Dropout(probability float64, seed, op uint32, x, step, first Value) Value {
	return r.elements(r.Of(x).DType, true, func(p *fuse.Program, v []fuse.Value) fuse.Value {
		return p.Dropout(probability, seed, op, v[0], v[1], v[2])
	}, x, step, first)
}

// Reduce implements [Builder].
func (r *recorder) Reduce(op backend.ReduceOp, x Value, axes ...int) Value {
	of := r.Of(x)
	shape := slices.Clone(of.Shape)
	for _, axis := range axes {
		shape[axis] = 1
	}
	if slices.Equal(shape, of.Shape) {
		return x
	}
	return r.add(node{Tensor: Tensor{shape, of.DType}, args: []Value{x}, axes: axes, fold: op})
}

// viewed adds a value in the memory of another one.
func (r *recorder) viewed(x Value, shape []int, view func(x strided) (strided, bool)) Value {
	return r.add(node{Tensor: Tensor{shape, r.Of(x).DType}, args: []Value{x}, view: view})
}

// Reshape implements [Builder].
func (r *recorder) Reshape(x Value, shape ...int) Value {
	if slices.Equal(shape, r.Of(x).Shape) {
		return x
	}
	v := r.viewed(x, slices.Clone(shape), func(x strided) (strided, bool) {
		return strided{x.slot, x.offset, shape, rowMajor(shape)}, x.dense()
	})
	r.nodes[v].renames = true
	return v
}

// Permute implements [Builder].
func (r *recorder) Permute(x Value, axes ...int) Value {
	permuted := func(list []int) (to []int) {
		for _, a := range axes {
			to = append(to, list[a])
		}
		return to
	}
	return r.viewed(x, permuted(r.Of(x).Shape), func(x strided) (strided, bool) {
		return strided{x.slot, x.offset, permuted(x.shape), permuted(x.strides)}, true
	})
}

// Broadcast implements [Builder].
func (r *recorder) Broadcast(x Value, shape ...int) Value {
	return r.viewed(x, shape, func(x strided) (strided, bool) {
		return strided{x.slot, x.offset, shape, x.along(shape)}, true
	})
}

// Slice implements [Builder].
func (r *recorder) Slice(x Value, axis, start, step, n int) Value {
	return r.viewed(x, with(r.Of(x).Shape, axis, n), func(x strided) (strided, bool) {
		return x.sliced(axis, start, step, n), true
	})
}

// Unslice implements [Builder].
func (r *recorder) Unslice(x Value, axis, start, step, n int) Value {
	of := r.Of(x)
	taken := of.Shape[axis]
	into := func(y strided, _ int) strided { return y.sliced(axis, start, step, taken) }
	return r.add(node{Tensor: Tensor{with(of.Shape, axis, n), of.DType}, args: []Value{x},
		into: into})
}

// Concat implements [Builder].
func (r *recorder) Concat(axis int, x ...Value) Value {
	starts, n := []int{0}, 0
	for _, v := range x {
		n += r.Of(v).Shape[axis]
		starts = append(starts, n)
	}
	first := r.Of(x[0])
	into := func(y strided, i int) strided {
		return y.sliced(axis, starts[i], 1, starts[i+1]-starts[i])
	}
	return r.add(node{Tensor: Tensor{with(first.Shape, axis, n), first.DType}, args: x, into: into})
}

// with returns a shape with another length of an axis.
func with(shape []int, axis, n int) []int {
	shape = slices.Clone(shape)
	shape[axis] = n
	return shape
}
