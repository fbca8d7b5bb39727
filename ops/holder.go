package ops

import (
	"fmt"
	"hash"

	"github.com/chewxy/hm"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// holderOp keeps the elements of v for which this rank is the lowest one that
// holds the extremum, and makes the others zero. Its operands are x, the
// extremum y over all ranks' x, and v, of one shape.
//
// It is linear in v, and its own adjoint. It jumps where the holder changes, but there the maximum
// has no gradient anyway.
type holderOp struct {
	comm  backend.Communicator
	dtype tensor.Dtype
	shape tensor.Shape
	at    site
}

var (
	_ gorgonia.SDOp = (*holderOp)(nil)
	_ gorgonia.ADOp = (*holderOp)(nil)
)

func (o *holderOp) apply(x, y, v *gorgonia.Node) (*gorgonia.Node, error) {
	o.at = next(o.comm, v, o.origin(), true)
	return gorgonia.ApplyOp(o, x, y, v)
}

func (o *holderOp) place() (backend.Communicator, site) { return o.comm, o.at }

// Comm returns the communicator whose ranks run the operation together.
func (o *holderOp) Comm() backend.Communicator { return o.comm }

func (o *holderOp) origin() backend.Origin {
	return backend.Origin{Purpose: backend.ForGraph, Shape: backend.ShapeOf(o.shape...)}
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

// Do finds the holders, in one AllReduce of as many bytes as v has.
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
	for _, v := range inputs {
		if err := check(v, o.shape, o.dtype); err != nil {
			return nil, err
		}
	}
	return at(o.comm, func(p onHost) (gorgonia.Value, error) {
		var xyv [3]backend.Buffer
		for i, v := range inputs {
			x, err := read(v)
			if err != nil {
				return nil, err
			}
			xyv[i] = x.Buffer
		}
		kept, memory, err := fresh(o.dtype, o.shape)
		if err != nil {
			return nil, err
		}
		return kept, o.fill(p, memory, xyv[0], xyv[1], xyv[2])
	})
}

// fill writes the elements of v that this rank owns to kept, and zeros:
//
//	owner[i] = x[i] is y[i] ? r : P
//	owner    = minimum of all ranks' owners
//	kept[i]  = owner[i] == r ? v[i] : 0
//
// Owners are integers of the size of v's elements, whose bits are kept.
func (o *holderOp) fill(p worker, kept, x, y, v backend.Buffer) error {
	r, P := float64(o.comm.Rank()), float64(o.comm.Size())
	bits := bitsOf(v.DType())
	if bits == backend.U8 && P > 255 {
		return fmt.Errorf("%w: gradient of Min or Max of bytes among %v ranks, at most 255: use "+
			"a wider dtype", backend.ErrUnsupported, P)
	}
	owner, err := p.scratch(bits, v.Len())
	if err != nil {
		return err
	}
	t := fuse.Type(bits)
	return inOrder(
		func() error {
			return p.apply(0, owner, func(p *fuse.Program, x []fuse.Value) fuse.Value {
				return p.Do(fuse.Where, same(p, x[0], x[1]), p.Const(t, r), p.Const(t, P))
			}, x, y)
		},
		func() error {
			return p.run(backend.Collective{Kind: backend.AllReduce, Op: backend.Min,
				Origin: o.at.origin}, owner, owner)
		},
		func() error {
			return p.apply(1, kept.As(bits), func(p *fuse.Program, x []fuse.Value) fuse.Value {
				mine := p.Do(fuse.Equal, x[0], p.Const(t, r))
				return p.Do(fuse.Where, mine, x[1], p.Const(t, 0))
			}, owner, v.As(bits))
		},
	)
}

// same returns a number that is not 0 where x is y, or both are NaN.
func same(p *fuse.Program, x, y fuse.Value) fuse.Value {
	nan := p.Do(fuse.Mul, p.Do(fuse.NotEqual, x, x), p.Do(fuse.NotEqual, y, y))
	return p.Do(fuse.Add, p.Do(fuse.Equal, x, y), nan)
}

// inOrder runs steps up to the first error.
func inOrder(steps ...func() error) error {
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// bitsOf returns the integer type that is as large as an element of d.
func bitsOf(d backend.DType) backend.DType {
	switch d.Size() {
	case 8:
		return backend.I64
	case 4:
		return backend.I32
	}
	return backend.U8
}

func (o *holderOp) fail(err error) error {
	return &Error{"LowestHolder", o.at.operand, o.shape, o.dtype, o.comm.Name(), o.comm.Rank(), err}
}

// ReturnsPtr returns true: the result is its own value.
func (o *holderOp) ReturnsPtr() bool { return true }

// CallsExtern returns false.
func (o *holderOp) CallsExtern() bool { return false }

// OverwritesInput returns -1: inputs are never written to.
func (o *holderOp) OverwritesInput() int { return -1 }

// WriteHash writes the op's identity, the same on every rank.
func (o *holderOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "euryale holder %q #%d", o.comm.Name(), o.at.ordinal())
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
func (o *holderOp) DoDiff(_ gorgonia.ExecutionContext, inputs gorgonia.Nodes,
	output *gorgonia.Node) error {
	grad, err := output.Grad()
	if err != nil {
		return o.fail(err)
	}
	dv, err := o.Do(inputs[0].Value(), inputs[1].Value(), grad)
	if err != nil {
		return err
	}
	return accumulateInto(inputs[2], dv)
}
