package ops

import (
	"fmt"
	"hash"

	"github.com/chewxy/hm"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// holderOp keeps the elements of v for which this rank is the lowest one that
// holds the extremum, and makes the others zero. Its operands are x, the
// extremum y over all ranks' x, and v, of one shape.
//
// It is linear in v, and its own adjoint. That it jumps where the holder changes
// is of no concern: there the maximum has no gradient.
type holderOp struct {
	comm   backend.Communicator
	dtype  tensor.Dtype
	shape  tensor.Shape
	serial int // see collectiveOp
}

var (
	_ gorgonia.SDOp = (*holderOp)(nil)
	_ gorgonia.ADOp = (*holderOp)(nil)
)

func (o *holderOp) apply(x, y, v *gorgonia.Node) (*gorgonia.Node, error) {
	users := v.Graph().To(v.ID())
	for users != nil && users.Next() {
		other, ok := users.Node().(*gorgonia.Node).Op().(*holderOp)
		if ok && other.comm.Name() == o.comm.Name() {
			o.serial = max(o.serial, other.serial+1)
		}
	}
	return gorgonia.ApplyOp(o, x, y, v)
}

// Arity returns 3.
func (o *holderOp) Arity() int { return 3 }

// Type returns a → a → a → a.
func (o *holderOp) Type() hm.Type {
	a := hm.TypeVariable('a')
	return hm.NewFnType(a, a, a, a)
}

// InferShape returns the shape of x.
func (o *holderOp) InferShape(inputs ...gorgonia.DimSizer) (tensor.Shape, error) {
	if err := checkShapes(inputs, o.shape); err != nil {
		return nil, o.fail(err)
	}
	return o.shape.Clone(), nil
}

// Do finds the holders, in one AllReduce of four bytes for each element.
func (o *holderOp) Do(inputs ...gorgonia.Value) (gorgonia.Value, error) {
	kept, err := o.keep(inputs)
	if err != nil {
		return nil, o.fail(err)
	}
	return kept, nil
}

func (o *holderOp) keep(inputs []gorgonia.Value) (gorgonia.Value, error) {
	if len(inputs) != 3 {
		return nil, fmt.Errorf("%w: %d operands, want 3", backend.ErrArgument, len(inputs))
	}
	var operands [3]operand
	for i, v := range inputs {
		x, err := read(o.comm.Device().Default().Kernels(), v, o.shape, o.dtype)
		if err != nil {
			return nil, err
		}
		operands[i] = x
	}
	kept, memory, err := fresh(o.dtype, o.shape)
	if err != nil {
		return nil, err
	}
	owner := make([]int32, memory.Len())
	r := int32(o.comm.Rank())
	mark(owner, operands[0].Buffer, operands[1].Buffer, r, int32(o.comm.Size()))
	b := backend.Of(owner)
	if err := backend.Run(o.comm, backend.Collective{Kind: backend.AllReduce, Op: backend.Min}, b, b); err != nil {
		return nil, err
	}
	keepOwned(memory, operands[2].Buffer, owner, r)
	return kept, nil
}

// mark sets owner to r where x is the extremum y, elsewhere to nobody.
func mark(owner []int32, x, y backend.Buffer, r, nobody int32) {
	switch x.DType() {
	case backend.F64:
		markElements[float64](owner, x, y, r, nobody)
	case backend.F32:
		markElements[float32](owner, x, y, r, nobody)
	case backend.I64:
		markElements[int64](owner, x, y, r, nobody)
	case backend.I32:
		markElements[int32](owner, x, y, r, nobody)
	case backend.U8:
		markElements[byte](owner, x, y, r, nobody)
	}
}

func markElements[T backend.Element](owner []int32, x, y backend.Buffer, r, nobody int32) {
	xs, ys := backend.View[T](x), backend.View[T](y)
	for i := range owner {
		owner[i] = nobody
		bothNaN := xs[i] != xs[i] && ys[i] != ys[i]
		if xs[i] == ys[i] || bothNaN {
			owner[i] = r
		}
	}
}

// keepOwned copies to dst the elements of v that r owns.
func keepOwned(dst, v backend.Buffer, owner []int32, r int32) {
	size := v.DType().Size()
	d, s := dst.Bytes(), v.Bytes()
	for i, o := range owner {
		if o == r {
			copy(d[i*size:(i+1)*size], s[i*size:])
		}
	}
}

func (o *holderOp) fail(err error) error { return fail(o, o.comm, err) }

// ReturnsPtr returns true: the result is a value of its own.
func (o *holderOp) ReturnsPtr() bool { return true }

// CallsExtern returns false.
func (o *holderOp) CallsExtern() bool { return false }

// OverwritesInput returns -1: inputs are never written to.
func (o *holderOp) OverwritesInput() int { return -1 }

// WriteHash writes the op's identity, the same on every rank.
func (o *holderOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "euryale holder %q #%d", o.comm.Name(), o.serial)
}

// Hashcode returns the hash of the op's identity.
func (o *holderOp) Hashcode() uint32 { return hashcode(o) }

// String returns "LowestHolder@world".
func (o *holderOp) String() string { return "LowestHolder@" + o.comm.Name() }

// DiffWRT says that there is a gradient for v.
func (o *holderOp) DiffWRT(int) []bool { return []bool{false, false, true} }

// SymDiff returns the gradient of v: the same elements are kept.
func (o *holderOp) SymDiff(inputs gorgonia.Nodes, _, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	again := &holderOp{comm: o.comm, dtype: o.dtype, shape: o.shape}
	dv, err := again.apply(inputs[0], inputs[1], grad)
	return gorgonia.Nodes{nil, nil, dv}, err
}

// DoDiff adds the gradient to that of v.
func (o *holderOp) DoDiff(_ gorgonia.ExecutionContext, inputs gorgonia.Nodes, output *gorgonia.Node) error {
	grad, err := output.Grad()
	if err != nil {
		return o.fail(err)
	}
	dv, err := o.Do(inputs[0].Value(), inputs[1].Value(), grad)
	if err != nil {
		return err
	}
	return accumulateInto(o.comm, inputs[2], dv)
}
